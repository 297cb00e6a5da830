"""A lab's folder: one command at a time may change it, and nothing of a lab outlives its removal."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from aerie_lab.cluster import process
from aerie_lab.errors import StartError, StateError
from aerie_lab.paths import cache_folder

_MIN_FREE_DISK_MIB = 300


def list_lab_names() -> list[str]:
    """Return the labs that have a folder, running or not."""
    folder = cache_folder() / "labs"
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


@contextlib.contextmanager
def lab_lock(folder: Path) -> Iterator[None]:
    """One `up` or `down` of a lab at a time. The lock file stays beside the folder; a dead holder's lock is free."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(f"another command is bringing lab '{folder.name}' up or down: wait until it has ended.") from error
        yield


def remove_lab(folder: Path) -> None:
    """End whatever is left of a lab and remove its folder."""
    process.kill_lab(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise StateError(f"{folder} cannot be removed: remove it by hand, it belongs to another user.")


def preserve_failed_logs(folder: Path) -> Path | None:
    """Move the logs of a failed start to where the next start does not remove them."""
    preserved_logs = cache_folder() / "failed" / folder.name
    if not (folder / "logs").is_dir():
        return None
    shutil.rmtree(preserved_logs, ignore_errors=True)
    preserved_logs.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(folder / "logs", preserved_logs)
    return preserved_logs


def require_disk_space(folder: Path) -> None:
    """Raise StartError when the disk is too full for a lab."""
    free = shutil.disk_usage(folder.parent).free // 2**20
    if free < _MIN_FREE_DISK_MIB:
        raise StartError(
            f"{folder.parent} has {free} MiB free, and a lab needs {_MIN_FREE_DISK_MIB}: free some disk space, "
            "or set AERIE_LAB_CACHE to a folder on another disk."
        )
