"""The pods of the stable revision, with what they report of their drafters.

Guarantees: pods are in the order of their names, so every reconcile selects the same ones. A pod that is terminating, or has
ended, is not among them. Not guaranteed: that a report is recent; a pod that does not answer keeps its latest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from aerie.engine.drafter_endpoint.calls import DrafterSource
from aerie.engine.drafter_endpoint.state import DrafterState, PreparedDrafter
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.drafters import DrafterObservation
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot

_NOT_OBSERVED = DrafterObservation()


@dataclass(frozen=True)
class EnginePod:
    """A pod of the stable revision."""

    name: str
    document: KubernetesObject
    observation: DrafterObservation

    @property
    def uid(self) -> str:
        """UID of the pod; a pod that is replaced under its name has another."""
        return str(self.document["metadata"].get("uid") or "")

    @property
    def is_ready(self) -> bool:
        """Whether it is ready."""
        return pod_failures.is_pod_ready(self.document)

    @property
    def placed_at(self) -> datetime | None:
        """Time at which it got its node, or was created where that is unknown; None while it waits for one."""
        return pod_failures.placed_at(self.document)

    @property
    def state(self) -> DrafterState | None:
        """The latest report of its drafter."""
        return self.observation.state

    @property
    def own_digest(self) -> str | None:
        """Digest of the drafter that it returns to; None while that is unknown."""
        return self.state.own.digest if self.state is not None and self.state.own is not None else None

    @property
    def loaded_digest(self) -> str | None:
        """Digest of the drafter in use; None while that is unknown."""
        return self.state.loaded.digest if self.state is not None and self.state.loaded is not None else None

    @property
    def is_isolated(self) -> bool:
        """Whether it reports that users do not reach it."""
        return self.state is not None and self.state.isolation is not None

    def serves_alone(self, digest: str | None) -> bool:
        """Return whether the drafter with this digest, or any for None, is its own, is loaded, and nothing is in progress."""
        state = self.state
        return (
            state is not None
            and self.own_digest is not None
            and self.own_digest == self.loaded_digest
            and digest in (None, self.own_digest)
            and state.lease is None
            and state.change is None
            and state.isolation is None
            and self.observation.call is None
        )

    def read_preparation(self, source: DrafterSource) -> PreparedDrafter | None:
        """Return its preparation of a drafter; None where it has prepared none, or another one."""
        prepared = self.state.prepared if self.state is not None else None
        return prepared if prepared is not None and prepared.source == source else None


def list_engine_pods(snapshot: Snapshot, revision: str) -> tuple[EnginePod, ...]:
    """Return the live pods of a revision, without those of a control."""
    observations = snapshot.engines.drafters
    pods = {str(pod["metadata"]["name"]): pod for pod in snapshot.cluster.live_pods(revision)}
    return tuple(EnginePod(name, pods[name], observations.get(name, _NOT_OBSERVED)) for name in sorted(pods))
