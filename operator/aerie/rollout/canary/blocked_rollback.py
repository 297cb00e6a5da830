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

from aerie.api.status import Arm, CanaryArm, Cause, Outcome, Status
from aerie.rollout.canary import transition
from aerie.rollout.canary.transition import Way, outcome_of
from aerie.rollout.capacity.arms import Fleet
from aerie.rollout.capacity.replica_counts import Arms
from aerie.rollout.capacity.traffic_weights import ALL
from aerie.rollout.conditions import PROGRESSING, Finding
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import Observed
from aerie.rollout.revision.desired import Wanted

_LIMIT = "Its pods have not served again for spec.rollout.progressDeadline"
_SAID_BEFORE = (_LIMIT, "cannot stand in for")
"""How the sentences of releases without the field `cause` begin, and what is in that of a revision that was given up."""


@dataclass(frozen=True)
class Turn:
    """The rollback, turned round."""

    stable: Arm
    """What is stable from now on."""
    way: Way


def turned(observed: Observed, wanted: Wanted, stable: Arm, known: CanaryArm, now: datetime) -> Turn | None:
    """The rollback turned round, where it is stuck and somebody has asked for something else; else None."""
    promoted = transition.word(observed.resource, known.revision) == "promote"
    third = wanted.revision not in (known.revision, stable.revision) and not wanted.problem
    fleet = Fleet.of(observed, stable.revision, known.revision, now, transition.stalled_since(known), grows="stable")
    if not (third or (promoted and fleet.canary.pods.serving)) or not fleet.stuck_back:
        return None
    status = observed.resource.status or Status()
    last = status.history[0] if status.history else None
    both = last is not None and last.revision == known.revision and cause_of(last) is not None
    leaving = CanaryArm(
        **dict(stable),
        change=known.change,
        phase="RollingBack",
        started_at=known.started_at,
        ready_at=known.started_at,
        step_started_at=now,
    )
    serving = fleet.canary.pods.serving
    if third and (both or not serving):
        more = _serving(observed, known.revision) > _serving(observed, stable.revision)
        kept, other = (known, stable) if more else (stable, known)
        why = f"{_LIMIT}, and revision {other.revision} cannot stand in for {kept.revision}: revision {wanted.revision} follows."
        gone = leaving.model_copy(update={**dict(_arm(other)), "change": known.change})
        outcome = outcome_of(gone, "Failed", why, status, None, now).model_copy(update={"cause": "GivenUp"})
        finding = Finding(PROGRESSING, "True", "RollingBack", why)
        way = Way(None, Arms(observed.resource.spec.replicas), {"stable": ALL}, finding, None, outcome, timedelta(0))
        return Turn(_arm(kept), way)
    why = f"{_LIMIT}. So revision {known.revision}, of which {serving} pods serve, is the stable one."
    outcome = outcome_of(leaving, "Failed", why, status, None, now).model_copy(update={"cause": "StableLost"})
    way = transition.withdraw(observed, known, leaving, None, outcome, now)
    # Traffic first: its pods go with the next look, when it is written that they are to.
    way = replace(way, arms=replace(way.arms, canary=max(way.arms.canary, fleet.stable.pods.asked)))
    return Turn(_arm(known), way)


def given_up(status: Status) -> str | None:
    """The revision that was given up by the last rollout although pods of it may serve; it goes."""
    last = status.history[0] if status.history else None
    return last.revision if last is not None and cause_of(last) == "GivenUp" else None


def cause_of(ended: Outcome) -> Cause | None:
    """Why a rollback was turned round; by the sentence where a release before the field wrote it, or a definition dropped it."""
    start, given_up = _SAID_BEFORE
    if ended.cause is not None or not ended.reason.startswith(start):
        return ended.cause
    return "GivenUp" if given_up in ended.reason else "StableLost"


def _serving(observed: Observed, revision: str) -> int:
    """Of all pods of the revision."""
    return sum(pod_failures.ready(pod) for control in (False, True) for pod in observed.group(revision, control=control))


def _arm(found: Arm) -> Arm:
    """Without what makes it a canary."""
    return Arm(**{name: getattr(found, name) for name in Arm.model_fields})
