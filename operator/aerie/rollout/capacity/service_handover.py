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
from aerie.manifests.apply_diff import needs_apply, with_digest
from aerie.rollout.capacity import drain_order
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot, is_owned_by, read_labels

ENDPOINT_PROPAGATION_DELAY = timedelta(seconds=10)
"""From a change of a Service until the gateway's proxies know its endpoints."""
MAX_SERVER_CLOCK_LEAD = timedelta(seconds=30)
"""By so much the API server's clock may be ahead; a time that lies further ahead dates nothing."""
_ZERO = timedelta(0)
DesiredObjects = list[dict[str, Any]]


@dataclass(frozen=True)
class _ArmService:
    """The Service of one arm."""

    name: str
    desired: Mapping[str, Any] | None
    """As it would be applied; None: it is to go."""
    live: KubernetesObject | None
    ready_now: int
    """Pods that serve behind it as it is."""
    ready_after_change: int
    """Pods that would serve behind it as it is wanted."""
    current_weight: int
    """What the route gives it now."""
    propagation_remaining: timedelta
    """Until it may be given requests."""

    @property
    def changes_selector(self) -> bool:
        """Whether its selector is to become another one."""
        return self.desired is not None and self.live is not None and _selector(self.live) != _selector(self.desired)

    @property
    def is_routable(self) -> bool:
        """Whether it may be given requests."""
        return self.desired is not None and not self.propagation_remaining


def order_service_changes(
    snapshot: Snapshot, desired_objects: DesiredObjects, now: datetime
) -> tuple[DesiredObjects, timedelta | None]:
    """Of what is to be there (`made`), as much as may be there now: with selectors and shares that have to wait as they are. And
    the time until the next step; None where nothing has to wait."""
    resource = snapshot.resource
    route = next((item for item in desired_objects if item["kind"] == "HTTPRoute"), None)
    unknown = "HTTPRoute" in snapshot.unlisted_kinds
    if (
        resource.spec.rollout.traffic.gateway is None
        or not desired_objects
        or (route is None and not unknown)
        or _has_foreign_objects(snapshot, desired_objects)
    ):
        return desired_objects, None
    if resource.spec.replicas == 0:  # no Service is to lead to pods, so none can wait for the pods that it is to lead to
        return desired_objects, None
    live = snapshot.child("HTTPRoute", resource.metadata.name)
    now_sent = _read_route_weights(live) if live is not None else {}
    if "Service" in snapshot.unlisted_kinds:
        return _with_selectors_and_weights(desired_objects, {}, now_sent or None), None
    wanted = _read_route_weights(route) if route is not None else {}
    arms = {arm.name: arm for arm in _read_arm_services(snapshot, desired_objects, now_sent, now, unknown=unknown)}
    settles = drain_order.live_route_propagation_remaining(snapshot, live, now) if live is not None else None
    stay = _services_keeping_selectors(list(arms.values()), moving=settles is not None)
    shares = _select_weights(arms, wanted, now_sent, stay)
    waits = [
        arm.propagation_remaining
        for arm in arms.values()
        if arm.propagation_remaining and (arm.current_weight or wanted.get(arm.name))
    ]
    if stay and settles is not None:
        waits.append(settles)
    return _with_selectors_and_weights(
        desired_objects, {arm.name: _selector(arm.live) for arm in stay if arm.live is not None}, shares
    ), min(waits, default=None)


# --------------------------------------------------------------------------------------------------------------------- decisions
def _services_keeping_selectors(arms: Sequence[_ArmService], *, moving: bool) -> list[_ArmService]:
    """The arms whose Services keep their selectors for now: those that would lead to fewer pods, while requests come to them that
    could go to more elsewhere, or that would be lost, or may still come, because a gateway has not seen yet that they are not
    to."""
    found = []
    for arm in arms:
        if not arm.changes_selector or arm.ready_after_change >= arm.ready_now:
            continue  # more pods behind it than before: the sooner the better
        most = max((other.ready_after_change for other in arms if other.desired is not None and other is not arm), default=0)
        if (most > arm.ready_after_change or not arm.ready_after_change) if arm.current_weight else moving:
            found.append(arm)
    return found


def _select_weights(
    arms: Mapping[str, _ArmService], wanted: Mapping[str, int], now_sent: Mapping[str, int], stay: Sequence[_ArmService]
) -> Mapping[str, int]:
    """What the route is to give each Service until the next look."""
    ready = [name in arms and arms[name].is_routable and arms[name].ready_now > 0 for name, weight in wanted.items() if weight]
    if all(ready) or not any(arm.ready_now for arm in arms.values()):
        return wanted
    if any(arm.current_weight for arm in stay):
        target = max((arm for arm in arms.values() if arm.desired is not None), key=lambda arm: arm.ready_after_change)
        if target.is_routable and target.ready_after_change:
            return _all_traffic_to(target, wanted)
    served = {name: weight for name, weight in now_sent.items() if weight and name in arms and arms[name].ready_now}
    if served and len(served) == sum(map(bool, now_sent.values())):
        return now_sent
    able = {
        name: weight if name in arms and arms[name].is_routable and arms[name].ready_now else 0 for name, weight in wanted.items()
    }
    if any(able.values()):
        return able
    spares = [arm for arm in arms.values() if arm.live is not None and not arm.propagation_remaining and arm.ready_now]
    spare = max(spares, key=lambda arm: (arm.desired is not None, arm.ready_now), default=None)
    return served or (_all_traffic_to(spare, [*wanted, spare.name]) if spare is not None else wanted)


def _all_traffic_to(arm: _ArmService, names_of: Iterable[str]) -> Mapping[str, int]:
    return {name: TOTAL_WEIGHT if name == arm.name else 0 for name in names_of}


# ------------------------------------------------------------------------------------------------------------------ what is there
def _read_arm_services(
    observed: Snapshot, made: DesiredObjects, now_sent: Mapping[str, int], now: datetime, *, unknown: bool
) -> list[_ArmService]:
    """The Services of all arms that are there or wanted. `unknown`: nothing is known of the route."""
    resource = observed.resource
    found = []
    for name in (f"{resource.metadata.name}-{arm}" for arm in network.GATEWAY_ARMS):
        wanted = next((item for item in made if (item["kind"], item["metadata"]["name"]) == ("Service", name)), None)
        live = observed.child("Service", name)
        if wanted is None and live is None:
            continue
        serve = _count_ready_pods(observed, _selector(live)) if live is not None else 0
        would = _count_ready_pods(observed, _selector(wanted)) if wanted is not None else 0
        left = _endpoint_propagation_remaining(live, now)
        if wanted is not None and needs_apply(live, wanted):
            left = ENDPOINT_PROPAGATION_DELAY
        found.append(_ArmService(name, wanted, live, serve, would, TOTAL_WEIGHT if unknown else now_sent.get(name, 0), left))
    return found


def _has_foreign_objects(observed: Snapshot, made: DesiredObjects) -> bool:
    """Whether somebody else has the route, or the Service of an arm."""
    uid = observed.resource.metadata.uid
    mine = {(item["kind"], item["metadata"]["name"]) for item in made if item["kind"] in ("Service", "HTTPRoute")}
    mine.discard(("Service", observed.resource.metadata.name))  # no arm's
    there = (*observed.children, *observed.name_conflicts)
    return any((one["kind"], one["metadata"]["name"]) in mine and not is_owned_by(one, uid) for one in there)


def _endpoint_propagation_remaining(live: KubernetesObject | None, now: datetime) -> timedelta:
    changed = drain_order.last_applied_at(live) if live is not None else None
    if changed is None or changed > now + MAX_SERVER_CLOCK_LEAD:
        return _ZERO
    return min(ENDPOINT_PROPAGATION_DELAY, max(_ZERO, changed + ENDPOINT_PROPAGATION_DELAY - now))


def _count_ready_pods(observed: Snapshot, selector: Mapping[str, str]) -> int:
    """Pods that serve and that the selector means."""
    found = (pod for pod in observed.pods if selector.items() <= read_labels(pod).items())
    return sum(pod_failures.is_pod_ready(pod) and not pod_failures.is_pod_terminal(pod) for pod in found)


def _selector(service: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = service["spec"].get("selector") or {
        naming.NAME_LABEL: ""
    }  # none selects nothing, and not everything
    return found


def _read_route_weights(route: Mapping[str, Any]) -> dict[str, int]:
    """What the route gives each Service."""
    backends = [backend for rule in route["spec"].get("rules") or [] for backend in rule.get("backendRefs") or []]
    return {backend["name"]: backend.get("weight", 1) for backend in backends}


def _with_selectors_and_weights(
    made: DesiredObjects, selectors: Mapping[str, Mapping[str, str]], shares: Mapping[str, int] | None
) -> DesiredObjects:
    """`made` with these selectors and, where there are any, these shares."""
    found = []
    for item in made:
        name = item["metadata"]["name"]
        if item["kind"] == "Service" and name in selectors:
            item = with_digest({**item, "spec": {**item["spec"], "selector": dict(selectors[name])}})
        elif item["kind"] == "HTTPRoute" and shares is not None and shares != _read_route_weights(item):
            rule = {**item["spec"]["rules"][0], "backendRefs": network.build_backend_refs(shares)}
            item = with_digest({**item, "spec": {**item["spec"], "rules": [rule]}})
        found.append(item)
    return found
