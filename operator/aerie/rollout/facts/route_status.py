"""Whether the gateway takes the route: of one that it refuses, no weight says where requests go.

Guarantee: refused is only what a gateway has refused in the route's own status. A route of which no gateway says anything may be
one that was made a moment ago, or names a Gateway that is not there or that nobody serves: after a while that is told, and no
more, because there may be gateways that write no status.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from aerie.api.types import duration
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot

ROUTE_STATUS_TIMEOUT = timedelta(minutes=2)
"""How long a gateway may take to say whether it takes a route; controllers need seconds."""
_PARENT_KEY_FIELDS = ("name", "namespace", "sectionName", "port")


def route_rejection_message(snapshot: Snapshot) -> str:
    """Why no gateway of mode Gateway takes the route, as a sentence; empty where one does, or none has said anything."""
    resource = snapshot.resource
    gateway = resource.spec.rollout.traffic.gateway
    route = snapshot.child("HTTPRoute", resource.metadata.name)
    if gateway is None or route is None:
        return ""
    found = read_accepted_conditions(snapshot, route)
    if not found or any(accepted["status"] != "False" for _, accepted in found):
        return ""
    place, said = found[0]
    section = f", listener {place[2]}" if place[2] else ""
    words = ": ".join(word for word in (said.get("reason"), said.get("message")) if word).rstrip(".")
    return f"Gateway {place[1]}/{place[0]}{section} does not accept HTTPRoute {resource.metadata.name} ({words})."


def route_rejected_since(snapshot: Snapshot) -> datetime | None:
    """Since when no gateway takes the route; None where one does, or none has said anything."""
    route = snapshot.child("HTTPRoute", snapshot.resource.metadata.name)
    if route is None or not route_rejection_message(snapshot):
        return None
    times = [accepted.get("lastTransitionTime") for _, accepted in read_accepted_conditions(snapshot, route)]
    made = snapshot.resource.metadata.creation_timestamp or datetime.fromtimestamp(0, tz=UTC)
    return max((datetime.fromisoformat(at) for at in times if at), default=made)


def check_route_status_timeout(snapshot: Snapshot, now: datetime) -> tuple[str, timedelta | None]:
    """That no gateway has said anything of the route for too long, as a sentence; else in how long it would be."""
    resource = snapshot.resource
    gateway = resource.spec.rollout.traffic.gateway
    route = snapshot.child("HTTPRoute", resource.metadata.name)
    made = route["metadata"].get("creationTimestamp") if route is not None else None
    if gateway is None or route is None or made is None or read_accepted_conditions(snapshot, route):
        return "", None
    left = datetime.fromisoformat(made) + ROUTE_STATUS_TIMEOUT - now
    if left > timedelta(0):
        return "", left
    places = [_parent_key(parent.to_dict(), resource.metadata.namespace) for parent in gateway.parent_refs]
    named = " and ".join(dict.fromkeys(f"Gateway {place[1]}/{place[0]}" for place in places))
    return (
        f"no gateway has said in {duration.format_duration(ROUTE_STATUS_TIMEOUT)} whether it takes HTTPRoute {resource.metadata.name}, so requests "
        f"may not reach it: see that {named} (spec.rollout.traffic.gateway.parentRefs) is there, and that a controller serves it"
    ), None


def read_accepted_conditions(snapshot: Snapshot, route: KubernetesObject) -> list[tuple[tuple[Any, ...], Any]]:
    """What gateways of the spec have said of the route: which one, and its condition."""
    resource = snapshot.resource
    gateway = resource.spec.rollout.traffic.gateway
    mine = [_parent_key(parent.to_dict(), resource.metadata.namespace) for parent in (gateway.parent_refs if gateway else [])]
    found = []
    for parent in (route.get("status") or {}).get("parents") or []:
        place = _parent_key(parent.get("parentRef") or {}, resource.metadata.namespace)
        accepted = next((one for one in parent.get("conditions") or [] if one["type"] == "Accepted"), None)
        if accepted is not None and place in mine:
            found.append((place, accepted))
    return found


def _parent_key(parent: Mapping[str, Any], namespace: str | None) -> tuple[Any, ...]:
    """What tells one parent of a route from another."""
    return tuple(parent.get(key) or (namespace if key == "namespace" else None) for key in _PARENT_KEY_FIELDS)
