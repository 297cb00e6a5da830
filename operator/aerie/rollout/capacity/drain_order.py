"""Requests first, pods afterwards: nothing that a gateway may still send to is taken away.

Its counterpart is handover.py: what requests are to go to is there first. While a Service that they go to, or are to go to, has
yet to be known to the gateway's proxies, nothing is taken away either.

A weight of 0 is in force when the gateway's proxies have it, which is some time after the API server has it. A pod that goes
before leaves an arm of which nobody serves with a share of the requests, and a gateway answers those with 503. So while a change
of the route is young, or no gateway has seen it, Deployments keep their size, and neither they nor Services are deleted.

Guarantees: what grows is not held up; what is to go goes within `PATIENCE` of the last change, whatever a gateway says. Not
guaranteed: a gateway whose proxies take longer than `SETTLES` although its controller has seen the route; nor that anything goes
while the API server refuses the route, because the one of before is then in force.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from aerie.manifests import naming
from aerie.manifests.apply_diff import needs_apply
from aerie.rollout.facts.route_status import read_accepted_conditions
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot, is_owned_by
from aerie.rollout.plan import ObjectReference

MIN_ROUTE_PROPAGATION = timedelta(seconds=2)
"""From a change of the route until proxies have it, at the least."""
ROUTE_PROPAGATION_TIMEOUT = timedelta(seconds=30)
"""Longest wait for a gateway to say that it has seen the change."""
_MIN_POLL_INTERVAL = timedelta(seconds=1)
_KINDS_BEHIND_ROUTE = ("Deployment", "Service")


def route_propagation_remaining(
    snapshot: Snapshot, desired_objects: Sequence[Mapping[str, Any]], now: datetime
) -> timedelta | None:
    """Time until requests go as the route among `made` says, as far as that is known; None when they do."""
    wanted = next((item for item in desired_objects if item["kind"] == "HTTPRoute"), None)
    if (
        wanted is None
        and desired_objects
        and not snapshot.is_rollout_suspended
        and any(is_owned_by(one, _owner_uid(snapshot)) for one in snapshot.children_of_kind("HTTPRoute"))
    ):
        return MIN_ROUTE_PROPAGATION  # mode Gateway has ended: the route goes first
    live = wanted and snapshot.child("HTTPRoute", wanted["metadata"]["name"])
    if wanted is None or live is None:
        return None
    return MIN_ROUTE_PROPAGATION if needs_apply(live, wanted) else live_route_propagation_remaining(snapshot, live, now)


def live_route_propagation_remaining(snapshot: Snapshot, live: KubernetesObject, now: datetime) -> timedelta | None:
    """Time until requests go as the route that is there says, as far as that is known; None when they do."""
    since = last_applied_at(live)
    if since is None or now >= since + ROUTE_PROPAGATION_TIMEOUT:
        return None
    young = since + MIN_ROUTE_PROPAGATION - now
    if young > timedelta(0):
        return min(young, MIN_ROUTE_PROPAGATION)  # the server's clock may be ahead
    if _is_latest_generation_observed(snapshot, live):
        return None
    # What a gateway says is an event of the route; this is for what is missed of them, and gets rarer.
    return min(since + ROUTE_PROPAGATION_TIMEOUT - now, max(_MIN_POLL_INTERVAL, (now - since) / 2))


def scales_down(snapshot: Snapshot, item: Mapping[str, Any]) -> bool:
    """Whether the object is a Deployment that would lose pods."""
    live = snapshot.child(item["kind"], item["metadata"]["name"])
    return item["kind"] == "Deployment" and live is not None and item["spec"]["replicas"] < (live["spec"].get("replicas") or 0)


def is_safe_to_delete(reference: ObjectReference) -> bool:
    """Whether it may be deleted although the route has not settled."""
    return reference.kind not in _KINDS_BEHIND_ROUTE


def _owner_uid(observed: Snapshot) -> str | None:
    return observed.resource.metadata.uid


def last_applied_at(live: KubernetesObject) -> datetime | None:
    """When Aerie last changed the object."""
    mine = [one for one in live["metadata"].get("managedFields") or [] if one.get("manager") == naming.FIELD_MANAGER]
    times = [datetime.fromisoformat(one["time"]) for one in mine if one.get("time")]
    return max(times, default=None)


def _is_latest_generation_observed(observed: Snapshot, live: KubernetesObject) -> bool:
    """Whether what gateways have said of the route is of its latest form; so it is where none has said anything."""
    generation = live["metadata"].get("generation")
    return all(
        accepted.get("observedGeneration", generation) == generation for _, accepted in read_accepted_conditions(observed, live)
    )
