"""Services and the HTTPRoute: how requests reach the pods of each arm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.manifests import naming

GATEWAY_API_VERSION = "gateway.networking.k8s.io/v1"
GATEWAY_ARMS = ("stable", "control", "canary", "previous")
"""Arms that have a Service in mode Gateway, in the order in which one replaces another."""


def build_service(service_name: str, resource_name: str, selector: Mapping[str, str]) -> dict[str, Any]:
    """Return a Service on port 80 and, for clients that use the port of the pod, on the engine's own port."""
    ports = [
        {"name": "http", "port": 80, "targetPort": naming.ENGINE_PORT_NAME},
        {"name": "engine", "port": naming.ENGINE_PORT, "targetPort": naming.ENGINE_PORT_NAME},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": service_name, "labels": naming.common_labels(resource_name)},
        "spec": {"type": "ClusterIP", "selector": dict(selector), "ports": ports},
    }


def build_main_service(resource: SpeculativeDeployment, selector: Mapping[str, str]) -> dict[str, Any]:
    """Return the Service with the resource's name, for the pods with these labels."""
    return build_service(resource.metadata.name, resource.metadata.name, selector)


def build_arm_service(resource: SpeculativeDeployment, arm: str, revision: str) -> dict[str, Any]:
    """Return the Service of one of the GATEWAY_ARMS, to which the route gives a weight."""
    name = resource.metadata.name
    return build_service(f"{name}-{arm}", name, naming.deployment_selector_labels(name, revision, control=arm == "control"))


def build_http_route(
    resource: SpeculativeDeployment, weights: Mapping[str, int], copy_service: str | None = None
) -> dict[str, Any]:
    """Return the HTTPRoute of mode Gateway, with a weight for each arm in `weights`. Raises ValueError in mode Service.

    `copy_service`: the Service that gets a copy of each request; None for none. There is one at most, because a gateway may
    reject a route with several.

    The request timeout is switched off: a long answer may stream for minutes. Gateways that have a timeout of their own
    (Contour: 15 s) would cut it.
    """
    gateway = resource.spec.rollout.traffic.gateway
    if gateway is None:
        raise ValueError(f"{resource.metadata.name} has no gateway: only rollout.traffic.mode Gateway has a route.")
    name = resource.metadata.name
    backend_refs = build_backend_refs({f"{name}-{arm}": weight for arm, weight in weights.items()})
    parent_refs = [parent.to_dict() for parent in gateway.parent_refs]
    rule: dict[str, Any] = {"backendRefs": backend_refs, "timeouts": {"request": "0s"}}
    if copy_service is not None:
        backend = {"name": copy_service, "port": 80}
        rule["filters"] = [{"type": "RequestMirror", "requestMirror": {"backendRef": backend}}]
    spec: dict[str, Any] = {"parentRefs": parent_refs, "rules": [rule]}
    if gateway.hostnames:
        spec["hostnames"] = list(gateway.hostnames)
    return {
        "apiVersion": GATEWAY_API_VERSION,
        "kind": "HTTPRoute",
        "metadata": {"name": name, "labels": naming.common_labels(name)},
        "spec": spec,
    }


def build_backend_refs(weights: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the route's backends; `weights` is keyed by the name of the Service."""
    return [{"name": name, "port": 80, "weight": weight} for name, weight in weights.items()]
