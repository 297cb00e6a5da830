"""Whether the gateway takes the route: of one that it refuses, no weight says where requests go.

Guarantee: refused is only what a gateway has refused in the route's own status. Not told: a parentRef to a Gateway that nobody
serves; its route has no status at all, and neither has one that was made a moment ago.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aerie.rollout.observed import Observed

_PARENT = ("name", "namespace", "sectionName", "port")


def refusal(observed: Observed) -> str:
    """Why no gateway of mode Gateway takes the route, as a sentence; empty where one does, or none has said anything."""
    resource = observed.resource
    gateway = resource.spec.rollout.traffic.gateway
    route = observed.child("HTTPRoute", resource.metadata.name)
    if gateway is None or route is None:
        return ""
    mine = [_place(parent.to_dict(), resource.metadata.namespace) for parent in gateway.parent_refs]
    found = []
    for parent in (route.get("status") or {}).get("parents") or []:
        place = _place(parent.get("parentRef") or {}, resource.metadata.namespace)
        accepted = next((one for one in parent.get("conditions") or [] if one["type"] == "Accepted"), None)
        if accepted is not None and place in mine:
            found.append((place, accepted))
    if not found or any(accepted["status"] != "False" for _, accepted in found):
        return ""
    place, said = found[0]
    section = f", listener {place[2]}" if place[2] else ""
    words = ": ".join(word for word in (said.get("reason"), said.get("message")) if word).rstrip(".")
    return f"Gateway {place[1]}/{place[0]}{section} does not accept HTTPRoute {resource.metadata.name} ({words})."


def _place(parent: Mapping[str, Any], namespace: str | None) -> tuple[Any, ...]:
    """What tells one parent of a route from another."""
    return tuple(parent.get(key) or (namespace if key == "namespace" else None) for key in _PARENT)
