"""Phases and conditions of a pod."""

from __future__ import annotations

from typing import Any

import pytest

from aerie_lab.node.status import ContainerState, PodFacts, build_pod_status, compute_phase, status_covers

NOW = 1_800_000_000.0


def ended(code: int, **fields: Any) -> ContainerState:
    return ContainerState("c", "i", terminated={"exitCode": code}, **fields)


def running(**fields: Any) -> ContainerState:
    return ContainerState("c", "i", running_since=NOW, started=True, **fields)


def crashed() -> ContainerState:
    return ContainerState("c", "i", waiting=("CrashLoopBackOff", ""), last_terminated={"exitCode": 1})


WAITING = ContainerState("c", "i")


@pytest.mark.parametrize(
    ("init", "main", "expected"),
    [
        ([], [WAITING], "Pending"),
        ([], [running()], "Running"),
        ([], [running(), WAITING], "Pending"),
        ([], [running(), ended(1)], "Running"),
        ([], [crashed()], "Running"),
        ([], [ended(0)], "Succeeded"),
        ([], [ended(0), ended(2)], "Failed"),
        ([running(init=True)], [WAITING], "Pending"),
        ([crashed()], [WAITING], "Pending"),
        ([ended(0), running()], [WAITING], "Pending"),
        ([ended(0)], [running()], "Running"),
        ([ended(3)], [WAITING], "Failed"),
    ],
)
def test_phase_follows_from_container_states(init: list[ContainerState], main: list[ContainerState], expected: str) -> None:
    assert compute_phase(init, main) == expected


def status_of(*main: ContainerState, pod: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    pod = {"metadata": {"generation": 1}, "spec": {}, **(pod or {})}
    pod_facts = PodFacts(pod, "10.0.0.1", "10.0.0.2", NOW, True, **facts)
    return build_pod_status(pod_facts, [], main, NOW)


def conditions_of(status: dict[str, Any]) -> dict[str, str]:
    return {c["type"]: c["status"] for c in status["conditions"]}


def test_a_pod_is_ready_when_all_its_containers_are() -> None:
    assert conditions_of(status_of(running(ready=True), running(ready=True)))["Ready"] == "True"
    half = status_of(running(ready=True), running())
    assert conditions_of(half)["Ready"] == conditions_of(half)["ContainersReady"] == "False"


@pytest.mark.parametrize("gate", [None, "False", "True"])
def test_a_pod_is_ready_when_its_readiness_gate_is_true(gate: str | None) -> None:
    conditions = [] if gate is None else [{"type": "g", "status": gate}]
    pod = {"spec": {"readinessGates": [{"conditionType": "g"}]}, "status": {"conditions": conditions}}
    conditions_by_type = conditions_of(status_of(running(ready=True), pod=pod))
    assert conditions_by_type["ContainersReady"] == "True"
    assert conditions_by_type["Ready"] == ("True" if gate == "True" else "False")


def test_a_transition_time_changes_only_with_the_status() -> None:
    before = [{"type": "Ready", "status": "True", "lastTransitionTime": "then"}]
    stays = status_of(running(ready=True), pod={"status": {"conditions": before}})
    moves = status_of(running(), pod={"status": {"conditions": before}})
    times = [{c["type"]: c["lastTransitionTime"] for c in status["conditions"]}["Ready"] for status in (stays, moves)]
    assert times[0] == "then"
    assert times[1] != "then"


@pytest.mark.parametrize(
    ("main", "failure", "over", "expected"),
    [
        (running(), True, False, "Running"),
        (ended(0), True, False, "Running"),  # Succeeded must not be seen before Failed
        (ended(0), True, True, "Failed"),
        (ended(0), False, True, "Succeeded"),
        (WAITING, False, True, "Failed"),
        (WAITING, False, False, "Pending"),
    ],
)
def test_the_failure_of_a_pod_shows_once_it_has_finished(main: ContainerState, failure: bool, over: bool, expected: str) -> None:
    status = status_of(main, failure=("DeadlineExceeded", "late") if failure else None, is_finished=over)
    assert status["phase"] == expected
    assert status.get("reason") == ("DeadlineExceeded" if failure else None)


def test_between_two_runs_the_state_is_the_last_termination() -> None:
    state = ContainerState("c", "i", waiting=("", ""), last_terminated={"exitCode": 1})
    assert state.to_status()["state"] == {"terminated": {"exitCode": 1}}


@pytest.mark.parametrize(
    ("current", "desired", "same"),
    [
        ({"a": 1, "more": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, {"a": None, "b": "", "c": {}, "d": []}, True),
        ({"a": "x"}, {"a": None}, False),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({"state": {"running": {}}}, {"state": {"running": {"startedAt": None}}}, True),
        ({"state": {"running": {"startedAt": 1}}}, {"state": {"terminated": {"exitCode": 0}}}, False),
        ({"lastState": {"terminated": {"exitCode": 1}}}, {"lastState": {}}, False),
        (
            {"conditions": [{"type": "theirs", "status": "True"}, {"type": "Ready", "status": "True", "lastProbeTime": None}]},
            {"conditions": [{"type": "Ready", "status": "True", "reason": None}]},
            True,
        ),
        ({"conditions": [{"type": "Ready", "status": "True"}]}, {"conditions": [{"type": "Ready", "status": "False"}]}, False),
        (
            {"conditions": [{"type": "Ready", "status": "True", "reason": "x"}]},
            {"conditions": [{"type": "Ready", "status": "True", "reason": None}]},
            False,
        ),
        (None, {"phase": "Pending"}, False),
    ],
)  # fmt: skip
def test_current_status_covers_the_desired_one(current: Any, desired: dict[str, Any], same: bool) -> None:
    assert status_covers(current, desired) is same


def test_a_written_status_covers_itself() -> None:
    written = status_of(running(ready=True), crashed(), ended(1))
    assert status_covers(written, written)
