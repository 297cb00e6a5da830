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

from aerie.api import SpeculativeDeployment
from aerie.api.status import Arm
from aerie.resources import history, names, preflight
from aerie.rollout.analysis.criteria import Terms
from aerie.rollout.analysis.memory import Memory
from aerie.rollout.evidence import terms_of
from aerie.rollout.observed import Observed, owned

OFTEN = 3600.0
"""Seconds of blocks after which it is written, once it no longer doubles sooner."""


@dataclass(frozen=True, slots=True)
class Written:
    """What the ConfigMap says for everybody to read; zeros where there is none."""

    blocks: int = 0
    until: float = 0.0


def terms(resource: SpeculativeDeployment, stable: Arm) -> Terms:
    """By what blocks of stable pods are counted: as if they were canary and control."""
    spec = resource.spec
    return terms_of(spec.rollout.analysis, (stable, stable), (spec.rollout.canary.replicas, 1), spec.speculation.tuning.slo)


def engine(observed: Observed, revision: str) -> str:
    """Which engine a revision's pods run: image and version; empty where its Deployment is not there, and it has no pods."""
    deployment = observed.deployment(revision)
    if deployment is None:
        return ""
    containers = deployment["spec"]["template"]["spec"].get("containers") or []
    image = next((one.get("image") for one in containers if one.get("name") == names.ENGINE), None) or ""
    record = observed.child("ConfigMap", preflight.name(observed.resource.metadata.name, revision))
    try:
        document = json.loads(((record or {}).get("data") or {}).get(preflight.RESOURCE) or "{}")
        version = document["spec"]["engine"].get("version") or ""
    except (ValueError, LookupError, TypeError, AttributeError):
        version = ""
    return f"{image} {version}".strip()


def due(memory: Memory, written: Written, *, rolling: bool) -> bool:
    """Whether the memory is to be written over what is written. `rolling`: a canary is under way, and will need it."""
    if memory.blocks == written.blocks:
        return False
    anew = memory.blocks < written.blocks
    return rolling or anew or memory.blocks >= 2 * written.blocks or memory.until >= written.until + OFTEN


def written(observed: Observed) -> Written:
    """What is written. What cannot be read is as good as none, and is written over."""
    data = _data(observed)
    try:
        return Written(int(data[history.BLOCKS]), datetime.fromisoformat(data[history.UNTIL]).timestamp())
    except (KeyError, ValueError):
        return Written()


def recalled(observed: Observed, stable: Arm) -> Memory | None:
    """What is known of the stable pods, as far as it is of the engine that they run: what the operator holds, or what an earlier
    one has written."""
    of = engine(observed, stable.revision)
    known = observed.memory
    if known is None or known.engine != of:
        known = Memory.unpack(_data(observed).get(history.MEMORY) or "")
    return known if of and known is not None and known.engine == of else None


def record(resource: SpeculativeDeployment, memory: Memory) -> dict[str, Any]:
    """The ConfigMap with this memory."""
    until = datetime.fromtimestamp(memory.until, tz=UTC).isoformat(timespec="milliseconds")
    return history.config_map(resource.metadata.name, str(memory.blocks), until, memory.pack())


def _data(observed: Observed) -> dict[str, Any]:
    metadata = observed.resource.metadata
    found = observed.child("ConfigMap", history.name(metadata.name))
    # One that is left of a resource before this one tells of other pods.
    return dict(found.get("data") or {}) if found is not None and owned(found, metadata.uid) else {}
