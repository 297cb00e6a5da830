"""Inputs of a container's environment from the API server: the objects that it names, the Services, and labels of its namespace.

Guarantees: everything but the Services is read again for each start. Not guaranteed: that a named object exists; without it,
`lookup` returns None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aerie_lab.errors import KubeError
from aerie_lab.kube.client import KubeObject, core_path
from aerie_lab.node.environment import build_service_variables
from aerie_lab.node.pod.context import AgentContext
from aerie_lab.node.support import HUB_LABEL


async def read_environment_inputs(
    container: KubeObject, pod: KubeObject, context: AgentContext, addresses: Mapping[str, str], allocatable: Mapping[str, str]
) -> dict[str, Any]:
    """Return the inputs of `build_environment` from the API server, fetched again for each start."""
    namespace, spec = pod["metadata"]["namespace"], pod["spec"]
    objects: dict[tuple[str, str], KubeObject] = {}
    for plural, name in _environment_references(container):
        try:
            objects[plural, name] = await context.client.get(core_path(plural, namespace, name))
        except KubeError as error:
            if error.status != 404:
                raise
    around = await context.client.get(core_path("namespaces", name=namespace))
    links = spec.get("enableServiceLinks", True)
    return {
        "hub": (around["metadata"].get("labels") or {}).get(HUB_LABEL) == "true",
        "services": build_service_variables(context.services.objects.values(), namespace, links),
        "lookup": lambda plural, name: objects.get((plural, name)),
        "status": addresses,
        "node": allocatable,
    }


def _environment_references(container: KubeObject) -> set[tuple[str, str]]:
    """(plural, name) of each config map and secret that the container's environment names."""
    references = set()
    sources = list(container.get("envFrom") or [])
    sources += [entry["valueFrom"] for entry in container.get("env") or [] if entry.get("valueFrom")]
    for source in sources:
        for field, plural in (
            ("configMapRef", "configmaps"),
            ("configMapKeyRef", "configmaps"),
            ("secretRef", "secrets"),
            ("secretKeyRef", "secrets"),
        ):
            if reference := source.get(field):
                references.add((plural, reference["name"]))
    return references
