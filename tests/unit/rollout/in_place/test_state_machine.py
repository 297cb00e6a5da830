"""The table of transitions."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.state import VerdictOutcome
from aerie.api.rollout import RolloutSpec
from aerie.api.status import InPlacePhase
from aerie.rollout.in_place.state_machine import TRANSITIONS, InPlaceObservation, Trigger, find_transition

PHASES = get_args(InPlacePhase)
AUTOMATIC, MANUAL = (RolloutSpec.from_dict({"canary": {"approval": approval}}) for approval in ("Automatic", "Manual"))
ROLLBACK = RolloutSpec.from_dict({"analysis": {"onInconclusive": "Rollback"}})
observations = st.builds(
    InPlaceObservation,
    st.booleans(),
    st.sampled_from((None, "promote", "rollback")),
    st.sampled_from(("", "broken")),
    st.sampled_from(get_args(VerdictOutcome)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.parametrize(
    ("phase", "observation", "spec", "target"),
    [
        ("Staging", {"is_complete": True}, AUTOMATIC, "Analyzing"),
        ("Staging", {"is_complete": True, "manual_action": "promote"}, AUTOMATIC, "Analyzing"),
        ("Staging", {"is_complete": True, "needs_evaluation": True}, AUTOMATIC, "Evaluating"),
        ("Staging", {"needs_evaluation": True}, AUTOMATIC, None),
        ("Evaluating", {"is_complete": True}, AUTOMATIC, "Staging"),
        ("Evaluating", {"verdict": "Rollback", "manual_action": "promote"}, AUTOMATIC, "RollingBack"),
        ("Evaluating", {"verdict": "Promote"}, AUTOMATIC, None),
        ("Evaluating", {"manual_action": "promote"}, AUTOMATIC, "Promoting"),
        ("Staging", {"abort_message": "unfit"}, AUTOMATIC, "Impossible"),
        ("Staging", {"deadline_exceeded": True}, AUTOMATIC, "Impossible"),
        ("Analyzing", {"verdict": "Promote"}, AUTOMATIC, "Promoting"),
        ("Analyzing", {"verdict": "Promote"}, MANUAL, "AwaitingApproval"),
        ("Analyzing", {"verdict": "Promote", "abort_message": "broken"}, AUTOMATIC, "RollingBack"),
        ("Analyzing", {"verdict": "Rollback", "manual_action": "promote"}, AUTOMATIC, "RollingBack"),
        ("Analyzing", {"verdict": "Inconclusive"}, AUTOMATIC, "Held"),
        ("Analyzing", {"verdict": "Inconclusive"}, ROLLBACK, "RollingBack"),
        ("Held", {"manual_action": "promote"}, AUTOMATIC, "Promoting"),
        ("Held", {"verdict": "Inconclusive"}, AUTOMATIC, None),
        ("Promoting", {"is_complete": True}, AUTOMATIC, "Promoted"),
        ("Promoting", {"is_complete": True, "is_superseded": True}, AUTOMATIC, "RollingBack"),
        ("Promoting", {"manual_action": "rollback"}, AUTOMATIC, "RollingBack"),
        ("RollingBack", {"is_superseded": True}, AUTOMATIC, None),
        ("RollingBack", {"is_complete": True, "is_superseded": True}, AUTOMATIC, "Returned"),
    ],
)
def test_transition(phase: InPlacePhase, observation: dict[str, Any], spec: RolloutSpec, target: str | None) -> None:
    transition = find_transition(phase, InPlaceObservation(**observation), spec)
    assert (transition[1] if transition is not None else None) == target


@given(st.sampled_from(PHASES), observations, st.sampled_from((AUTOMATIC, MANUAL, ROLLBACK)))
def test_promotion_needs_a_verdict_or_a_user(phase: InPlacePhase, observation: InPlaceObservation, spec: RolloutSpec) -> None:
    transition = find_transition(phase, observation, spec)
    if transition is not None and transition[1] == "Promoting":
        assert observation.manual_action == "promote" or (phase == "Analyzing" and observation.verdict == "Promote")
        assert not observation.is_superseded
    if observation.is_superseded and phase != "RollingBack":
        assert transition is not None
        assert transition[1] == "RollingBack"


def test_every_phase_is_left_and_every_trigger_has_a_use() -> None:
    assert {phase for phase, _ in TRANSITIONS} == set(PHASES)
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)
    assert len(fields(InPlaceObservation)) == 7
