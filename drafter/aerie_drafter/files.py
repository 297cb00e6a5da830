"""Atomic replacement of a folder or file, so that a full disk or a kill never destroys the previous content; and locks.

Guarantee: `replace_folder` yields an empty folder beside the old one. It takes the old one's name only after the block has ended
and everything is synced to disk, on Linux in one step (renameat2 with RENAME_EXCHANGE). An error or kill before that does not
change the old folder; the next call removes the remains of a kill. Not guaranteed: two processes that replace a folder at the
same time; `reserve_output` keeps the second out. If the file system cannot exchange two names, a kill between two renames leaves
the old folder as `.NAME.previous`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from aerie_drafter.errors import CheckpointError


@contextlib.contextmanager
def replace_folder(folder: Path, is_replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` when the block ends without an error. Raises CheckpointError.

    A folder with content is replaced only if `is_replaceable(folder)`.
    """
    folder = folder.resolve()  # keep a link, and replace its target
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not is_replaceable(folder))):
        raise CheckpointError(f"{folder}: contains files that aerie-drafter did not write; choose a new or empty folder.")
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
        note = "; the previous one is unchanged" if folder.exists() else ""
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror or error}){note}.") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def replace_file(path: Path, text: str) -> None:
    """Write a text file that takes the place of an earlier one when it is complete. Raises CheckpointError."""
    new = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        _fsync(new)
        new.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror or error}).") from error
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock while the block runs; wait for another process that holds it. Raises CheckpointError.

    The system releases the lock of a process that ends, also by a kill.
    """
    with _open_lock(path) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def reserve_output(output: Path, *, is_folder: bool) -> Iterator[None]:
    """Hold an output file or folder for this process while the block runs. Raises CheckpointError if another one holds it.

    The lock is a hidden file, inside of a folder and beside a file, which remains; without a process it means nothing. A folder
    of outputs may be a mounted volume, and processes that share it have only its inside in common.
    """
    output = output.resolve()
    path = output / ".lock" if is_folder else output.with_name(f".{output.name}.lock")
    with _open_lock(path) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{output}: another process writes to it; wait for its end, or set another output.") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be locked ({error.strerror or error}).") from error
        yield


def _open_lock(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror or error}).") from error


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


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False if the system or file system does not support it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    current_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h
    return call is not None and call(current_folder, os.fsencode(first), current_folder, os.fsencode(second), exchange) == 0
