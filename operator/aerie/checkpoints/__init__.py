"""Reads the configs and headers of checkpoints from where they lie: a folder, the Hugging Face Hub, or its
cache.

The pure core (`aerie.engine.models.checkpoint`) takes bytes; this package is the edge that fetches them, as few as it can. It stands
above the core and below the controller, because the command line and a preflight Job both read with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from aerie.checkpoints.directory import read_checkpoint_directory
from aerie.checkpoints.hub_cache import is_hub_offline, read_cached_repository
from aerie.checkpoints.hugging_face import HubClient, HubError, HubRejectionError
from aerie.engine.models.checkpoint import Checkpoint

__all__ = ["HubClient", "HubError", "HubRejectionError", "is_hub_offline", "read_checkpoint_directory", "read_repository"]


def read_repository(repository: str, revision: str | None, environment: Mapping[str, str] = os.environ) -> Checkpoint:
    """A repository, from where the environment has engines read it. Raises CheckpointError."""
    if is_hub_offline(environment):
        return read_cached_repository(repository, revision, environment)
    with HubClient.from_environment(environment) as hub:
        return hub.read_checkpoint(repository, revision)
