"""Service handover, Service before requests: in mode Gateway no arm gets requests before its Service selects its pods.

Between a change of a Service and the gateway's proxies lie the EndpointSlice controller, the gateway's own controller and a
push to the proxies. A change of the route takes another path, and may be there first. An arm whose Service was created or got
another selector a moment ago is then one without pods, whose share the gateway answers with 503. So:

    promoted          NAME-stable ─► promoted pods          the route leads to NAME-canary, which is the same pods
                      10 s later                            all to NAME-stable; then NAME-canary is deleted (drain_order.py)
    reverted          NAME-canary is created, promoted pods all to NAME-stable, which still leads to the promoted pods
                      10 s later                            all to NAME-canary, the same pods
                      NAME-stable ─► previous pods          unchanged
                      10 s later                            the weights of the rollback
    Verifying         NAME-previous is created              all to NAME-stable
                      10 s later                            weights by pods

None of these is a state of the rollout. Each reconcile compares the live objects with the desired ones, and takes the next
step. A Service may get requests `ENDPOINT_PROPAGATION_DELAY` after Aerie last changed it. One that gets requests is not led to
fewer pods while another one may soon take them. While an arm that is to get requests may not have them yet, the route stays,
as long as all its backends have ready pods.

Guarantees: pure. An arm without a ready pod gets no requests as long as another one may have them. Requests never wait where
an arm could serve them: where the live route leads to an arm without a ready pod, they move immediately to the arms that may
have them. Those are the ones with a desired weight, or with a current one, or one that is to have none, even if it is about to
be deleted; without such an arm, the desired weights apply. Every wait ends, as long as the API server accepts the Services and
nobody keeps changing them. A route that does not exist yet waits for nothing; neither does anything where spec.replicas is 0.
Where somebody else's Service bears an arm's name, this module changes nothing (rollout/reconcile.py applies no route then).
While Services cannot be listed, the route keeps its weights; while HTTPRoutes cannot, any Service may be getting requests.

Not guaranteed: that the endpoints are known after `ENDPOINT_PROPAGATION_DELAY`: it is a time limit, and the endpoints are not
inspected. That time is not exact either: it is counted from a time of the API server, with which the leader's clock agrees to
within five seconds (controller/clock.py). A Service is dated by Aerie's own last change, of whatever field. Where nothing
dates it, or a time more than `MAX_SERVER_CLOCK_LEAD` in the future, it counts as an old one. The status shows the desired
weights, which the route has some seconds later.
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
"""Time from a change of a Service until the gateway's proxies know its endpoints."""
MAX_SERVER_CLOCK_LEAD = timedelta(seconds=30)
"""Maximum time that the API server's clock may be ahead; a time further in the future dates nothing."""
_ZERO = timedelta(0)
DesiredObjects = list[dict[str, Any]]


@dataclass(frozen=True)
class _ArmService:
    """Service of one arm."""

    name: str
    desired: Mapping[str, Any] | None
    """The Service as it would be applied; None: it is to be deleted."""
    live: KubernetesObject | None
    ready_now: int
    """Ready pods behind the live Service."""
    ready_after_change: int
    """Ready pods behind the desired Service."""
    current_weight: int
    """Its weight in the live route."""
    propagation_remaining: timedelta
    """Time until it may get requests."""

    @property
    def changes_selector(self) -> bool:
        """Whether its selector is to change."""
        return self.desired is not None and self.live is not None and _selector(self.live) != _selector(self.desired)

    @property
    def is_routable(self) -> bool:
        """Whether it may get requests."""
        return self.desired is not None and not self.propagation_remaining


def order_service_changes(
    snapshot: Snapshot, desired_objects: DesiredObjects, now: datetime
) -> tuple[DesiredObjects, timedelta | None]:
    """Return as much of the desired objects as may exist now, and the time until the next step; None where nothing has to
    wait.

    Selectors and weights that have to wait stay as they are.
    """
    resource = snapshot.resource
    route = next((item for item in desired_objects if item["kind"] == "HTTPRoute"), None)
    is_route_unknown = "HTTPRoute" in snapshot.cluster.unlisted_kinds
    if (
        resource.spec.rollout.traffic.gateway is None
        or not desired_objects
        or (route is None and not is_route_unknown)
        or _has_foreign_objects(snapshot, desired_objects)
    ):
        return desired_objects, None
    if resource.spec.replicas == 0:  # no Service is to select pods, so none can wait for its pods
        return desired_objects, None
    live = snapshot.cluster.child("HTTPRoute", resource.metadata.name)
    current_weights = _read_route_weights(live) if live is not None else {}
    if "Service" in snapshot.cluster.unlisted_kinds:
        return _with_selectors_and_weights(desired_objects, {}, current_weights or None), None
    desired_weights = _read_route_weights(route) if route is not None else {}
    arms = {
        arm.name: arm
        for arm in _read_arm_services(snapshot, desired_objects, current_weights, now, is_route_unknown=is_route_unknown)
    }
    route_remaining = drain_order.live_route_propagation_remaining(snapshot.resource, live, now) if live is not None else None
    unchanged = _services_keeping_selectors(list(arms.values()), is_route_propagating=route_remaining is not None)
    weights = _select_weights(arms, desired_weights, current_weights, unchanged)
    delays = [
        arm.propagation_remaining
        for arm in arms.values()
        if arm.propagation_remaining and (arm.current_weight or desired_weights.get(arm.name))
    ]
    if unchanged and route_remaining is not None:
        delays.append(route_remaining)
    return _with_selectors_and_weights(
        desired_objects, {arm.name: _selector(arm.live) for arm in unchanged if arm.live is not None}, weights
    ), min(delays, default=None)


# --------------------------------------------------------------------------------------------------------------------- decisions
def _services_keeping_selectors(arms: Sequence[_ArmService], *, is_route_propagating: bool) -> list[_ArmService]:
    """Return the arms whose Services keep their selectors for now: those that would lead to fewer pods under a further
    condition.

    Either they get requests that could go to more pods elsewhere, or that would be lost. Or requests may still arrive, because
    a gateway has not observed yet that they get none.
    """
    services = []
    for arm in arms:
        if not arm.changes_selector or arm.ready_after_change >= arm.ready_now:
            continue  # as many pods behind it as before, or more: change it immediately
        max_ready_elsewhere = max(
            (other.ready_after_change for other in arms if other.desired is not None and other is not arm), default=0
        )
        if (
            (max_ready_elsewhere > arm.ready_after_change or not arm.ready_after_change)
            if arm.current_weight
            else is_route_propagating
        ):
            services.append(arm)
    return services


def _select_weights(
    arms: Mapping[str, _ArmService],
    desired_weights: Mapping[str, int],
    current_weights: Mapping[str, int],
    unchanged: Sequence[_ArmService],
) -> Mapping[str, int]:
    """Return the weights of the route until the next reconcile."""
    is_ready = [
        name in arms and arms[name].is_routable and arms[name].ready_now > 0 for name, weight in desired_weights.items() if weight
    ]
    if all(is_ready) or not any(arm.ready_now for arm in arms.values()):
        return desired_weights
    if any(arm.current_weight for arm in unchanged):
        target = max((arm for arm in arms.values() if arm.desired is not None), key=lambda arm: arm.ready_after_change)
        if target.is_routable and target.ready_after_change:
            return _all_traffic_to(target, desired_weights)
    ready_weights = {name: weight for name, weight in current_weights.items() if weight and name in arms and arms[name].ready_now}
    if ready_weights and len(ready_weights) == sum(map(bool, current_weights.values())):
        return current_weights
    routable_weights = {
        name: weight if name in arms and arms[name].is_routable and arms[name].ready_now else 0
        for name, weight in desired_weights.items()
    }
    if any(routable_weights.values()):
        return routable_weights
    candidates = [arm for arm in arms.values() if arm.live is not None and not arm.propagation_remaining and arm.ready_now]
    fallback = max(candidates, key=lambda arm: (arm.desired is not None, arm.ready_now), default=None)
    return ready_weights or (
        _all_traffic_to(fallback, [*desired_weights, fallback.name]) if fallback is not None else desired_weights
    )


def _all_traffic_to(arm: _ArmService, service_names: Iterable[str]) -> Mapping[str, int]:
    return {name: TOTAL_WEIGHT if name == arm.name else 0 for name in service_names}


# ------------------------------------------------------------------------------------------------------------------ live objects
def _read_arm_services(
    snapshot: Snapshot,
    desired_objects: DesiredObjects,
    current_weights: Mapping[str, int],
    now: datetime,
    *,
    is_route_unknown: bool,
) -> list[_ArmService]:
    """Return the Services of all arms that exist or are desired. `is_route_unknown`: HTTPRoutes cannot be listed."""
    resource = snapshot.resource
    services = []
    for name in (f"{resource.metadata.name}-{arm}" for arm in network.GATEWAY_ARMS):
        desired = next((item for item in desired_objects if (item["kind"], item["metadata"]["name"]) == ("Service", name)), None)
        live = snapshot.cluster.child("Service", name)
        if desired is None and live is None:
            continue
        ready_now = _count_ready_pods(snapshot, _selector(live)) if live is not None else 0
        ready_after_change = _count_ready_pods(snapshot, _selector(desired)) if desired is not None else 0
        propagation_remaining = _endpoint_propagation_remaining(live, now)
        if desired is not None and needs_apply(live, desired):
            propagation_remaining = ENDPOINT_PROPAGATION_DELAY
        services.append(
            _ArmService(
                name,
                desired,
                live,
                ready_now,
                ready_after_change,
                TOTAL_WEIGHT if is_route_unknown else current_weights.get(name, 0),
                propagation_remaining,
            )
        )
    return services


def _has_foreign_objects(snapshot: Snapshot, desired_objects: DesiredObjects) -> bool:
    """Return whether somebody else owns the route, or the Service of an arm."""
    uid = snapshot.resource.metadata.uid
    desired_names = {
        (item["kind"], item["metadata"]["name"]) for item in desired_objects if item["kind"] in ("Service", "HTTPRoute")
    }
    desired_names.discard(("Service", snapshot.resource.metadata.name))  # belongs to no arm
    existing_objects = (*snapshot.cluster.children, *snapshot.cluster.name_conflicts)
    return any(
        (existing_object["kind"], existing_object["metadata"]["name"]) in desired_names and not is_owned_by(existing_object, uid)
        for existing_object in existing_objects
    )


def _endpoint_propagation_remaining(live: KubernetesObject | None, now: datetime) -> timedelta:
    applied_at = drain_order.last_applied_at(live) if live is not None else None
    if applied_at is None or applied_at > now + MAX_SERVER_CLOCK_LEAD:
        return _ZERO
    return min(ENDPOINT_PROPAGATION_DELAY, max(_ZERO, applied_at + ENDPOINT_PROPAGATION_DELAY - now))


def _count_ready_pods(snapshot: Snapshot, selector: Mapping[str, str]) -> int:
    """Return the number of ready pods that the selector selects."""
    pods = (pod for pod in snapshot.cluster.pods if selector.items() <= read_labels(pod).items())
    return sum(pod_failures.is_pod_ready(pod) and not pod_failures.is_pod_terminal(pod) for pod in pods)


def _selector(service: Mapping[str, Any]) -> Mapping[str, str]:
    # Without a selector it selects nothing, and not everything.
    selector: Mapping[str, str] = service["spec"].get("selector") or {naming.NAME_LABEL: ""}
    return selector


def _read_route_weights(route: Mapping[str, Any]) -> dict[str, int]:
    """Return the weight of each Service in the route."""
    backends = [backend for rule in route["spec"].get("rules") or [] for backend in rule.get("backendRefs") or []]
    return {backend["name"]: backend.get("weight", 1) for backend in backends}


def _with_selectors_and_weights(
    desired_objects: DesiredObjects, selectors: Mapping[str, Mapping[str, str]], weights: Mapping[str, int] | None
) -> DesiredObjects:
    """Return the desired objects with these selectors and, where given, these weights."""
    result = []
    for item in desired_objects:
        name = item["metadata"]["name"]
        if item["kind"] == "Service" and name in selectors:
            item = with_digest({**item, "spec": {**item["spec"], "selector": dict(selectors[name])}})
        elif item["kind"] == "HTTPRoute" and weights is not None and weights != _read_route_weights(item):
            rule = {**item["spec"]["rules"][0], "backendRefs": network.build_backend_refs(weights)}
            item = with_digest({**item, "spec": {**item["spec"], "rules": [rule]}})
        result.append(item)
    return result
