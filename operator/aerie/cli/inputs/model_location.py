"""Where a model lies that the command line names: a folder of this machine, or a repository of the Hub.

A folder that is there goes before a repository of the same name, as in vLLM. A repository without a commit is read at its branch;
whoever prints the report says which commit that was, which the checkpoint's name has.
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
"""Characters of a repository's name and of a revision, each, as in a resource."""

HubReader = Callable[[str, str | None], Checkpoint]
"""Reads a repository at a revision."""


@dataclass(frozen=True)
class HubRepository:
    """A repository of the Hub."""

    name: str
    revision: str | None = None
    """Commit, branch or tag; None: its main branch."""


ModelLocation = Path | HubRepository


def parse_model_location(text: str, option: str) -> ModelLocation:
    """What `option` names. Raises CommandError."""
    if os.path.isdir(text) or text.startswith(("/", "./", "../", "~")):  # no error for a name that no file has
        return Path(text)
    if found := parse_hub_repository(text):
        return found
    if not text or re.search(r"[@:\\]|[^ -~]", text):
        raise CommandError(f"{option} is '{text[:_MAX_NAME_CHARACTERS]}': write a folder, or a repository as OWNER/NAME@COMMIT.")
    return Path(text)


def parse_hub_repository(text: str) -> HubRepository | None:
    """A repository as OWNER/NAME or NAME@REVISION writes it; None for anything else, such as a path or one word."""
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
    """The checkpoint; `name`: what a folder's is called. Raises CheckpointError, CommandError."""
    if isinstance(location, Path):
        return read_checkpoint_directory(location, folder_name)
    try:
        return hub_reader(location.name, location.revision)
    except HubRejectionError as error:
        if location.revision is not None:
            raise
        raise CommandError(f"{error} There is no folder {location.name} either.") from None
