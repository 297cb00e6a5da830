"""What the tuner knows: when it is written down, and how the next operator finds it again.

    edge: windows ─► decision, each interval ─► Kept ─┬─► due? ─► ConfigMap ─► recalled by the next operator
                                                      └─► Advice

It is written when it was decided, so once in spec.speculation.tuning.interval while there are requests, and before the canary
that the decision may ask for. A crash costs the windows of one interval.

Guarantee: pure. The ConfigMap belongs to the resource and is not part of it: writing it changes neither spec nor status.
"""

from __future__ import annotations

from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.resources import tuning
from aerie.resources.tuning import Kept
from aerie.rollout.observed import Observed, owned


def tunes(resource: SpeculativeDeployment) -> bool:
    """Whether the resource is tuned, or told how it should be."""
    return resource.spec.speculation.tuning.mode != "Off"


def due(observed: Observed) -> bool:
    """Whether what the tuner knows is to be written."""
    kept = observed.kept
    if kept is None or not tunes(observed.resource):
        return False
    there = written(observed)
    return there is None or abs(there.at - kept.at) > 0.002


def written(observed: Observed) -> Kept | None:
    """What is written. What cannot be read is as good as none, and is written over."""
    metadata = observed.resource.metadata
    found = observed.child("ConfigMap", tuning.name(metadata.name))
    # One that is left of a resource before this one tells of other pods.
    return Kept.from_data(found.get("data") or {}) if found is not None and owned(found, metadata.uid) else None


def record(resource: SpeculativeDeployment, kept: Kept) -> dict[str, Any]:
    """The ConfigMap with it."""
    return tuning.config_map(resource.metadata.name, kept)
