"""The ConfigMap in which what stable pods told of themselves outlives the operator."""

from __future__ import annotations

from typing import Any

from aerie.manifests import naming

BLOCKS, UNTIL, MEMORY = "blocks", "until", "memory"
"""Its data: for people how many blocks it rests on and when the last of them ended; and the rest, packed."""


def name(resource_name: str) -> str:
    """Its name: with ours in it, because a chat's users may well have a ConfigMap named chat-history."""
    return f"{resource_name}-aerie-history"


def config_map(resource_name: str, blocks: str, until: str, memory: str) -> dict[str, Any]:
    """The ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name(resource_name), "labels": naming.common(resource_name)},
        "data": {BLOCKS: blocks, UNTIL: until, MEMORY: memory},
    }
