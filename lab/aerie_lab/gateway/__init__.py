"""The lab's gateway: Contour and Envoy as ordinary pods, and one Gateway that the machine reaches on a port.

CRDs and RBAC are Contour's own files, copied from its pinned module when it is built; manifests.yaml is ours.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import yaml

CONTOUR_NAMESPACE = "projectcontour"
"""Where Contour and Envoy run. The Gateway's own namespace and name are a choice of the lab; routes of any may attach to it."""

_CONTOUR_MANIFESTS = (
    "gateway/00-crds.yaml",
    "contour/01-crds.yaml",
    "contour/00-common.yaml",
    "contour/02-role-contour.yaml",
    "contour/02-rbac.yaml",
)


def load_gateway_objects(contour_folder: Path, gateway_name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (definitions, all other objects). `contour_folder` is the built family's, `gateway_name` is NAMESPACE/NAME."""
    # The C loader reads the 1.5 MB of definitions ten times as fast, where PyYAML has it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    objects: list[dict[str, Any]] = []
    for name in _CONTOUR_MANIFESTS:
        objects += [item for item in yaml.load_all((contour_folder / "manifests" / name).read_text(), loader) if item]
    own = resources.files("aerie_lab.gateway").joinpath("manifests.yaml").read_text()
    namespace, name = gateway_name.split("/")
    objects += list(yaml.load_all(own.replace("{namespace}", namespace).replace("{gateway}", name), loader))
    if namespace != CONTOUR_NAMESPACE:
        objects.append({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    definitions = [item for item in objects if item["kind"] == "CustomResourceDefinition"]
    return definitions, [item for item in objects if item["kind"] != "CustomResourceDefinition"]
