"""What an engine finds of a model or drafter before it loads weights: config.json, and the names of its tensors.

From a folder, or by name from the Hub that HF_ENDPOINT names or the cache of HF_HOME where HF_HUB_OFFLINE is set, as vLLM would.
Without either a name is believed: then there is nobody to ask, and None stands for what is not known.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_lab.errors import LabError

_INVALID_REPOSITORY_MESSAGE = (
    "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{}'. Use "
    "`repo_type` argument if needed."
)


class EngineError(LabError):
    """vLLM would not start: the message is what it ends with, its exit status 1."""


@dataclass(frozen=True)
class ModelFiles:
    """Files of one model."""

    config: Mapping[str, Any]
    tensor_names: frozenset[str] | None
    """Names; None where the weights are no safetensors files."""


def has_hub(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether there is a Hub, or its cache, in which names are looked up."""
    return bool(environment.get("HF_ENDPOINT") or environment.get("HF_HUB_OFFLINE"))


def read_hub_files(name: str, revision: str | None, environment: Mapping[str, str] = os.environ) -> ModelFiles | None:
    """Return the model of this name on the Hub; None for a path of this machine or without a Hub. Raises EngineError."""
    path = Path(name)
    if path.is_absolute() or path.exists() or not has_hub(environment):
        return None
    from aerie.checkpoints import read_repository  # a third of a simulated engine's start, and most have folders
    from aerie.engine.models.checkpoint import CheckpointError

    logging.getLogger("httpx").setLevel(logging.WARNING)  # an engine's log is read for other things
    try:
        checkpoint = read_repository(name, revision, environment)
    except CheckpointError as error:
        raise EngineError(
            f"OSError: {name} is not a local folder and is not a valid model identifier listed on "
            f"'{environment.get('HF_ENDPOINT', 'https://huggingface.co')}/models'\n({error})"
        ) from error
    return ModelFiles(checkpoint.config, None if checkpoint.tensors is None else frozenset(checkpoint.tensors))


def read_model_config(folder: Path) -> Mapping[str, Any]:
    """config.json of a target in a folder. Raises EngineError."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        if not folder.exists():
            raise EngineError(_INVALID_REPOSITORY_MESSAGE.format(folder)) from error
        raise EngineError(f"ValueError: Invalid repository ID or local directory specified: '{folder}'.") from error
    return config


def read_drafter_files(folder: Path) -> ModelFiles:
    """Return a drafter in a folder. Raises EngineError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise EngineError(
            f"Value error, Invalid repository ID or local directory specified: '{folder}'.\n"
            f"Please verify the following requirements:\n1. Provide a valid Hugging Face repository ID.\n"
            f"2. Specify a local directory that contains a recognized configuration file. ({error.strerror})"
        ) from error
    except ValueError as error:
        raise EngineError(
            f"OSError: It looks like the config file at '{folder / 'config.json'}' is not a valid JSON file."
        ) from error
    if not isinstance(config, dict):
        raise EngineError(f"OSError: '{folder / 'config.json'}' holds no JSON object.")
    return ModelFiles(config, _read_tensor_names(folder))


def _read_tensor_names(folder: Path) -> frozenset[str]:
    names: set[str] = set()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"RuntimeError: Cannot find any model weights with `{folder}`")
    for file in files:
        with file.open("rb") as stream:
            try:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            except (ValueError, OverflowError, MemoryError) as error:
                raise EngineError(f"SafetensorError: Error while deserializing header of {file}") from error
        names |= set(header) - {"__metadata__"}
    return frozenset(names)
