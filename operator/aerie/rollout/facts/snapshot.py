"""What the edge gathered about one resource, as the core wants it. Objects are the API server's own dictionaries.

Guarantee: a pod that is dead (evicted, refused by its node) is in no group and holds no place, although its object stays for as
long as the cluster likes; once `alive` was called, neither is one whose node is lost.
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
from aerie.rollout.facts import pod_failures as pods
from aerie.rollout.facts.arm_metrics import ArmMetrics
from aerie.rollout.facts.concurrency import StartPermission
from aerie.rollout.facts.context_length import ContextLengths
from aerie.rollout.facts.last_valid_spec import SpecSubstitution
from aerie.rollout.facts.pod_failures import PodFailure
from aerie.tuning.recommendation import Recommendation

KubernetesObject = Mapping[str, Any]


@dataclass(frozen=True)
class _DeploymentPods:
    """The pods of one Deployment."""

    live: tuple[KubernetesObject, ...] = ()
    terminal: tuple[KubernetesObject, ...] = ()
    terminating_count: int = 0
    ready_count: int = 0

    @classmethod
    def from_pods(cls, group: Sequence[KubernetesObject]) -> _DeploymentPods:
        dead = tuple(filter(pods.is_pod_terminal, group))
        rest = [pod for pod in group if not pods.is_pod_terminal(pod)] if dead else group
        alive = tuple(pod for pod in rest if not pod["metadata"].get("deletionTimestamp"))
        return cls(alive, dead, len(rest) - len(alive), sum(map(pods.is_pod_ready, alive)))


_NO_PODS = _DeploymentPods()


@dataclass(frozen=True)
class Snapshot:
    """One resource and what belongs to it, read one after the other: parts may be a moment older than others."""

    resource: SpeculativeDeployment
    children: tuple[KubernetesObject, ...] = ()
    """Objects with the resource's label, of all kinds that Aerie makes."""
    name_conflicts: tuple[KubernetesObject, ...] = ()
    """Objects without the label that bear a name which Aerie wants for a child."""
    pods: tuple[KubernetesObject, ...] = ()
    """The engines' pods."""
    preflight_pods: tuple[KubernetesObject, ...] = ()
    node_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels that tell the hardware of nodes, by name, as far as they are known (hardware.py)."""
    job_creation_errors: Mapping[str, str] = field(default_factory=dict)
    """Why a Job under way has no pod, in the words of the cluster, by name of the Job."""
    last_log_lines: Mapping[str, str] = field(default_factory=dict)
    """Last lines that a crashed engine wrote, by name of the pod."""
    metrics_by_deployment: Mapping[str, ArmMetrics] = field(default_factory=dict)
    """What engines achieve, by name of their Deployment, as far as their metrics have been read."""
    blocks: tuple[ClosedBlock, ...] = ()
    """Closed blocks of the analysis under way; some may have been seen before."""
    equivalence_result: EquivalenceResult | None = None
    """What the engines' greedy answers show, once all have been asked for; it may have been seen before."""
    context_lengths: ContextLengths | None = None
    """How long a request the engines of each arm take; None where that is not known."""
    invalid_metrics: Mapping[str, str] = field(default_factory=dict)
    """Why the metrics page of a pod could not be believed the last few times, by name of the pod."""
    metrics_source_error: str | None = ""
    """What keeps spec.metrics.source from being of use; empty when nothing does, None while that is not known."""
    baseline_calibration: BaselineCalibration | None = None
    """What the operator holds of the stable pods; None where it has counted none, and may have to read what is written."""
    recommendation: Recommendation | None = None
    """What the tuner advises; None where it has said nothing since the operator began."""
    unlisted_kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds that cannot be listed, none of them crucial, each with a sentence on it: nothing is known of such children."""
    is_listing_forbidden: bool = False
    """Whether listing them is refused, rather than failing."""
    crd_problem: str = ""
    """What is amiss with the CustomResourceDefinition; empty where nothing is."""
    start_permission: StartPermission = field(default_factory=StartPermission)
    """What may begin, as far as the operator limits that."""
    tuning_record: TuningRecord | None = None
    """What the tuner knows and would have written down; None where it has decided nothing."""
    spec_substitution: SpecSubstitution | None = None
    """What in the resource stands in for fields of its spec that cannot be read; None where all of it is as the spec says."""

    @property
    def unmanaged_kinds(self) -> frozenset[str]:
        """Kinds that are not to be applied: they cannot be listed, or nothing tells how they are to be."""
        return frozenset(self.unlisted_kinds) | (
            self.spec_substitution.unmanaged_kinds if self.spec_substitution is not None else frozenset()
        )

    @property
    def is_rollout_suspended(self) -> bool:
        """Whether the rollout is held, because not enough is known: what serves is repaired and scaled, nothing else."""
        return bool(self.unlisted_kinds) or self.spec_substitution is not None

    def child(self, kind: str, name: str) -> KubernetesObject | None:
        """The child of that kind and name."""
        return self._children_by_name.get((kind, name))

    def children_of_kind(self, kind: str) -> Iterator[KubernetesObject]:
        """The children of that kind."""
        return (one for one in self.children if one["kind"] == kind)

    def deployment(self, revision: str, *, control: bool = False) -> KubernetesObject | None:
        """The Deployment of one group of pods."""
        return self.child("Deployment", naming.deployment_name(self.resource.metadata.name, revision, control=control))

    def exclude_lost_pods(self, now: datetime) -> tuple[Snapshot, datetime | None]:
        """The same without pods whose end is overdue, because their node is lost; and when the next pod will be overdue."""
        ends = [(pod, pods.node_lost_at(pod)) for pod in self.pods]
        left = tuple(pod for pod, end in ends if end is None or now < end)
        coming = min((end for _, end in ends if end is not None and now < end), default=None)
        return (self if len(left) == len(self.pods) else replace(self, pods=left)), coming

    def live_pods(self, revision: str, *, control: bool = False) -> tuple[KubernetesObject, ...]:
        """The live pods of one Deployment that are not on their way out."""
        return self._deployment_pods(revision, control=control).live

    def ready_pod_count(self, revision: str, *, control: bool = False) -> int:
        """How many pods of one Deployment serve."""
        return self._deployment_pods(revision, control=control).ready_count

    def terminal_pods(self, revision: str, *, control: bool = False) -> tuple[KubernetesObject, ...]:
        """The pods of one Deployment that have ended for good; they are replaced, and their objects stay."""
        return self._deployment_pods(revision, control=control).terminal

    def terminating_pod_count(self, revision: str, *, control: bool = False) -> int:
        """How many pods of one Deployment are on their way out."""
        return self._deployment_pods(revision, control=control).terminating_count

    def pod_failure(self, revision: str, *, control: bool = False) -> PodFailure | None:
        """What keeps the pods of one Deployment from serving, or from being made; None when all serve."""
        group = self.live_pods(revision, control=control)
        served = max((str(pod["metadata"].get("creationTimestamp") or "") for pod in group if pods.is_pod_ready(pod)), default="")
        ended = [
            (str(pod["metadata"].get("creationTimestamp") or ""), pod["metadata"]["name"], pod)
            for pod in self.terminal_pods(revision, control=control)
        ]
        # A dead pod that is older than one that serves has been replaced. Of the others the first, so that the sentence stays.
        fresh = [pod for made, _, pod in sorted(ended, key=lambda end: end[:2]) if made > served][:1]
        refusal = pods.read_pod_creation_failure(self.deployment(revision, control=control))
        if refusal is None and all(map(pods.is_pod_ready, group)) and group:
            return None
        return pods.most_severe_failure([*group, *fresh], self.last_log_lines, refusal)

    def _deployment_pods(self, revision: str, *, control: bool) -> _DeploymentPods:
        return self._pods_by_deployment.get((revision, "true" if control else "false"), _NO_PODS)

    @cached_property
    def _pods_by_deployment(self) -> Mapping[tuple[str | None, str | None], _DeploymentPods]:
        """The pods by revision and by whether they are control pods, in one walk: a decision asks for them some twenty times."""
        found: dict[tuple[str | None, str | None], list[KubernetesObject]] = {}
        for pod in self.pods:
            told = read_labels(pod)
            if told.get(naming.NAME_LABEL) == self.resource.metadata.name:
                found.setdefault((told.get(naming.REVISION_LABEL), told.get(naming.CONTROL_LABEL)), []).append(pod)
        return {key: _DeploymentPods.from_pods(group) for key, group in found.items()}

    @cached_property
    def _children_by_name(self) -> Mapping[tuple[str, str], KubernetesObject]:
        return {(one["kind"], one["metadata"]["name"]): one for one in reversed(self.children)}

    def arm_metrics(self, revision: str, *, control: bool = False) -> ArmMetrics | None:
        """What the pods of one Deployment achieve together."""
        return self.metrics_by_deployment.get(naming.deployment_name(self.resource.metadata.name, revision, control=control))


def read_labels(item: KubernetesObject) -> Mapping[str, str]:
    """The object's labels."""
    found: Mapping[str, str] = item["metadata"].get("labels") or {}
    return found


def is_owned_by(item: KubernetesObject, uid: str | None) -> bool:
    """Whether the object is controlled by the owner with this uid."""
    references = item["metadata"].get("ownerReferences") or []
    return any(reference.get("controller") and reference.get("uid") == uid for reference in references)
