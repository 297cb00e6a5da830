"""The canary's state machine: every row of its table, and what holds whatever happens."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aerie.api.rollout import Analysis, Canary
from aerie.rollout.canary.state_machine import TABLE, End, Input, Looks, Phase, Stage, Step, Terms, advance

T0 = datetime(2026, 11, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
TERMS = Terms(Canary(ramp=[25, 50], scale_down_delay=timedelta(minutes=10)), Analysis(), timedelta(minutes=30))
MANUAL = Terms(Canary(ramp=[25, 50], approval="Manual"), Analysis(on_inconclusive="Rollback"), timedelta(minutes=30))
EXPLORING = dataclasses.replace(TERMS, explore=timedelta(minutes=30))
READY, WAITING = Looks(ready=True), Looks(ready=False, late_at=T0 + 30 * MINUTE)
LATE = Looks(ready=False, late=True)


def at(phase: Phase, step: int | None = None) -> Stage:
    """A canary whose present phase began at T0."""
    ready = None if phase == "Starting" else T0
    began = T0 if phase in ("Ramping", "Promoting", "Watching", "Rechecking") else None
    return Stage(phase, T0, ready, step if phase == "Ramping" else None, began)


def example(phase: Phase, word: Input) -> tuple[Stage, Looks, Terms, datetime]:
    """A look that gives this input and nothing more urgent."""
    soon = T0 + MINUTE
    return {
        "rejected": (at(phase, 0), Looks(ready=True, word="rollback"), TERMS, soon),
        "stopped": (at(phase, 0), Looks(ready=True, stop="It crashes."), TERMS, soon),
        "worse": (at(phase, 0), Looks(ready=True, verdict="Rollback", reason="It is worse."), TERMS, soon),
        "fallen": (at(phase, 0), Looks(ready=True, fallen="It has fallen."), TERMS, soon),
        "late": (at(phase, 0), LATE, TERMS, soon),
        "approved": (at(phase, 0), Looks(ready=True, word="promote"), TERMS, soon),
        "better": (at(phase, 0), Looks(ready=True, verdict="Promote", reason="It is better."), TERMS, soon),
        "better, ask": (at(phase, 0), Looks(ready=True, verdict="Promote", reason="It is better."), MANUAL, soon),
        "explored": (at(phase, 0), Looks(ready=True, reason="It is 3 % below."), EXPLORING, T0 + 35 * MINUTE),
        "undecided, hold": (at(phase, 0), Looks(ready=True, verdict="Inconclusive", reason="Too few."), TERMS, soon),
        "undecided, end": (at(phase, 0), Looks(ready=True, verdict="Inconclusive", reason="Too few."), MANUAL, soon),
        "ready": (at(phase, 0), READY, TERMS, soon),
        "due": (at(phase, 0), READY, TERMS, T0 + (61 if phase == "Rechecking" else 11 if phase == "Watching" else 6) * MINUTE),
        "topped": (at(phase, 1), READY, TERMS, T0 + 6 * MINUTE),
    }[word]


@pytest.mark.parametrize(("phase", "word"), TABLE)
def test_every_row(phase: Phase, word: Input) -> None:
    step = advance(*example(phase, word))
    target = TABLE[phase, word]
    assert (step.end or step.stage.phase) == target
    assert step.why
    assert (step.again is None) == (step.end is not None)


@pytest.mark.parametrize("phase", get_args(Phase))
@pytest.mark.parametrize("word", get_args(Input))
def test_an_input_without_a_row_changes_nothing(phase: Phase, word: Input) -> None:
    if (phase, word) in TABLE:
        return
    stage, looks, terms, now = example(phase, word)
    looks = dataclasses.replace(looks, ready=looks.ready and (phase, "ready") not in TABLE)
    now = min(now, T0 + MINUTE)  # time alone leads on in some phases; here it is not over
    assert advance(stage, looks, terms, now).stage == stage


def test_a_whole_rollout() -> None:
    stage, now, seen = Stage("Starting", T0), T0, []
    step = advance(stage, WAITING, TERMS, now)
    assert (step.stage, step.end, step.again) == (stage, None, timedelta(minutes=30))
    looks = READY
    while step.end is None:
        seen.append((step.stage.phase, step.stage.step))
        now += step.again if step.again is not None else 2 * MINUTE
        if step.stage.phase == "Analyzing":
            looks = Looks(ready=True, verdict="Promote", reason="The acceptance length is 20 % higher.")
        step = advance(step.stage, looks, TERMS, now)
    assert step.end == "Promoted"
    assert list(dict.fromkeys(seen)) == [
        ("Starting", None),
        ("WarmingUp", None),
        ("Analyzing", None),
        ("Ramping", 0),
        ("Ramping", 1),
        ("Promoting", None),
    ]


def test_without_a_ramp_it_is_promoted_at_once() -> None:
    terms = Terms(Canary(ramp=[]), Analysis(), timedelta(minutes=30))
    step = advance(at("Analyzing"), Looks(ready=True, verdict="Promote", reason="Better."), terms, T0)
    assert (step.stage.phase, step.stage.step, step.stage.step_started_at) == ("Promoting", None, T0)


def test_what_speaks_against_comes_first_and_a_person_before_the_figures() -> None:
    both = Looks(ready=True, verdict="Promote", reason="Better.", stop="A pod crashes.", word="promote")
    assert advance(at("Analyzing"), both, TERMS, T0).end == "RolledBack"
    person = Looks(ready=True, verdict="Promote", reason="Better.", word="rollback")
    step = advance(at("Analyzing"), person, TERMS, T0)
    assert (step.end, step.why) == ("RolledBack", "A person asked for the rollback.")


@pytest.mark.parametrize("phase", ["Ramping", "Promoting"])
def test_a_step_may_take_as_long_as_its_pods_need(phase: Phase) -> None:
    step = advance(at(phase, 0), WAITING, TERMS, T0 + timedelta(hours=200))
    assert (step.end, step.stage) == (None, at(phase, 0))


def test_a_ramp_that_becomes_empty_leads_to_the_promotion() -> None:
    terms = dataclasses.replace(TERMS, canary=Canary(ramp=[]))
    for looks in (READY, WAITING):
        for step in (0, 1, 7):
            found = advance(at("Ramping", step), looks, terms, T0)
            assert (found.stage.phase, found.stage.step, found.end) == ("Promoting", None, None)
            assert found.why == "spec.rollout.canary.ramp has become empty: there is no share to hold."


def test_a_ramp_that_becomes_shorter_ends_with_its_last_share() -> None:
    terms = dataclasses.replace(TERMS, canary=Canary(ramp=[25]))
    step = advance(at("Ramping", 3), READY, terms, T0 + 5 * MINUTE)
    assert (step.stage.phase, step.why) == ("Promoting", "25 % of the traffic have been held for spec.rollout.canary.rampHold.")


def test_a_share_that_is_not_borne_is_not_held() -> None:
    assert advance(at("Ramping", 0), WAITING, TERMS, T0 + 20 * MINUTE).stage == at("Ramping", 0)


def test_a_fall_after_the_promotion_is_checked_against_old_pods_before_anything_is_taken_back() -> None:
    fallen = Looks(ready=True, fallen="It has fallen.", verdict="Rollback", reason="It is worse.")
    step = advance(at("Watching"), fallen, TERMS, T0 + MINUTE)
    assert (step.stage.phase, step.stage.step_started_at, step.end) == ("Rechecking", T0 + MINUTE, None)
    assert advance(step.stage, fallen, TERMS, T0 + 2 * MINUTE).end == "RolledBack"
    assert advance(step.stage, READY, TERMS, T0 + 20 * MINUTE).end is None, "scaleDownDelay is over, and this is not"
    assert advance(step.stage, READY, TERMS, T0 + 61 * MINUTE).end == "Over"


LOOKS = st.builds(
    Looks,
    ready=st.booleans(),
    late=st.booleans(),
    late_at=st.none() | st.integers(0, 600).map(lambda minutes: T0 + minutes * MINUTE),
    stop=st.sampled_from(["", "", "", "It crashes."]),
    verdict=st.sampled_from(["Continue", "Continue", "Promote", "Rollback", "Inconclusive"]),
    reason=st.just("Because."),
    fallen=st.sampled_from(["", "", "It has fallen."]),
    word=st.sampled_from([None, None, None, "promote", "rollback"]),
)


@given(phase=st.sampled_from(get_args(Phase)), looks=LOOKS, minutes=st.integers(0, 3000), manual=st.booleans())
def test_one_look_is_at_most_one_row(phase: Phase, looks: Looks, minutes: int, manual: bool) -> None:
    stage, terms = at(phase, 0), MANUAL if manual else TERMS
    step = advance(stage, looks, terms, T0 + minutes * MINUTE)
    targets = {target for (of, _), target in TABLE.items() if of == phase}
    if step.end is not None:
        assert step.end in targets
    elif step.stage != stage:
        assert step.stage.phase in targets
    assert advance(stage, looks, terms, T0 + minutes * MINUTE) == step


class Rollouts(RuleBasedStateMachine):
    """A canary under anything that may be seen of it. The stage is all that is kept, so that a crash between any two rules,
    a look done twice and a look at an old stage are among the runs."""

    @initialize(manual=st.booleans(), hold=st.booleans(), ramp=st.lists(st.integers(1, 99), max_size=3, unique=True).map(sorted))
    def begin(self, manual: bool, hold: bool, ramp: list[int]) -> None:
        approval, inconclusive = ("Manual" if manual else "Automatic"), ("Hold" if hold else "Rollback")
        canary = Canary.model_validate({"ramp": ramp, "approval": approval})
        analysis = Analysis.model_validate({"onInconclusive": inconclusive})
        self.terms = Terms(canary, analysis, timedelta(minutes=30))
        self.now = T0
        self.stage = Stage("Starting", T0)
        self.before: Stage | None = None
        self.end: End | None = None

    def look(self, looks: Looks) -> None:
        """One look, written down unless `advance` ended it."""
        step: Step = advance(self.stage, looks, self.terms, self.now)
        if self.stage.phase in ("Analyzing", "WarmingUp", "AwaitingApproval", "Held") and step.stage.phase in (
            "Ramping",
            "Promoting",
        ):
            analysed = self.stage.phase == "Analyzing" and looks.verdict == "Promote"
            assert looks.word == "promote" or (analysed and self.terms.canary.approval == "Automatic")
            assert not looks.stop
            assert looks.verdict != "Rollback" or self.stage.phase == "WarmingUp"  # not judged yet
        self.before, self.stage, self.end = self.stage, step.stage, step.end

    @precondition(lambda self: self.end is None)
    @rule(looks=LOOKS)
    def any_look(self, looks: Looks) -> None:
        self.look(looks)

    @precondition(lambda self: self.end is None)
    @rule(looks=LOOKS, minutes=st.integers(0, 90))
    def later(self, looks: Looks, minutes: int) -> None:
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
        looks = Looks(ready=True, verdict="Promote", reason="Better.", word="promote")
        for _ in range(4 + len(self.terms.canary.ramp) + 2):
            step = advance(stage, looks, self.terms, now)
            if step.end is not None:
                assert step.end == "Promoted"
                return
            stage, now = step.stage, now + (step.again or timedelta(0))
        raise AssertionError(f"it does not end: {stage}")


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
