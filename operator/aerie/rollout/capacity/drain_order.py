"""Drain ordering, traffic before pods: nothing is removed to which a gateway may still send requests.

The counterpart is capacity/service_handover.py: a backend is ready before requests go to it. Nothing is removed either while a
Service that receives requests, or will receive them, is not yet known to the gateway's proxies.

A weight of 0 is effective once the gateway's proxies have it, some time after the API server has it. A pod that is deleted
before leaves an arm without a ready pod but with a share of the requests, and a gateway answers those with 503. So while a
change of the route is recent, or no gateway has observed it, Deployments keep their size, and neither they nor Services are
deleted.

Guarantees: scaling up is never delayed; a removal happens within `ROUTE_PROPAGATION_TIMEOUT` of the last change, whatever a
gateway reports. Not guaranteed: a gateway whose proxies take longer than `MIN_ROUTE_PROPAGATION` although its controller has
observed the route; nor that anything is removed while the API server rejects the route, because the previous one is then
active.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.manifests import naming
from aerie.manifests.apply_diff import needs_apply
from aerie.rollout.facts.route_status import read_accepted_conditions
from aerie.rollout.facts.snapshot import ClusterState, KubernetesObject, Snapshot, is_owned_by
from aerie.rollout.plan import ObjectReference

MIN_ROUTE_PROPAGATION = timedelta(seconds=2)
"""Minimum time from a change of the route until proxies have it."""
ROUTE_PROPAGATION_TIMEOUT = timedelta(seconds=30)
"""Maximum wait for a gateway to report that it has observed the change."""
_MIN_POLL_INTERVAL = timedelta(seconds=1)
_KINDS_BEHIND_ROUTE = ("Deployment", "Service")


def route_propagation_remaining(
    snapshot: Snapshot, desired_objects: Sequence[Mapping[str, Any]], now: datetime
) -> timedelta | None:
    """Return the time until requests follow the route in `desired_objects`, as far as that is known; None when they do."""
    desired = next((item for item in desired_objects if item["kind"] == "HTTPRoute"), None)
    if (
        desired is None
        and desired_objects
        and not snapshot.is_rollout_suspended
        and any(is_owned_by(route, _owner_uid(snapshot.resource)) for route in snapshot.cluster.children_of_kind("HTTPRoute"))
    ):
        return MIN_ROUTE_PROPAGATION  # mode Gateway has ended: the route is deleted first
    live = desired and snapshot.cluster.child("HTTPRoute", desired["metadata"]["name"])
    if desired is None or live is None:
        return None
    return MIN_ROUTE_PROPAGATION if needs_apply(live, desired) else live_route_propagation_remaining(snapshot.resource, live, now)


def live_route_propagation_remaining(resource: SpeculativeDeployment, live: KubernetesObject, now: datetime) -> timedelta | None:
    """Return the time until requests follow the live route, as far as that is known; None when they do."""
    applied_at = last_applied_at(live)
    if applied_at is None or now >= applied_at + ROUTE_PROPAGATION_TIMEOUT:
        return None
    minimum_remaining = applied_at + MIN_ROUTE_PROPAGATION - now
    if minimum_remaining > timedelta(0):
        return min(minimum_remaining, MIN_ROUTE_PROPAGATION)  # the server's clock may be ahead
    if _is_latest_generation_observed(resource, live):
        return None
    # A gateway status is an event of the route. This poll is for missed events, and its interval grows.
    return min(applied_at + ROUTE_PROPAGATION_TIMEOUT - now, max(_MIN_POLL_INTERVAL, (now - applied_at) / 2))


def scales_down(cluster: ClusterState, item: Mapping[str, Any]) -> bool:
    """Return whether the object is a Deployment that would lose pods."""
    live = cluster.child(item["kind"], item["metadata"]["name"])
    return item["kind"] == "Deployment" and live is not None and item["spec"]["replicas"] < (live["spec"].get("replicas") or 0)


def is_safe_to_delete(reference: ObjectReference) -> bool:
    """Return whether the object may be deleted although the route has not propagated."""
    return reference.kind not in _KINDS_BEHIND_ROUTE


def _owner_uid(resource: SpeculativeDeployment) -> str | None:
    return resource.metadata.uid


def last_applied_at(live: KubernetesObject) -> datetime | None:
    """Return when Aerie last changed the object."""
    own_entries = [entry for entry in live["metadata"].get("managedFields") or [] if entry.get("manager") == naming.FIELD_MANAGER]
    times = [datetime.fromisoformat(entry["time"]) for entry in own_entries if entry.get("time")]
    return max(times, default=None)


def _is_latest_generation_observed(resource: SpeculativeDeployment, live: KubernetesObject) -> bool:
    """Return whether the gateways' status is of the route's latest generation; true where there is no status."""
    generation = live["metadata"].get("generation")
    return all(
        condition.get("observedGeneration", generation) == generation for _, condition in read_accepted_conditions(resource, live)
    )
