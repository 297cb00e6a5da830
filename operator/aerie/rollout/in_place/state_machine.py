"""The state machine of a rollout in place, as a table: which trigger leads from which phase to which.

    Staging ──► Analyzing ──┬─► AwaitingApproval (approval: Manual) ─┬─► Promoting ──► PROMOTED
       │            │       └─► Held (inconclusive at maxDuration) ──┘       │
       │            └───────────────────────────────────► RollingBack ◄──────┘───────► RETURNED
       ├─► IMPOSSIBLE (the pods cannot: the change is rolled out by pods, or fails)
       └─► Evaluating (shadow evaluation) ──┬──► Staging, once
                                            └──► RollingBack

One reconcile takes at most one trigger: the most urgent one that is active. A change of the spec comes first, then a user's
request, then evidence against the drafter, then evidence for it.

Guarantees: a pure function. There is no promotion without the verdict Promote or a user's request, and none before all pods of
the start have prepared the same files. Every phase has an end, except AwaitingApproval and Held, which wait for a user. A
rollout that is rolled back stays so, whatever the spec asks for meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from aerie.analysis.state import VerdictOutcome
from aerie.api.rollout import RolloutSpec
from aerie.api.status import InPlacePhase

EndState = Literal["Promoted", "Returned", "Impossible"]


class Trigger(StrEnum):
    """What may cause a transition."""

    SUPERSEDED = "Superseded"
    """The revision is no longer desired."""
    ROLLBACK_REQUESTED = "RollbackRequested"
    """A user requests the rollback."""
    ABORTED = "Aborted"
    """A hard failure, which needs no statistics: pods reject the drafter, or are broken by it."""
    WORSE = "Worse"
    """The verdict is Rollback."""
    PROMOTE_REQUESTED = "PromoteRequested"
    """A user requests the promotion."""
    BETTER = "Better"
    """The verdict is Promote, and no approval is needed."""
    NEEDS_EVALUATION = "NeedsEvaluation"
    """The pods are prepared, and a shadow evaluation comes first."""
    NEEDS_APPROVAL = "NeedsApproval"
    """The verdict is Promote, and approval is needed."""
    INCONCLUSIVE_HOLD = "InconclusiveHold"
    """The verdict is Inconclusive, and the spec says to hold."""
    INCONCLUSIVE_ROLLBACK = "InconclusiveRollback"
    """The verdict is Inconclusive, and the spec says to roll back."""
    COMPLETE = "Complete"
    """The pods have done what the phase is for."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """The time of the phase is over."""


TRANSITIONS: dict[tuple[InPlacePhase, Trigger], InPlacePhase | EndState] = {
    ("Staging", Trigger.SUPERSEDED): "RollingBack",
    ("Staging", Trigger.ROLLBACK_REQUESTED): "RollingBack",
    ("Staging", Trigger.ABORTED): "Impossible",
    ("Staging", Trigger.NEEDS_EVALUATION): "Evaluating",
    ("Staging", Trigger.COMPLETE): "Analyzing",
    ("Staging", Trigger.DEADLINE_EXCEEDED): "Impossible",
    ("Evaluating", Trigger.SUPERSEDED): "RollingBack",
    ("Evaluating", Trigger.ROLLBACK_REQUESTED): "RollingBack",
    ("Evaluating", Trigger.ABORTED): "RollingBack",
    ("Evaluating", Trigger.WORSE): "RollingBack",
    ("Evaluating", Trigger.PROMOTE_REQUESTED): "Promoting",
    ("Evaluating", Trigger.COMPLETE): "Staging",
    ("Analyzing", Trigger.SUPERSEDED): "RollingBack",
    ("Analyzing", Trigger.ROLLBACK_REQUESTED): "RollingBack",
    ("Analyzing", Trigger.ABORTED): "RollingBack",
    ("Analyzing", Trigger.WORSE): "RollingBack",
    ("Analyzing", Trigger.PROMOTE_REQUESTED): "Promoting",
    ("Analyzing", Trigger.BETTER): "Promoting",
    ("Analyzing", Trigger.NEEDS_APPROVAL): "AwaitingApproval",
    ("Analyzing", Trigger.INCONCLUSIVE_HOLD): "Held",
    ("Analyzing", Trigger.INCONCLUSIVE_ROLLBACK): "RollingBack",
    ("AwaitingApproval", Trigger.SUPERSEDED): "RollingBack",
    ("AwaitingApproval", Trigger.ROLLBACK_REQUESTED): "RollingBack",
    ("AwaitingApproval", Trigger.PROMOTE_REQUESTED): "Promoting",
    ("Held", Trigger.SUPERSEDED): "RollingBack",
    ("Held", Trigger.ROLLBACK_REQUESTED): "RollingBack",
    ("Held", Trigger.PROMOTE_REQUESTED): "Promoting",
    ("Promoting", Trigger.SUPERSEDED): "RollingBack",
    ("Promoting", Trigger.ROLLBACK_REQUESTED): "RollingBack",
    ("Promoting", Trigger.ABORTED): "RollingBack",
    ("Promoting", Trigger.COMPLETE): "Promoted",
    ("Promoting", Trigger.DEADLINE_EXCEEDED): "Promoted",
    ("RollingBack", Trigger.COMPLETE): "Returned",
    ("RollingBack", Trigger.DEADLINE_EXCEEDED): "Returned",
}
"""The complete transition table. A trigger without a row for a phase has no effect in that phase."""


@dataclass(frozen=True)
class InPlaceObservation:
    """Observation of one reconcile."""

    is_superseded: bool = False
    manual_action: Literal["promote", "rollback"] | None = None
    abort_message: str = ""
    """Message about a hard failure; empty without one."""
    verdict: VerdictOutcome = "Continue"
    is_complete: bool = False
    """Whether the pods have done what the phase is for."""
    deadline_exceeded: bool = False
    needs_evaluation: bool = False
    """Whether a shadow evaluation comes next."""


def find_transition(
    phase: InPlacePhase, observation: InPlaceObservation, rollout_spec: RolloutSpec
) -> tuple[Trigger, InPlacePhase | EndState] | None:
    """Return the trigger that takes effect in a phase, and where it leads; None for neither."""
    for trigger in _active_triggers(observation, rollout_spec):
        target = TRANSITIONS.get((phase, trigger))
        if target is not None:
            return trigger, target
    return None


def _active_triggers(observation: InPlaceObservation, rollout_spec: RolloutSpec) -> Iterator[Trigger]:
    """Yield the active triggers, the most urgent first."""
    if observation.is_superseded:
        yield Trigger.SUPERSEDED
    if observation.manual_action == "rollback":
        yield Trigger.ROLLBACK_REQUESTED
    if observation.abort_message:
        yield Trigger.ABORTED
    if observation.verdict == "Rollback":
        yield Trigger.WORSE
    if observation.manual_action == "promote":
        yield Trigger.PROMOTE_REQUESTED
    if observation.verdict == "Promote":
        yield Trigger.BETTER if rollout_spec.canary.approval == "Automatic" else Trigger.NEEDS_APPROVAL
    if observation.verdict == "Inconclusive":
        is_held = rollout_spec.analysis.on_inconclusive == "Hold"
        yield Trigger.INCONCLUSIVE_HOLD if is_held else Trigger.INCONCLUSIVE_ROLLBACK
    if observation.is_complete and observation.needs_evaluation:
        yield Trigger.NEEDS_EVALUATION
    if observation.is_complete:
        yield Trigger.COMPLETE
    if observation.deadline_exceeded:
        yield Trigger.DEADLINE_EXCEEDED
