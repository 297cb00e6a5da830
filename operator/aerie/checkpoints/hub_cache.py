"""Reads a checkpoint from the Hub's cache on a disk, for engines that work without a network.

    $HF_HUB_CACHE/models--{organization}--{name}/refs/{branch}               the commit that a branch or tag was at
                                                /snapshots/{commit}/...     the files, as links to blobs

The layout and the variables are those of huggingface_hub (`constants.py`, `file_download.py`). Guarantees: nothing is written,
and no network is asked; what is not there, or only in part, is a HubRefusalError that says how to fill the cache. Not guaranteed:
that a snapshot has every file of its repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aerie.checkpoints.directory import read_checkpoint_directory
from aerie.checkpoints.hugging_face import HubRejectionError
from aerie.engine.models.checkpoint import Checkpoint, CheckpointError

_TRUE_VALUES = frozenset({"1", "on", "yes", "true"})


def is_hub_offline(environment: Mapping[str, str]) -> bool:
    """Whether huggingface_hub would ask no network."""
    return any(environment.get(name, "").strip().lower() in _TRUE_VALUES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_cache_directory(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps repositories."""
    given = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(given or f"{home}/hub").expanduser()


def read_cached_repository(repository: str, revision: str | None, environment: Mapping[str, str]) -> Checkpoint:
    """The checkpoint, named `repository@commit`. Raises CheckpointError."""
    wanted = revision or "main"
    folder = hub_cache_directory(environment) / f"models--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / wanted).read_text().strip()
    except (OSError, UnicodeDecodeError):
        commit = wanted
    name, snapshot = f"{repository}@{commit}", folder / "snapshots" / commit
    try:
        return read_checkpoint_directory(snapshot, name)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        # What is missing is for the person to bring, as it is for the engine, which is offline too.
        raise HubRejectionError(
            f"{error} The Hub is not asked, because HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: download {repository} at "
            f"{wanted} into the cache, whose folder is {hub_cache_directory(environment)}, or mount the volume that has it and set HF_HOME."
        ) from error
