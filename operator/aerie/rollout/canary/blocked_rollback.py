"""A rollback that does not end by itself: stable pods made room for the canary, and cannot start any more.

    RollingBack ─► stable pods late ─► a person promotes the canary, or the spec asks for a third revision
                                       ─► what serves stays: the canary's revision is stable, and the former stable one goes

The image, the token or the nodes of the stable revision may be gone; its pods then never serve again, and the canary's are what
clients have. Nobody is asked to wait for that: from progressDeadline on, a new spec or the annotation aerie.dev/promote is heard.

Guarantees: pure; no pod that serves is given up; what was rejected becomes stable only by a person's word or under a newer spec
that follows at once. Where neither revision can start a pod any more, the second such step gives up what is left of that of which
fewer serve, so that a new spec is taken up in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.api.status import Arm, BlockedRollbackCause, CanaryArm, RolloutOutcome, Status
from aerie.rollout.canary import transition
from aerie.rollout.canary.transition import CanaryTransition, build_outcome
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import DesiredRevision

_DEADLINE_MESSAGE = "Its pods have not served again for spec.rollout.progressDeadline"
_LEGACY_REASON_PARTS = (_DEADLINE_MESSAGE, "cannot stand in for")
"""How the sentences of releases without the field `cause` begin, and what is in that of a revision that was given up."""


@dataclass(frozen=True)
class RollbackReversal:
    """The rollback, turned round."""

    stable: Arm
    """What is stable from now on."""
    transition: CanaryTransition


def reverse_blocked_rollback(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, canary_arm: CanaryArm, now: datetime
) -> RollbackReversal | None:
    """The rollback turned round, where it is stuck and somebody has asked for something else; else None."""
    promoted = transition.read_manual_action(snapshot.resource, canary_arm.revision) == "promote"
    third = desired.revision not in (canary_arm.revision, stable.revision) and not desired.problem
    fleet = RolloutPods.from_snapshot(
        snapshot, stable.revision, canary_arm.revision, now, transition.read_stalled_since(canary_arm), growing_arm="stable"
    )
    if not (third or (promoted and fleet.canary.counts.ready)) or not fleet.is_rollback_blocked:
        return None
    status = snapshot.resource.status or Status()
    last = status.history[0] if status.history else None
    both = last is not None and last.revision == canary_arm.revision and find_reversal_cause(last) is not None
    leaving = CanaryArm(
        **dict(stable),
        change=canary_arm.change,
        phase="RollingBack",
        started_at=canary_arm.started_at,
        ready_at=canary_arm.started_at,
        step_started_at=now,
    )
    serving = fleet.canary.counts.ready
    if third and (both or not serving):
        more = _count_ready_pods(snapshot, canary_arm.revision) > _count_ready_pods(snapshot, stable.revision)
        kept, other = (canary_arm, stable) if more else (stable, canary_arm)
        why = f"{_DEADLINE_MESSAGE}, and revision {other.revision} cannot stand in for {kept.revision}: revision {desired.revision} follows."
        gone = leaving.model_copy(update={**dict(_to_plain_arm(other)), "change": canary_arm.change})
        outcome = build_outcome(gone, "Failed", why, status, None, now).model_copy(update={"cause": "GivenUp"})
        finding = ConditionUpdate(PROGRESSING, "True", "RollingBack", why)
        way = CanaryTransition(
            None, ArmReplicas(snapshot.resource.spec.replicas), {"stable": TOTAL_WEIGHT}, finding, None, outcome, timedelta(0)
        )
        return RollbackReversal(_to_plain_arm(kept), way)
    why = f"{_DEADLINE_MESSAGE}. So revision {canary_arm.revision}, of which {serving} pods serve, is the stable one."
    outcome = build_outcome(leaving, "Failed", why, status, None, now).model_copy(update={"cause": "StableLost"})
    way = transition.roll_back_canary(snapshot, canary_arm, leaving, None, outcome, now)
    # Traffic first: its pods go with the next look, when it is written that they are to.
    way = replace(way, arms=replace(way.arms, canary=max(way.arms.canary, fleet.stable.counts.requested)))
    return RollbackReversal(_to_plain_arm(canary_arm), way)


def find_abandoned_revision(status: Status) -> str | None:
    """The revision that was given up by the last rollout although pods of it may serve; it goes."""
    last = status.history[0] if status.history else None
    return last.revision if last is not None and find_reversal_cause(last) == "GivenUp" else None


def find_reversal_cause(outcome: RolloutOutcome) -> BlockedRollbackCause | None:
    """Why a rollback was turned round; by the sentence where a release before the field wrote it, or a definition dropped it."""
    start, given_up = _LEGACY_REASON_PARTS
    if outcome.cause is not None or not outcome.reason.startswith(start):
        return outcome.cause
    return "GivenUp" if given_up in outcome.reason else "StableLost"


def _count_ready_pods(observed: Snapshot, revision: str) -> int:
    """Of all pods of the revision."""
    return sum(
        pod_failures.is_pod_ready(pod) for control in (False, True) for pod in observed.live_pods(revision, control=control)
    )


def _to_plain_arm(found: Arm) -> Arm:
    """Without what makes it a canary."""
    return Arm(**{name: getattr(found, name) for name in Arm.model_fields})
