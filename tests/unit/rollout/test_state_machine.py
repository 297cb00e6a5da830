"""The canary's state machine: every row of its table, and what holds whatever happens."""

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
TERMS = CanaryPolicy(
    CanarySpec(step_weights=[25, 50], scale_down_delay=timedelta(minutes=10)), AnalysisSpec(), timedelta(minutes=30)
)
MANUAL = CanaryPolicy(
    CanarySpec(step_weights=[25, 50], approval="Manual"), AnalysisSpec(on_inconclusive="Rollback"), timedelta(minutes=30)
)
EXPLORING = dataclasses.replace(TERMS, exploration_duration=timedelta(minutes=30))
READY, WAITING = CanaryObservation(ready=True), CanaryObservation(ready=False, next_deadline_at=T0 + 30 * MINUTE)
LATE = CanaryObservation(ready=False, deadline_exceeded=True)


def at(phase: StateMachinePhase, step: int | None = None) -> CanaryState:
    """A canary whose present phase began at T0."""
    ready = None if phase == "Starting" else T0
    began = T0 if phase in ("Ramping", "Promoting", "Monitoring", "Verifying") else None
    return CanaryState(phase, T0, ready, step if phase == "Ramping" else None, began)


def example(phase: StateMachinePhase, trigger: Trigger) -> tuple[CanaryState, CanaryObservation, CanaryPolicy, datetime]:
    """An observation that gives this trigger and nothing more urgent."""
    soon = T0 + MINUTE
    return {
        Trigger.ROLLBACK_REQUESTED: (at(phase, 0), CanaryObservation(ready=True, manual_action="rollback"), TERMS, soon),
        Trigger.ABORTED: (at(phase, 0), CanaryObservation(ready=True, abort_message="It crashes."), TERMS, soon),
        Trigger.WORSE: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict="Rollback", verdict_message="It is worse."),
            TERMS,
            soon,
        ),
        Trigger.REGRESSED: (at(phase, 0), CanaryObservation(ready=True, regression_message="It has fallen."), TERMS, soon),
        Trigger.DEADLINE_EXCEEDED: (at(phase, 0), LATE, TERMS, soon),
        Trigger.PROMOTE_REQUESTED: (at(phase, 0), CanaryObservation(ready=True, manual_action="promote"), TERMS, soon),
        Trigger.BETTER: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict="Promote", verdict_message="It is better."),
            TERMS,
            soon,
        ),
        Trigger.NEEDS_APPROVAL: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict="Promote", verdict_message="It is better."),
            MANUAL,
            soon,
        ),
        Trigger.EXPLORED: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict_message="It is 3 % below."),
            EXPLORING,
            T0 + 35 * MINUTE,
        ),
        Trigger.INCONCLUSIVE_HOLD: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict="Inconclusive", verdict_message="Too few."),
            TERMS,
            soon,
        ),
        Trigger.INCONCLUSIVE_ROLLBACK: (
            at(phase, 0),
            CanaryObservation(ready=True, verdict="Inconclusive", verdict_message="Too few."),
            MANUAL,
            soon,
        ),
        Trigger.READY: (at(phase, 0), READY, TERMS, soon),
        Trigger.TIMER: (
            at(phase, 0),
            READY,
            TERMS,
            T0 + (61 if phase == "Verifying" else 11 if phase == "Monitoring" else 6) * MINUTE,
        ),
        Trigger.LAST_RAMP_STEP: (at(phase, 1), READY, TERMS, T0 + 6 * MINUTE),
    }[trigger]


@pytest.mark.parametrize(("phase", "trigger"), TRANSITIONS)
def test_every_row(phase: StateMachinePhase, trigger: Trigger) -> None:
    step = advance_state(*example(phase, trigger))
    target = TRANSITIONS[phase, trigger]
    assert (step.end_state or step.state.phase) == target
    assert step.message
    assert (step.requeue_after is None) == (step.end_state is not None)


@pytest.mark.parametrize("phase", get_args(StateMachinePhase))
@pytest.mark.parametrize("trigger", list(Trigger))
def test_a_trigger_without_a_row_changes_nothing(phase: StateMachinePhase, trigger: Trigger) -> None:
    if (phase, trigger) in TRANSITIONS:
        return
    stage, looks, terms, now = example(phase, trigger)
    looks = dataclasses.replace(looks, ready=looks.ready and (phase, Trigger.READY) not in TRANSITIONS)
    now = min(now, T0 + MINUTE)  # time alone leads on in some phases; here it is not over
    assert advance_state(stage, looks, terms, now).state == stage


def test_a_whole_rollout() -> None:
    stage, now, seen = CanaryState("Starting", T0), T0, []
    step = advance_state(stage, WAITING, TERMS, now)
    assert (step.state, step.end_state, step.requeue_after) == (stage, None, timedelta(minutes=30))
    looks = READY
    while step.end_state is None:
        seen.append((step.state.phase, step.state.step))
        now += step.requeue_after if step.requeue_after is not None else 2 * MINUTE
        if step.state.phase == "Analyzing":
            looks = CanaryObservation(ready=True, verdict="Promote", verdict_message="The acceptance length is 20 % higher.")
        step = advance_state(step.state, looks, TERMS, now)
    assert step.end_state == "Promoted"
    assert list(dict.fromkeys(seen)) == [
        ("Starting", None),
        ("WarmingUp", None),
        ("Analyzing", None),
        ("Ramping", 0),
        ("Ramping", 1),
        ("Promoting", None),
    ]


def test_without_a_ramp_it_is_promoted_at_once() -> None:
    terms = CanaryPolicy(CanarySpec(step_weights=[]), AnalysisSpec(), timedelta(minutes=30))
    step = advance_state(at("Analyzing"), CanaryObservation(ready=True, verdict="Promote", verdict_message="Better."), terms, T0)
    assert (step.state.phase, step.state.step, step.state.step_started_at) == ("Promoting", None, T0)


def test_what_speaks_against_comes_first_and_a_person_before_the_figures(messages: Messages) -> None:
    both = CanaryObservation(
        ready=True, verdict="Promote", verdict_message="Better.", abort_message="A pod crashes.", manual_action="promote"
    )
    assert advance_state(at("Analyzing"), both, TERMS, T0).end_state == "RolledBack"
    person = CanaryObservation(ready=True, verdict="Promote", verdict_message="Better.", manual_action="rollback")
    step = advance_state(at("Analyzing"), person, TERMS, T0)
    assert step.end_state == "RolledBack"
    messages.check("rollback requested", step.message)


@pytest.mark.parametrize("phase", ["Ramping", "Promoting"])
def test_a_step_may_take_as_long_as_its_pods_need(phase: StateMachinePhase) -> None:
    step = advance_state(at(phase, 0), WAITING, TERMS, T0 + timedelta(hours=200))
    assert (step.end_state, step.state) == (None, at(phase, 0))


def test_a_ramp_that_becomes_empty_leads_to_the_promotion(messages: Messages) -> None:
    terms = dataclasses.replace(TERMS, canary=CanarySpec(step_weights=[]))
    for looks in (READY, WAITING):
        for step in (0, 1, 7):
            found = advance_state(at("Ramping", step), looks, terms, T0)
            assert (found.state.phase, found.state.step, found.end_state) == ("Promoting", None, None)
            messages.check("stepWeights became empty", found.message)


def test_a_ramp_that_becomes_shorter_ends_with_its_last_share(messages: Messages) -> None:
    terms = dataclasses.replace(TERMS, canary=CanarySpec(step_weights=[25]))
    step = advance_state(at("Ramping", 3), READY, terms, T0 + 5 * MINUTE)
    assert step.state.phase == "Promoting"
    messages.check("end of a step", step.message)


def test_a_share_that_is_not_borne_is_not_held() -> None:
    assert advance_state(at("Ramping", 0), WAITING, TERMS, T0 + 20 * MINUTE).state == at("Ramping", 0)


def test_a_fall_after_the_promotion_is_checked_against_old_pods_before_anything_is_taken_back() -> None:
    fallen = CanaryObservation(
        ready=True, regression_message="It has fallen.", verdict="Rollback", verdict_message="It is worse."
    )
    step = advance_state(at("Monitoring"), fallen, TERMS, T0 + MINUTE)
    assert (step.state.phase, step.state.step_started_at, step.end_state) == ("Verifying", T0 + MINUTE, None)
    assert advance_state(step.state, fallen, TERMS, T0 + 2 * MINUTE).end_state == "RolledBack"
    assert advance_state(step.state, READY, TERMS, T0 + 20 * MINUTE).end_state is None, "scaleDownDelay is over, and this is not"
    assert advance_state(step.state, READY, TERMS, T0 + 61 * MINUTE).end_state == "Completed"


LOOKS = st.builds(
    CanaryObservation,
    ready=st.booleans(),
    deadline_exceeded=st.booleans(),
    next_deadline_at=st.none() | st.integers(0, 600).map(lambda minutes: T0 + minutes * MINUTE),
    abort_message=st.sampled_from(["", "", "", "It crashes."]),
    verdict=st.sampled_from(["Continue", "Continue", "Promote", "Rollback", "Inconclusive"]),
    verdict_message=st.just("Because."),
    regression_message=st.sampled_from(["", "", "It has fallen."]),
    manual_action=st.sampled_from([None, None, None, "promote", "rollback"]),
)


@given(phase=st.sampled_from(get_args(StateMachinePhase)), looks=LOOKS, minutes=st.integers(0, 3000), manual=st.booleans())
def test_one_look_is_at_most_one_row(phase: StateMachinePhase, looks: CanaryObservation, minutes: int, manual: bool) -> None:
    stage, terms = at(phase, 0), MANUAL if manual else TERMS
    step = advance_state(stage, looks, terms, T0 + minutes * MINUTE)
    targets = {target for (of, _), target in TRANSITIONS.items() if of == phase}
    if step.end_state is not None:
        assert step.end_state in targets
    elif step.state != stage:
        assert step.state.phase in targets
    assert advance_state(stage, looks, terms, T0 + minutes * MINUTE) == step


class Rollouts(RuleBasedStateMachine):
    """A canary under anything that may be seen of it. The stage is all that is kept, so that a crash between any two rules,
    a look done twice and a look at an old stage are among the runs."""

    @initialize(manual=st.booleans(), hold=st.booleans(), ramp=st.lists(st.integers(1, 99), max_size=3, unique=True).map(sorted))
    def begin(self, manual: bool, hold: bool, ramp: list[int]) -> None:
        approval, inconclusive = ("Manual" if manual else "Automatic"), ("Hold" if hold else "Rollback")
        canary = CanarySpec.model_validate({"stepWeights": ramp, "approval": approval})
        analysis = AnalysisSpec.model_validate({"onInconclusive": inconclusive})
        self.terms = CanaryPolicy(canary, analysis, timedelta(minutes=30))
        self.now = T0
        self.stage = CanaryState("Starting", T0)
        self.before: CanaryState | None = None
        self.end: EndState | None = None

    def look(self, looks: CanaryObservation) -> None:
        """One look, written down unless `advance` ended it."""
        step: StateTransition = advance_state(self.stage, looks, self.terms, self.now)
        if self.stage.phase in ("Analyzing", "WarmingUp", "AwaitingApproval", "Held") and step.state.phase in (
            "Ramping",
            "Promoting",
        ):
            analysed = self.stage.phase == "Analyzing" and looks.verdict == "Promote"
            assert looks.manual_action == "promote" or (analysed and self.terms.canary.approval == "Automatic")
            assert not looks.abort_message
            assert looks.verdict != "Rollback" or self.stage.phase == "WarmingUp"  # not judged yet
        self.before, self.stage, self.end = self.stage, step.state, step.end_state

    @precondition(lambda self: self.end is None)
    @rule(looks=LOOKS)
    def any_look(self, looks: CanaryObservation) -> None:
        self.look(looks)

    @precondition(lambda self: self.end is None)
    @rule(looks=LOOKS, minutes=st.integers(0, 90))
    def later(self, looks: CanaryObservation, minutes: int) -> None:
        self.now += minutes * MINUTE
        self.look(looks)

    @precondition(lambda self: self.before is not None)
    @rule()
    def the_write_was_lost(self) -> None:
        assert self.before is not None
        self.stage, self.end = self.before, None

    @invariant()
    def it_ends_when_nothing_but_time_and_good_pods_are_left(self) -> None:
        """Liveness: a canary that is ready, whose analysis says Promote, and whom a person approves, is promoted in time."""
        if self.end is not None:
            return
        stage, now = self.stage, self.now
        looks = CanaryObservation(ready=True, verdict="Promote", verdict_message="Better.", manual_action="promote")
        for _ in range(4 + len(self.terms.canary.step_weights) + 2):
            step = advance_state(stage, looks, self.terms, now)
            if step.end_state is not None:
                assert step.end_state == "Promoted"
                return
            stage, now = step.state, now + (step.requeue_after or timedelta(0))
        raise AssertionError(f"it does not end: {stage}")


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
