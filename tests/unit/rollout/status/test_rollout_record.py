"""The record of rollouts for reports: what it has, when it is written, that it is bounded, and that it changes no decision."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from aerie.api.status import Arm, Status
from aerie.manifests import rollout_history_config_map as history
from aerie.manifests.rollout_history_config_map import MAX_BYTES, MAX_ROLLOUTS, Record, pack_record, unpack_record
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.status.rollout_record import MAX_OBSERVATIONS, WRITE_INTERVAL, thin_observations
from tests.snapshots import replace_facts
from tests.unit.rollout.in_place.fleet import serving_fleet
from tests.unit.rollout.world import World, monitored_world, serving_world, world_in_phase

CONFIG_MAP = ("ConfigMap", "chat-aerie-rollouts")


def records(world: World) -> list[Record]:
    """Return the stored records, the oldest first."""
    packed = history.read_packed_records(world.objects.get(CONFIG_MAP))
    unpacked = [unpack_record(text) for text in packed.values()]
    assert None not in unpacked
    return [record for record in unpacked if record is not None]


def test_no_rollout_has_no_record() -> None:
    world = serving_world()
    world.now += timedelta(days=1)
    world.step()
    assert world.status["phase"] == "Ready"
    assert CONFIG_MAP not in world.objects
    assert world.rollout_history is None


def test_observations_show_how_the_comparison_went_on() -> None:
    world, stable = world_in_phase("Analyzing")
    world.measure(20, +0.05)
    (record,) = records(world)
    assert (record["replacedRevision"], record["drafter"], record["purpose"]) == (stable, "models/eagle31", "Rollout")
    assert [phase["phase"] for phase in record["phases"]] == ["Starting", "WarmingUp", "Analyzing"]
    observations = [observation for observation in record["observations"] if observation.get("comparisons")]
    assert [observation["samples"] for observation in observations] == list(range(1, 21))
    comparison = next(item for item in world.status["analysis"]["comparisons"] if item["metric"] == "TokensPerStep")
    assert observations[-1]["comparisons"]["TokensPerStep"][0] == comparison["estimate"]
    uppers = [
        observation["comparisons"]["TokensPerStep"][2]
        for observation in observations
        if observation["comparisons"]["TokensPerStep"][2] is not None
    ]
    assert len(uppers) > 10
    assert uppers[-1] < uppers[0]
    arms = observations[-1]["arms"]
    assert arms["new"]["tokensPerStep"] / arms["stable"]["tokensPerStep"] == pytest.approx(1.05, abs=0.04)
    assert arms["stable"]["tokensPerStep"] == pytest.approx(2.5, rel=0.05), "of this block alone"


def test_promotion_is_recorded_with_its_outcome() -> None:
    world, _ = monitored_world()
    (record,) = records(world)
    outcome = world.status["rolloutHistory"][0]
    assert record["outcome"] == outcome
    assert [phase["phase"] for phase in record["phases"]][-3:] == ["Ramping", "Promoting", "Promoted"]
    assert record["observations"][-1]["weight"] == 100
    assert record["parameters"]["goal"] == "NonInferior"
    world.step()
    assert world.rollout_history is None, "nothing is stored in memory between rollouts"


def test_a_failed_write_of_the_outcome_is_repeated() -> None:
    world, _ = world_in_phase("Analyzing")
    world.measure(2, 0.0)
    stored = copy.deepcopy(world.objects[CONFIG_MAP])
    world.annotate(rollback=world.status["canary"]["revision"])
    for _ in range(5):
        if "outcome" not in records(world)[-1]:
            world.step()
    assert "outcome" in records(world)[-1]
    world.objects[CONFIG_MAP] = stored  # as if the API server had rejected the last write
    ended = _plan_until_the_record_is_due(world)
    assert ended is not None
    world.step()
    assert records(world)[-1]["outcome"]["result"] == "RolledBack"
    assert "earlierOutcomes" not in records(world)[-1]


def test_writes_of_an_outcome_are_not_repeated_for_ever() -> None:
    world, _ = world_in_phase("Analyzing")
    world.annotate(rollback=world.status["canary"]["revision"])
    world.step()
    for _ in range(40):
        world.now += timedelta(minutes=1)
        world.objects.pop(CONFIG_MAP, None)  # somebody deletes it each time
        world.step()
    assert world.rollout_history is None
    assert CONFIG_MAP not in world.objects


def _plan_until_the_record_is_due(world: World) -> dict[str, Any] | None:
    for _ in range(3):
        if (config_map := world.plan().history_config_map) is not None:
            return config_map
        world.now += WRITE_INTERVAL
    return None


def test_rollback_after_the_promotion_has_both_outcomes() -> None:
    world, _ = monitored_world()
    world.annotate(rollback=world.desired_revision)
    for _ in range(20):
        world.step()
        world.schedule()
        world.ready()
        world.now += timedelta(minutes=1)
    assert world.status["rolloutHistory"][0]["result"] == "RolledBack"
    (record,) = records(world)
    assert record["outcome"] == world.status["rolloutHistory"][0]
    assert [item["result"] for item in record["earlierOutcomes"]] == ["Promoted"]


def test_writes_are_a_minute_apart_except_at_the_end() -> None:
    world, _ = world_in_phase("Analyzing")
    written: list[float] = []
    plan = world.step()
    for number in range(60):
        world.measure(1, -0.15 if number > 20 else 0.0, seconds=25, step=False)
        plan = world.step()
        if world.status["phase"] != "Analyzing":
            break
        if plan.history_config_map is not None:
            written.append(world.now.timestamp())
    gaps = [later - earlier for earlier, later in itertools.pairwise(written)]
    assert len(gaps) > 5
    assert min(gaps) >= WRITE_INTERVAL.total_seconds()
    for _ in range(20):
        if plan.status.rollout_history[0].result == "RolledBack":
            break
        world.schedule()
        world.ready()
        world.now += timedelta(seconds=1)
        plan = world.step()
    assert plan.history_config_map is not None, "the end is written at once"
    (record,) = records(world)
    assert record["outcome"]["result"] == "RolledBack"
    samples = [observation["samples"] for observation in record["observations"] if "samples" in observation]
    assert samples == sorted(samples)
    assert len(set(samples)) > len(written), "observations between two writes are not lost"
    assert world.step().history_config_map is None


def test_record_goes_on_after_a_restart_of_the_operator() -> None:
    world, _ = world_in_phase("Analyzing")
    world.measure(5, 0.0)
    (before,) = records(world)
    world.rollout_history = None
    assert world.step().history_config_map is None, "its first write is a minute away"
    world.measure(5, 0.0)
    (record,) = records(world)
    assert record["observations"][: len(before["observations"])] == before["observations"]
    assert record["observations"][-1]["samples"] == 10


def test_rollout_in_place_by_turns_and_with_equal_requests() -> None:
    fleet = serving_fleet(6, rollout={"inPlace": {"mode": "Auto"}, "analysis": {"shadow": {"source": "Mirror"}}})
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase("Staging", "Evaluating")
    fleet.run_until_phase("Ready")
    assert not fleet.violations
    (record,) = records(fleet)
    designs = [observation["design"] for observation in record["observations"] if "design" in observation]
    assert list(dict.fromkeys(designs)) == ["EqualRequests", "ByTurns"]
    assert record["outcome"]["result"] == "Promoted"
    assert record["evaluation"]["result"] == "Accepted"
    assert (record["digest"], len(record["replacedDigest"])) == (fleet.status["stable"]["inPlace"]["digest"], 64)
    measured = [observation["arms"] for observation in record["observations"] if len(observation.get("arms", {})) == 2]
    assert measured
    gain = measured[-1]["new"]["tokensPerStep"] / measured[-1]["stable"]["tokensPerStep"] - 1
    assert gain == pytest.approx(0.09, abs=0.05)


def test_shadow_evaluation_between_pods() -> None:
    world, _ = world_in_phase("Evaluating", rollout={"analysis": {"shadow": {"source": "Mirror"}}})
    world.evaluator.gain = 0.05
    world.evaluate(8)
    record = world.rollout_history.record if world.rollout_history is not None else {}
    observations = [
        observation
        for observation in record["observations"]
        if (observation.get("design"), observation["phase"]) == ("EqualRequests", "Evaluating")
    ]
    assert len(observations) >= 5
    assert all(observation["weight"] == 0 for observation in observations), "no user is served by the canary"


def test_paused_rollout_writes_nothing() -> None:
    world, _ = world_in_phase("Analyzing")
    world.edit(rollout={"paused": True})
    world.now += timedelta(minutes=5)
    plan = world.step()
    assert world.status["phase"] == "Paused"
    assert plan.history_config_map is None


def test_somebody_elses_config_map_is_left_alone() -> None:
    world = serving_world()
    labels = {"aerie.dev/name": "chat"}
    world.objects[CONFIG_MAP] = {
        "kind": "ConfigMap",
        "metadata": {"name": CONFIG_MAP[1], "uid": "x", "labels": labels},
        "data": {},
    }
    world.drafter("eagle31")
    plans = [world.step() for _ in range(3)]
    assert all(plan.history_config_map is None for plan in plans)
    assert "CONFLICT" not in json.dumps(world.status), "a report is no reason to warn"
    assert world.condition("Degraded")[0] == "False"


def test_only_the_last_rollouts_are_kept() -> None:
    world = serving_world()
    for number in range(MAX_ROLLOUTS + 2):
        world.drafter("eagle31" if number % 2 == 0 else "eagle3")
        for _ in range(4):
            world.step()
            world.check()
        world.annotate(rollback=world.desired_revision)
        world.now += timedelta(minutes=2)
        world.settle()
        world.edit(drafter=world.document["spec"]["drafter"], replicas=2)
        world.annotate(retry=str(number))
    stored = records(world)
    assert 2 <= len(stored) <= MAX_ROLLOUTS
    assert [record["startTime"] for record in stored] == sorted(record["startTime"] for record in stored)


def _long_record(number: int, seed: int) -> dict[str, Any]:
    """Return a record of MAX_OBSERVATIONS observations with all metrics, of numbers that do not compress well."""
    source = random.Random(seed)  # noqa: S311 - no secrets

    def value() -> float:
        return round(source.uniform(-0.3, 0.3), 4)

    names = [
        *("TokensPerStep", "AcceptanceLength", "TimePerOutputToken", "SlowTimePerOutputToken", "TimeToFirstToken"),
        *("SlowTimeToFirstToken", "FailedRequests", "AbandonedRequests", "OutputLength", "TruncatedRequests", "Preemptions"),
    ]
    arm = {"acceptanceLength": value(), "tokensPerStep": value(), "acceptanceByPosition": [value() for _ in range(7)]}
    observations = [
        {"seconds": 120.0 * index, "comparisons": {name: [value(), value(), value()] for name in names}, "arms": {"new": arm}}
        for index in range(MAX_OBSERVATIONS)
    ]
    return {"format": 1, "revision": f"r{number}", "observations": observations}


def test_size_is_bounded() -> None:
    packed = {f"2026010{number}T000000Z-r{number}": pack_record(_long_record(number, number)) for number in range(1, 8)}
    config_map = history.render_rollout_history_config_map("chat", packed)
    stored = config_map["binaryData"]
    assert 3 <= len(stored) <= MAX_ROLLOUTS
    assert max(packed) in stored
    assert len(json.dumps(config_map)) < MAX_BYTES + 2000


def test_observations_are_thinned_evenly() -> None:
    observations: list[Record] = []
    for index in range(1000):
        observations = thin_observations([*observations, {"seconds": 60.0 * index}])
    seconds = [observation["seconds"] for observation in observations]
    assert len(observations) == MAX_OBSERVATIONS
    assert (seconds[0], seconds[-1]) == (0.0, 60.0 * 999)
    gaps = [later - earlier for earlier, later in itertools.pairwise(seconds)]
    assert max(gaps) <= 8 * 300


@pytest.mark.parametrize(
    "text",
    [
        "",
        "!",
        "AAAA",
        pack_record({"format": 2}),
        pack_record({}),
        pack_record({"format": 1}),
        pack_record({"format": 1, "phases": [], "observations": [{"phase": "Analyzing"}]}),
        pack_record({"format": 1, "phases": [3], "observations": []}),
    ],
)
def test_other_text_is_no_record(text: str) -> None:
    assert unpack_record(text) is None


def _plans(world: World) -> Iterator[ReconcilePlan]:
    yield world.plan()
    world.objects[CONFIG_MAP]["binaryData"] = {"20260101T000000Z-x": "torn"}
    world.rollout_history = None
    yield world.plan()
    del world.objects[CONFIG_MAP]
    yield world.plan()


def test_a_torn_or_missing_record_changes_no_decision() -> None:
    world, _ = world_in_phase("Analyzing")
    world.measure(4, 0.0)
    world.now += timedelta(minutes=2)
    plans = list(_plans(world))
    assert all(plan.status == plans[0].status for plan in plans)
    assert all(plan.objects_to_apply == plans[0].objects_to_apply for plan in plans)


def test_a_history_of_another_resource_is_not_continued() -> None:
    world, _ = world_in_phase("Analyzing")
    assert world.rollout_history is not None
    snapshot = world.observed()
    other = snapshot.resource.metadata.model_copy(update={"uid": "u2"})
    snapshot = replace_facts(snapshot, resource=snapshot.resource.model_copy(update={"metadata": other}))
    from aerie.rollout.status.rollout_record import update_rollout_history

    status = snapshot.resource.status or Status()
    assert isinstance(status.stable, Arm)
    update = update_rollout_history(snapshot, status, world.now)
    assert update.history is not None
    assert update.history.uid == "u2"
    assert len(update.history.record["observations"]) == 1
