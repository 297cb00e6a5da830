"""Messages on pods that do not serve."""

from __future__ import annotations

from datetime import timedelta

from aerie.rollout.facts import pod_failures
from tests.golden import Messages
from tests.unit.rollout.cluster import Pod, State
from tests.unit.rollout.world import START


def pod(name: str, state: State) -> Pod:
    return Pod(name, "chat-a", {}, "", START, state, START)


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
