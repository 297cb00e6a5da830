"""The arms of a rollout as they are, and how many pods each is to have in the phase that the canary is in.

Guarantee: pure; the numbers are those of capacity.py, for every phase of machine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aerie.rollout import capacity, pods
from aerie.rollout.capacity import Arms, Places, Pods
from aerie.rollout.observed import Object, Observed


@dataclass(frozen=True)
class Group:
    """The pods of one arm."""

    objects: tuple[Object, ...]
    pods: Pods

    @classmethod
    def of(cls, observed: Observed, revision: str, *, control: bool = False) -> Group:
        found = observed.group(revision, control=control)
        deployment = observed.deployment(revision, control=control)
        asked = (deployment or {}).get("spec", {}).get("replicas") or 0
        serving = sum(map(pods.ready, found))
        return cls(found, Pods(max(asked, len(found)), observed.leaving(revision, control=control), serving))


@dataclass(frozen=True)
class Fleet:
    """The arms as they are, and the places that there are for them."""

    places: Places
    stable: Group
    canary: Group
    control: Group

    @classmethod
    def of(cls, observed: Observed, stable: str, canary: str) -> Fleet:
        spec = observed.resource.spec
        return cls(
            Places.of(spec.replicas, spec.rollout.canary),
            Group.of(observed, stable),
            Group.of(observed, canary),
            Group.of(observed, stable, control=True),
        )

    def asked(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> Arms:
        """Pods that each arm is to have in this phase."""
        return (
            capacity.judged(self.places)
            if phase not in ("Ramping", "Promoting")
            else capacity.grown(
                self.places, self.goal(phase, ramp, step, by_pods=by_pods), self.stable.pods, self.canary.pods, self.control.pods
            )
        )

    def goal(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> int:
        """Serving pods that the canary needs in this phase."""
        if phase == "Promoting":
            return self.places.replicas
        if phase == "Ramping":
            return capacity.ramp_goal(self.places, ramp[min(step or 0, len(ramp) - 1)], by_pods=by_pods)
        return self.places.canary

    def ready(self, phase: str, ramp: Sequence[int], step: int | None, *, by_pods: bool) -> bool:
        """Whether the pods that the phase asks for serve."""
        enough = self.canary.pods.serving >= self.goal(phase, ramp, step, by_pods=by_pods)
        controlled = phase in ("Ramping", "Promoting") or self.control.pods.serving >= self.places.control
        return enough and controlled
