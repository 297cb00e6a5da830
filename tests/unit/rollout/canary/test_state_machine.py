"""The canary's state machine: every transition of its table, and its invariants under any observations."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aerie.api.rollout import AnalysisSpec, CanarySpec
from aerie.rollout.canary.state_machine import (
    TRANSITIONS,
    CanaryObservation,
    CanaryPolicy,
    CanaryState,
    EndState,
    StateMachinePhase,
    StateTransition,
    Trigger,
    advance_state,
)
from tests.golden import Messages

T0 = datetime(2026, 11, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
POLICY = CanaryPolicy(
    CanarySpec(step_weights=[25, 50], scale_down_delay=timedelta(minutes=10)), AnalysisSpec(), timedelta(minutes=30)
)
MANUAL_POLICY = CanaryPolicy(
    CanarySpec(step_weights=[25, 50], approval="Manual"), AnalysisSpec(on_inconclusive="Rollback"), timedelta(minutes=30)
)
EXPLORATION_POLICY = dataclasses.replace(POLICY, exploration_duration=timedelta(minutes=30))
READY, WAITING = CanaryObservation(ready=True), CanaryObservation(ready=False, next_deadline_at=T0 + 30 * MINUTE)
LATE = CanaryObservation(ready=False, deadline_exceeded=True)


def at(phase: StateMachinePhase, step: int | None = None) -> CanaryState:
    """Return a canary whose current phase began at T0."""
    ready = None if phase in ("Starting", "Evaluating") else T0
    began = T0 if phase in ("Ramping", "Promoting", "Monitoring", "Verifying") else None
    return CanaryState(phase, T0, ready, step if phase == "Ramping" else None, began)


def example(phase: StateMachinePhase, trigger: Trigger) -> tuple[CanaryState, CanaryObservation, CanaryPolicy, datetime]:
    """Return an observation that gives this trigger and nothing more urgent."""
    soon = T0 + MINUTE
    return {
        Trigger.ROLLBACK_REQUESTED: (at(phase, 0), CanaryObservation(ready=True, manual_action="rollback"), POLICY, soon),
        Trigger.ABORTED: (at(phase, 0), CanaryObservation(ready=True, abort_message="It crashes."), POLICY, soon),
        Trigger.WORSE: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict="Rollback", verdict_message="It is worse."),
            POLICY,
            soon,
        ),
        Trigger.REGRESSED: (at(phase, 0), CanaryObservation(ready=True, regression_message="It has fallen."), POLICY, soon),
        Trigger.DEADLINE_EXCEEDED: (at(phase, 0), LATE, POLICY, soon),
        Trigger.PROMOTE_REQUESTED: (at(phase, 0), CanaryObservation(ready=True, manual_action="promote"), POLICY, soon),
        Trigger.EXTENDED: (
            at(phase, 0),
            CanaryObservation(ready=True, extension_ends_at=T0 + 30 * MINUTE),
            POLICY,
            soon,
        ),
        Trigger.BETTER: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict="Promote", verdict_message="It is better."),
            POLICY,
            soon,
        ),
        Trigger.NEEDS_APPROVAL: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict="Promote", verdict_message="It is better."),
            MANUAL_POLICY,
            soon,
        ),
        Trigger.EXPLORED: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict_message="It is 3 % below."),
            EXPLORATION_POLICY,
            T0 + 35 * MINUTE,
        ),
        Trigger.INCONCLUSIVE_HOLD: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict="Inconclusive", verdict_message="Too few."),
            POLICY,
            soon,
        ),
        Trigger.INCONCLUSIVE_ROLLBACK: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict="Inconclusive", verdict_message="Too few."),
            MANUAL_POLICY,
            soon,
        ),
        Trigger.NEEDS_EVALUATION: (at(phase, 0), CanaryObservation(ready=True, needs_evaluation=True), POLICY, soon),
        Trigger.READY: (at(phase, 0), READY, POLICY, soon),
        Trigger.EVALUATED: (
            at(phase, 0),
            CanaryObservation(ready=True, evaluated_message="It was accepted."),
            POLICY,
            soon,
        ),
        Trigger.TIMER: (
            at(phase, 0),
            READY,
            POLICY,
            T0 + (61 if phase == "Verifying" else 11 if phase == "Monitoring" else 6) * MINUTE,
        ),
        Trigger.LAST_RAMP_STEP: (at(phase, 1), READY, POLICY, T0 + 6 * MINUTE),
    }[trigger]


@pytest.mark.parametrize(("phase", "trigger"), TRANSITIONS)
def test_transition_matches_table(phase: StateMachinePhase, trigger: Trigger) -> None:
    step = advance_state(*example(phase, trigger))
    target = TRANSITIONS[phase, trigger]
    assert (step.end_state or step.state.phase) == target
    assert step.message
    assert (step.requeue_after is None) == (step.end_state is not None)


@pytest.mark.parametrize("phase", get_args(StateMachinePhase))
@pytest.mark.parametrize("trigger", list(Trigger))
def test_trigger_without_transition_changes_nothing(phase: StateMachinePhase, trigger: Trigger) -> None:
    if (phase, trigger) in TRANSITIONS:
        return
    state, observation, policy, now = example(phase, trigger)
    observation = dataclasses.replace(observation, ready=observation.ready and (phase, Trigger.READY) not in TRANSITIONS)
    now = min(now, T0 + MINUTE)  # in some phases time alone is a trigger; here it has not passed
    assert advance_state(state, observation, policy, now).state == state


def test_a_whole_rollout() -> None:
    state, now, phases = CanaryState("Starting", T0), T0, []
    step = advance_state(state, WAITING, POLICY, now)
    assert (step.state, step.end_state, step.requeue_after) == (state, None, timedelta(minutes=30))
    observation = READY
    while step.end_state is None:
        phases.append((step.state.phase, step.state.step))
        now += step.requeue_after if step.requeue_after is not None else 2 * MINUTE
        if step.state.phase == "Analyzing":
            observation = CanaryObservation(
                ready=True, verdict="Promote", verdict_message="The acceptance length is 20 % higher."
            )
        step = advance_state(step.state, observation, POLICY, now)
    assert step.end_state == "Promoted"
    assert list(dict.fromkeys(phases)) == [
        ("Starting", None),
        ("WarmingUp", None),
        ("Analyzing", None),
        ("Ramping", 0),
        ("Ramping", 1),
        ("Promoting", None),
    ]


def test_shadow_evaluation_comes_between_start_and_warm_up() -> None:
    pending = CanaryObservation(ready=True, needs_evaluation=True, evaluation_ends_at=T0 + 15 * MINUTE)
    step = advance_state(at("Starting"), pending, POLICY, T0)
    assert (step.state.phase, step.state.ready_at) == ("Evaluating", None)
    step = advance_state(step.state, pending, POLICY, T0 + 5 * MINUTE)
    assert (step.state.phase, step.requeue_after) == ("Evaluating", 10 * MINUTE)
    step = advance_state(
        step.state, CanaryObservation(ready=False, evaluated_message="It is good enough."), POLICY, T0 + 6 * MINUTE
    )
    assert (step.state.phase, step.state.ready_at, step.message) == ("WarmingUp", T0 + 6 * MINUTE, "It is good enough.")


@pytest.mark.parametrize(("policy", "phase", "step"), [(POLICY, "Ramping", 0), (MANUAL_POLICY, "AwaitingApproval", None)])
def test_accepted_canary_needs_no_analysis(policy: CanaryPolicy, phase: StateMachinePhase, step: int | None) -> None:
    accepted = CanaryObservation(ready=True, verdict="Promote", verdict_message="Better.", evaluated_message="Accepted.")
    transition = advance_state(at("Evaluating"), accepted, policy, T0 + MINUTE)
    assert (transition.state.phase, transition.state.ready_at, transition.state.step) == (phase, T0 + MINUTE, step)


def test_promotion_during_shadow_evaluation_begins_the_ramp() -> None:
    step = advance_state(at("Evaluating"), CanaryObservation(ready=True, manual_action="promote"), POLICY, T0 + MINUTE)
    assert (step.state.phase, step.state.ready_at, step.state.step) == ("Ramping", T0 + MINUTE, 0)


def test_extension_ends_as_the_analysis_ended() -> None:
    """Its end is fixed when it begins: a later request does not move it, and begins another one after it."""
    ends_at = T0 + 30 * MINUTE
    step = advance_state(at("Held"), CanaryObservation(ready=True, extension_ends_at=ends_at), POLICY, T0)
    assert (step.state.phase, step.state.extension_ends_at, step.state.is_extended) == ("Analyzing", ends_at, True)
    later = CanaryObservation(ready=True, extension_ends_at=ends_at + 30 * MINUTE)
    step = advance_state(step.state, later, POLICY, T0 + 10 * MINUTE)
    assert (step.state.extension_ends_at, step.requeue_after) == (ends_at, 20 * MINUTE)
    inconclusive = dataclasses.replace(later, verdict="Inconclusive", verdict_message="Too few.")
    step = advance_state(step.state, inconclusive, POLICY, ends_at)
    assert (step.state.phase, step.state.is_extended) == ("Held", False)
    step = advance_state(step.state, later, POLICY, ends_at)
    assert (step.state.phase, step.state.extension_ends_at) == ("Analyzing", ends_at + 30 * MINUTE)


def test_decisions_precede_an_extension() -> None:
    for action, phase in (("promote", "Ramping"), ("rollback", "Held")):
        observation = CanaryObservation(ready=True, manual_action=action, extension_ends_at=T0 + 30 * MINUTE)  # type: ignore[arg-type]
        step = advance_state(at("Held"), observation, POLICY, T0)
        assert (step.state.phase, step.end_state) == (phase, "RolledBack" if action == "rollback" else None)
    worse = CanaryObservation(ready=True, verdict="Rollback", verdict_message="Worse.", extension_ends_at=T0 + 30 * MINUTE)
    assert advance_state(at("Held"), worse, POLICY, T0).end_state == "RolledBack"


def test_empty_ramp_promotes_immediately() -> None:
    policy = CanaryPolicy(CanarySpec(step_weights=[]), AnalysisSpec(), timedelta(minutes=30))
    step = advance_state(at("Analyzing"), CanaryObservation(ready=True, verdict="Promote", verdict_message="Better."), policy, T0)
    assert (step.state.phase, step.state.step, step.state.step_started_at) == ("Promoting", None, T0)


def test_abort_precedes_promotion_and_manual_action_precedes_verdict(messages: Messages) -> None:
    both = CanaryObservation(
        ready=True, verdict="Promote", verdict_message="Better.", abort_message="A pod crashes.", manual_action="promote"
    )
    assert advance_state(at("Analyzing"), both, POLICY, T0).end_state == "RolledBack"
    person = CanaryObservation(ready=True, verdict="Promote", verdict_message="Better.", manual_action="rollback")
    step = advance_state(at("Analyzing"), person, POLICY, T0)
    assert step.end_state == "RolledBack"
    messages.check("rollback requested", step.message)


@pytest.mark.parametrize("phase", ["Ramping", "Promoting"])
def test_ramp_step_waits_for_its_pods(phase: StateMachinePhase) -> None:
    step = advance_state(at(phase, 0), WAITING, POLICY, T0 + timedelta(hours=200))
    assert (step.end_state, step.state) == (None, at(phase, 0))


def test_ramp_that_becomes_empty_promotes(messages: Messages) -> None:
    policy = dataclasses.replace(POLICY, canary=CanarySpec(step_weights=[]))
    for observation in (READY, WAITING):
        for step in (0, 1, 7):
            transition = advance_state(at("Ramping", step), observation, policy, T0)
            assert (transition.state.phase, transition.state.step, transition.end_state) == ("Promoting", None, None)
            messages.check("stepWeights became empty", transition.message)


def test_shortened_ramp_ends_with_its_last_step(messages: Messages) -> None:
    policy = dataclasses.replace(POLICY, canary=CanarySpec(step_weights=[25]))
    step = advance_state(at("Ramping", 3), READY, policy, T0 + 5 * MINUTE)
    assert step.state.phase == "Promoting"
    messages.check("end of a step", step.message)


def test_ramp_timer_waits_for_ready_pods() -> None:
    assert advance_state(at("Ramping", 0), WAITING, POLICY, T0 + 20 * MINUTE).state == at("Ramping", 0)


def test_regression_after_promotion_is_verified_before_rollback() -> None:
    regressed = CanaryObservation(
        ready=True, regression_message="It has fallen.", verdict="Rollback", verdict_message="It is worse."
    )
    step = advance_state(at("Monitoring"), regressed, POLICY, T0 + MINUTE)
    assert (step.state.phase, step.state.step_started_at, step.end_state) == ("Verifying", T0 + MINUTE, None)
    assert advance_state(step.state, regressed, POLICY, T0 + 2 * MINUTE).end_state == "RolledBack"
    assert advance_state(step.state, READY, POLICY, T0 + 20 * MINUTE).end_state is None, "scaleDownDelay is over, and this is not"
    assert advance_state(step.state, READY, POLICY, T0 + 61 * MINUTE).end_state == "Completed"


OBSERVATIONS = st.builds(
    CanaryObservation,
    ready=st.booleans(),
    deadline_exceeded=st.booleans(),
    next_deadline_at=st.none() | st.integers(0, 600).map(lambda minutes: T0 + minutes * MINUTE),
    abort_message=st.sampled_from(["", "", "", "It crashes."]),
    verdict=st.sampled_from(["Continue", "Continue", "Promote", "Rollback", "Inconclusive"]),
    verdict_message=st.just("Because."),
    regression_message=st.sampled_from(["", "", "It has fallen."]),
    manual_action=st.sampled_from([None, None, None, "promote", "rollback"]),
    extension_ends_at=st.none() | st.integers(0, 600).map(lambda minutes: T0 + minutes * MINUTE),
    needs_evaluation=st.booleans(),
    evaluated_message=st.sampled_from(["", "", "It was accepted."]),
    evaluation_ends_at=st.none() | st.integers(0, 600).map(lambda minutes: T0 + minutes * MINUTE),
)


@given(
    phase=st.sampled_from(get_args(StateMachinePhase)),
    observation=OBSERVATIONS,
    minutes=st.integers(0, 3000),
    manual=st.booleans(),
)
def test_one_call_makes_at_most_one_transition(
    phase: StateMachinePhase, observation: CanaryObservation, minutes: int, manual: bool
) -> None:
    state, policy = at(phase, 0), MANUAL_POLICY if manual else POLICY
    step = advance_state(state, observation, policy, T0 + minutes * MINUTE)
    targets = {target for (source, _), target in TRANSITIONS.items() if source == phase}
    if step.end_state is not None:
        assert step.end_state in targets
    elif step.state != state:
        assert step.state.phase in targets
    assert advance_state(state, observation, policy, T0 + minutes * MINUTE) == step


class Rollouts(RuleBasedStateMachine):
    """A canary under any observations. Only its state is stored, so the runs include crashes between any two rules, repeated
    calls and calls with an old state."""

    @initialize(manual=st.booleans(), hold=st.booleans(), ramp=st.lists(st.integers(1, 99), max_size=3, unique=True).map(sorted))
    def begin(self, manual: bool, hold: bool, ramp: list[int]) -> None:
        approval, inconclusive = ("Manual" if manual else "Automatic"), ("Hold" if hold else "Rollback")
        canary = CanarySpec.model_validate({"stepWeights": ramp, "approval": approval})
        analysis = AnalysisSpec.model_validate({"onInconclusive": inconclusive})
        self.policy = CanaryPolicy(canary, analysis, timedelta(minutes=30))
        self.now = T0
        self.state = CanaryState("Starting", T0)
        self.before: CanaryState | None = None
        self.end: EndState | None = None

    def observe(self, observation: CanaryObservation) -> None:
        """Advance the state once and check the transition."""
        step: StateTransition = advance_state(self.state, observation, self.policy, self.now)
        before_ramp = ("Evaluating", "Analyzing", "WarmingUp", "AwaitingApproval", "Held")
        if self.state.phase in before_ramp and step.state.phase in ("Ramping", "Promoting"):
            analysed = self.state.phase in ("Analyzing", "Evaluating") and observation.verdict == "Promote"
            assert observation.manual_action == "promote" or (analysed and self.policy.canary.approval == "Automatic")
            assert not observation.abort_message
            assert observation.verdict != "Rollback" or self.state.phase == "WarmingUp"  # not evaluated yet
        assert not step.state.is_extended or self.state.is_extended or self.state.phase == "Held"
        if self.state.is_extended and step.end_state is None:
            assert step.state.phase in ("Analyzing", "Held", "AwaitingApproval", "Ramping", "Promoting")
        if self.state.phase == "Starting" and step.state.phase == "WarmingUp":
            assert not observation.needs_evaluation
        if self.state.phase == "Evaluating" and step.state.phase not in ("Evaluating", "Ramping", "Promoting"):
            needs_approval = step.state.phase == "AwaitingApproval" and observation.verdict == "Promote"
            assert observation.evaluated_message or needs_approval
            assert observation.verdict != "Rollback"
        self.before, self.state, self.end = self.state, step.state, step.end_state

    @precondition(lambda self: self.end is None)
    @rule(observation=OBSERVATIONS)
    def any_observation(self, observation: CanaryObservation) -> None:
        self.observe(observation)

    @precondition(lambda self: self.end is None)
    @rule(observation=OBSERVATIONS, minutes=st.integers(0, 90))
    def later(self, observation: CanaryObservation, minutes: int) -> None:
        self.now += minutes * MINUTE
        self.observe(observation)

    @precondition(lambda self: self.before is not None)
    @rule()
    def the_write_was_lost(self) -> None:
        assert self.before is not None
        self.state, self.end = self.before, None

    @invariant()
    def ready_and_approved_canary_is_promoted(self) -> None:
        """Liveness: a ready canary with the verdict Promote and a manual promotion is promoted in time."""
        if self.end is not None:
            return
        state, now = self.state, self.now
        observation = CanaryObservation(ready=True, verdict="Promote", verdict_message="Better.", manual_action="promote")
        for _ in range(4 + len(self.policy.canary.step_weights) + 2):
            step = advance_state(state, observation, self.policy, now)
            if step.end_state is not None:
                assert step.end_state == "Promoted"
                return
            state, now = step.state, now + (step.requeue_after or timedelta(0))
        raise AssertionError(f"it does not end: {state}")


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
