"""GPUs that a pod requests, as far as its limits and its node selector reveal them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NVIDIA_GPU_RESOURCE = "nvidia.com/gpu"
_GPU_RESOURCES = frozenset({NVIDIA_GPU_RESOURCE, "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe"})
"""Extended resources of the vendors' device plugins, one unit for each device."""
_MIG_RESOURCE_PREFIX = "nvidia.com/mig-"
"""Prefix of instances of a partitioned GPU, such as nvidia.com/mig-3g.40gb."""


def is_gpu_resource(name: str) -> bool:
    """Return whether an extended resource is a GPU, or an instance of one."""
    return name in _GPU_RESOURCES or name.startswith(_MIG_RESOURCE_PREFIX)


def count_gpus(limits: Mapping[str, str], pod_spec: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return the GPUs of one pod, or None where its container's limits request no whole number of them, and the resource that
    requests them."""
    resources = [name for name in limits if is_gpu_resource(name)]
    if len(resources) == 1:
        amount = limits[resources[0]]
        return (int(amount) if amount.isdecimal() else None), resources[0]
    if resources:
        return None, " and ".join(sorted(resources))
    return None, "resourceClaims (DRA)" if pod_spec.get("resourceClaims") else ""


def read_gpu_memory_bytes(limits: Mapping[str, str], pod_spec: Mapping[str, Any]) -> int | None:
    """Return the bytes of one GPU, or None. Sources are the name of a MIG instance, and labels that NVIDIA's GPU feature
    discovery gives nodes: gpu.memory in MiB, or the GB in the product's name."""
    instances = [name for name in limits if name.startswith(_MIG_RESOURCE_PREFIX)]
    if instances:
        size = re.search(r"[.](\d+)gb", instances[0])
        return int(size[1]) * 2**30 if size and len(instances) == 1 else None
    labels = pod_spec.get("nodeSelector")
    if not isinstance(labels, dict):
        return None
    memory, product = str(labels.get(f"{NVIDIA_GPU_RESOURCE}.memory", "")), str(labels.get(f"{NVIDIA_GPU_RESOURCE}.product", ""))
    if memory.isdecimal():
        return int(memory) * 2**20
    size_in_name = re.search(r"(\d+)GB", product)
    return int(size_in_name[1]) * 2**30 if size_in_name else None
