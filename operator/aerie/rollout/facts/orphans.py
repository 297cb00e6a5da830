"""Orphans: children of a deleted resource that still exist when a resource of the same name has been created.

The garbage collector deletes them within seconds. Until then they bear the names and the labels of the new resource's
children. They must neither be reported as somebody else's nor be taken for the new resource's. Old pods would promote a
revision whose own pods have yet to start, and a finished Job would vouch for files that nobody has inspected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.api import SpeculativeDeployment
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot, is_owned_by

ORPHAN_REQUEUE_DELAY = timedelta(seconds=5)
"""Requeue delay while there are orphans: their deletion is an event only for kinds that are watched."""


@dataclass(frozen=True)
class Orphans:
    """Kind and name of each orphan."""

    keys: frozenset[tuple[str, str]] = frozenset()

    def __contains__(self, item: KubernetesObject) -> bool:
        return (item["kind"], item["metadata"]["name"]) in self.keys


def exclude_orphans(snapshot: Snapshot) -> tuple[Snapshot, Orphans]:
    """Return the snapshot without orphans, and the orphans. Objects of other owners stay in the snapshot."""
    resource = snapshot.resource
    orphaned_children = [child for child in snapshot.cluster.children if _is_orphan(child, resource)]
    created_at = resource.metadata.creation_timestamp
    pods = tuple(pod for pod in snapshot.cluster.pods if not _predates(pod, created_at))
    if not orphaned_children and len(pods) == len(snapshot.cluster.pods):
        return snapshot, Orphans()
    orphans = Orphans(frozenset((child["kind"], child["metadata"]["name"]) for child in orphaned_children))
    children = tuple(child for child in snapshot.cluster.children if child not in orphans)
    return replace(snapshot, cluster=replace(snapshot.cluster, children=children, pods=pods)), orphans


def _is_orphan(child: KubernetesObject, resource: SpeculativeDeployment) -> bool:
    if is_owned_by(child, resource.metadata.uid):
        return False
    return any(
        reference.get("controller")
        and (reference.get("kind"), reference.get("name")) == (resource.kind, resource.metadata.name)
        and str(reference.get("apiVersion")).partition("/")[0] == resource.api_version.partition("/")[0]
        for reference in child["metadata"].get("ownerReferences") or []
    )


def _predates(pod: KubernetesObject, resource_created_at: datetime | None) -> bool:
    """Return whether the pod is older than the resource, by the server's times: pods of a Deployment do not name the resource."""
    pod_created_at = pod["metadata"].get("creationTimestamp")
    return (
        resource_created_at is not None
        and pod_created_at is not None
        and datetime.fromisoformat(pod_created_at) < resource_created_at
    )
