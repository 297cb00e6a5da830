"""Location of a model that the command line names: a local folder, or a repository of the Hub.

An existing folder takes precedence over a repository of the same name, as in vLLM. A repository without a commit is read at its
branch. The checkpoint's name contains the commit, so that the report can name it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aerie.checkpoints import HubRejectionError, read_checkpoint_directory
from aerie.cli.console import CommandError
from aerie.engine.models.checkpoint import Checkpoint

_REPOSITORY_PATTERN = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_MAX_NAME_CHARACTERS = 192
"""Maximum characters of a repository's name, and of a revision, as in a resource."""

HubReader = Callable[[str, str | None], Checkpoint]
"""Reads a checkpoint from a repository at a revision."""


@dataclass(frozen=True)
class HubRepository:
    """A repository of the Hub."""

    name: str
    revision: str | None = None
    """Commit, branch or tag; None: the main branch."""


ModelLocation = Path | HubRepository


def parse_model_location(text: str, option: str) -> ModelLocation:
    """Return the location that `option` names. Raises CommandError."""
    if os.path.isdir(text) or text.startswith(("/", "./", "../", "~")):  # isdir: no error for a name that no file can have
        return Path(text)
    if repository := parse_hub_repository(text):
        return repository
    if not text or re.search(r"[@:\\]|[^ -~]", text):
        raise CommandError(f"{option} is '{text[:_MAX_NAME_CHARACTERS]}': set a folder, or a repository as OWNER/NAME@COMMIT.")
    return Path(text)


def parse_hub_repository(text: str) -> HubRepository | None:
    """Return the repository of OWNER/NAME or NAME@REVISION; None for anything else, such as a path or one word."""
    match = _REPOSITORY_PATTERN.fullmatch(text)
    if match is None or not ("/" in match["name"] or match["revision"]):
        return None
    parts = [*match["name"].split("/"), *(match["revision"] or "main").split("/")]
    if (
        any(set(part) <= {"."} or ".." in part for part in parts)
        or max(map(len, match.groups(default=""))) > _MAX_NAME_CHARACTERS
    ):
        return None
    return HubRepository(match["name"], match["revision"])


def read_model_location(location: ModelLocation, hub_reader: HubReader, folder_name: str | None = None) -> Checkpoint:
    """Return the checkpoint; `folder_name` is the name of a folder's checkpoint. Raises CheckpointError, CommandError."""
    if isinstance(location, Path):
        return read_checkpoint_directory(location, folder_name)
    try:
        return hub_reader(location.name, location.revision)
    except HubRejectionError as error:
        if location.revision is not None:
            raise
        raise CommandError(f"{error} There is no folder {location.name} either.") from None
