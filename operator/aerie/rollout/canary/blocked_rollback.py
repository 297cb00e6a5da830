"""A blocked rollback: stable pods made room for the canary and cannot start again, so the rollback does not end automatically.

    RollingBack ─► stable pods late ─► a user promotes the canary, or the spec asks for a third revision
                                       ─► ready pods stay: the canary's revision is stable, and the former stable one is removed

The image, the token or the nodes of the stable revision may no longer exist. Its pods then never become ready again, and clients
have only the pods of the canary. Nobody has to wait for that: from progressDeadline on, a new spec or the annotation
aerie.dev/promote takes effect.

Guarantees: pure. No ready pod is given up. A rejected revision becomes stable only by a user's request or under a newer spec that
follows immediately. If neither revision can start a pod any more, the second such step abandons the remaining pods of the
revision with fewer ready pods. So a new spec is taken up in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.api.status import Arm, BlockedRollbackCause, CanaryArm, RolloutOutcome, Status
from aerie.rollout.canary.observation import read_manual_action
from aerie.rollout.canary.rollback import roll_back_canary
from aerie.rollout.canary.transition import CanaryTransition, build_outcome, read_stalled_since
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import DesiredRevision

_DEADLINE_MESSAGE = "Its pods have not been ready again for spec.rollout.progressDeadline"
_LEGACY_REASON_PARTS = (_DEADLINE_MESSAGE, "cannot replace")
"""Two parts of messages without the field `reversalCause`: their start, and the text that marks an abandoned revision."""


@dataclass(frozen=True)
class RollbackReversal:
    """The transition that reverses a blocked rollback."""

    stable: Arm
    """The arm that is stable from now on."""
    transition: CanaryTransition


def reverse_blocked_rollback(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, canary_arm: CanaryArm, now: datetime
) -> RollbackReversal | None:
    """Return the reversal of a rollback that is blocked and for which something else is requested; None otherwise."""
    promotion_requested = read_manual_action(snapshot.resource, canary_arm.revision) == "promote"
    has_third_revision = desired.revision not in (canary_arm.revision, stable.served_revision) and not desired.problem
    fleet = RolloutPods.from_snapshot(
        snapshot, stable.revision, canary_arm.revision, now, read_stalled_since(canary_arm), growing_arm="stable"
    )
    if not (has_third_revision or (promotion_requested and fleet.canary.counts.ready)) or not fleet.is_rollback_blocked:
        return None
    status = snapshot.resource.status or Status()
    last_outcome = status.rollout_history[0] if status.rollout_history else None
    was_reversed_before = (
        last_outcome is not None
        and last_outcome.revision == canary_arm.revision
        and find_reversal_cause(last_outcome) is not None
    )
    leaving_canary = CanaryArm(
        **dict(stable),
        change=canary_arm.change,
        phase="RollingBack",
        start_time=canary_arm.start_time,
        ready_time=canary_arm.start_time,
        step_start_time=now,
    )
    if has_third_revision and (was_reversed_before or not fleet.canary.counts.ready):
        return _abandon_revision(snapshot, desired, stable, canary_arm, leaving_canary, now)
    return _replace_stable_revision(snapshot, canary_arm, leaving_canary, fleet, now)


def _abandon_revision(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, canary_arm: CanaryArm, leaving_canary: CanaryArm, now: datetime
) -> RollbackReversal:
    """Return the reversal that removes the revision with fewer ready pods, so that a third revision can follow."""
    has_canary_more_ready_pods = _count_ready_pods(snapshot, canary_arm.revision) > _count_ready_pods(snapshot, stable.revision)
    retained_arm, abandoned_arm = (canary_arm, stable) if has_canary_more_ready_pods else (stable, canary_arm)
    message = (
        f"{_DEADLINE_MESSAGE}, and revision {abandoned_arm.revision} cannot replace {retained_arm.revision}: "
        f"revision {desired.revision} follows."
    )
    abandoned_canary = leaving_canary.model_copy(update={**dict(_to_plain_arm(abandoned_arm)), "change": canary_arm.change})
    status = snapshot.resource.status or Status()
    outcome = build_outcome(abandoned_canary, "Failed", message, status, None, now).model_copy(
        update={"reversal_cause": "Abandoned"}
    )
    condition = ConditionUpdate(PROGRESSING, "True", "RollingBack", message)
    rollback = CanaryTransition(
        None, ArmReplicas(snapshot.resource.spec.replicas), {"stable": TOTAL_WEIGHT}, condition, None, outcome, timedelta(0)
    )
    return RollbackReversal(_to_plain_arm(retained_arm), rollback)


def _replace_stable_revision(
    snapshot: Snapshot, canary_arm: CanaryArm, leaving_canary: CanaryArm, fleet: RolloutPods, now: datetime
) -> RollbackReversal:
    """Return the reversal that makes the canary's revision stable, and rolls back the former stable one."""
    ready_pods = fleet.canary.counts.ready
    message = f"{_DEADLINE_MESSAGE}. Revision {canary_arm.revision}, with {ready_pods} ready pods, becomes the stable one."
    status = snapshot.resource.status or Status()
    outcome = build_outcome(leaving_canary, "Failed", message, status, None, now).model_copy(
        update={"reversal_cause": "StableUnavailable"}
    )
    rollback = roll_back_canary(snapshot, canary_arm, leaving_canary, None, outcome, now)
    # Traffic first: the pods are scaled down by the next reconcile, once the status contains that.
    rollback = replace(rollback, arms=replace(rollback.arms, canary=max(rollback.arms.canary, fleet.stable.counts.requested)))
    return RollbackReversal(_to_plain_arm(canary_arm), rollback)


def find_abandoned_revision(status: Status) -> str | None:
    """Return the revision that the last rollout abandoned. It is removed even though pods of it may be ready."""
    last_outcome = status.rollout_history[0] if status.rollout_history else None
    return last_outcome.revision if last_outcome is not None and find_reversal_cause(last_outcome) == "Abandoned" else None


def find_reversal_cause(outcome: RolloutOutcome) -> BlockedRollbackCause | None:
    """Return why a rollback was reversed; None where it was not. The message decides where an older definition dropped
    the field."""
    reason_start, abandonment_part = _LEGACY_REASON_PARTS
    if outcome.reversal_cause is not None or not outcome.message.startswith(reason_start):
        return outcome.reversal_cause
    return "Abandoned" if abandonment_part in outcome.message else "StableUnavailable"


def _count_ready_pods(snapshot: Snapshot, revision: str) -> int:
    """Return the number of ready pods of the revision, those of a control included."""
    return sum(
        pod_failures.is_pod_ready(pod)
        for control in (False, True)
        for pod in snapshot.cluster.live_pods(revision, control=control)
    )


def _to_plain_arm(arm: Arm) -> Arm:
    """Return the arm without the fields of a canary."""
    return Arm(**{name: getattr(arm, name) for name in Arm.model_fields})
