"""A promotion, and the time after it in which pods of the previous revision are retained (canary/post_promotion.py).

    desired: the promoted revision ───► monitoring continues
    desired: the previous revision ───► the promotion is reverted
    desired: a third revision ────────► the retained pods are removed first; where clients need them, the promotion is reverted

Guarantees: no canary starts while pods are retained. Not guaranteed: that the time of monitoring is used in full, because a new
spec ends it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from aerie.api.status import Arm, PreviousArm, Status
from aerie.rollout.canary import post_promotion
from aerie.rollout.canary.analysis_run.phases import close_analysis
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression.context import ProgressionContext
from aerie.rollout.progression.progression import Progression, apply_canary_transition
from aerie.rollout.revision.desired import DesiredRevision


def monitor_promotion(context: ProgressionContext) -> Progression | None:
    """Advance post-promotion monitoring while pods of the previous revision are retained."""
    if context.status.previous is None or context.stable is None:
        return None
    return _progress_post_promotion(
        context.snapshot, context.desired, context.serving, context.stable, context.status.previous, context.now
    )


def _progress_post_promotion(
    snapshot: Snapshot, desired: DesiredRevision, serving: Progression, stable: Arm, previous: PreviousArm, now: datetime
) -> Progression:
    """Return the progression while pods of the previous revision are retained."""
    status = snapshot.resource.status or Status()
    if desired.revision == stable.served_revision:
        return apply_post_promotion(
            serving, post_promotion.advance_monitoring(snapshot, stable, previous, now), rejected_revision=desired.revision
        )
    if desired.revision == previous.served_revision and not desired.problem:
        reason = "The spec was reverted to the previous revision."
        transition = post_promotion.revert_promotion(snapshot, stable, previous, reason, status.analysis, now, "Superseded")
        return apply_post_promotion(serving, transition)
    rollout_pods = RolloutPods.from_snapshot(snapshot, previous.revision, stable.revision, now)
    if post_promotion.count_required_previous_pods(rollout_pods):
        # The promoted pods cannot do without them, so one of the two revisions has to become complete first.
        reason = f"The spec has changed, and only {rollout_pods.canary.counts.ready} promoted pods are ready."
        return apply_post_promotion(
            serving, post_promotion.revert_promotion(snapshot, stable, previous, reason, status.analysis, now, "Superseded")
        )
    message = (
        f"Deleting the pods of revision {previous.revision}, retained since the promotion of {stable.revision}, "
        "before the next canary."
    )
    transition = post_promotion.PostPromotionTransition(
        None,
        close_analysis(status.analysis),
        serving.weights,
        ConditionUpdate(PROGRESSING, "True", "Preflight", message),
    )
    return replace(apply_post_promotion(serving, transition), phase="Preflight", requeue_after=timedelta(0))


def apply_post_promotion(
    serving: Progression,
    transition: post_promotion.PostPromotionTransition,
    rejected_revision: str | None = None,
    reference_acceptance_length: float | None = None,
) -> Progression:
    """Return the progression with the result of post-promotion monitoring. `rejected_revision`: not tried again if the
    promotion is reverted."""
    if transition.rollback is not None:
        assert transition.rollback_revision is not None
        return replace(
            apply_canary_transition(serving, transition.rollback, rejected_revision), stable_revision=transition.rollback_revision
        )
    return replace(
        serving,
        phase=transition.previous.phase if transition.previous else "Ready",
        progressing=transition.progressing,
        weights=transition.weights,
        analysis=transition.analysis,
        previous=transition.previous,
        reference_acceptance_length=reference_acceptance_length,
        requeue_after=transition.requeue_after,
    )
