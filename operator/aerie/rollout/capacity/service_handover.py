"""Service first, requests afterwards: in mode Gateway no arm gets requests before its Service leads to its pods.

Between a change of a Service and what the gateway's proxies know lie the EndpointSlice controller, the gateway's own controller
and a push to the proxies; a change of the route takes another way, and may be there first. An arm whose Service was made or given
another selector a moment ago is then one without pods, whose share the gateway answers with 503. So:

    promoted          NAME-stable ─► promoted pods          the route leads to NAME-canary, which is the same pods
                      10 s later                            all to NAME-stable; then NAME-canary goes (settling.py)
    taken back        NAME-canary is made, promoted pods    all to NAME-stable, which leads to the promoted pods still
                      10 s later                            all to NAME-canary, the same pods
                      NAME-stable ─► pods of before         as it is
                      10 s later                            the shares of the way back
    Rechecking        NAME-previous is made                 all to NAME-stable
                      10 s later                            shares by pods

None of these is a state of the rollout. Each look compares what is there with what is wanted, and takes the next step: a Service
may be given requests `ENDPOINTS` after Aerie last changed it; one that has requests is not led to fewer pods while another one
may soon take them; and while an arm that is to have requests may not have them yet, the route stays as it is, as long as all
that it sends to serves.

Guarantees: pure. An arm of which nobody serves gets no requests as long as another one may have them. Requests never wait where
an arm could serve them: where the route of now leads to an arm of which nobody serves, they go at once to the arms that may have
them: as wanted, or as now, or to one that is to have none, be it about to go; and without such an arm as wanted. No wait is
without an end, as long as the API server takes the Services and nobody keeps changing them. A route that is not there yet waits
for nothing, nor does anything where the spec asks for no pods. Where somebody else's Service bears an arm's name, all is as if
this module were not there (decide.py applies no route then). While Services cannot be listed, the route keeps its shares; while
HTTPRoutes cannot, any Service may have requests.

Not guaranteed: that the endpoints are there after `ENDPOINTS`: it is a limit of time, and the endpoints are not looked at. Nor is
that time exact: it is counted from a time of the API server, with which the leader's clock agrees to within five seconds
(controller/clock.py). A Service is dated by Aerie's own last change, of whatever field; where nothing dates it, or a time that is
to come by more than `AHEAD`, it counts as one that has been there for long. The status shows the shares that are wanted, which
the route has some seconds later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from aerie.manifests import naming, network
from aerie.manifests.apply_diff import drifted, stamped
from aerie.rollout.capacity import drain_order
from aerie.rollout.capacity.traffic_weights import ALL
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import Object, Observed, labels, owned

ENDPOINTS = timedelta(seconds=10)
"""From a change of a Service until the gateway's proxies know its endpoints."""
AHEAD = timedelta(seconds=30)
"""By so much the API server's clock may be ahead; a time that lies further ahead dates nothing."""
_NO_TIME = timedelta(0)
Made = list[dict[str, Any]]


@dataclass(frozen=True)
class _Arm:
    """The Service of one arm."""

    name: str
    wanted: Mapping[str, Any] | None
    """As it would be applied; None: it is to go."""
    live: Object | None
    serve: int
    """Pods that serve behind it as it is."""
    would: int
    """Pods that would serve behind it as it is wanted."""
    weight: int
    """What the route gives it now."""
    left: timedelta
    """Until it may be given requests."""

    @property
    def turns(self) -> bool:
        """Whether its selector is to become another one."""
        return self.wanted is not None and self.live is not None and _selector(self.live) != _selector(self.wanted)

    @property
    def open(self) -> bool:
        """Whether it may be given requests."""
        return self.wanted is not None and not self.left


def ordered(observed: Observed, made: Made, now: datetime) -> tuple[Made, timedelta | None]:
    """Of what is to be there (`made`), as much as may be there now: with selectors and shares that have to wait as they are. And
    the time until the next step; None where nothing has to wait."""
    resource = observed.resource
    route = next((item for item in made if item["kind"] == "HTTPRoute"), None)
    unknown = "HTTPRoute" in observed.unlisted
    if resource.spec.rollout.traffic.gateway is None or not made or (route is None and not unknown) or _foreign(observed, made):
        return made, None
    if resource.spec.replicas == 0:  # no Service is to lead to pods, so none can wait for the pods that it is to lead to
        return made, None
    live = observed.child("HTTPRoute", resource.metadata.name)
    now_sent = _shares(live) if live is not None else {}
    if "Service" in observed.unlisted:
        return _with(made, {}, now_sent or None), None
    wanted = _shares(route) if route is not None else {}
    arms = {arm.name: arm for arm in _arms(observed, made, now_sent, now, unknown=unknown)}
    settles = drain_order.unsettled(observed, live, now) if live is not None else None
    stay = _stay(list(arms.values()), moving=settles is not None)
    shares = _now(arms, wanted, now_sent, stay)
    waits = [arm.left for arm in arms.values() if arm.left and (arm.weight or wanted.get(arm.name))]
    if stay and settles is not None:
        waits.append(settles)
    return _with(made, {arm.name: _selector(arm.live) for arm in stay if arm.live is not None}, shares), min(waits, default=None)


# --------------------------------------------------------------------------------------------------------------------- decisions
def _stay(arms: Sequence[_Arm], *, moving: bool) -> list[_Arm]:
    """The arms whose Services keep their selectors for now: those that would lead to fewer pods, while requests come to them that
    could go to more elsewhere, or that would be lost, or may still come, because a gateway has not seen yet that they are not
    to."""
    found = []
    for arm in arms:
        if not arm.turns or arm.would >= arm.serve:
            continue  # more pods behind it than before: the sooner the better
        most = max((other.would for other in arms if other.wanted is not None and other is not arm), default=0)
        if (most > arm.would or not arm.would) if arm.weight else moving:
            found.append(arm)
    return found


def _now(
    arms: Mapping[str, _Arm], wanted: Mapping[str, int], now_sent: Mapping[str, int], stay: Sequence[_Arm]
) -> Mapping[str, int]:
    """What the route is to give each Service until the next look."""
    ready = [name in arms and arms[name].open and arms[name].serve > 0 for name, weight in wanted.items() if weight]
    if all(ready) or not any(arm.serve for arm in arms.values()):
        return wanted
    if any(arm.weight for arm in stay):
        target = max((arm for arm in arms.values() if arm.wanted is not None), key=lambda arm: arm.would)
        if target.open and target.would:
            return _all_to(target, wanted)
    served = {name: weight for name, weight in now_sent.items() if weight and name in arms and arms[name].serve}
    if served and len(served) == sum(map(bool, now_sent.values())):
        return now_sent
    able = {name: weight if name in arms and arms[name].open and arms[name].serve else 0 for name, weight in wanted.items()}
    if any(able.values()):
        return able
    spares = [arm for arm in arms.values() if arm.live is not None and not arm.left and arm.serve]
    spare = max(spares, key=lambda arm: (arm.wanted is not None, arm.serve), default=None)
    return served or (_all_to(spare, [*wanted, spare.name]) if spare is not None else wanted)


def _all_to(arm: _Arm, names_of: Iterable[str]) -> Mapping[str, int]:
    return {name: ALL if name == arm.name else 0 for name in names_of}


# ------------------------------------------------------------------------------------------------------------------ what is there
def _arms(observed: Observed, made: Made, now_sent: Mapping[str, int], now: datetime, *, unknown: bool) -> list[_Arm]:
    """The Services of all arms that are there or wanted. `unknown`: nothing is known of the route."""
    resource = observed.resource
    found = []
    for name in (f"{resource.metadata.name}-{arm}" for arm in network.ARMS):
        wanted = next((item for item in made if (item["kind"], item["metadata"]["name"]) == ("Service", name)), None)
        live = observed.child("Service", name)
        if wanted is None and live is None:
            continue
        serve = _serving(observed, _selector(live)) if live is not None else 0
        would = _serving(observed, _selector(wanted)) if wanted is not None else 0
        left = _young(live, now)
        if wanted is not None and drifted(live, wanted):
            left = ENDPOINTS
        found.append(_Arm(name, wanted, live, serve, would, ALL if unknown else now_sent.get(name, 0), left))
    return found


def _foreign(observed: Observed, made: Made) -> bool:
    """Whether somebody else has the route, or the Service of an arm."""
    uid = observed.resource.metadata.uid
    mine = {(item["kind"], item["metadata"]["name"]) for item in made if item["kind"] in ("Service", "HTTPRoute")}
    mine.discard(("Service", observed.resource.metadata.name))  # no arm's
    there = (*observed.children, *observed.namesakes)
    return any((one["kind"], one["metadata"]["name"]) in mine and not owned(one, uid) for one in there)


def _young(live: Object | None, now: datetime) -> timedelta:
    changed = drain_order.changed(live) if live is not None else None
    if changed is None or changed > now + AHEAD:
        return _NO_TIME
    return min(ENDPOINTS, max(_NO_TIME, changed + ENDPOINTS - now))


def _serving(observed: Observed, selector: Mapping[str, str]) -> int:
    """Pods that serve and that the selector means."""
    found = (pod for pod in observed.pods if selector.items() <= labels(pod).items())
    return sum(pod_failures.ready(pod) and not pod_failures.dead(pod) for pod in found)


def _selector(service: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = service["spec"].get("selector") or {naming.NAME: ""}  # none selects nothing, and not everything
    return found


def _shares(route: Mapping[str, Any]) -> dict[str, int]:
    """What the route gives each Service."""
    backends = [backend for rule in route["spec"].get("rules") or [] for backend in rule.get("backendRefs") or []]
    return {backend["name"]: backend.get("weight", 1) for backend in backends}


def _with(made: Made, selectors: Mapping[str, Mapping[str, str]], shares: Mapping[str, int] | None) -> Made:
    """`made` with these selectors and, where there are any, these shares."""
    found = []
    for item in made:
        name = item["metadata"]["name"]
        if item["kind"] == "Service" and name in selectors:
            item = stamped({**item, "spec": {**item["spec"], "selector": dict(selectors[name])}})
        elif item["kind"] == "HTTPRoute" and shares is not None and shares != _shares(item):
            rule = {**item["spec"]["rules"][0], "backendRefs": network.backends(shares)}
            item = stamped({**item, "spec": {**item["spec"], "rules": [rule]}})
        found.append(item)
    return found
