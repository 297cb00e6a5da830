"""What the tuner knows: when it is written down, that it stays, and that it goes with the mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aerie.manifests import tuning_config_map
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.rollout.children import tuning_record
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reconcile import build_reconcile_plan
from tests.snapshots import replace_facts
from tests.unit.rollout.world import IMAGE, World, serving

PLACE = ("ConfigMap", "chat-aerie-tuning")
KEPT = TuningRecord(1_790_000_000.123, "f1", "packed", "{}", "HOLD\n")


def step(world: World, known: TuningRecord | None) -> ReconcilePlan:
    """A pass with what the tuner knows, and what it writes."""
    plan = build_reconcile_plan(replace_facts(world.observed(), tuning_record=known), IMAGE, world.now, world.catalog)
    for item in plan.objects_to_apply:
        world.apply(item)
    for reference in plan.objects_to_delete:
        del world.objects[reference.kind, reference.name]
    return plan


def names(plan: ReconcilePlan) -> list[str]:
    return [f"{item['kind']} {item['metadata']['name']}" for item in plan.objects_to_apply]


def test_tuning_record_is_written_once_per_decision() -> None:
    world = serving()
    assert names(step(world, None)) == []
    assert names(step(world, KEPT)) == ["ConfigMap chat-aerie-tuning"]
    assert names(step(world, KEPT)) == []
    found = tuning_record.read_tuning_record(world.observed())
    assert found is not None
    assert replace(found, decision_time=KEPT.decision_time) == KEPT
    assert found.decision_time == pytest.approx(KEPT.decision_time, abs=0.002)
    later = replace(KEPT, decision_time=KEPT.decision_time + 1800.0, explanation="CHANGE\n")
    assert names(step(world, later)) == ["ConfigMap chat-aerie-tuning"]
    assert world.objects[PLACE]["data"][tuning_config_map.EXPLANATION_KEY] == "CHANGE\n"
    assert step(world, None).objects_to_delete == (), "an operator that knows nothing yet leaves it"
    assert PLACE in world.objects


def test_tuning_record_does_not_change_status() -> None:
    world = serving()
    world.step()
    before = step(world, None).status
    assert step(world, KEPT).status == before


def test_tuning_record_is_deleted_with_the_mode() -> None:
    world = serving()
    step(world, KEPT)
    world.edit(speculation={"numSpeculativeTokens": 3, "tuning": {"mode": "Off"}})
    plan = step(world, KEPT)
    assert [one.name for one in plan.objects_to_delete] == ["chat-aerie-tuning"]
    assert names(step(world, KEPT)) == []


def test_tuning_record_of_another_resource_is_ignored() -> None:
    world = serving()
    step(world, KEPT)
    world.objects[PLACE]["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert tuning_record.read_tuning_record(world.observed()) is None


@pytest.mark.parametrize(
    "data",
    [{}, {tuning_config_map.DECISION_TIME_KEY: "yesterday"}, {**KEPT.to_data(), tuning_config_map.DECISION_TIME_KEY: "2026"}],
    ids=["empty", "few", "no moment"],
)
def test_manual_edit_of_tuning_record_is_overwritten(data: dict[str, str]) -> None:
    world = serving()
    step(world, KEPT)
    world.objects[PLACE]["data"] = data
    assert tuning_record.read_tuning_record(world.observed()) is None
    assert names(step(world, KEPT)) == ["ConfigMap chat-aerie-tuning"]
    assert world.objects[PLACE]["data"] == KEPT.to_data()
