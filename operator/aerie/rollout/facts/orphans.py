"""What is left of a resource that was deleted, when one of the same name has come after it.

The garbage collector takes it within seconds. Until then it bears the names that the new resource wants and the labels that it
looks for, and must neither be told as somebody else's nor be taken for the new one's: pods of before would promote a revision
whose own pods have yet to start, and a finished Job would answer for files that nobody has looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.api import SpeculativeDeployment
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot, is_owned_by

ORPHAN_REQUEUE_DELAY = timedelta(seconds=5)
"""Its end is an event for those kinds only that are watched."""


@dataclass(frozen=True)
class Orphans:
    """Kind and name of each child that is left."""

    keys: frozenset[tuple[str, str]] = frozenset()

    def __contains__(self, item: KubernetesObject) -> bool:
        return (item["kind"], item["metadata"]["name"]) in self.keys


def exclude_orphans(snapshot: Snapshot) -> tuple[Snapshot, Orphans]:
    """What belongs to the resource itself, or to somebody else; and what is left of one before it."""
    resource = snapshot.resource
    old = [child for child in snapshot.children if _is_orphan(child, resource)]
    made = resource.metadata.creation_timestamp
    pods = tuple(pod for pod in snapshot.pods if not _predates(pod, made))
    if not old and len(pods) == len(snapshot.pods):
        return snapshot, Orphans()
    found = Orphans(frozenset((child["kind"], child["metadata"]["name"]) for child in old))
    children = tuple(child for child in snapshot.children if child not in found)
    return replace(snapshot, children=children, pods=pods), found


def _is_orphan(child: KubernetesObject, resource: SpeculativeDeployment) -> bool:
    if is_owned_by(child, resource.metadata.uid):
        return False
    return any(
        reference.get("controller")
        and (reference.get("kind"), reference.get("name")) == (resource.kind, resource.metadata.name)
        and str(reference.get("apiVersion")).partition("/")[0] == resource.api_version.partition("/")[0]
        for reference in child["metadata"].get("ownerReferences") or []
    )


def _predates(pod: KubernetesObject, made: datetime | None) -> bool:
    """Whether the pod is older than the resource, by the server's times: pods of a Deployment do not name the resource."""
    created = pod["metadata"].get("creationTimestamp")
    return made is not None and created is not None and datetime.fromisoformat(created) < made
