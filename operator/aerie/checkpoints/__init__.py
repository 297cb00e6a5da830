"""Readers for the configs and headers of checkpoints: from a folder, the Hugging Face Hub, or its cache.

The pure core (`aerie.engine.models.checkpoint`) takes bytes. This package is the I/O layer that fetches them, as few as possible.
It is above the core and below the controller, because the command line and a preflight Job both use it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from aerie.checkpoints.directory import read_checkpoint_directory
from aerie.checkpoints.hub_cache import is_hub_offline, read_cached_repository
from aerie.checkpoints.hugging_face import HubClient, HubError, HubRejectionError, RepositoryInfo
from aerie.engine.models.checkpoint import Checkpoint

__all__ = [
    "HubClient",
    "HubError",
    "HubRejectionError",
    "RepositoryInfo",
    "is_hub_offline",
    "read_checkpoint_directory",
    "read_repository",
]


def read_repository(repository: str, revision: str | None, environment: Mapping[str, str] = os.environ) -> Checkpoint:
    """Read a repository from the place where an engine in this environment reads it. Raises CheckpointError."""
    if is_hub_offline(environment):
        return read_cached_repository(repository, revision, environment)
    with HubClient.from_environment(environment) as hub:
        return hub.read_checkpoint(repository, revision)
