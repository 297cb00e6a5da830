"""This process in the group that `torchrun` started: rank, device, and collective operations."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

CPU_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """Rank, number of processes, and device; by default a single process, without communication."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU_DEVICE

    @property
    def is_main(self) -> bool:
        """Return whether this is the process that writes files and reports."""
        return self.rank == 0

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()


def is_main_process() -> bool:
    """Return whether this is the main process of torchrun's group, also before it has joined the group."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def join_process_group() -> Iterator[Processes]:
    """Join the process group of torchrun while the block runs; without torchrun, yield a single process."""
    gpu = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield Processes(device=device)
        return
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), device)
        dist.barrier()
    finally:
        _release_sharded_tensors()
        dist.destroy_process_group()


def _release_sharded_tensors() -> None:
    """Drop the last references to the process group, so that its threads end with it.

    PyTorch (2.13) caches what it computed for sharded tensors, and by that their device mesh and its group, until the process
    ends. A thread of the group that still releases tensors while the interpreter ends aborts the process ("terminate called
    without an active exception").
    """
    # The import takes a second. A name that another release lacks is skipped: the barrier makes an abort rare.
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    gc.collect()  # modules and their hooks refer to one another
    for module, name in (
        (debug, "_clear_sharding_prop_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (_redistribute, "_gen_transform_infos.cache_clear"),
        (_collective_utils, "MeshTopoInfo.build_from_mesh.cache_clear"),
    ):
        with contextlib.suppress(AttributeError):
            operator.attrgetter(name)(module)()
    gc.collect()
