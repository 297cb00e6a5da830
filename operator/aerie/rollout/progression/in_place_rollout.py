"""The rollout in place of the desired revision, from its start to its promotion or the return of its pods.

    in progress ─┬─ desired ─────────────────► it advances (in_place/advance.py)
                 └─ not desired any more ────► its pods return, then the desired revision follows
    start ───────┬─ pods can ────────────────► its pods read the drafter
                 ├─ pods cannot, mode Auto ──► a canary by pods, whose change says why
                 └─ pods cannot, Required ───► it fails with the reason before it claims a slot, and nothing starts

Guarantees: a rollout in place and a canary are never in progress at once. The stable arm keeps the drafter that its pods serve
with, whatever else is decided. Not guaranteed: that a rollout which pods rejected is in place at another attempt.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from aerie.api.status import CanaryArm, Phase, Status
from aerie.rollout.canary.transition import build_outcome
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.in_place.advance import advance_rollout, start_rollout
from aerie.rollout.in_place.eligibility import find_in_place_obstacle
from aerie.rollout.in_place.transition import InPlaceTransition
from aerie.rollout.progression.canary_rollout import progress_canary
from aerie.rollout.progression.context import ProgressionContext
from aerie.rollout.progression.progression import Progression
from aerie.rollout.revision.drafter_change import is_of_drafter_alone

_MAX_CHANGE_CHARACTERS = 1024


def advance_in_place(context: ProgressionContext) -> Progression | None:
    """Advance the rollout in place that is in progress."""
    rollout, stable = context.status.in_place_rollout, context.stable
    if rollout is None or stable is None or context.canary_arm is not None:
        return None
    transition = advance_rollout(context.snapshot, context.desired, stable, rollout, context.now)
    if transition.obstacle and transition.outcome is None:
        ended = replace(context, serving=replace(context.serving, in_place=None, drafters=transition.drafters))
        return _roll_out_by_pods(ended, transition.obstacle)
    return _apply_transition(context, transition)


def fail_impossible_rollout(context: ProgressionContext) -> Progression | None:
    """Report why the desired revision cannot be rolled out in place, where mode Required allows nothing else.

    It claims no slot: Failed holds none, so the next reconcile would claim it again, and the phase would alternate.
    """
    stable, desired, snapshot = context.stable, context.desired, context.snapshot
    is_required = snapshot.resource.spec.rollout.in_place.mode == "Required"
    if context.canary_arm is not None or stable is None or not is_required:
        return None
    obstacle = find_in_place_obstacle(snapshot, desired, stable, context.preflight_result)
    if obstacle is None or not is_of_drafter_alone(snapshot, desired, stable):
        return None
    message = f"spec.rollout.inPlace.mode is Required, and the rollout cannot be in place. {obstacle}"
    condition = ConditionUpdate(PROGRESSING, "False", "InPlaceImpossible", message)
    return replace(context.serving, phase="Failed", progressing=condition, needs_preflight_job=True)


def start_in_place(context: ProgressionContext) -> Progression | None:
    """Start the rollout of the desired revision in place, or say why it is by pods."""
    stable, desired = context.stable, context.desired
    if context.canary_arm is not None or stable is None:
        return None
    obstacle = find_in_place_obstacle(context.snapshot, desired, stable, context.preflight_result)
    if obstacle is None and desired.revision == stable.revision and not context.snapshot.cluster.ready_pod_count(stable.revision):
        return _return_to_revision_of_pods(context)
    if obstacle is None:
        return _apply_transition(context, start_rollout(context.snapshot, desired, stable, context.now))
    is_auto = context.snapshot.resource.spec.rollout.in_place.mode == "Auto"  # `fail_impossible_rollout` decides on Required
    if not is_auto or not is_of_drafter_alone(context.snapshot, desired, stable):
        return None
    return _roll_out_by_pods(context, obstacle)


def keep_drafter_of_stable_pods(progression: Progression, status: Status) -> Progression:
    """Return the progression with the drafter of the revision that is stable after it, where that has changed.

    A revision that was rolled out by pods has its drafter in its arguments. One to which a promotion is reverted has the drafter
    that its pods were promoted to before.
    """
    if status.stable is None or progression.stable_revision == status.stable.revision:
        return progression
    arms = (status.previous, status.canary)
    in_place = next((arm.in_place for arm in arms if arm is not None and arm.revision == progression.stable_revision), None)
    return replace(progression, in_place=None, stable_in_place=in_place, expected_drafter=in_place, drafters=())


def _apply_transition(context: ProgressionContext, transition: InPlaceTransition) -> Progression:
    """Return the progression with the result of a transition."""
    rollout, outcome = transition.rollout, transition.outcome
    is_rejected = outcome is not None and outcome.result in ("RolledBack", "Failed") and not context.desired.problem
    progression = replace(
        context.serving,
        phase=rollout.phase if rollout is not None else "Ready",
        progressing=transition.progressing,
        analysis=transition.analysis,
        outcome=outcome,
        requeue_after=transition.requeue_after,
        rejected_revision=context.serving.rejected_revision,
        in_place=rollout,
        stable_in_place=transition.stable_in_place,
        expected_drafter=transition.expected_drafter,
        drafters=transition.drafters,
        reference_acceptance_length=transition.reference_acceptance_length,
        needs_preflight_job=rollout is not None and rollout.revision == context.desired.revision,
    )
    if outcome is not None and is_rejected and outcome.revision == context.desired.revision:
        phase: Phase = "Failed" if outcome.result == "Failed" else "RolledBack"
        return replace(progression, phase=phase, rejected_revision=outcome.revision)
    return progression


def _roll_out_by_pods(context: ProgressionContext, obstacle: str) -> Progression:
    """Return the progression that starts a canary, whose change says why it is by pods."""
    progression = progress_canary(context)
    if progression.canary is None:
        return progression
    change = f"{progression.canary.change}, by pods: {obstacle.rstrip('.')}"
    if len(change) > _MAX_CHANGE_CHARACTERS:
        change = f"{change[: _MAX_CHANGE_CHARACTERS - 1]}…"
    condition = replace(progression.progressing, message=f"{progression.progressing.message} Not in place: {obstacle}")
    return replace(progression, canary=progression.canary.model_copy(update={"change": change}), progressing=condition)


def _return_to_revision_of_pods(context: ProgressionContext) -> Progression:
    """Return the progression in which pods come to the drafter of their revision again: none is ready with the other one."""
    stable, desired, status = context.stable, context.desired, context.status
    assert stable is not None
    message = f"Revision {desired.revision} is stable: no pod is ready with the drafter of revision {stable.served_revision}."
    canary = CanaryArm(**dict(desired.arm), change=desired.describe_change(status), start_time=context.now)
    return replace(
        context.serving,
        outcome=build_outcome(canary, "Promoted", message, status, None, context.now),
        stable_in_place=None,
        expected_drafter=None,
        drafters=(),
        requeue_after=timedelta(0),
    )
