"""Engine exits during a rollout: from the pods' status to the verdict, in every phase that evaluates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from aerie.rollout.facts.pod_failures import count_restarts_since
from tests.golden import Messages
from tests.unit.rollout.world import World, masked, monitored_world, world_in_phase

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)


def outcome_message(world: World) -> str:
    return str(world.status["rolloutHistory"][0]["message"])


def test_canary_with_engine_exits_is_rolled_back(messages: Messages) -> None:
    world, old = world_in_phase("Analyzing", replicas=4)
    new = world.desired_revision
    world.measure(5, +0.2)
    world.kill(new, 1)
    world.measure(2, +0.2)
    assert world.status["phase"] == "Analyzing", "one may be an accident"
    world.kill(new, 2)
    world.measure(1, +0.2)
    assert world.status["phase"] == "RollingBack"
    messages.check("engines that ended", outcome_message(world))
    assert world.status["stable"]["revision"] == old


def test_one_engine_exit_requires_manual_promotion(messages: Messages) -> None:
    world, _ = world_in_phase("Analyzing", replicas=4)
    world.kill(world.desired_revision, 1)
    world.measure(40, +0.2)
    assert world.status["phase"] == "Analyzing"
    messages.check("one engine that ended", world.message("Progressing"))


def test_equal_engine_exits_of_control_do_not_roll_back() -> None:
    world, old = world_in_phase("Analyzing", replicas=4)
    world.kill(world.desired_revision, 1)
    world.kill(old, 1, control=True)
    world.measure(1, +0.2)
    world.kill(world.desired_revision, 2)
    world.kill(old, 2, control=True)
    world.measure(60, +0.2)
    assert world.status["phase"] in ("Ramping", "Promoting", "Monitoring", "Ready")


def test_engine_exits_before_analysis_are_not_counted() -> None:
    world, _ = world_in_phase("WarmingUp", replicas=4)
    world.kill(world.desired_revision, 7)
    world.now += timedelta(minutes=5)
    world.step()
    world.measure(20, +0.2)
    assert world.status["phase"] == "Ramping"


@pytest.mark.parametrize("phase", ["Ramping", "Promoting"])
def test_engine_exits_roll_back_during_ramp(phase: str, messages: Messages) -> None:
    world, _ = world_in_phase(phase, replicas=4)
    world.kill(world.desired_revision, 1)
    world.measure(1, +0.2)
    world.kill(world.desired_revision, 3)
    world.measure(1, +0.2)
    assert world.status["phase"] == "RollingBack"
    messages.check(f"engines that ended in phase {phase}", outcome_message(world))


def test_engine_exits_roll_back_promotion(messages: Messages) -> None:
    world, old = monitored_world()
    new = world.status["stable"]["revision"]
    world.measure_alone(1, 3.0)
    world.kill(new, 1)
    world.measure_alone(1, 3.0)
    assert world.status["phase"] == "RollingBack"
    messages.check("engines that ended after the promotion", outcome_message(world))
    assert world.status["stable"]["revision"] == old


def test_crash_after_promotion_extends_retention(messages: Messages) -> None:
    world, old = monitored_world()
    new = world.status["stable"]["revision"]
    world.measure_alone(1, 3.0)
    world.kill(new, 1, most=1)
    world.measure_alone(10, 3.0)
    assert world.status["phase"] == "Monitoring", "10 minutes are over"
    messages.check("one engine that ended after the promotion", masked(world.message("Progressing"), NEW=new, OLD=old))
    world.now += timedelta(minutes=40)
    world.step()
    world.settle()
    assert world.status["phase"] == "Ready"


def test_counted_restarts() -> None:
    def pod(
        name: str, ended: timedelta, status: int = 1, container: str = "engine", state: str = "lastState"
    ) -> dict[str, object]:
        terminated = {"terminated": {"exitCode": status, "finishedAt": (NOW + ended).isoformat()}}
        return {
            "metadata": {"name": name},
            "status": {"containerStatuses": [{"name": container, "restartCount": 2, state: terminated}]},
        }

    minute = timedelta(minutes=1)
    pods = [pod("a", minute), pod("b", -minute), pod("c", minute, status=0), pod("d", minute, container="proxy")]
    assert count_restarts_since(pods, NOW) == {"a": 2}
    assert count_restarts_since([pod("e", minute, state="state")], NOW) == {"e": 3}, "it is about to be restarted"
    assert count_restarts_since([{"metadata": {"name": "new"}}], NOW) == {}
