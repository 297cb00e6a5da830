"""The rollout of the desired revision by a canary, from its start to its promotion or its rollback.

Guarantees: a canary starts only where no other one has pods, and after every gate. Not guaranteed: that it is promoted; its
verdict decides (canary/advance.py).
"""

from __future__ import annotations

from dataclasses import replace

from aerie.rollout.canary import post_promotion
from aerie.rollout.canary.advance import advance_canary, start_canary
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.progression.context import ProgressionContext
from aerie.rollout.progression.progression import Progression, apply_canary_transition
from aerie.rollout.progression.promotion import apply_post_promotion


def progress_canary(context: ProgressionContext) -> Progression:
    """Start or advance the canary; start post-promotion monitoring once it is promoted."""
    snapshot, desired, stable, canary_arm = context.snapshot, context.desired, context.stable, context.canary_arm
    assert stable is not None  # else it is a first revision
    transition = (
        start_canary(snapshot, desired, stable, context.now)
        if canary_arm is None
        else advance_canary(snapshot, desired, stable, canary_arm, context.now)
    )
    outcome = transition.outcome
    if outcome is not None and outcome.result == "Promoted":
        assert canary_arm is not None
        monitoring = post_promotion.start_monitoring(snapshot, stable, canary_arm, transition.analysis, context.now)
        promoted = replace(
            apply_canary_transition(context.serving, transition, None),
            stable_revision=desired.revision,
            target_replicas=ArmReplicas(context.replicas),
        )
        return apply_post_promotion(
            promoted,
            monitoring,
            reference_acceptance_length=post_promotion.read_reference_acceptance_length(transition.analysis),
        )
    rejected_revision = desired.revision if outcome is not None and outcome.retry_time is None else None
    return replace(apply_canary_transition(context.serving, transition, rejected_revision), needs_preflight_job=True)
