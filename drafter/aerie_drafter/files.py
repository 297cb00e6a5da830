"""Replaces a whole folder at once, so that a full disk or a kill never costs what was there before.

Guarantee: `replacing(folder)` gives an empty folder beside it to write into; only when the block has ended, and everything is
on the disk, does it take the old one's name, on Linux in one step (renameat2 with RENAME_EXCHANGE). Any error or kill before
that leaves the old folder as it was; what a kill leaves behind is removed by the next call. Not guaranteed: two processes
replacing one folder at the same time; and where the file system cannot exchange two names, a kill between two renames leaves
the old folder under the name `.NAME.previous`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from aerie_drafter.errors import CheckpointError


@contextlib.contextmanager
def replace_folder(folder: Path, is_replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` when the block ends without an error. Raises CheckpointError.

    An existing folder is replaced only if it is empty or `owned(folder)` says that its content may go.
    """
    folder = folder.resolve()  # a link stays, and what it names is replaced
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not is_replaceable(folder))):
        raise CheckpointError(
            f"{folder}: holds something that no aerie-drafter command wrote; choose a folder that is new or empty."
        )
    new = folder.with_name(f".{folder.name}.writing")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        yield new
        for path in sorted(new.rglob("*")):
            _fsync(path)
        _fsync(new)
        _swap_into_place(new, folder)
        _fsync(folder.parent)
    except OSError as error:
        kept = "; the earlier one is untouched" if folder.exists() else ""
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror or error}){kept}.") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap_into_place(new: Path, folder: Path) -> None:
    if not folder.exists():
        new.rename(folder)
    elif not _exchange(new, folder):
        old = folder.with_name(f".{folder.name}.previous")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system has no such call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h
    return call is not None and call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
