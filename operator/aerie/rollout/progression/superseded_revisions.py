"""Revisions in progress that are no longer desired: a canary is rolled back, a first revision is adopted or dropped.

    canary ─────────► rolled back; a rollback that cannot end is reversed, where something else is requested
    first revision ─┬─ any pod ready ─► it is stable, and the desired revision follows by a canary
                    └─ none ──────────► the desired revision replaces it

Guarantees: a first revision with any ready pod is never deleted for a change of the spec. The outcome of a superseded rollout is
reported once. Not guaranteed: that a superseded revision is tried again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from aerie.api.status import CanaryArm, RolloutOutcome, Status
from aerie.rollout.canary import blocked_rollback
from aerie.rollout.canary.rollback import roll_back_canary
from aerie.rollout.canary.transition import build_outcome
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.progression.context import ProgressionContext
from aerie.rollout.progression.progression import Progression, apply_canary_transition
from aerie.rollout.progression.stable_revision import keep_stable_revision
from aerie.rollout.revision.desired import DesiredRevision


def reverse_blocked_rollback(context: ProgressionContext) -> Progression | None:
    """Reverse a rollback that does not end, where something else is requested."""
    canary_arm, stable = context.canary_arm, context.stable
    if canary_arm is None or stable is None or canary_arm.phase != "RollingBack":
        return None
    reversal = blocked_rollback.reverse_blocked_rollback(context.snapshot, context.desired, stable, canary_arm, context.now)
    if reversal is None:
        return None
    return replace(apply_canary_transition(context.serving, reversal.transition, None), stable_revision=reversal.stable.revision)


def roll_back_superseded_canary(context: ProgressionContext) -> Progression | None:
    """Continue a rollback, or start that of a canary whose revision is no longer desired."""
    canary_arm, stable, serving, status = context.canary_arm, context.stable, context.serving, context.status
    if canary_arm is None or stable is None:
        return None
    is_rolling_back = canary_arm.phase == "RollingBack"
    is_superseded = canary_arm.revision != context.desired.revision or bool(context.desired.problem)
    if not (is_rolling_back or is_superseded):
        return None
    outcome = None if is_rolling_back else _build_superseded_outcome(canary_arm, context.desired, status, context.now)
    transition = roll_back_canary(context.snapshot, stable, canary_arm, status.analysis, outcome, context.now)
    if transition.canary is None and serving.rejected_revision is not None:  # reported immediately, without Ready in between
        return replace(
            keep_stable_revision(serving, status),
            target_replicas=transition.arms,
            weights=transition.weights,
            requeue_after=transition.requeue_after,
        )
    return apply_canary_transition(serving, transition, serving.rejected_revision if outcome is None else None)


def adopt_serving_first_revision(context: ProgressionContext) -> Progression | None:
    """Make a superseded first revision stable where any of its pods is ready."""
    canary_arm = context.canary_arm
    if canary_arm is None or canary_arm.revision == context.desired.revision:
        return None
    ready_pods = context.snapshot.cluster.ready_pod_count(canary_arm.revision)
    if not ready_pods:
        return None
    return _adopt_superseded_first_revision(context.serving, context.desired, canary_arm, context.status, ready_pods, context.now)


def drop_superseded_first_revision(context: ProgressionContext) -> ProgressionContext:
    """Return the context without a superseded first revision, none of whose pods is ready."""
    canary_arm = context.canary_arm
    if canary_arm is None or canary_arm.revision == context.desired.revision:
        return context
    outcome = _build_superseded_outcome(canary_arm, context.desired, context.status, context.now)
    return replace(context, serving=replace(context.serving, outcome=outcome), canary_arm=None)


def _adopt_superseded_first_revision(
    serving: Progression, desired: DesiredRevision, canary_arm: CanaryArm, status: Status, ready_pods: int, now: datetime
) -> Progression:
    """Return the progression in which a superseded first revision with ready pods is stable, and the desired one follows by a
    canary."""
    message = (
        f"Revision {canary_arm.revision} is stable: {ready_pods}/{serving.target_replicas.stable} pods ready. "
        f"The desired revision {desired.revision} follows with a canary."
    )
    outcome = build_outcome(canary_arm, "Promoted", message, status, None, now)
    condition = ConditionUpdate(PROGRESSING, "True", "Preflight", message)
    return replace(
        serving,
        stable_revision=canary_arm.revision,
        phase="Preflight",
        progressing=condition,
        outcome=outcome,
        requeue_after=timedelta(0),
    )


def _build_superseded_outcome(canary_arm: CanaryArm, desired: DesiredRevision, status: Status, now: datetime) -> RolloutOutcome:
    """Return the outcome of the rollout in progress when another revision is desired."""
    if desired.problem:
        return build_outcome(canary_arm, "Failed", desired.problem, status, status.analysis, now)
    is_reverted = status.stable is not None and status.stable.served_revision == desired.revision
    reason = "The spec was reverted to the stable revision." if is_reverted else "The spec has changed."
    return build_outcome(canary_arm, "Superseded", reason, status, status.analysis, now)
