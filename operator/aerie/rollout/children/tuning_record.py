"""Storage of the tuner state: when it is written, and how the next operator reads it.

    controller: windows ─► decision, each interval ─► TuningRecord ─┬─► write due? ─► ConfigMap ─► read by the next operator
                                                                    └─► Recommendation

The record is written after each decision: once in spec.speculation.tuning.decisionInterval while there are requests, and before
the canary that the decision may request. A crash loses the windows of one interval.

Guarantee: pure. The ConfigMap belongs to the resource and is not part of it: a write changes neither spec nor status.
"""

from __future__ import annotations

from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.manifests import tuning_config_map
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by


def is_tuning_enabled(resource: SpeculativeDeployment) -> bool:
    """Return whether tuning applies or recommends settings. Where the spec asks for no drafts, it does only if the spec permits
    it."""
    return resource.spec.speculation.tuning.mode != "Off" and not find_drafting_obstacle(resource)


def find_drafting_obstacle(resource: SpeculativeDeployment) -> str:
    """Return why the spec permits no setting with drafts; empty where it permits one."""
    spec = resource.spec.speculation
    if spec.num_speculative_tokens:
        return ""
    if spec.tuning.when_zero == "Keep":
        return (
            "spec.speculation.numSpeculativeTokens is 0, so no setting with drafts is tried: set it to the tokens to start with, "
            "or set spec.speculation.tuning.whenZero: Try"
        )
    if resource.spec.drafter is None:
        return "spec.speculation.tuning.whenZero is Try, but there is no drafter: set spec.drafter"
    return ""


def is_tuning_write_due(snapshot: Snapshot) -> bool:
    """Return whether the tuner state is to be written."""
    record = snapshot.operator.tuning_record
    if record is None or not is_tuning_enabled(snapshot.resource):
        return False
    stored_record = read_tuning_record(snapshot)
    return stored_record is None or abs(stored_record.decision_time - record.decision_time) > 0.002


def read_tuning_record(snapshot: Snapshot) -> TuningRecord | None:
    """Return the stored record. A record that cannot be read counts as none, and is overwritten."""
    metadata = snapshot.resource.metadata
    config_map = snapshot.cluster.child("ConfigMap", tuning_config_map.tuning_config_map_name(metadata.name))
    # A ConfigMap left by a deleted resource of the same name describes other pods.
    return (
        TuningRecord.from_data(config_map.get("data") or {})
        if config_map is not None and is_owned_by(config_map, metadata.uid)
        else None
    )


def build_tuning_config_map(resource: SpeculativeDeployment, record: TuningRecord) -> dict[str, Any]:
    """Return the ConfigMap with the record."""
    return tuning_config_map.render_tuning_config_map(resource.metadata.name, record)
