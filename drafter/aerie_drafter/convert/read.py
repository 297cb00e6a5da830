"""Checkpoints of other projects: one safetensors file, several with an index, or a pickled pytorch_model.bin.

Guarantee: nothing in a pickled file is executed (torch.load with weights_only); it may contain tensors and plain containers.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie_drafter.checkpoint import read_finite_tensors
from aerie_drafter.errors import CheckpointError
from aerie_drafter.weights import CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX_FILE, is_finite, read_headers, read_json

PICKLED_WEIGHTS_FILE = "pytorch_model.bin"


@dataclass(frozen=True)
class SourceCheckpoint:
    """Content of another project's checkpoint."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    weights_file: Path
    """File that errors of the weights refer to."""


def read_source_checkpoint(folder: Path) -> SourceCheckpoint:
    """Read config.json and the weights of a folder, without conversion. Raises CheckpointError."""
    config = read_json(folder / CONFIG_FILE)
    if (
        not (folder / WEIGHTS_FILE).exists()
        and not (folder / WEIGHTS_INDEX_FILE).exists()
        and (folder / PICKLED_WEIGHTS_FILE).exists()
    ):
        return SourceCheckpoint(
            folder, config, read_pickled_tensors(folder / PICKLED_WEIGHTS_FILE), {}, folder / PICKLED_WEIGHTS_FILE
        )
    header = read_headers(folder)
    return SourceCheckpoint(folder, config, read_finite_tensors(header), header.metadata, folder / WEIGHTS_FILE)


def read_pickled_tensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a pickled file. Raises CheckpointError."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, LookupError, AttributeError, TypeError) as error:
        reason = (str(error).splitlines() or ["it is truncated"])[0]
        raise CheckpointError(
            f"{file}: cannot be read as tensors only ({reason}); download it again, or as safetensors."
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{file}: expected: a dictionary of tensors.")
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise CheckpointError(f"{file}: {name} contains NaN or infinity; use an earlier checkpoint.")
    return {str(name): tensor for name, tensor in tensors.items()}
