"""When what is remembered of the stable pods is written down, as what, and how it is found again.

    edge: blocks of stable pods ─► Memory, in the operator's memory ─┬─► due? ─► ConfigMap ─► recalled by the next operator
                                                                     └─► terms of an analysis that begins

Steady state is to write nothing, and a history grows all the time. So it is written when it has doubled, later once an hour, and
when a canary begins. A crash costs what came since: half of a history that is young, an hour of one that is old.

Guarantee: pure. The ConfigMap belongs to the resource and is not part of it: writing it changes neither spec nor status.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import Arm
from aerie.resources import history
from aerie.rollout.analysis.criteria import Terms
from aerie.rollout.analysis.memory import Memory
from aerie.rollout.evidence import edges_of, terms_of
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
    return terms_of(
        spec.rollout.analysis, (stable, stable), (spec.rollout.canary.replicas, 1), edges_of(spec.speculation.tuning.slo)
    )


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


def recalled(observed: Observed) -> Memory | None:
    """What is known of the resource's stable pods: what the operator holds, or what an earlier one has written."""
    return observed.memory or Memory.unpack(_data(observed).get(history.MEMORY) or "")


def record(resource: SpeculativeDeployment, memory: Memory) -> dict[str, Any]:
    """The ConfigMap with this memory."""
    until = datetime.fromtimestamp(memory.until, tz=UTC).isoformat(timespec="milliseconds")
    return history.config_map(resource.metadata.name, str(memory.blocks), until, memory.pack())


def _data(observed: Observed) -> dict[str, Any]:
    metadata = observed.resource.metadata
    found = observed.child("ConfigMap", history.name(metadata.name))
    # One that is left of a resource before this one tells of other pods.
    return dict(found.get("data") or {}) if found is not None and owned(found, metadata.uid) else {}
