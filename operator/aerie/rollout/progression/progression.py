"""Result of the policies: the progression of a rollout, which says what each revision gets from this reconcile.

Guarantees: frozen; a policy returns a changed copy. Not guaranteed: that the fields agree with each
other; each policy ensures that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

from aerie.api.status import AnalysisStatus, CanaryArm, InPlaceDrafter, InPlaceRollout, Phase, PreviousArm, RolloutOutcome
from aerie.rollout.canary.transition import CanaryTransition
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.conditions import ConditionUpdate
from aerie.rollout.plan import PodDrafterPlan


@dataclass(frozen=True)
class Progression:
    """State of the rollout after this step."""

    stable_revision: str | None
    phase: Phase
    progressing: ConditionUpdate
    preflight_passed: ConditionUpdate
    target_replicas: ArmReplicas
    """Pods to request."""
    canary: CanaryArm | None = None
    """The revision whose pods run beside the stable ones, or start before there are any."""
    weights: Mapping[str, int] = field(default_factory=lambda: {"stable": TOTAL_WEIGHT})
    analysis: AnalysisStatus | None = None
    outcome: RolloutOutcome | None = None
    needs_preflight_job: bool = False
    """Whether the preflight Job has to exist."""
    requeue_after: timedelta | None = None
    rejected_revision: str | None = None
    """The revision that is not tried again."""
    previous: PreviousArm | None = None
    """The previous revision, whose pods are retained for a while."""
    reference_acceptance_length: float | None = None
    """Acceptance length with which the revision passed that has just become stable."""
    claims_slot: bool = False
    """Whether the rollout would start, and claims a slot for that."""
    in_place: InPlaceRollout | None = None
    """The rollout in place."""
    stable_in_place: InPlaceDrafter | None = None
    """The drafter that the stable pods serve with, where it was promoted in place."""
    expected_drafter: InPlaceDrafter | None = None
    """The drafter that new pods of the stable revision come to, where it is not that of the revision."""
    drafters: tuple[PodDrafterPlan, ...] = ()
    """Pods whose drafter is observed, and the change that each needs now."""
    drafter_problem: str = ""
    """Which stable pods cannot come to their drafter, as a sentence; empty if all can."""

    @property
    def served_revision(self) -> str | None:
        """Revision whose spec the stable pods serve."""
        return self.stable_in_place.revision if self.stable_in_place is not None else self.stable_revision

    @property
    def routes_to_all_pods(self) -> bool:
        """Whether requests go to all existing pods."""
        return self.previous is None or self.previous.phase == "Verifying" or self.weights.get("previous", 0) > 0

    @property
    def exclusive_revision(self) -> str | None:
        """The revision that receives all requests, where others have pods too."""
        return None if self.routes_to_all_pods else self.stable_revision

    @property
    def canary_revision(self) -> str | None:
        """Revision of the canary."""
        return self.canary.revision if self.canary is not None else None


def apply_canary_transition(serving: Progression, transition: CanaryTransition, rejected_revision: str | None) -> Progression:
    """Return the progression with the result of a canary transition."""
    phase: Phase = transition.canary.phase if transition.canary is not None else "Ready"
    return replace(
        serving,
        phase=phase,
        progressing=transition.progressing,
        target_replicas=transition.arms,
        canary=transition.canary,
        weights=transition.weights,
        analysis=transition.analysis,
        outcome=transition.outcome,
        requeue_after=transition.requeue_after,
        rejected_revision=rejected_revision,
    )
