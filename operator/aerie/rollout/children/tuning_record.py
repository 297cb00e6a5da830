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
from aerie.manifests import tuning_config_map
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by


def is_tuning_enabled(resource: SpeculativeDeployment) -> bool:
    """Whether the resource is tuned, or told how it should be. One whose spec asks for no drafts is only where it says so."""
    return resource.spec.speculation.tuning.mode != "Off" and not find_drafting_obstacle(resource)


def find_drafting_obstacle(resource: SpeculativeDeployment) -> str:
    """Why nothing with drafts may be tried, as the spec says; empty where it may."""
    spec = resource.spec.speculation
    if spec.tokens:
        return ""
    if spec.tuning.when_zero == "Keep":
        return (
            "spec.speculation.tokens is 0, so nothing that drafts is tried: write the tokens to begin with, or "
            "spec.speculation.tuning.whenZero: Try"
        )
    if resource.spec.drafter is None:
        return "spec.speculation.tuning.whenZero is Try, and no drafter is named: write spec.drafter"
    return ""


def is_tuning_write_due(snapshot: Snapshot) -> bool:
    """Whether what the tuner knows is to be written."""
    kept = snapshot.tuning_record
    if kept is None or not is_tuning_enabled(snapshot.resource):
        return False
    there = read_tuning_record(snapshot)
    return there is None or abs(there.decision_time - kept.decision_time) > 0.002


def read_tuning_record(snapshot: Snapshot) -> TuningRecord | None:
    """What is written. What cannot be read is as good as none, and is written over."""
    metadata = snapshot.resource.metadata
    found = snapshot.child("ConfigMap", tuning_config_map.tuning_config_map_name(metadata.name))
    # One that is left of a resource before this one tells of other pods.
    return TuningRecord.from_data(found.get("data") or {}) if found is not None and is_owned_by(found, metadata.uid) else None


def build_tuning_config_map(resource: SpeculativeDeployment, record: TuningRecord) -> dict[str, Any]:
    """The ConfigMap with it."""
    return tuning_config_map.render_tuning_config_map(resource.metadata.name, record)
