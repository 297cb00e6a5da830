"""The ConfigMap with Aerie's plugin of vLLM, by which engines get it without an image of their own.

docs/decisions/0003-plugin-delivery.md has the alternatives. The files are those of the distribution `aerie-vllm`, which is
installed beside the operator in the same release. vLLM finds the plugin by the entry points in its metadata (`*.dist-info`), in a
folder that is on PYTHONPATH.

Guarantees: the ConfigMap cannot be changed, and its name has a digest of its content. So the files of a pod stay the same while
it lives, and a release of Aerie with another plugin writes another ConfigMap. Not guaranteed: that nobody deletes it; a pod that
starts then waits until it exists again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from typing import Any

from aerie.manifests import naming

DISTRIBUTION, PACKAGE = "aerie-vllm", "aerie_vllm"
_METADATA_FILES = ("METADATA", "entry_points.txt")


@dataclass(frozen=True)
class Plugin:
    """The plugin of this release."""

    files: Mapping[str, str]
    """Content by path in a folder of PYTHONPATH."""
    digest: str
    """The beginning of a digest of all files."""


@cache
def load_plugin() -> Plugin:
    """Return the plugin that is installed beside the operator. Raises PackageNotFoundError if none is."""
    distribution = metadata.distribution(DISTRIBUTION)
    files = dict(_read_modules(resources.files(PACKAGE), PACKAGE))
    for name in _METADATA_FILES:
        files[f"{PACKAGE}-{distribution.version}.dist-info/{name}"] = distribution.read_text(name) or ""
    return Plugin(files, hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:10])


def _read_modules(folder: Traversable, path: str) -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _read_modules(entry, f"{path}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{path}/{entry.name}", entry.read_text(encoding="utf-8")


def plugin_config_map_name(resource_name: str) -> str:
    """Return the name of the ConfigMap with the plugin of this release."""
    return _name_prefix(resource_name) + load_plugin().digest


def is_plugin_config_map(resource_name: str, name: str) -> bool:
    """Return whether a ConfigMap of the resource has the plugin, of this or another release."""
    return name.startswith(_name_prefix(resource_name))


def build_plugin_config_map(resource_name: str) -> dict[str, Any]:
    """Return the ConfigMap with the plugin of this release."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": plugin_config_map_name(resource_name), "labels": naming.common_labels(resource_name)},
        "immutable": True,
        "data": {_key(path): content for path, content in load_plugin().files.items()},
    }


def build_plugin_volume(resource_name: str) -> dict[str, Any]:
    """Return the volume whose root is a folder for PYTHONPATH."""
    items = [{"key": _key(path), "path": path} for path in load_plugin().files]
    return {"name": naming.PLUGIN_VOLUME, "configMap": {"name": plugin_config_map_name(resource_name), "items": items}}


def find_plugin_config_map(pod_template: Mapping[str, Any]) -> str | None:
    """Return the name of the ConfigMap that `build_plugin_volume` named for pods of the template; None without the plugin."""
    for volume in pod_template["spec"].get("volumes") or []:
        if volume.get("name") == naming.PLUGIN_VOLUME:
            name = (volume.get("configMap") or {}).get("name")
            return str(name) if name else None
    return None


def _name_prefix(resource_name: str) -> str:
    return f"{resource_name}-aerie-plugin-"


def _key(path: str) -> str:
    """Return a file's key in the ConfigMap, in which a key has no slash."""
    return path.replace("/", ".")
