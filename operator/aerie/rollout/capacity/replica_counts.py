"""How many pods each arm is to have at one moment of a rollout.

    Starting … AwaitingApproval   stable  canary  control     the canary's and the control's pods are equal in number
    Ramping, Promoting            stable▼ canary▲             the control's place goes to the canary
    RollingBack                   stable▲ canary▼
    Watching, Rechecking          stable  previous            in the places that canary and control had

Two sources of places. `Surge`: canary and control come on top of the stable pods, and no more than that ever does; stable pods
go only where the canary's have taken their place and serve. `Reuse`: no pod on top; the stable arm makes room first.

Guarantees, for every input: pods that serve are never given up below the floor (`Surge`: the replicas of the spec; `Reuse`:
those less the places lent to canary and control), but for the few pods that are late, which the rollout goes around; all arms
together ask for no more than the places there are, but for control pods that stand in although the spec asks for no control any
more, which keep theirs; a canary never shrinks on its way up. `Reuse` leaves a stable pod whatever
spec.replicas is: where that is too small for canary, control and a stable pod, so many run until the canary has ended. Not
guaranteed: that the cluster has the places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aerie.api.rollout import Canary
from aerie.rollout.facts.late_pods import tolerated


@dataclass(frozen=True)
class Pods:
    """Of one arm."""

    asked: int = 0
    """Replicas asked for so far, or the pods there are where those are more."""
    leaving: int = 0
    """Besides them the pods on their way out, which still hold their GPUs."""
    serving: int = 0
    excused: int = 0
    """Pods that are late and so few that they hold nothing up (lateness.py)."""

    @property
    def done(self) -> int:
        """Pods that need not be waited for."""
        return self.serving + self.excused

    @property
    def held(self) -> int:
        """Places that the arm holds."""
        return self.asked + self.leaving


@dataclass(frozen=True)
class Arms:
    """Replicas to ask for."""

    stable: int
    canary: int = 0
    control: int = 0


@dataclass(frozen=True)
class Places:
    """What the spec lets a rollout of `replicas` pods take."""

    replicas: int
    canary: int
    control: int
    total: int
    """Pods of all arms together."""
    floor: int
    """Serving pods that are never given up on purpose."""

    @classmethod
    def of(cls, replicas: int, canary: Canary) -> Places:
        """The places of the resource. A canary is never larger than what it is to replace."""
        size = min(canary.replicas, replicas)
        control = size if canary.control == "Fresh" else 0
        if canary.capacity == "Surge":
            return cls(replicas, size, control, total=replicas + size + control, floor=replicas)
        total = max(replicas, size + control + 1) if replicas else 0
        return cls(replicas, size, control, total=total, floor=total - size - control)

    def owed(self, *arms: Pods) -> int:
        """Serving pods that are missing from the floor, beside those of these arms: others have to stand in for them. Late pods
        are excused as far as a fleet of that size may have some, and not the larger one that it was before."""
        excused = min(sum(arm.excused for arm in arms), tolerated(self.floor))
        return max(0, self.floor - sum(arm.serving for arm in arms) - excused)


def judged(places: Places) -> Arms:
    """While the canary starts and is judged."""
    stable = min(places.replicas, places.total - places.canary - places.control)
    return Arms(max(0, stable), places.canary, places.control)


def standing_in(arms: Arms, places: Places, stable: Pods, canary: Pods, control: Pods) -> Arms:
    """The same with the control pods that stand in for stable ones, where the spec asks for no control any more. They keep the
    places that they hold; none is asked for anew."""
    same = min(control.asked, places.owed(stable, canary)) if control.serving else 0
    return Arms(arms.stable, arms.canary, max(arms.control, same))


def grown(places: Places, goal: int, stable: Pods, canary: Pods, control: Pods) -> Arms:
    """On the way to a canary of `goal` pods, from what is there. The control is no longer needed, but where its pods stand in for
    stable ones that do not serve. A canary that is larger, because the ramp was lowered or replicas are fewer, gives a pod up
    when a stable one serves for it."""
    goal = max(places.canary, min(goal, places.replicas))
    same = min(control.asked, places.owed(stable, canary)) if control.serving else 0
    wanted_stable = max(0, min(places.replicas, places.total - goal - same))
    # What the canary's serving pods carry already, the stable ones need not.
    kept = max(wanted_stable, min(places.replicas, places.owed(canary)))
    free = places.total - stable.held - canary.held - control.held
    more_stable = max(0, min(kept - stable.asked, free))
    more_canary = max(0, min(goal - canary.asked, free - more_stable))
    most_canary = max(goal, min(places.replicas, places.owed(stable)))
    asked = max(places.canary, min(most_canary, canary.asked + more_canary))
    return Arms(min(kept, stable.asked + more_stable), asked, same)


def withdrawn(places: Places, stable: Pods, canary: Pods, control: Pods) -> Arms:
    """On the way back to the stable arm alone: pods of control and canary stand in for stable ones that do not serve, and one
    goes when a stable one serves."""
    free = places.total - stable.held - canary.held - control.held
    more_stable = max(0, min(places.replicas - stable.asked, free))
    needed = places.owed(stable)
    same = min(control.asked, needed) if control.serving else 0
    kept = max(0, min(canary.asked, needed - min(same, control.serving))) if canary.serving else 0
    return Arms(min(places.replicas, stable.asked + more_stable), kept, same)


def kept(places: Places) -> int:
    """Pods of the revision before that may stay after a promotion: in the places that canary and control had."""
    return max(0, min(places.replicas, places.total - places.replicas))


def ramp_share(ramp: Sequence[int], step: int | None) -> int:
    """Percent of the traffic that a step of the ramp asks for: of a ramp that has become shorter the last share, and of an empty
    ramp nothing, because it asks for no step."""
    return ramp[min(step or 0, len(ramp) - 1)] if ramp else 0


def ramp_goal(places: Places, share: int, *, by_pods: bool) -> int:
    """Pods that the canary needs for `share` percent of the traffic.

    By weight (Gateway) as many as the share of the load is of the fleet; by pods (Service) so many that they are that share of
    all that serve.
    """
    if not by_pods:
        return max(places.canary, -(-places.replicas * share // 100))
    for size in range(places.canary, places.replicas):
        stable = min(places.replicas, places.total - size)
        if 100 * size >= share * (size + stable):
            return size
    return places.replicas
