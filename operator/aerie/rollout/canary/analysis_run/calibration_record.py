"""Storage of the calibration of the stable pods: when it is written, in which form, and how a later operator reads it.

    controller: blocks of stable pods ─► BaselineCalibration, in memory ─┬─► write due? ─► ConfigMap ─► read by the next operator
                                                                         └─► plan of an analysis that begins

The steady state writes nothing, although a calibration grows all the time. So the calibration is written when it has doubled,
later once an hour, and when a canary begins. A crash loses what came since the last write: half of a young calibration, an hour
of an old one.

A calibration belongs to one origin: the image of the stable revision's Deployment, spec.engine.version where the revision's
record has it, spec.rollout.traffic.mode, and the node selector and node affinity of the pods. With another origin the
calibration restarts. A stored calibration that names another origin, or none, is dropped when it is read. Nor is it used for a
canary that may run on other nodes than the stable pods.

Guarantees: pure. An analysis is calibrated only by blocks of the engine that its control runs, in the same traffic mode. The
ConfigMap belongs to the resource and is not part of it: a write changes neither spec nor status. Not guaranteed: that an image
stays the same where its tag is moved to another release and no version is set; a digest, or spec.engine.version, reveals that.
Nor does the origin show how a balancer routes within a traffic mode; the analysis itself tests the history for that
(analysis/criteria/history_fit.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.api import SpeculativeDeployment
from aerie.api.status import Arm, Status
from aerie.manifests import calibration_config_map, naming, preflight_job
from aerie.rollout.canary.analysis_run.run import build_analysis_plan
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by

CALIBRATION_WRITE_INTERVAL_SECONDS = 3600.0
"""Seconds of blocks after which the calibration is written, once it no longer doubles sooner."""


@dataclass(frozen=True, slots=True)
class StoredCalibration:
    """The plain fields of the ConfigMap, which everybody can read; zeros where there is no ConfigMap."""

    blocks: int = 0
    counted_until: float = 0.0


def build_calibration_plan(resource: SpeculativeDeployment, stable: Arm) -> AnalysisPlan:
    """Return the plan by which blocks of stable pods are counted: as if these pods were canary and control."""
    spec = resource.spec
    return build_analysis_plan(
        spec.rollout.analysis, (stable, stable), (spec.rollout.canary.replicas, 1), spec.speculation.tuning.slo
    )


def read_origin(snapshot: Snapshot, revision: str) -> str:
    """Return the origin of blocks of a revision's pods, as text: image and version of the engine, traffic mode, and choice of
    nodes, if any. Empty without a Deployment, so without pods."""
    deployment = snapshot.cluster.deployment(revision)
    if deployment is None:
        return ""
    containers = deployment["spec"]["template"]["spec"].get("containers") or []
    image = (
        next((container.get("image") for container in containers if container.get("name") == naming.ENGINE_CONTAINER), None) or ""
    )
    preflight_config_map = snapshot.cluster.child(
        "ConfigMap", preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision)
    )
    try:
        document = json.loads(((preflight_config_map or {}).get("data") or {}).get(preflight_job.RESOURCE_KEY) or "{}")
        version = document["spec"]["engine"].get("version") or ""
    except (ValueError, LookupError, TypeError, AttributeError):
        version = ""
    parts = [image, version, snapshot.resource.spec.rollout.traffic.mode, _read_node_choice(snapshot, revision)]
    return " ".join(part for part in parts if part)


def _read_node_choice(snapshot: Snapshot, revision: str) -> str:
    """Return node selector and node affinity of a revision's pods, as text; empty where they have none."""
    deployment = snapshot.cluster.deployment(revision)
    pod_spec = deployment["spec"]["template"]["spec"] if deployment is not None else {}
    choice = [pod_spec.get("nodeSelector") or {}, (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}]
    return json.dumps(choice, sort_keys=True) if any(choice) else ""


def is_calibration_write_due(calibration: BaselineCalibration, stored: StoredCalibration, *, canary_active: bool) -> bool:
    """Return whether the calibration is to replace the stored one. `canary_active`: a canary is in progress, and will need it."""
    if calibration.block_count == stored.blocks:
        return False
    was_restarted = calibration.block_count < stored.blocks
    return (
        canary_active
        or was_restarted
        or calibration.block_count >= 2 * stored.blocks
        or calibration.last_block_end_time >= stored.counted_until + CALIBRATION_WRITE_INTERVAL_SECONDS
    )


def read_stored_calibration(snapshot: Snapshot) -> StoredCalibration:
    """Return the stored fields. A ConfigMap that cannot be read counts as none, and is overwritten."""
    data = _read_config_map_data(snapshot)
    try:
        return StoredCalibration(
            int(data[calibration_config_map.BLOCK_COUNT_KEY]),
            datetime.fromisoformat(data[calibration_config_map.LAST_BLOCK_END_KEY]).timestamp(),
        )
    except (KeyError, ValueError):
        return StoredCalibration()


def find_calibration(snapshot: Snapshot, stable: Arm) -> BaselineCalibration | None:
    """Return the calibration of the stable pods' current origin: that in the operator's memory, or one that an earlier operator
    stored. None without one, and for a canary with another choice of nodes."""
    canary, origin = (snapshot.resource.status or Status()).canary, read_origin(snapshot, stable.revision)
    if canary is not None and _read_node_choice(snapshot, canary.revision) != _read_node_choice(snapshot, stable.revision):
        return None
    calibration = snapshot.operator.baseline_calibration
    if calibration is None or calibration.origin != origin:
        calibration = BaselineCalibration.unpack(
            _read_config_map_data(snapshot).get(calibration_config_map.CALIBRATION_KEY) or ""
        )
    return calibration if origin and calibration is not None and calibration.origin == origin else None


def build_calibration_config_map(resource: SpeculativeDeployment, calibration: BaselineCalibration) -> dict[str, Any]:
    """Return the ConfigMap that stores the calibration."""
    last_block_end = datetime.fromtimestamp(calibration.last_block_end_time, tz=UTC).isoformat(timespec="milliseconds")
    return calibration_config_map.render_calibration_config_map(
        resource.metadata.name, str(calibration.block_count), last_block_end, calibration.pack()
    )


def _read_config_map_data(snapshot: Snapshot) -> dict[str, Any]:
    metadata = snapshot.resource.metadata
    config_map = snapshot.cluster.child("ConfigMap", calibration_config_map.calibration_config_map_name(metadata.name))
    # A ConfigMap left by a deleted resource of the same name describes other pods.
    return dict(config_map.get("data") or {}) if config_map is not None and is_owned_by(config_map, metadata.uid) else {}
