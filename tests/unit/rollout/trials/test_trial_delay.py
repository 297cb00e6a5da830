"""Trials that are delayed: by the cooldown, which doubles after failed starts, and by a lack of room for their pods."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from aerie.api.status import Status
from aerie.engine.speculation import Static
from aerie.rollout.trials.failures import find_capacity_obstacle
from tests.golden import Messages
from tests.unit.rollout.tuned_world import K5, MINUTE, edit_speculation, recommend, run_trial, run_until, speculation, tuned_world
from tests.unit.rollout.world import World, masked


@pytest.mark.parametrize("slower", [0.1, 0.0])
def test_cooldown_ends_when_traffic_changed_since_the_trial(slower: float) -> None:
    world = tuned_world(rollout={"analysis": {"maxDuration": "1h"}})
    run_trial(world, slower)
    world.settle()
    world.now += timedelta(hours=1)
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Cooldown")
    recommend(world)
    assert world.recommendation is not None
    trial = speculation(world)["trials"][0]
    began, ended = (datetime.fromisoformat(trial[name]).timestamp() for name in ("startTime", "completionTime"))
    for since, reason in ((began - 1, "Cooldown"), ((began + ended) / 2, "Trial")):
        world.recommendation = replace(world.recommendation, traffic_changed_at=since)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", reason)


def test_time_from_a_clock_ahead_counts_from_now() -> None:
    world = tuned_world()
    ahead = (world.now + timedelta(days=7)).isoformat()
    world.document["status"]["speculation"]["lastChangeTime"] = ahead
    world.step()
    assert datetime.fromisoformat(speculation(world)["lastChangeTime"]) == world.now
    world.now += timedelta(hours=7)
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Trial")


# ----------------------------------------------------------------------------------------------------------------- failed starts
def run_crashing_trial(world: World) -> None:
    """Run a trial whose engines crash, from its recommendation to its end."""
    recommend(world)
    world.step()
    assert world.condition("SpeculationTuned") == ("False", "Trial")
    trial = speculation(world)["trial"]["revision"]
    for _ in range(60):
        world.step()
        world.check()
        world.schedule()
        world.crash(trial, 3)
        world.ready(world.desired_revision)
        if "trial" not in speculation(world) and world.status["phase"] == "Ready":
            return
        world.now += MINUTE
    raise AssertionError("the trial does not end")


def test_cooldown_after_failed_starts_doubles() -> None:
    world = tuned_world()
    for times, hours in ((1, 24), (2, 48), (3, 96)):
        run_crashing_trial(world)
        (failure,) = speculation(world)["failures"]
        assert (failure["setting"], failure["reason"], failure["failureCount"]) == (K5, "Failed", times)
        ended = world.now
        world.now = ended + timedelta(hours=hours - 1)
        recommend(world)
        assert world.recommendation is not None
        world.recommendation = replace(world.recommendation, traffic_changed_at=world.now.timestamp() - 1)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", "Cooldown"), "other traffic does not make it start"
        world.now = ended + timedelta(hours=hours, minutes=1)


def test_other_spec_or_retry_clears_failed_settings() -> None:
    for change in ("spec", "word"):
        world = tuned_world()
        run_crashing_trial(world)
        if change == "spec":
            edit_speculation(world, numSpeculativeTokens=2)
            run_until(world, "Analyzing")
            world.annotate(promote=world.desired_revision)
            run_until(world, "Ready")
        else:
            world.annotate(retry="now")
            world.step()
        assert "failures" not in speculation(world)
        assert "consecutiveFailures" not in speculation(world)


# ----------------------------------------------------------------------------------------------------------------------- no room
NO_NODE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes: Insufficient nvidia.com/gpu",
}


def run_trial_without_room(world: World) -> None:
    """Run a trial in a cluster that has room for the replicas alone."""
    recommend(world)
    world.step()
    places = world.document["spec"]["replicas"]
    for _ in range(60):
        world.step()
        world.check()
        world.schedule()
        for pod in world.pods[places:]:
            pod["status"] = {"phase": "Pending", "conditions": [NO_NODE]}
        if "trial" not in speculation(world) and world.status["phase"] == "Ready":
            return
        world.now += MINUTE
    raise AssertionError("the trial does not end")


def test_lack_of_room_blocks_trials_and_message_names_fixes(messages: Messages) -> None:
    world = tuned_world()
    run_trial_without_room(world)
    assert speculation(world)["failures"][0]["reason"] == "InsufficientCapacity"
    assert speculation(world)["savings"]["spent"] == 0, "a pod without a node costs nothing"
    world.now += timedelta(days=30)
    for setting in (Static(5), Static(7)):
        recommend(world, setting)
        world.step()
        assert world.condition("SpeculationTuned") == ("False", "InsufficientCapacity")
    for fragment in ("2 ", "capacity: Reuse", "quota", "aerie.dev/retry"):
        assert fragment in world.message("SpeculationTuned")
    messages.check("no capacity for a trial", masked(world.message("SpeculationTuned")))
    for change in ("fewer pods", "a rollout found room", "a manual retry"):
        other = copy.deepcopy(world)
        if change == "fewer pods":
            other.edit(replicas=3, rollout={"canary": {"capacity": "Reuse"}})
        elif change == "a rollout found room":
            other.edit(replicas=4)
        else:
            other.annotate(retry="there are more nodes now")
        other.settle()
        recommend(other)
        other.step()
        assert other.condition("SpeculationTuned") == ("False", "Trial"), change


def test_lack_of_room_message_counts_current_trial_pods(messages: Messages) -> None:
    """An autoscaler has since requested more replicas, and not all of them serve."""
    world = tuned_world()
    run_trial_without_room(world)
    world.edit(replicas=8)
    world.now += timedelta(days=1)
    speculation_status = Status.from_dict(world.status).speculation
    assert speculation_status is not None
    obstacle = find_capacity_obstacle(speculation_status, world.observed(), {speculation_status.failures[0].spec_revision})
    messages.check("no capacity for a trial", masked(obstacle))
