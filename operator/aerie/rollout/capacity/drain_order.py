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
from aerie.manifests.apply_diff import drifted
from aerie.rollout.facts.route_status import spoken
from aerie.rollout.facts.snapshot import Object, Observed, owned
from aerie.rollout.plan import Reference

SETTLES = timedelta(seconds=2)
"""From a change of the route until proxies have it, at the least."""
PATIENCE = timedelta(seconds=30)
"""Longest wait for a gateway to say that it has seen the change."""
_LOOK = timedelta(seconds=1)
_BEHIND = ("Deployment", "Service")


def left(observed: Observed, made: Sequence[Mapping[str, Any]], now: datetime) -> timedelta | None:
    """Time until requests go as the route among `made` says, as far as that is known; None when they do."""
    wanted = next((item for item in made if item["kind"] == "HTTPRoute"), None)
    if wanted is None and made and not observed.rests and any(owned(one, _uid(observed)) for one in observed.of("HTTPRoute")):
        return SETTLES  # mode Gateway has ended: the route goes first
    live = wanted and observed.child("HTTPRoute", wanted["metadata"]["name"])
    if wanted is None or live is None:
        return None
    return SETTLES if drifted(live, wanted) else unsettled(observed, live, now)


def unsettled(observed: Observed, live: Object, now: datetime) -> timedelta | None:
    """Time until requests go as the route that is there says, as far as that is known; None when they do."""
    since = changed(live)
    if since is None or now >= since + PATIENCE:
        return None
    young = since + SETTLES - now
    if young > timedelta(0):
        return min(young, SETTLES)  # the server's clock may be ahead
    if _seen(observed, live):
        return None
    # What a gateway says is an event of the route; this is for what is missed of them, and gets rarer.
    return min(since + PATIENCE - now, max(_LOOK, (now - since) / 2))


def shrinks(observed: Observed, item: Mapping[str, Any]) -> bool:
    """Whether the object is a Deployment that would lose pods."""
    live = observed.child(item["kind"], item["metadata"]["name"])
    return item["kind"] == "Deployment" and live is not None and item["spec"]["replicas"] < (live["spec"].get("replicas") or 0)


def may_go(reference: Reference) -> bool:
    """Whether it may be deleted although the route has not settled."""
    return reference.kind not in _BEHIND


def _uid(observed: Observed) -> str | None:
    return observed.resource.metadata.uid


def changed(live: Object) -> datetime | None:
    """When Aerie last changed the object."""
    mine = [one for one in live["metadata"].get("managedFields") or [] if one.get("manager") == naming.FIELD_MANAGER]
    times = [datetime.fromisoformat(one["time"]) for one in mine if one.get("time")]
    return max(times, default=None)


def _seen(observed: Observed, live: Object) -> bool:
    """Whether what gateways have said of the route is of its latest form; so it is where none has said anything."""
    generation = live["metadata"].get("generation")
    return all(accepted.get("observedGeneration", generation) == generation for _, accepted in spoken(observed, live))
