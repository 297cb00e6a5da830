"""Acceptance of the route by the gateway: the weights of a rejected route do not determine where requests go.

Guarantee: a route counts as rejected only where a gateway has rejected it in the route's own status. A route without any
gateway status may have been created a moment ago, or may name a Gateway that does not exist or has no controller. After a
timeout that is reported, and nothing else follows, because there may be gateways that write no status.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.types import duration
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot

ROUTE_STATUS_TIMEOUT = timedelta(minutes=2)
"""Time for a gateway to report whether it accepts a route; controllers need seconds."""
_PARENT_KEY_FIELDS = ("name", "namespace", "sectionName", "port")


def route_rejection_message(snapshot: Snapshot) -> str:
    """Return why no gateway of mode Gateway accepts the route, as a sentence; empty where one does, or none has status yet."""
    resource = snapshot.resource
    gateway = resource.spec.rollout.traffic.gateway
    route = snapshot.cluster.child("HTTPRoute", resource.metadata.name)
    if gateway is None or route is None:
        return ""
    conditions_by_parent = read_accepted_conditions(snapshot.resource, route)
    if not conditions_by_parent or any(condition["status"] != "False" for _, condition in conditions_by_parent):
        return ""
    parent_key, rejection = conditions_by_parent[0]
    section = f", listener {parent_key[2]}" if parent_key[2] else ""
    cause = ": ".join(part for part in (rejection.get("reason"), rejection.get("message")) if part).rstrip(".")
    return f"Gateway {parent_key[1]}/{parent_key[0]}{section} does not accept HTTPRoute {resource.metadata.name} ({cause})."


def is_route_status_current(snapshot: Snapshot, *, unknown: bool) -> bool:
    """Return whether the gateway status is of the present spec of the route; `unknown` where it does not say."""
    route = snapshot.cluster.child("HTTPRoute", snapshot.resource.metadata.name)
    conditions = read_accepted_conditions(snapshot.resource, route) if route is not None else []
    observed = {condition.get("observedGeneration") for _, condition in conditions} - {None}
    return route["metadata"].get("generation") in observed if route is not None and observed else unknown


def route_rejected_since(snapshot: Snapshot) -> datetime | None:
    """Return since when no gateway accepts the route; None where one does, or none has status yet."""
    route = snapshot.cluster.child("HTTPRoute", snapshot.resource.metadata.name)
    if route is None or not route_rejection_message(snapshot):
        return None
    times = [condition.get("lastTransitionTime") for _, condition in read_accepted_conditions(snapshot.resource, route)]
    resource_created_at = snapshot.resource.metadata.creation_timestamp or datetime.fromtimestamp(0, tz=UTC)
    return max((datetime.fromisoformat(time) for time in times if time), default=resource_created_at)


def check_route_status_timeout(snapshot: Snapshot, now: datetime) -> tuple[str, timedelta | None]:
    """Return the message that the gateway status is overdue, or an empty message and the time until it would be."""
    resource = snapshot.resource
    gateway = resource.spec.rollout.traffic.gateway
    route = snapshot.cluster.child("HTTPRoute", resource.metadata.name)
    route_created_at = route["metadata"].get("creationTimestamp") if route is not None else None
    if gateway is None or route is None or route_created_at is None or read_accepted_conditions(snapshot.resource, route):
        return "", None
    remaining = datetime.fromisoformat(route_created_at) + ROUTE_STATUS_TIMEOUT - now
    if remaining > timedelta(0):
        return "", remaining
    parent_keys = [_parent_key(parent.to_dict(), resource.metadata.namespace) for parent in gateway.parent_refs]
    gateway_names = " and ".join(dict.fromkeys(f"Gateway {parent_key[1]}/{parent_key[0]}" for parent_key in parent_keys))
    return (
        f"No gateway has reported within {duration.format_duration(ROUTE_STATUS_TIMEOUT)} whether it accepts HTTPRoute "
        f"{resource.metadata.name}, so requests may not reach the pods. Check that {gateway_names} "
        "(spec.rollout.traffic.gateway.parentRefs) exists and has a controller."
    ), None


def read_accepted_conditions(resource: SpeculativeDeployment, route: KubernetesObject) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the parent key and the condition Accepted of each parent in the route's status that the spec names."""
    gateway = resource.spec.rollout.traffic.gateway
    spec_parent_keys = [
        _parent_key(parent.to_dict(), resource.metadata.namespace) for parent in (gateway.parent_refs if gateway else [])
    ]
    conditions_by_parent = []
    for parent in (route.get("status") or {}).get("parents") or []:
        parent_key = _parent_key(parent.get("parentRef") or {}, resource.metadata.namespace)
        accepted = next((condition for condition in parent.get("conditions") or [] if condition["type"] == "Accepted"), None)
        if accepted is not None and parent_key in spec_parent_keys:
            conditions_by_parent.append((parent_key, accepted))
    return conditions_by_parent


def _parent_key(parent: Mapping[str, Any], namespace: str | None) -> tuple[Any, ...]:
    """Return the fields that distinguish one parent of a route from another."""
    return tuple(parent.get(key) or (namespace if key == "namespace" else None) for key in _PARENT_KEY_FIELDS)
