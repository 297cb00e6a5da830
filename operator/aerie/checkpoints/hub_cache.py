"""Read a checkpoint from the Hub's cache on a disk, for engines that run without a network.

    $HF_HUB_CACHE/models--{organization}--{name}/refs/{branch}               the commit of a branch or tag
                                                /snapshots/{commit}/...     the files, as links to blobs

The layout and the variables are those of huggingface_hub (`constants.py`, `file_download.py`). Guarantees: nothing is written,
and there are no network requests. A missing or incomplete snapshot is a HubRejectionError with instructions to fill the cache.
Not guaranteed: that a snapshot has every file of its repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aerie.checkpoints.directory import read_checkpoint_directory
from aerie.checkpoints.hugging_face import HubRejectionError
from aerie.engine.models.checkpoint import Checkpoint, CheckpointError

_TRUE_VALUES = frozenset({"1", "on", "yes", "true"})


def is_hub_offline(environment: Mapping[str, str]) -> bool:
    """Return whether the environment puts huggingface_hub into offline mode."""
    return any(environment.get(name, "").strip().lower() in _TRUE_VALUES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_cache_directory(environment: Mapping[str, str]) -> Path:
    """Return the folder in which huggingface_hub caches repositories."""
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    home = environment.get("HF_HOME") or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(cache or f"{home}/hub").expanduser()


def read_cached_repository(repository: str, revision: str | None, environment: Mapping[str, str]) -> Checkpoint:
    """Read the checkpoint from the cache; its name is `repository@commit`. Raises CheckpointError."""
    revision = revision or "main"
    directory = hub_cache_directory(environment) / f"models--{repository.replace('/', '--')}"
    try:
        commit = (directory / "refs" / revision).read_text().strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    name, snapshot = f"{repository}@{commit}", directory / "snapshots" / commit
    try:
        return read_checkpoint_directory(snapshot, name)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        # The user has to provide the missing files, because the engine is offline too.
        raise HubRejectionError(
            f"{error} The Hub is not accessed, because HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: download {repository} at "
            f"{revision} into the cache, whose folder is {hub_cache_directory(environment)}, or mount the volume that has it and "
            "set HF_HOME."
        ) from error
