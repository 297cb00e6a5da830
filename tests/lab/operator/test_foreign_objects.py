"""Objects of somebody else that bear a name which Aerie would give: left alone from apply to delete, and named in a condition."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from aerie.api import SpeculativeDeployment
from aerie.rollout.revision.desired import resolve_desired_revision
from aerie_lab.testing import Namespace, wait_until

Object = dict[str, Any]
SELECTOR = {"app": "theirs"}
POD: Object = {
    "metadata": {"labels": SELECTOR},
    "spec": {"containers": [{"name": "theirs", "image": "example.com/theirs"}]},
}
GATEWAY = {
    "mode": "Gateway",
    "gateway": {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": ["a.example"]},
}
THEIRS: dict[str, Object] = {
    "Service": {"apiVersion": "v1", "spec": {"selector": SELECTOR, "ports": [{"port": 9999}]}},
    "HTTPRoute": {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "spec": {"hostnames": ["theirs.example"], "rules": [{"backendRefs": [{"name": "theirs", "port": 9999}]}]},
    },
    "PodDisruptionBudget": {"apiVersion": "policy/v1", "spec": {"minAvailable": 1, "selector": {"matchLabels": SELECTOR}}},
    "ConfigMap": {"apiVersion": "v1", "data": {"theirs": "yes"}},
    "Deployment": {"apiVersion": "apps/v1", "spec": {"replicas": 0, "selector": {"matchLabels": SELECTOR}, "template": POD}},
    "Job": {
        "apiVersion": "batch/v1",
        "spec": {"suspend": True, "template": {"spec": {**POD["spec"], "restartPolicy": "Never"}}},
    },
}
FIRST = (
    ("Service", "{name}"),
    ("Service", "{name}-stable"),
    ("HTTPRoute", "{name}"),
    ("PodDisruptionBudget", "{name}-{revision}"),
    ("ConfigMap", "{name}-{revision}-preflight"),
    ("Job", "{name}-{revision}-preflight"),
    ("Deployment", "{name}-{revision}"),
)
"""What a first revision is made of."""
SECOND = (
    ("Service", "{name}-canary"),
    ("Service", "{name}-control"),
    ("PodDisruptionBudget", "{name}-{revision}"),
    ("ConfigMap", "{name}-{revision}-preflight"),
    ("Job", "{name}-{revision}-preflight"),
    ("Deployment", "{name}-{revision}"),
    ("Deployment", "{name}-{before}-control"),
)
"""What a canary adds."""
UNNEEDED = (("PodDisruptionBudget", "{name}"),)
"""What Aerie does not make, and somebody with a resource of that name may well have."""


def of(document: Object) -> str:
    return resolve_desired_revision(SpeculativeDeployment.from_dict(document)).revision


def theirs(kind: str, name: str) -> Object:
    return {**copy.deepcopy(THEIRS[kind]), "kind": kind, "metadata": {"name": name, "labels": {"team": "other"}}}


def content(item: Object) -> Object:
    """All of it that whoever made it would call theirs: without status and what follows from it."""
    metadata = {
        key: item["metadata"].get(key) for key in ("name", "uid", "labels", "ownerReferences", "deletionTimestamp", "generation")
    }
    managers = sorted({entry["manager"] for entry in item["metadata"].get("managedFields") or []} & {"aerie"})
    return {"metadata": metadata, "managers": managers, **{key: item[key] for key in ("spec", "data") if key in item}}


def degraded(document: Object) -> tuple[str, str]:
    conditions = (document.get("status") or {}).get("conditions") or []
    return next(((each["reason"], each["message"]) for each in conditions if each["type"] == "Degraded"), ("", ""))


@pytest.mark.usefixtures("operator")
@pytest.mark.timeout(900)
def test_nothing_of_somebody_else_is_taken_over_whatever_its_kind(namespace: Namespace, light: Callable[..., Object]) -> None:
    rollout = {"canary": {"stepWeights": [], "scaleDownDelay": "0s"}, "traffic": GATEWAY}
    made: dict[tuple[str, str], Object] = {}
    named: dict[str, tuple[str, str]] = {}

    def put(kind: str, name: str) -> None:
        namespace.apply(theirs(kind, name))
        made[kind, name] = content(namespace.get(kind, name))

    def says_so(resource: str) -> bool:
        kind, name = named[resource]
        reason, message = degraded(namespace.get("specdep", resource))
        return reason == "NameTaken" and f"{kind} {name} belongs to another owner" in message

    # What is there before the resource is.
    for number, (kind, pattern) in enumerate((*FIRST, *UNNEEDED)):
        name = f"first-{number}"
        document = light("eagle3", name=name, replicas=1, rollout=rollout)
        place = pattern.format(name=name, revision=of(document))
        put(kind, place)
        namespace.apply(document)
        if (kind, pattern) not in UNNEEDED:
            named[name] = (kind, place)
    for name in named:
        wait_until(lambda name=name: says_so(name), f"{name} says that {named[name]} is not its own", timeout_seconds=240)  # type: ignore[misc]

    # What comes to be before a canary does.
    second = {f"second-{number}": place for number, place in enumerate(SECOND)}
    for name in second:
        namespace.apply(light("eagle3", name=name, replicas=1, rollout=rollout))
    for name in second:
        wait_until(
            lambda name=name: (namespace.get("specdep", name).get("status") or {}).get("phase") == "Ready",  # type: ignore[misc]
            f"{name} is ready",
            timeout_seconds=240,
        )
    for name, (kind, pattern) in second.items():
        old, new = (light(drafter, name=name, replicas=1, rollout=rollout) for drafter in ("eagle3", "eagle31"))
        place = pattern.format(name=name, revision=of(new), before=of(old))
        put(kind, place)
        named[name] = (kind, place)
        namespace.apply(new)
    for name in second:
        wait_until(lambda name=name: says_so(name), f"{name} says that {named[name]} is not its own", timeout_seconds=240)  # type: ignore[misc]
        if named[name][0] == "Service":
            backends = namespace.get("httproute", name)["spec"]["rules"][0]["backendRefs"]
            assert named[name][1] not in {backend["name"] for backend in backends if backend.get("weight")}, (
                "no request goes there"
            )

    for (kind, name), before in made.items():
        assert content(namespace.get(kind, name)) == before, f"{kind} {name} is as it was"
    for name in (*named, f"first-{len(FIRST)}"):
        namespace.kubectl("delete", "specdep", name)
    wait_until(
        lambda: not namespace.list_all("deployments", "aerie.dev/name"), "all that was Aerie's is gone", timeout_seconds=120
    )
    for (kind, name), before in made.items():
        assert content(namespace.get(kind, name)) == before, f"{kind} {name} is there still"
