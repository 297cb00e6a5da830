"""Snapshot of one resource, as the I/O layer hands it to the decision. Objects are the API server's own dictionaries.

Guarantee: a terminal pod (evicted, rejected by its node) is in no group and takes no capacity, although its object stays for
as long as the cluster keeps it. After `exclude_lost_pods`, neither is a pod whose node is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.equivalence import EquivalenceResult
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.api import SpeculativeDeployment
from aerie.manifests import naming
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.arm_metrics import ArmMetrics
from aerie.rollout.facts.concurrency import StartPermission
from aerie.rollout.facts.context_length import ContextLengths
from aerie.rollout.facts.drafters import DrafterObservation
from aerie.rollout.facts.last_valid_spec import SpecSubstitution
from aerie.rollout.facts.pairs import PairObservation
from aerie.rollout.facts.pod_failures import PodFailure
from aerie.rollout.facts.receivers import NotificationReceiver
from aerie.tuning.recommendation import Recommendation

KubernetesObject = Mapping[str, Any]


@dataclass(frozen=True)
class _DeploymentPods:
    """Pods of one Deployment."""

    live: tuple[KubernetesObject, ...] = ()
    terminal: tuple[KubernetesObject, ...] = ()
    terminating_count: int = 0
    ready_count: int = 0

    @classmethod
    def from_pods(cls, pods: Sequence[KubernetesObject]) -> _DeploymentPods:
        """Return the pods sorted by state."""
        terminal = tuple(filter(pod_failures.is_pod_terminal, pods))
        remaining = [pod for pod in pods if not pod_failures.is_pod_terminal(pod)] if terminal else pods
        live = tuple(pod for pod in remaining if not pod["metadata"].get("deletionTimestamp"))
        return cls(live, terminal, len(remaining) - len(live), sum(map(pod_failures.is_pod_ready, live)))


_NO_PODS = _DeploymentPods()


@dataclass(frozen=True)
class ClusterState:
    """What the API server holds of one resource: its child objects and their pods."""

    resource_name: str
    """Name of the resource: children and pods are named and labelled by it."""
    children: tuple[KubernetesObject, ...] = ()
    """Objects with the resource's label, of all kinds that Aerie creates."""
    name_conflicts: tuple[KubernetesObject, ...] = ()
    """Objects without the label whose name Aerie needs for a child."""
    pods: tuple[KubernetesObject, ...] = ()
    """Engine pods."""
    preflight_pods: tuple[KubernetesObject, ...] = ()
    node_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Hardware labels of nodes by name, as far as they are known (facts/hardware.py)."""
    job_creation_errors: Mapping[str, str] = field(default_factory=dict)
    """Why an active Job has no pod, in Kubernetes' own words, by name of the Job."""
    last_log_lines: Mapping[str, str] = field(default_factory=dict)
    """Last log lines of a crashed engine, by name of the pod."""
    unlisted_kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds that cannot be listed, none of them crucial, each with a message: such children are unknown."""
    is_listing_forbidden: bool = False
    """Whether listing them is forbidden, rather than failing."""
    crd_problem: str = ""
    """Problem of the CustomResourceDefinition; empty where there is none."""

    def child(self, kind: str, name: str) -> KubernetesObject | None:
        """Return the child of that kind and name."""
        return self._children_by_name.get((kind, name))

    def children_of_kind(self, kind: str) -> Iterator[KubernetesObject]:
        """Return the children of that kind."""
        return (child for child in self.children if child["kind"] == kind)

    def deployment(self, revision: str, *, control: bool = False) -> KubernetesObject | None:
        """Return the Deployment of one group of pods."""
        return self.child("Deployment", naming.deployment_name(self.resource_name, revision, control=control))

    def exclude_lost_pods(self, now: datetime) -> tuple[ClusterState, datetime | None]:
        """Return the state without pods whose node is lost, so that their end is overdue; and when the next pod becomes
        overdue."""
        lost_times = [(pod, pod_failures.node_lost_at(pod)) for pod in self.pods]
        remaining_pods = tuple(pod for pod, lost_at in lost_times if lost_at is None or now < lost_at)
        next_lost_at = min((lost_at for _, lost_at in lost_times if lost_at is not None and now < lost_at), default=None)
        return (self if len(remaining_pods) == len(self.pods) else replace(self, pods=remaining_pods)), next_lost_at

    def live_pods(self, revision: str, *, control: bool = False) -> tuple[KubernetesObject, ...]:
        """Return the pods of one Deployment that are neither terminal nor terminating."""
        return self._deployment_pods(revision, control=control).live

    def ready_pod_count(self, revision: str, *, control: bool = False) -> int:
        """Return how many pods of one Deployment are ready."""
        return self._deployment_pods(revision, control=control).ready_count

    def terminal_pods(self, revision: str, *, control: bool = False) -> tuple[KubernetesObject, ...]:
        """Return the pods of one Deployment that have ended permanently; they are replaced, and their objects stay."""
        return self._deployment_pods(revision, control=control).terminal

    def terminating_pod_count(self, revision: str, *, control: bool = False) -> int:
        """Return how many pods of one Deployment are terminating."""
        return self._deployment_pods(revision, control=control).terminating_count

    def pod_failure(self, revision: str, *, control: bool = False) -> PodFailure | None:
        """Return why pods of one Deployment are not ready, or cannot be created; None when all are ready."""
        live_pods = self.live_pods(revision, control=control)
        newest_ready = max(
            (str(pod["metadata"].get("creationTimestamp") or "") for pod in live_pods if pod_failures.is_pod_ready(pod)),
            default="",
        )
        terminal_pods = [
            (str(pod["metadata"].get("creationTimestamp") or ""), pod["metadata"]["name"], pod)
            for pod in self.terminal_pods(revision, control=control)
        ]
        # A terminal pod older than the newest ready one has been replaced. The first of the others keeps the message stable.
        unreplaced = [
            pod for created_at, _, pod in sorted(terminal_pods, key=lambda entry: entry[:2]) if created_at > newest_ready
        ][:1]
        creation_failure = pod_failures.read_pod_creation_failure(self.deployment(revision, control=control))
        if creation_failure is None and all(map(pod_failures.is_pod_ready, live_pods)) and live_pods:
            return None
        return pod_failures.most_severe_failure([*live_pods, *unreplaced], self.last_log_lines, creation_failure)

    def _deployment_pods(self, revision: str, *, control: bool) -> _DeploymentPods:
        return self._pods_by_deployment.get((revision, "true" if control else "false"), _NO_PODS)

    @cached_property
    def _pods_by_deployment(self) -> Mapping[tuple[str | None, str | None], _DeploymentPods]:
        """Pods by revision and by the control label, grouped once: a decision needs them some twenty times."""
        pods_by_key: dict[tuple[str | None, str | None], list[KubernetesObject]] = {}
        for pod in self.pods:
            labels = read_labels(pod)
            if labels.get(naming.NAME_LABEL) == self.resource_name:
                pods_by_key.setdefault((labels.get(naming.REVISION_LABEL), labels.get(naming.CONTROL_LABEL)), []).append(pod)
        return {key: _DeploymentPods.from_pods(pods) for key, pods in pods_by_key.items()}

    @cached_property
    def _children_by_name(self) -> Mapping[tuple[str, str], KubernetesObject]:
        return {(child["kind"], child["metadata"]["name"]): child for child in reversed(self.children)}


@dataclass(frozen=True)
class EngineState:
    """What the engines of one resource report."""

    metrics_by_deployment: Mapping[str, ArmMetrics] = field(default_factory=dict)
    """Metrics of the engines, by name of their Deployment, as far as they have been scraped."""
    blocks: tuple[ClosedBlock, ...] = ()
    """Closed blocks of the analysis in progress; some may have been in earlier snapshots."""
    equivalence_result: EquivalenceResult | None = None
    """Result of the comparison of the engines' greedy answers, once all are complete; it may have been in earlier snapshots."""
    context_lengths: ContextLengths | None = None
    """Longest request that the engines of each arm serve; None where that is unknown."""
    invalid_metrics: Mapping[str, str] = field(default_factory=dict)
    """Why the last few scrapes of a pod were invalid, by name of the pod."""
    metrics_source_error: str | None = ""
    """Why spec.metrics.source is unusable; empty when it is usable, None while that is unknown."""
    pairs: PairObservation | None = None
    """Counts of the evaluator in a shadow evaluation between pods; None where none is read."""
    drafters: Mapping[str, DrafterObservation] = field(default_factory=dict)
    """What the pods of the latest plan report of their drafters, by name of the pod."""


@dataclass(frozen=True)
class OperatorState:
    """What the operator process holds in memory of one resource, and grants it."""

    baseline_calibration: BaselineCalibration | None = None
    """Calibration of the stable pods; None where none is counted, and the stored calibration may have to be read."""
    recommendation: Recommendation | None = None
    """Recommendation of the tuner; None where it has made none since the operator started."""
    tuning_record: TuningRecord | None = None
    """State that the tuner wants to save; None where it has decided nothing."""
    start_permission: StartPermission = field(default_factory=StartPermission)
    """Changes that may start within the operator's concurrency limits."""
    notification_receivers: tuple[NotificationReceiver, ...] = ()
    """Receivers of notifications that annotations may name."""


@dataclass(frozen=True)
class Snapshot:
    """One resource, and what is known of it from three sources, read in turn: parts may be a moment older than others."""

    resource: SpeculativeDeployment
    cluster: ClusterState
    engines: EngineState = field(default_factory=EngineState)
    operator: OperatorState = field(default_factory=OperatorState)
    spec_substitution: SpecSubstitution | None = None
    """Substitutes for fields of the spec that cannot be read; None where the whole resource is as its spec says."""

    @property
    def unmanaged_kinds(self) -> frozenset[str]:
        """Kinds that are not applied: they cannot be listed, or their desired state is unknown."""
        return frozenset(self.cluster.unlisted_kinds) | (
            self.spec_substitution.unmanaged_kinds if self.spec_substitution is not None else frozenset()
        )

    @property
    def is_rollout_suspended(self) -> bool:
        """Whether the rollout is suspended because too little is known: serving pods are repaired and scaled, nothing else."""
        return bool(self.cluster.unlisted_kinds) or self.spec_substitution is not None

    def exclude_lost_pods(self, now: datetime) -> tuple[Snapshot, datetime | None]:
        """Return the snapshot without pods whose node is lost; and when the next pod becomes overdue."""
        cluster, next_lost_at = self.cluster.exclude_lost_pods(now)
        return (self if cluster is self.cluster else replace(self, cluster=cluster)), next_lost_at

    def isolated_pod_names(self, revision: str) -> list[str]:
        """Return the names of the revision's pods that are isolated from users, as they report."""
        names = (str(pod["metadata"]["name"]) for pod in self.cluster.live_pods(revision))
        states = ((name, self.engines.drafters[name].state) for name in names if name in self.engines.drafters)
        return sorted(name for name, state in states if state is not None and state.isolation is not None)

    def arm_metrics(self, revision: str, *, control: bool = False) -> ArmMetrics | None:
        """Return the metrics of the pods of one Deployment together."""
        return self.engines.metrics_by_deployment.get(
            naming.deployment_name(self.cluster.resource_name, revision, control=control)
        )


def read_labels(item: KubernetesObject) -> Mapping[str, str]:
    """Return the object's labels."""
    labels: Mapping[str, str] = item["metadata"].get("labels") or {}
    return labels


def is_owned_by(item: KubernetesObject, uid: str | None) -> bool:
    """Return whether the object is controlled by the owner with this uid."""
    references = item["metadata"].get("ownerReferences") or []
    return any(reference.get("controller") and reference.get("uid") == uid for reference in references)
