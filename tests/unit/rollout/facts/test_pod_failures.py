"""Messages on pods that do not serve."""

from __future__ import annotations

from datetime import timedelta

from aerie.rollout.facts import pod_failures
from tests.golden import Messages
from tests.unit.rollout.pods import Pod, State
from tests.unit.rollout.world import START


def pod(name: str, state: State) -> Pod:
    return Pod(name, "chat-a", {}, "", START, state, START)


def test_a_pod_that_waited_for_its_node_is_awaited_from_the_time_at_which_it_got_it() -> None:
    """The node's kubelet reports the condition Ready later than the scheduler reports the node."""
    waiting = pod("a", "Roomless")
    assert pod_failures.not_ready_since(waiting.document()) == START
    placed = START + timedelta(hours=1)
    waiting.node, waiting.placed_at, waiting.is_reported = "H100-1", placed, False
    waiting.become("Loading", placed)
    assert pod_failures.not_ready_since(waiting.document()) == placed
    waiting.is_reported, waiting.since = True, placed + timedelta(seconds=2)
    assert pod_failures.not_ready_since(waiting.document()) == waiting.since
    waiting.become("Serving", placed + timedelta(minutes=5))
    assert pod_failures.not_ready_since(waiting.document()) is None


def test_lack_of_room_is_reported_besides_worse_failures(messages: Messages) -> None:
    """One pod of four without its image is excused; the rollout then waits for room alone, which has to be shown."""
    states: dict[str, State] = {"a": "Roomless", "b": "Imageless", "c": "Roomless"}
    group = [pod(name, state).document() for name, state in states.items()]
    worst = pod_failures.most_severe_failure(group, {})
    assert worst is not None
    assert worst.reason == "ImagePullBackOff"
    messages.check("image and node", worst.message)


def test_lack_of_room_alone_is_reported_once(messages: Messages) -> None:
    group = [pod(name, "Roomless").document() for name in ("a", "b")] + [pod("c", "Loading").document()]
    worst = pod_failures.most_severe_failure(group, {})
    assert worst is not None
    assert worst.reason == "Unschedulable"
    messages.check("no node", worst.message)


def test_quota_is_reported_besides_a_crash(messages: Messages) -> None:
    failure = pod_failures.PodFailure("QuotaExceeded", "Deployment chat-a cannot create its pods: exceeded quota: gpus")
    worst = pod_failures.most_severe_failure(
        [pod("a", "Crashing").document()], {}, pod_failures.PodCreationFailure(failure, START + timedelta(0))
    )
    assert worst is not None
    assert worst.reason == "CrashLoopBackOff"
    messages.check("crash and quota", worst.message)
