"""Sharding of a drafter and its optimizer over the processes of a group, by PyTorch's fully_shard (FSDP2).

Each process keeps 1/n of the weights, of their gradients and of AdamW's moments between the steps. The whole drafter is one unit:
its weights are gathered once for a step, because every unrolled step uses all of them. So the peak within a step still contains
all weights and, in the backward pass, all gradients.

Guarantees: a sharded training computes what one without sharding computes, to rounding. `gather` returns whole tensors, so that
checkpoints have no trace of the number of processes. Not guaranteed: equal bits, because gradients are added in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aerie_drafter.errors import ConfigError
from aerie_drafter.train.processes import Processes


def shard_module(module: nn.Module, processes: Processes) -> nn.Module:
    """Shard the parameters of a module over all processes, in place. Raises ConfigError for a single process."""
    if processes.world_size < 2:
        raise ConfigError("optimizer.shard is true, but this is a single process: start it with torchrun, or set it to false.")
    from torch.distributed.fsdp import fully_shard  # takes seconds to import

    mesh = dist.device_mesh.init_device_mesh(processes.device.type, (processes.world_size,))
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return module


@contextmanager
def gathered_parameters(module: Any) -> Iterator[None]:
    """Let a sharded module have its whole parameters while the block runs, in all processes."""
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def gather(value: Any, device: torch.device | None = None) -> Any:
    """Return a nest of mappings and lists with whole tensors in place of shards; all processes have to call this.

    With a device, tensors are moved to it one by one.
    """
    if isinstance(value, Mapping):
        return {name: gather(item, device) for name, item in value.items()}
    if isinstance(value, list):
        return [gather(item, device) for item in value]
    if not isinstance(value, Tensor):
        return value
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole if device is None else whole.to(device)


def like_parameter(value: Any, parameter: Tensor) -> Any:
    """Return this process's shard of a whole tensor, if the parameter is sharded; every process has the same tensor."""
    if not hasattr(parameter, "full_tensor") or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # takes a second to import

    sharded: Any = parameter
    return distribute_tensor(value.to(parameter.device), sharded.device_mesh, sharded.placements, src_data_rank=None)
