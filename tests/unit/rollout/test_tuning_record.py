"""The tuner's record: when it is written, that it persists, and that it is deleted with the mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aerie.manifests import tuning_config_map
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.rollout.children import tuning_record
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reconcile import build_reconcile_plan
from tests.snapshots import replace_facts
from tests.unit.rollout.world import IMAGE, World, serving_world

CONFIG_MAP = ("ConfigMap", "chat-aerie-tuning")
RECORD = TuningRecord(1_790_000_000.123, "f1", "packed", "{}", "HOLD\n")


def step(world: World, record: TuningRecord | None) -> ReconcilePlan:
    """Reconcile with the tuner's record and apply the plan."""
    plan = build_reconcile_plan(replace_facts(world.observed(), tuning_record=record), IMAGE, world.now, world.catalog)
    for item in plan.objects_to_apply:
        world.apply(item)
    for reference in plan.objects_to_delete:
        del world.objects[reference.kind, reference.name]
    return plan


def names(plan: ReconcilePlan) -> list[str]:
    return [f"{item['kind']} {item['metadata']['name']}" for item in plan.objects_to_apply]


def test_tuning_record_is_written_once_per_decision() -> None:
    world = serving_world()
    assert names(step(world, None)) == []
    assert names(step(world, RECORD)) == ["ConfigMap chat-aerie-tuning"]
    assert names(step(world, RECORD)) == []
    stored = tuning_record.read_tuning_record(world.observed())
    assert stored is not None
    assert replace(stored, decision_time=RECORD.decision_time) == RECORD
    assert stored.decision_time == pytest.approx(RECORD.decision_time, abs=0.002)
    later = replace(RECORD, decision_time=RECORD.decision_time + 1800.0, explanation="CHANGE\n")
    assert names(step(world, later)) == ["ConfigMap chat-aerie-tuning"]
    assert world.objects[CONFIG_MAP]["data"][tuning_config_map.EXPLANATION_KEY] == "CHANGE\n"
    assert step(world, None).objects_to_delete == (), "an operator that knows nothing yet leaves it"
    assert CONFIG_MAP in world.objects


def test_tuning_record_does_not_change_status() -> None:
    world = serving_world()
    world.step()
    before = step(world, None).status
    assert step(world, RECORD).status == before


def test_tuning_record_is_deleted_with_the_mode() -> None:
    world = serving_world()
    step(world, RECORD)
    world.edit(speculation={"numSpeculativeTokens": 3, "tuning": {"mode": "Off"}})
    plan = step(world, RECORD)
    assert [reference.name for reference in plan.objects_to_delete] == ["chat-aerie-tuning"]
    assert names(step(world, RECORD)) == []


def test_tuning_record_of_another_resource_is_ignored() -> None:
    world = serving_world()
    step(world, RECORD)
    world.objects[CONFIG_MAP]["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert tuning_record.read_tuning_record(world.observed()) is None


@pytest.mark.parametrize(
    "data",
    [{}, {tuning_config_map.DECISION_TIME_KEY: "yesterday"}, {**RECORD.to_data(), tuning_config_map.DECISION_TIME_KEY: "2026"}],
    ids=["empty", "few", "no moment"],
)
def test_manual_edit_of_tuning_record_is_overwritten(data: dict[str, str]) -> None:
    world = serving_world()
    step(world, RECORD)
    world.objects[CONFIG_MAP]["data"] = data
    assert tuning_record.read_tuning_record(world.observed()) is None
    assert names(step(world, RECORD)) == ["ConfigMap chat-aerie-tuning"]
    assert world.objects[CONFIG_MAP]["data"] == RECORD.to_data()
