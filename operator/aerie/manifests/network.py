"""Services and the HTTPRoute: how requests find the pods of each arm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.manifests import naming

GATEWAY_API = "gateway.networking.k8s.io/v1"
ARMS = ("stable", "control", "canary", "previous")
"""Arms that have a Service in mode Gateway, in the order in which one stands in for another."""


def service(name: str, resource_name: str, selector: Mapping[str, str]) -> dict[str, Any]:
    """A Service on port 80 and, for those who address the engine as in its pod, on the engine's own port."""
    ports = [
        {"name": "http", "port": 80, "targetPort": naming.PORT_NAME},
        {"name": "engine", "port": naming.PORT, "targetPort": naming.PORT_NAME},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": naming.common(resource_name)},
        "spec": {"type": "ClusterIP", "selector": dict(selector), "ports": ports},
    }


def main_service(resource: SpeculativeDeployment, only: str | None = None) -> dict[str, Any]:
    """The Service that bears the resource's name: all pods that serve, of all arms, or only those of one revision."""
    name = resource.metadata.name
    return service(name, name, naming.serving(name, only))


def arm_service(resource: SpeculativeDeployment, arm: str, revision: str) -> dict[str, Any]:
    """The Service of one of the ARMS, which the route gives a weight."""
    name = resource.metadata.name
    return service(f"{name}-{arm}", name, naming.group(name, revision, control=arm == "control"))


def route(resource: SpeculativeDeployment, weights: Mapping[str, int]) -> dict[str, Any]:
    """The HTTPRoute of mode Gateway, with a weight for each arm in `weights`. Raises ValueError in mode Service.

    The request's time limit is switched off: a long answer may stream for minutes, and gateways that have a limit of
    their own (Contour: 15 s) would cut it.
    """
    gateway = resource.spec.rollout.traffic.gateway
    if gateway is None:
        raise ValueError(f"{resource.metadata.name} has no gateway: a route belongs to rollout.traffic.mode Gateway.")
    name = resource.metadata.name
    sent = backends({f"{name}-{arm}": weight for arm, weight in weights.items()})
    parents = [parent.to_dict() for parent in gateway.parent_refs]
    spec: dict[str, Any] = {"parentRefs": parents, "rules": [{"backendRefs": sent, "timeouts": {"request": "0s"}}]}
    if gateway.hostnames:
        spec["hostnames"] = list(gateway.hostnames)
    return {
        "apiVersion": GATEWAY_API,
        "kind": "HTTPRoute",
        "metadata": {"name": name, "labels": naming.common(name)},
        "spec": spec,
    }


def backends(weights: Mapping[str, int]) -> list[dict[str, Any]]:
    """The route's backends, by name of the Service."""
    return [{"name": name, "port": 80, "weight": weight} for name, weight in weights.items()]
