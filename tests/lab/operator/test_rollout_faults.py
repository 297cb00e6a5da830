"""Rollouts with every fault that the state machine handles, side by side in one namespace, under an operator that is killed
repeatedly.

    scenarios   one resource each, as a coroutine with the user's actions, the cluster's faults and corrupt metrics
    kills       SIGKILL when the first canary enters a phase, for each phase
    recorder    violations of invariants, over the whole time and for all resources (event_recorder.py); transitions taken

Each wait is for a state, with minutes of time. Pods that are not measured run nothing; the others are simulated engines with own
requests, so no client's traffic is needed (test_canary.py has it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from aerie.rollout.canary.state_machine import TRANSITIONS, StateMachinePhase, Trigger
from aerie_lab.cluster import Lab
from aerie_lab.faults import FaultInjector
from aerie_lab.testing.plugin import new_namespace
from tests.lab.operator.environment import Case, Environment, OperatorSeries
from tests.lab.operator.event_recorder import record_events
from tests.lab.operator.notification_sink import NotificationSink, run_notification_sink
from tests.lab.operator.scenarios import SCENARIOS

pytestmark = pytest.mark.timeout(1800)
NO_EVALUATOR = "engines of these scenarios answer no requests: test_shadow_pods.py, with kills, and unit tests of evaluations"
NOT_COVERED: dict[tuple[StateMachinePhase, Trigger], str] = {
    (
        "Analyzing",
        Trigger.EXPLORED,
    ): "a trial of tuning, which these scenarios do not have: unit tests of the state machine and of tuned rollouts",
    ("Verifying", Trigger.TIMER): "it takes an hour: unit tests of post-promotion monitoring",
    (
        "Ramping",
        Trigger.DEADLINE_EXCEEDED,
    ): "it takes more pods than one that are late for their revision's sake: unit tests of fleet size",
    ("Promoting", Trigger.DEADLINE_EXCEEDED): "as with Ramping",
    ("Starting", Trigger.NEEDS_EVALUATION): NO_EVALUATOR,
    **{transition: NO_EVALUATOR for transition in TRANSITIONS if transition[0] == "Evaluating"},
}
"""Transitions that no scenario takes, and the reason."""


@dataclass
class RunResult:
    """The results of a run."""

    failures: dict[str, BaseException | None]
    killed_in: dict[str, str]
    violations: list[str]
    transitions_taken: dict[tuple[str, Trigger], set[str]]
    phase_changes: int
    missing_notifications: set[str]
    """Ids of notifications that were not received."""


async def run_scenarios(
    lab: Lab, namespace: str, faults: FaultInjector, launcher: Any, notification_sink: NotificationSink
) -> RunResult:
    """Run all scenarios."""
    async with lab.client() as client, record_events(client, namespace) as recorder:
        operators = OperatorSeries(launcher, namespace, notification_sink.url)
        environment = Environment(lab, namespace, client, recorder, operators, faults)
        operators_task = asyncio.create_task(operators.run())
        try:
            recorder.listeners.append(environment.kill_in_new_phase)
            cases = {name: Case(name, environment) for name in SCENARIOS}

            async def run_scenario(name: str) -> None:
                try:
                    await SCENARIOS[name](cases[name])
                finally:
                    for fault in reversed(cases[name].faults):
                        await asyncio.to_thread(fault.undo)

            errors = await asyncio.gather(*map(run_scenario, SCENARIOS), return_exceptions=True)
            recorder.listeners.clear()
            missing_notifications = await notification_sink.wait_until_none_missing(recorder)
        finally:
            operators_task.cancel()
            await asyncio.gather(operators_task, return_exceptions=True)
        failures = dict(zip(SCENARIOS, errors, strict=True))
        return RunResult(
            failures,
            environment.killed_in,
            recorder.violations(),
            recorder.transitions_taken(),
            recorder.phase_changes(),
            missing_notifications,
        )


@pytest.fixture(scope="module")
def notification_sink(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotificationSink]:
    with run_notification_sink(lab, tmp_path_factory.mktemp("received")) as sink:
        yield sink


@pytest.fixture(scope="module")
def result(lab: Lab, inner_operators: Any, notification_sink: NotificationSink) -> Iterator[RunResult]:
    with new_namespace(lab, "rollout-faults") as namespace:
        try:
            yield asyncio.run(run_scenarios(lab, namespace.name, namespace.faults, inner_operators, notification_sink))
        finally:
            inner_operators.end_all()


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_scenario(result: RunResult, name: str) -> None:
    failure = result.failures[name]
    if failure is not None:
        raise failure


def test_operator_was_killed_in_every_phase(result: RunResult) -> None:
    expected = {phase for phase, _ in TRANSITIONS.keys() - NOT_COVERED.keys()} | {"RollingBack"}
    assert expected <= result.killed_in.keys()


def test_all_notifications_were_received(result: RunResult) -> None:
    assert result.missing_notifications == set()


def test_no_invariant_was_violated(result: RunResult) -> None:
    assert result.phase_changes > 2 * len(SCENARIOS), "the recorder has observed them"
    assert result.violations == []


def test_every_transition_of_the_table_was_taken(result: RunResult) -> None:
    assert TRANSITIONS.keys() >= NOT_COVERED.keys(), "excluded transitions exist"
    assert TRANSITIONS.keys() - NOT_COVERED.keys() - result.transitions_taken.keys() == set()
