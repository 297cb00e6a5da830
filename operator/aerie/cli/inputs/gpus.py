"""Which GPUs a pod asks for, as far as its limits and its node selector tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NVIDIA_GPU_RESOURCE = "nvidia.com/gpu"
_GPU_RESOURCES = frozenset({NVIDIA_GPU_RESOURCE, "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe"})
"""Extended resources of the vendors' device plugins, one for each device."""
_MIG_RESOURCE_PREFIX = "nvidia.com/mig-"
"""Instances of a divided GPU, such as nvidia.com/mig-3g.40gb."""


def count_gpus(limits: Mapping[str, str], pod_spec: Mapping[str, Any]) -> tuple[int | None, str]:
    """GPUs of one pod, where its container's limits ask for a whole number of them, and how it asks for them."""
    named = [name for name in limits if name in _GPU_RESOURCES or name.startswith(_MIG_RESOURCE_PREFIX)]
    if len(named) == 1:
        amount = limits[named[0]]
        return (int(amount) if amount.isdecimal() else None), named[0]
    if named:
        return None, " and ".join(sorted(named))
    return None, "resourceClaims (DRA)" if pod_spec.get("resourceClaims") else ""


def read_gpu_memory_bytes(limits: Mapping[str, str], pod_spec: Mapping[str, Any]) -> int | None:
    """Bytes of one GPU, from the name of a MIG instance, or labels that NVIDIA's GPU feature discovery gives nodes: gpu.memory
    in MiB, or the GB in the product's name."""
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
    named = re.search(r"(\d+)GB", product)
    return int(named[1]) * 2**30 if named else None
