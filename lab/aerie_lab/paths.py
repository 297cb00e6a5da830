"""Where the lab keeps its files: one cache folder, shared by all labs of a user, and one folder per lab below it.

Guarantees: nothing is written outside `cache_folder()`; a lab's folder holds all that a later command must know of it.
A lab's folder path is kept short, because a unix socket's path may have 107 bytes at most.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from aerie_lab.errors import StateError

NAME_PATTERN = re.compile(r"[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?")


def cache_folder() -> Path:
    """Return the lab's cache: `$AERIE_LAB_CACHE`, else `$XDG_CACHE_HOME/aerie-lab`, else `~/.cache/aerie-lab`."""
    if explicit := os.environ.get("AERIE_LAB_CACHE"):
        return Path(explicit).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "aerie-lab"


def lab_folder(name: str) -> Path:
    """Return the folder of the lab `name`. Raises StateError when the name cannot be one."""
    if not NAME_PATTERN.fullmatch(name):
        raise StateError(f"'{name}' cannot name a lab: use up to 20 lower-case letters, digits and inner dashes, such as 'dev'.")
    folder = cache_folder() / "labs" / name
    if len(os.fsencode(folder / "control.sock")) > 100:
        raise StateError(f"the lab's folder {folder} is too long for a unix socket: set AERIE_LAB_CACHE to a shorter path.")
    return folder
