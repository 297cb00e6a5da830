"""Foreign objects with names that Aerie would use: never changed or deleted, and named in a condition."""

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
FOREIGN_OBJECTS: dict[str, Object] = {
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
FIRST_REVISION_OBJECTS = (
    ("Service", "{name}"),
    ("Service", "{name}-stable"),
    ("HTTPRoute", "{name}"),
    ("PodDisruptionBudget", "{name}-{revision}"),
    ("ConfigMap", "{name}-{revision}-preflight"),
    ("Job", "{name}-{revision}-preflight"),
    ("Deployment", "{name}-{revision}"),
)
"""Objects of a first revision."""
CANARY_OBJECTS = (
    ("Service", "{name}-canary"),
    ("Service", "{name}-control"),
    ("PodDisruptionBudget", "{name}-{revision}"),
    ("ConfigMap", "{name}-{revision}-preflight"),
    ("Job", "{name}-{revision}-preflight"),
    ("Deployment", "{name}-{revision}"),
    ("Deployment", "{name}-{before}-control"),
)
"""Objects that a canary adds."""
UNUSED_NAMES = (("PodDisruptionBudget", "{name}"),)
"""Objects that Aerie does not create, and that a user may have under the resource's name."""


def revision_of(document: Object) -> str:
    return resolve_desired_revision(SpeculativeDeployment.from_dict(document)).revision


def foreign_object(kind: str, name: str) -> Object:
    return {**copy.deepcopy(FOREIGN_OBJECTS[kind]), "kind": kind, "metadata": {"name": name, "labels": {"team": "other"}}}


def owned_content(item: Object) -> Object:
    """Return the content that its owner has written: without status and what follows from it."""
    metadata = {
        key: item["metadata"].get(key) for key in ("name", "uid", "labels", "ownerReferences", "deletionTimestamp", "generation")
    }
    managers = sorted({entry["manager"] for entry in item["metadata"].get("managedFields") or []} & {"aerie"})
    return {"metadata": metadata, "managers": managers, **{key: item[key] for key in ("spec", "data") if key in item}}


def degraded_condition(document: Object) -> tuple[str, str]:
    conditions = (document.get("status") or {}).get("conditions") or []
    return next(
        ((condition["reason"], condition["message"]) for condition in conditions if condition["type"] == "Degraded"), ("", "")
    )


@pytest.mark.usefixtures("operator")
@pytest.mark.timeout(900)
def test_foreign_objects_are_reported_and_left_alone(namespace: Namespace, processless_resource: Callable[..., Object]) -> None:
    rollout = {"canary": {"stepWeights": [], "scaleDownDelay": "0s"}, "traffic": GATEWAY}
    contents: dict[tuple[str, str], Object] = {}
    conflicts: dict[str, tuple[str, str]] = {}

    def create_foreign(kind: str, name: str) -> None:
        namespace.apply(foreign_object(kind, name))
        contents[kind, name] = owned_content(namespace.get(kind, name))

    def conflict_is_reported(resource: str) -> bool:
        kind, name = conflicts[resource]
        reason, message = degraded_condition(namespace.get("specdep", resource))
        return reason == "NameTaken" and f"{kind} {name} belongs to another owner" in message

    # Objects that exist before the resource.
    for number, (kind, pattern) in enumerate((*FIRST_REVISION_OBJECTS, *UNUSED_NAMES)):
        name = f"first-{number}"
        document = processless_resource("eagle3", name=name, replicas=1, rollout=rollout)
        object_name = pattern.format(name=name, revision=revision_of(document))
        create_foreign(kind, object_name)
        namespace.apply(document)
        if (kind, pattern) not in UNUSED_NAMES:
            conflicts[name] = (kind, object_name)
    for name in conflicts:
        wait_until(
            lambda name=name: conflict_is_reported(name),  # type: ignore[misc]
            f"{name} reports that {conflicts[name]} is not its own",
            timeout_seconds=240,
        )

    # Objects that are created before a canary.
    second = {f"second-{number}": pattern for number, pattern in enumerate(CANARY_OBJECTS)}
    for name in second:
        namespace.apply(processless_resource("eagle3", name=name, replicas=1, rollout=rollout))
    for name in second:
        wait_until(
            lambda name=name: (namespace.get("specdep", name).get("status") or {}).get("phase") == "Ready",  # type: ignore[misc]
            f"{name} is ready",
            timeout_seconds=240,
        )
    for name, (kind, pattern) in second.items():
        old, new = (processless_resource(drafter, name=name, replicas=1, rollout=rollout) for drafter in ("eagle3", "eagle31"))
        object_name = pattern.format(name=name, revision=revision_of(new), before=revision_of(old))
        create_foreign(kind, object_name)
        conflicts[name] = (kind, object_name)
        namespace.apply(new)
    for name in second:
        wait_until(
            lambda name=name: conflict_is_reported(name),  # type: ignore[misc]
            f"{name} reports that {conflicts[name]} is not its own",
            timeout_seconds=240,
        )
        if conflicts[name][0] == "Service":
            backends = namespace.get("httproute", name)["spec"]["rules"][0]["backendRefs"]
            assert conflicts[name][1] not in {backend["name"] for backend in backends if backend.get("weight")}, (
                "no request goes there"
            )

    for (kind, name), before in contents.items():
        assert owned_content(namespace.get(kind, name)) == before, f"{kind} {name} is as it was"
    for name in (*conflicts, f"first-{len(FIRST_REVISION_OBJECTS)}"):
        namespace.kubectl("delete", "specdep", name)
    wait_until(
        lambda: not namespace.list_all("deployments", "aerie.dev/name"), "all objects of Aerie are deleted", timeout_seconds=120
    )
    for (kind, name), before in contents.items():
        assert owned_content(namespace.get(kind, name)) == before, f"{kind} {name} still exists"
