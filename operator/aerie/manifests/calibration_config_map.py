"""The ConfigMap that keeps the baseline calibration of stable pods across restarts of the operator."""

from __future__ import annotations

from typing import Any

from aerie.manifests import naming

BLOCK_COUNT_KEY, LAST_BLOCK_END_KEY, CALIBRATION_KEY = "blockCount", "lastBlockEndTime", "calibration"
"""Keys of its data: the number of blocks and the end of the last one, for people; and the packed calibration."""


def calibration_config_map_name(resource_name: str) -> str:
    """Return the ConfigMap's name. It contains `aerie`, because a user may have a ConfigMap named
    chat-calibration for a resource chat."""
    return f"{resource_name}-aerie-calibration"


def render_calibration_config_map(resource_name: str, block_count: str, last_block_end: str, calibration: str) -> dict[str, Any]:
    """Return the ConfigMap as a plain object."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": calibration_config_map_name(resource_name), "labels": naming.common_labels(resource_name)},
        "data": {BLOCK_COUNT_KEY: block_count, LAST_BLOCK_END_KEY: last_block_end, CALIBRATION_KEY: calibration},
    }
