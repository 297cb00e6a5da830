"""When what is remembered of the stable pods is written down, as what, and how it is found again.

    edge: blocks of stable pods ─► Memory, in the operator's memory ─┬─► due? ─► ConfigMap ─► recalled by the next operator
                                                                     └─► terms of an analysis that begins

Steady state is to write nothing, and a history grows all the time. So it is written when it has doubled, later once an hour, and
when a canary begins. A crash costs what came since: half of a history that is young, an hour of one that is old.

A history is of one engine: the image of the stable revision's Deployment, and spec.engine.version where its record has that.
With another one it begins anew, and what is written of another one, or does not say of which, is dropped on reading.

Guarantees: pure; an analysis is informed by blocks of the engine alone that its control runs. The ConfigMap belongs to the
resource and is not part of it: writing it changes neither spec nor status. Not guaranteed: that an image stays what it was where
its tag is moved to another release and no version is written; a digest, or spec.engine.version, tells.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria import AnalysisPlan
from aerie.api import SpeculativeDeployment
from aerie.api.status import Arm
from aerie.manifests import calibration_config_map, naming, preflight_job
from aerie.rollout.canary.analysis_run import build_analysis_plan
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by

CALIBRATION_WRITE_INTERVAL_SECONDS = 3600.0
"""Seconds of blocks after which it is written, once it no longer doubles sooner."""


@dataclass(frozen=True, slots=True)
class StoredCalibration:
    """What the ConfigMap says for everybody to read; zeros where there is none."""

    blocks: int = 0
    counted_until: float = 0.0


def build_calibration_plan(resource: SpeculativeDeployment, stable: Arm) -> AnalysisPlan:
    """By what blocks of stable pods are counted: as if they were canary and control."""
    spec = resource.spec
    return build_analysis_plan(
        spec.rollout.analysis, (stable, stable), (spec.rollout.canary.replicas, 1), spec.speculation.tuning.slo
    )


def read_engine_identity(snapshot: Snapshot, revision: str) -> str:
    """Which engine a revision's pods run: image and version; empty where its Deployment is not there, and it has no pods."""
    deployment = snapshot.deployment(revision)
    if deployment is None:
        return ""
    containers = deployment["spec"]["template"]["spec"].get("containers") or []
    image = next((one.get("image") for one in containers if one.get("name") == naming.ENGINE_CONTAINER), None) or ""
    record = snapshot.child("ConfigMap", preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision))
    try:
        document = json.loads(((record or {}).get("data") or {}).get(preflight_job.RESOURCE_KEY) or "{}")
        version = document["spec"]["engine"].get("version") or ""
    except (ValueError, LookupError, TypeError, AttributeError):
        version = ""
    return f"{image} {version}".strip()


def is_calibration_write_due(calibration: BaselineCalibration, stored: StoredCalibration, *, canary_active: bool) -> bool:
    """Whether the memory is to be written over what is written. `rolling`: a canary is under way, and will need it."""
    if calibration.blocks == stored.blocks:
        return False
    anew = calibration.blocks < stored.blocks
    return (
        canary_active
        or anew
        or calibration.blocks >= 2 * stored.blocks
        or calibration.until >= stored.counted_until + CALIBRATION_WRITE_INTERVAL_SECONDS
    )


def read_stored_calibration(snapshot: Snapshot) -> StoredCalibration:
    """What is written. What cannot be read is as good as none, and is written over."""
    data = _read_config_map_data(snapshot)
    try:
        return StoredCalibration(
            int(data[calibration_config_map.BLOCK_COUNT_KEY]),
            datetime.fromisoformat(data[calibration_config_map.LAST_BLOCK_END_KEY]).timestamp(),
        )
    except (KeyError, ValueError):
        return StoredCalibration()


def find_calibration(snapshot: Snapshot, stable: Arm) -> BaselineCalibration | None:
    """What is known of the stable pods, as far as it is of the engine that they run: what the operator holds, or what an earlier
    one has written."""
    of = read_engine_identity(snapshot, stable.revision)
    known = snapshot.baseline_calibration
    if known is None or known.engine != of:
        known = BaselineCalibration.unpack(_read_config_map_data(snapshot).get(calibration_config_map.CALIBRATION_KEY) or "")
    return known if of and known is not None and known.engine == of else None


def build_calibration_config_map(resource: SpeculativeDeployment, calibration: BaselineCalibration) -> dict[str, Any]:
    """The ConfigMap with this memory."""
    until = datetime.fromtimestamp(calibration.until, tz=UTC).isoformat(timespec="milliseconds")
    return calibration_config_map.render_calibration_config_map(
        resource.metadata.name, str(calibration.blocks), until, calibration.pack()
    )


def _read_config_map_data(observed: Snapshot) -> dict[str, Any]:
    metadata = observed.resource.metadata
    found = observed.child("ConfigMap", calibration_config_map.calibration_config_map_name(metadata.name))
    # One that is left of a resource before this one tells of other pods.
    return dict(found.get("data") or {}) if found is not None and is_owned_by(found, metadata.uid) else {}
