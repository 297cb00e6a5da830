"""The lab's gateway: Contour and Envoy as ordinary pods, and one Gateway that the machine reaches on a port.

CRDs and RBAC are Contour's own files, copied from its pinned module when it is built; manifests.yaml is ours.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import yaml

NAMESPACE = "projectcontour"
GATEWAY = "lab"
"""Name of the Gateway, in NAMESPACE; routes of any namespace may attach to it."""

_UPSTREAM = (
    "gateway/00-crds.yaml",
    "contour/01-crds.yaml",
    "contour/00-common.yaml",
    "contour/02-role-contour.yaml",
    "contour/02-rbac.yaml",
)


def documents(contour: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(definitions, the rest): all objects of the gateway; `contour` is the folder of the built family."""
    # The C loader reads the 1.5 MB of definitions ten times as fast, where PyYAML has it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    objects: list[dict[str, Any]] = []
    for name in _UPSTREAM:
        objects += [item for item in yaml.load_all((contour / "manifests" / name).read_text(), loader) if item]
    own = resources.files("aerie_lab.gateway").joinpath("manifests.yaml").read_text()
    objects += list(yaml.load_all(own, loader))
    definitions = [item for item in objects if item["kind"] == "CustomResourceDefinition"]
    return definitions, [item for item in objects if item["kind"] != "CustomResourceDefinition"]
