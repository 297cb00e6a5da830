"""This process among those that `torchrun` started: its rank, its device, and the few things that all do together."""

from __future__ import annotations

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
    """Alone: rank 0 of 1, and nothing is sent."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU_DEVICE

    @property
    def is_main(self) -> bool:
        """The one process that writes files and speaks."""
        return self.rank == 0

    def all_reduce(self, values: Tensor) -> Tensor:
        """Over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        """Until all are here."""
        if self.world_size > 1:
            dist.barrier()


@contextmanager
def join_process_group() -> Iterator[Processes]:
    """What torchrun's environment says, with a process group while the block runs; without torchrun, this process alone."""
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
        # A sharded target keeps the group's threads past its end (PyTorch registers FSDP modules for ever). A thread that still
        # lets go of the last sum's tensors when the interpreter ends aborts the process; after a barrier it has done so.
        dist.barrier()
    finally:
        dist.destroy_process_group()
