"""Result of the policies: the progression of a rollout, which says what each revision gets from this reconcile.

Guarantees: frozen; a policy returns a changed copy. Not guaranteed: that the fields agree with each
other; each policy ensures that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

from aerie.api.status import AnalysisStatus, CanaryArm, InPlaceDrafter, InPlaceRollout, Phase, PreviousArm, RolloutOutcome
from aerie.manifests import naming
from aerie.rollout.canary.transition import CanaryTransition
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.conditions import ConditionUpdate
from aerie.rollout.facts.pod_failures import is_pod_ready, is_pod_terminal
from aerie.rollout.facts.snapshot import ClusterState, KubernetesObject, read_labels
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
    def is_canary_isolated(self) -> bool:
        """Whether users are served by neither canary nor control."""
        return self.stable_revision is not None and self.canary is not None and self.canary.is_isolated

    @property
    def evaluates_canary(self) -> bool:
        """Whether the evaluator compares canary and control."""
        return self.is_canary_isolated and self.canary is not None and self.canary.phase == "Evaluating"

    def build_serving_selector(self, cluster: ClusterState) -> dict[str, str]:
        """Return the labels of the pods that the Service with the resource's name selects.

        While the canary is isolated, these are the stable pods, and so until all others have ended. While none of them is ready,
        the control stands in, or else the canary (traffic_weights.single_arm_weights).
        """
        name, stable = cluster.resource_name, self.stable_revision
        if stable is None or not (self.is_canary_isolated or self._leaves_isolated_pods(cluster)):
            return naming.serving_selector_labels(name, self.exclusive_revision)
        stable_labels = naming.deployment_selector_labels(name, stable, control=False)
        ready_others = [pod for pod in _list_other_pods(cluster, stable_labels) if is_pod_ready(pod)]
        if cluster.ready_pod_count(stable) or not ready_others:
            return stable_labels
        has_control = cluster.ready_pod_count(stable, control=True) > 0
        return naming.serving_selector_labels(name, stable if has_control else None)

    def _leaves_isolated_pods(self, cluster: ClusterState) -> bool:
        """Return whether pods of an isolated canary are about to be deleted, and are still left out."""
        service = cluster.child("Service", cluster.resource_name)
        selector = service["spec"].get("selector") or {} if service is not None else {}
        if self.canary is not None or self.previous is not None or selector.get(naming.CONTROL_LABEL) != "false":
            return False
        return any(_list_other_pods(cluster, selector))

    @property
    def canary_revision(self) -> str | None:
        """Revision of the canary."""
        return self.canary.revision if self.canary is not None else None


def _list_other_pods(cluster: ClusterState, labels: Mapping[str, str]) -> Iterator[KubernetesObject]:
    """Yield the engine pods without these labels that have not ended and are not terminating."""
    for pod in cluster.pods:
        if not (labels.items() <= read_labels(pod).items() or pod["metadata"].get("deletionTimestamp") or is_pod_terminal(pod)):
            yield pod


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
