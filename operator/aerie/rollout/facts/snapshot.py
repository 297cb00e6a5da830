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

from aerie.analysis.baseline import Memory
from aerie.analysis.equivalence import Answers
from aerie.analysis.measurement.blocks import Block
from aerie.api import SpeculativeDeployment
from aerie.manifests import naming
from aerie.manifests.tuning_config_map import Kept
from aerie.rollout.facts import pod_failures as pods
from aerie.rollout.facts.arm_metrics import Figures
from aerie.rollout.facts.concurrency import Turn
from aerie.rollout.facts.context_length import ContextLengths
from aerie.rollout.facts.last_valid_spec import Substitute
from aerie.rollout.facts.pod_failures import Trouble
from aerie.tuning.recommendation import Advice

Object = Mapping[str, Any]


@dataclass(frozen=True)
class _Group:
    """The pods of one Deployment."""

    alive: tuple[Object, ...] = ()
    dead: tuple[Object, ...] = ()
    leaving: int = 0
    serving: int = 0

    @classmethod
    def of(cls, group: Sequence[Object]) -> _Group:
        dead = tuple(filter(pods.dead, group))
        rest = [pod for pod in group if not pods.dead(pod)] if dead else group
        alive = tuple(pod for pod in rest if not pod["metadata"].get("deletionTimestamp"))
        return cls(alive, dead, len(rest) - len(alive), sum(map(pods.ready, alive)))


_NOBODY = _Group()


@dataclass(frozen=True)
class Observed:
    """One resource and what belongs to it, read one after the other: parts may be a moment older than others."""

    resource: SpeculativeDeployment
    children: tuple[Object, ...] = ()
    """Objects with the resource's label, of all kinds that Aerie makes."""
    namesakes: tuple[Object, ...] = ()
    """Objects without the label that bear a name which Aerie wants for a child."""
    pods: tuple[Object, ...] = ()
    """The engines' pods."""
    preflight_pods: tuple[Object, ...] = ()
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels that tell the hardware of nodes, by name, as far as they are known (hardware.py)."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Why a Job under way has no pod, in the words of the cluster, by name of the Job."""
    last_lines: Mapping[str, str] = field(default_factory=dict)
    """Last lines that a crashed engine wrote, by name of the pod."""
    figures: Mapping[str, Figures] = field(default_factory=dict)
    """What engines achieve, by name of their Deployment, as far as their metrics have been read."""
    blocks: tuple[Block, ...] = ()
    """Closed blocks of the analysis under way; some may have been seen before."""
    answers: Answers | None = None
    """What the engines' greedy answers show, once all have been asked for; it may have been seen before."""
    contexts: ContextLengths | None = None
    """How long a request the engines of each arm take; None where that is not known."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Why the metrics page of a pod could not be believed the last few times, by name of the pod."""
    source_trouble: str | None = ""
    """What keeps spec.metrics.source from being of use; empty when nothing does, None while that is not known."""
    memory: Memory | None = None
    """What the operator holds of the stable pods; None where it has counted none, and may have to read what is written."""
    advice: Advice | None = None
    """What the tuner advises; None where it has said nothing since the operator began."""
    unlisted: Mapping[str, str] = field(default_factory=dict)
    """Kinds that cannot be listed, none of them crucial, each with a sentence on it: nothing is known of such children."""
    forbidden: bool = False
    """Whether listing them is refused, rather than failing."""
    outdated: str = ""
    """What is amiss with the CustomResourceDefinition; empty where nothing is."""
    turn: Turn = field(default_factory=Turn)
    """What may begin, as far as the operator limits that."""
    kept: Kept | None = None
    """What the tuner knows and would have written down; None where it has decided nothing."""
    substitute: Substitute | None = None
    """What in the resource stands in for fields of its spec that cannot be read; None where all of it is as the spec says."""

    @property
    def unknown(self) -> frozenset[str]:
        """Kinds that are not to be applied: they cannot be listed, or nothing tells how they are to be."""
        return frozenset(self.unlisted) | (self.substitute.kinds if self.substitute is not None else frozenset())

    @property
    def rests(self) -> bool:
        """Whether the rollout is held, because not enough is known: what serves is repaired and scaled, nothing else."""
        return bool(self.unlisted) or self.substitute is not None

    def child(self, kind: str, name: str) -> Object | None:
        """The child of that kind and name."""
        return self._children.get((kind, name))

    def of(self, kind: str) -> Iterator[Object]:
        """The children of that kind."""
        return (one for one in self.children if one["kind"] == kind)

    def deployment(self, revision: str, *, control: bool = False) -> Object | None:
        """The Deployment of one group of pods."""
        return self.child("Deployment", naming.deployment(self.resource.metadata.name, revision, control=control))

    def alive(self, now: datetime) -> tuple[Observed, datetime | None]:
        """The same without pods whose end is overdue, because their node is lost; and when the next pod will be overdue."""
        ends = [(pod, pods.hangs_at(pod)) for pod in self.pods]
        left = tuple(pod for pod, end in ends if end is None or now < end)
        coming = min((end for _, end in ends if end is not None and now < end), default=None)
        return (self if len(left) == len(self.pods) else replace(self, pods=left)), coming

    def group(self, revision: str, *, control: bool = False) -> tuple[Object, ...]:
        """The live pods of one Deployment that are not on their way out."""
        return self._group(revision, control=control).alive

    def serving(self, revision: str, *, control: bool = False) -> int:
        """How many pods of one Deployment serve."""
        return self._group(revision, control=control).serving

    def dead(self, revision: str, *, control: bool = False) -> tuple[Object, ...]:
        """The pods of one Deployment that have ended for good; they are replaced, and their objects stay."""
        return self._group(revision, control=control).dead

    def leaving(self, revision: str, *, control: bool = False) -> int:
        """How many pods of one Deployment are on their way out."""
        return self._group(revision, control=control).leaving

    def trouble(self, revision: str, *, control: bool = False) -> Trouble | None:
        """What keeps the pods of one Deployment from serving, or from being made; None when all serve."""
        group = self.group(revision, control=control)
        served = max((str(pod["metadata"].get("creationTimestamp") or "") for pod in group if pods.ready(pod)), default="")
        ended = [
            (str(pod["metadata"].get("creationTimestamp") or ""), pod["metadata"]["name"], pod)
            for pod in self.dead(revision, control=control)
        ]
        # A dead pod that is older than one that serves has been replaced. Of the others the first, so that the sentence stays.
        fresh = [pod for made, _, pod in sorted(ended, key=lambda end: end[:2]) if made > served][:1]
        refusal = pods.refusal_of(self.deployment(revision, control=control))
        if refusal is None and all(map(pods.ready, group)) and group:
            return None
        return pods.worst([*group, *fresh], self.last_lines, refusal)

    def _group(self, revision: str, *, control: bool) -> _Group:
        return self._groups.get((revision, "true" if control else "false"), _NOBODY)

    @cached_property
    def _groups(self) -> Mapping[tuple[str | None, str | None], _Group]:
        """The pods by revision and by whether they are control pods, in one walk: a decision asks for them some twenty times."""
        found: dict[tuple[str | None, str | None], list[Object]] = {}
        for pod in self.pods:
            told = labels(pod)
            if told.get(naming.NAME) == self.resource.metadata.name:
                found.setdefault((told.get(naming.REVISION), told.get(naming.CONTROL)), []).append(pod)
        return {key: _Group.of(group) for key, group in found.items()}

    @cached_property
    def _children(self) -> Mapping[tuple[str, str], Object]:
        return {(one["kind"], one["metadata"]["name"]): one for one in reversed(self.children)}

    def figures_of(self, revision: str, *, control: bool = False) -> Figures | None:
        """What the pods of one Deployment achieve together."""
        return self.figures.get(naming.deployment(self.resource.metadata.name, revision, control=control))


def labels(item: Object) -> Mapping[str, str]:
    """The object's labels."""
    found: Mapping[str, str] = item["metadata"].get("labels") or {}
    return found


def owned(item: Object, uid: str | None) -> bool:
    """Whether the object is controlled by the owner with this uid."""
    references = item["metadata"].get("ownerReferences") or []
    return any(reference.get("controller") and reference.get("uid") == uid for reference in references)
