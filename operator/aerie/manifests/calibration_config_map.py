"""The ConfigMap in which what stable pods told of themselves outlives the operator."""

from __future__ import annotations

from typing import Any

from aerie.manifests import naming

BLOCK_COUNT_KEY, LAST_BLOCK_END_KEY, CALIBRATION_KEY = "blocks", "until", "memory"
"""Its data: for people how many blocks it rests on and when the last of them ended; and the rest, packed."""


def calibration_config_map_name(resource_name: str) -> str:
    """Its name: with ours in it, because a chat's users may well have a ConfigMap named chat-history."""
    return f"{resource_name}-aerie-history"


def render_calibration_config_map(resource_name: str, block_count: str, last_block_end: str, calibration: str) -> dict[str, Any]:
    """The ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": calibration_config_map_name(resource_name), "labels": naming.common_labels(resource_name)},
        "data": {BLOCK_COUNT_KEY: block_count, LAST_BLOCK_END_KEY: last_block_end, CALIBRATION_KEY: calibration},
    }
