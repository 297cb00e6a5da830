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

from aerie.checkpoints import HubRefusalError, read_folder
from aerie.cli.console import CommandError
from aerie.engine.models.checkpoint import Checkpoint

_REPOSITORY = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_MOST = 192
"""Characters of a repository's name and of a revision, each, as in a resource."""

FromHub = Callable[[str, str | None], Checkpoint]
"""Reads a repository at a revision."""


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub."""

    name: str
    revision: str | None = None
    """Commit, branch or tag; None: its main branch."""


Place = Path | Repository


def parse_place(text: str, option: str) -> Place:
    """What `option` names. Raises CommandError."""
    if os.path.isdir(text) or text.startswith(("/", "./", "../", "~")):  # no error for a name that no file has
        return Path(text)
    if found := parse_repository(text):
        return found
    if not text or re.search(r"[@:\\]|[^ -~]", text):
        raise CommandError(f"{option} is '{text[:_MOST]}': write a folder, or a repository as OWNER/NAME@COMMIT.")
    return Path(text)


def parse_repository(text: str) -> Repository | None:
    """A repository as OWNER/NAME or NAME@REVISION writes it; None for anything else, such as a path or one word."""
    match = _REPOSITORY.fullmatch(text)
    if match is None or not ("/" in match["name"] or match["revision"]):
        return None
    parts = [*match["name"].split("/"), *(match["revision"] or "main").split("/")]
    if any(set(part) <= {"."} or ".." in part for part in parts) or max(map(len, match.groups(default=""))) > _MOST:
        return None
    return Repository(match["name"], match["revision"])


def read_place(place: Place, from_hub: FromHub, name: str | None = None) -> Checkpoint:
    """The checkpoint; `name`: what a folder's is called. Raises CheckpointError, CommandError."""
    if isinstance(place, Path):
        return read_folder(place, name)
    try:
        return from_hub(place.name, place.revision)
    except HubRefusalError as error:
        if place.revision is not None:
            raise
        raise CommandError(f"{error} There is no folder {place.name} either.") from None
