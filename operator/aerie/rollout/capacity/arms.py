"""The arms of a rollout as they are, and how many pods each is to have in the phase that the canary is in.

Guarantee: pure; the numbers are those of capacity.py, for every phase of machine.py, and of lateness.py: a few late pods of many
hold no phase up, and no phase is late while none of its pods is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from aerie.api.status import GROWING_PHASES
from aerie.rollout.capacity import replica_counts
from aerie.rollout.capacity.replica_counts import Arms, Places, Pods
from aerie.rollout.facts import pod_failures as pods
from aerie.rollout.facts.late_pods import STALL, Lateness, lateness
from aerie.rollout.facts.snapshot import Object, Observed


@dataclass(frozen=True)
class Group:
    """The pods of one arm."""

    objects: tuple[Object, ...]
    dead: tuple[Object, ...]
    pods: Pods
    lateness: Lateness

    @classmethod
    def of(
        cls, observed: Observed, revision: str, now: datetime, *, control: bool = False, stalled_since: datetime | None = None
    ) -> Group:
        alive = observed.group(revision, control=control)
        deployment = observed.deployment(revision, control=control)
        replicas = (deployment or {}).get("spec", {}).get("replicas") or 0
        late = lateness(
            alive,
            replicas,
            pods.refusal_of(deployment),
            stalled_since,
            observed.resource.spec.rollout.progress_deadline,
            now,
        )
        asked = max(replicas, len(alive))
        counts = Pods(
            asked,
            observed.leaving(revision, control=control),
            observed.serving(revision, control=control),
            excused=late.excused(asked),
        )
        return cls(alive, observed.dead(revision, control=control), counts, late)

    @property
    def too_late(self) -> bool:
        """Whether so many pods are late that it counts against the revision."""
        return self.lateness.too_many(self.pods.asked)


@dataclass(frozen=True)
class Fleet:
    """The arms as they are, and the places that there are for them."""

    places: Places
    stable: Group
    canary: Group
    control: Group
    stalled: bool = False
    """Whether the arm that grows has got no further for so long that it is late, whether its pods have ever been made or not."""
    stalls_at: datetime | None = None
    """When it will be; None when it is, or is not waited for."""

    @classmethod
    def of(
        cls,
        observed: Observed,
        stable: str,
        canary: str,
        now: datetime,
        stalled_since: datetime | None = None,
        grows: Literal["canary", "stable"] = "canary",
    ) -> Fleet:
        """`stalled_since`: since when pods of the arm that `grows` have been waited for without progress, by the status."""
        spec = observed.resource.spec
        stalls = stalled_since + STALL * spec.rollout.progress_deadline if stalled_since is not None else None
        forth, back = (stalled_since, None) if grows == "canary" else (None, stalled_since)
        return cls(
            Places.of(spec.replicas, spec.rollout.canary),
            Group.of(observed, stable, now, stalled_since=back),
            Group.of(observed, canary, now, stalled_since=forth),
            Group.of(observed, stable, now, control=True, stalled_since=forth),
            stalls is not None and now >= stalls,
            stalls if stalls is not None and now < stalls else None,
        )

    def asked(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> Arms:
        """Pods that each arm is to have in this phase."""
        arms = (self.stable.pods, self.canary.pods, self.control.pods)
        if phase in GROWING_PHASES:
            return replica_counts.grown(self.places, self.goal(phase, ramp, step, by_pods=by_pods), *arms)
        return replica_counts.standing_in(replica_counts.judged(self.places), self.places, *arms)

    def goal(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> int:
        """Serving pods that the canary needs in this phase."""
        if phase == "Promoting":
            return self.places.replicas
        if phase == "Ramping":
            return replica_counts.ramp_goal(self.places, replica_counts.ramp_share(ramp, step), by_pods=by_pods)
        return self.places.canary

    def ready(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> bool:
        """Whether the pods that the phase asks for serve, but for the few that are late."""
        enough = self.canary.pods.done >= self.goal(phase, ramp, step, by_pods=by_pods)
        controlled = phase in GROWING_PHASES or self.control.pods.done >= self.places.control
        return enough and controlled

    @property
    def stuck_back(self) -> bool:
        """Whether so many stable pods are late, for whatever reason, that the way back to them does not end by itself."""
        return _missed(self.stable) or (self.stalled and not self.stable.lateness.wants_room)

    @property
    def only_control_missing(self) -> bool:
        """Whether a canary that starts waits for pods of the stable revision alone."""
        return self.canary.pods.done >= self.places.canary and self.control.pods.done < self.places.control

    def late(self, phase: str) -> bool:
        """Whether pods that the phase waits for are late, and too many of them to be excused.

        While the canary starts, a lack of room ends it too: nobody is served by a canary that waits for a GPU for ever. Once it
        is accepted, room is all that it waits for.
        """
        if phase in GROWING_PHASES:
            return self.canary.too_late
        groups = (self.canary, self.control)
        return any(map(_missed, groups)) or (self.stalled and not any(group.lateness.wants_room for group in groups))

    def roomless(self) -> bool:
        """Whether all that is late waits for room: of what the canary is, nothing is known then."""
        groups = (self.canary, self.control)
        return any(group.lateness.roomless for group in groups) and not any(group.lateness.late for group in groups)

    def late_at(self, phase: str) -> datetime | None:
        """When the next pod that the phase waits for becomes late."""
        groups = (self.canary,) if phase in GROWING_PHASES else (self.canary, self.control)
        moments = [group.lateness.next_at for group in groups] + ([] if phase in GROWING_PHASES else [self.stalls_at])
        return min((moment for moment in moments if moment is not None), default=None)


def owed(observed: Observed, revisions: Iterable[str], now: datetime) -> int:
    """Serving pods that the spec owes its users beyond those of these revisions: others stand in for them until they serve."""
    spec = observed.resource.spec
    groups = (Group.of(observed, revision, now).pods for revision in revisions)
    return Places.of(spec.replicas, spec.rollout.canary).owed(*groups)


def _missed(group: Group) -> bool:
    counted = group.lateness
    return replace(counted, late=counted.late + counted.roomless).too_many(group.pods.asked)
