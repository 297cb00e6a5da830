"""The ends of a rollout in place: no pod can be on trial, its drafter is promoted, or the pods have returned.

Guarantees: pure. Each end has its reason in the condition and, where a revision got an outcome, in the history.
"""

from __future__ import annotations

from datetime import timedelta

from aerie.api.status import PendingOutcome
from aerie.api.types import duration
from aerie.rollout.canary.state_machine import MANUAL_PROMOTION_MESSAGE, MANUAL_ROLLBACK_MESSAGE
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.in_place import messages
from aerie.rollout.in_place.return_pods import plan_returns
from aerie.rollout.in_place.state_machine import Trigger
from aerie.rollout.in_place.step import Step, find_unreturned
from aerie.rollout.in_place.transition import InPlaceTransition, build_in_place_outcome, find_candidate
from aerie.rollout.in_place.trial import resume_trial


def end_impossible(step: Step, trigger: Trigger) -> InPlaceTransition:
    """Return the end of a rollout whose pods cannot be on trial: nothing has changed in them."""
    assert step.staging is not None
    reason = step.staging.problem
    if trigger == Trigger.DEADLINE_EXCEEDED:
        progress_deadline = duration.format_duration(step.spec.progress_deadline)
        awaited = messages.describe_awaited_pods(step.staging)
        reason = f"{awaited[:1].upper()}{awaited[1:]}, for spec.rollout.progressDeadline ({progress_deadline})."
    outcome = None
    if step.spec.in_place.mode == "Required" or step.desired.revision == step.stable.revision:  # there are no other pods
        outcome = build_in_place_outcome(step.rollout, "Failed", reason, step.stable, None, step.now)
    return InPlaceTransition(
        None,
        ConditionUpdate(PROGRESSING, "False", "InPlaceImpossible", reason),
        step.status.analysis,
        step.stable.in_place,
        step.stable.in_place,
        plan_returns(step.pods, step.stable.in_place, step.now)[0],
        outcome,
        obstacle=reason,
        requeue_after=timedelta(0),
    )


def end_promoted(step: Step) -> InPlaceTransition:
    """Return the end of a rollout whose drafter is that of the pods now."""
    candidate, analysis = find_candidate(step.rollout), step.analysis
    assert candidate is not None
    reason = analysis.message if analysis is not None and analysis.verdict == "Promote" else MANUAL_PROMOTION_MESSAGE
    if step.promotion is not None and (step.promotion.waiting or step.promotion.failures):
        names = messages.list_names([*step.promotion.waiting, *step.promotion.failures])
        reason = f"{reason} Some pods do not have the drafter yet: {names.rstrip('.')}."
    return InPlaceTransition(
        None,
        ConditionUpdate(PROGRESSING, "False", "Complete", f"Revision {step.rollout.revision} is rolled out in place."),
        analysis,
        candidate,
        candidate,
        plan_returns(step.pods, candidate, step.now)[0],
        build_in_place_outcome(step.rollout, "Promoted", reason, step.stable, analysis, step.now),
        _read_reference_length(step),
        requeue_after=timedelta(0),
    )


def _read_reference_length(step: Step) -> float | None:
    """Return the acceptance length of the drafter under users' requests; None where it is unknown, or the load decides it.

    A shadow evaluation has other requests, or copies of them in one pod.
    """
    analysis, setting = step.analysis, step.stable.setting
    if analysis is None or analysis.design != "ByTurns" or setting is None or setting.mode != "Static":
        return None
    trial = resume_trial(step.rollout, analysis.parameters)
    return None if trial is None else trial.state.canary_acceptance.reference_length


def end_returned(step: Step) -> InPlaceTransition:
    """Return the end of a rollout whose pods have returned."""
    pending = step.rollout.pending_outcome or PendingOutcome(result="RolledBack", message=MANUAL_ROLLBACK_MESSAGE)
    reason, unreturned = pending.message, [pod.name for pod in find_unreturned(step)]
    if unreturned:
        reason = f"{reason} Pods that do not answer return when their leases end: {messages.list_names(unreturned)}."
    return InPlaceTransition(
        None,
        ConditionUpdate(PROGRESSING, "False", "RolledBack", reason),
        step.analysis or step.status.analysis,
        step.stable.in_place,
        step.stable.in_place,
        plan_returns(step.pods, step.stable.in_place, step.now)[0],
        build_in_place_outcome(step.rollout, pending.result, reason, step.stable, step.analysis, step.now),
        requeue_after=timedelta(0),
    )
