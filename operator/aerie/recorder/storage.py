"""The files and their storage as the pipeline uses them: append, maintain, complete.

    folder     the volume itself: complete files stay where they were written
    bucket     a folder of the pod, whose complete files are uploaded; while that fails, the folder fills to a limit

Guarantees: the size of a folder that only waits for uploads is limited by MAX_SPOOLED_FILES. All functions block; one thread
calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from aerie.recorder.files import PromptFolder
from aerie.recorder.objects import Bucket, PromptObjects
from aerie.recorder.retention import StoredFile

MAX_SPOOLED_FILES = 4
"""Complete files in the folder of the pod, each somewhat larger than ROTATE_BYTES at most, from which on nothing is written."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept."""

    max_age: timedelta
    max_bytes: int


@dataclass(frozen=True, slots=True)
class StorageReport:
    """Result of a maintenance."""

    files: tuple[StoredFile, ...]
    deleted_files: int


class Storage:
    """The storage. `bucket`: None for a folder of a volume. `clock`: the present time."""

    def __init__(self, folder: Path, bucket: Bucket | None, retention: Retention, clock: Callable[[], datetime]) -> None:
        self._folder = PromptFolder(folder, clock)
        self._objects = PromptObjects(bucket) if bucket is not None else None
        self._retention, self._clock = retention, clock
        self._is_recovered = False

    def append(self, line: bytes) -> None:
        """Write a line. Raises OSError: it is not written."""
        self._recover()
        if self._objects is not None and len(self._folder.list_files()) >= MAX_SPOOLED_FILES:
            raise OSError(f"{MAX_SPOOLED_FILES} files wait for their upload")
        self._folder.append(line)

    def maintain(self) -> StorageReport:
        """Complete the open file if it is due, upload and delete what is due, and report the files. Raises OSError."""
        self._recover()
        self._folder.check()
        self._folder.rotate()
        retention = self._retention
        if self._objects is None:
            deleted = self._folder.delete_expired(retention.max_age, retention.max_bytes)
            return StorageReport(tuple(self._folder.list_files()), deleted)
        self._objects.upload(self._folder)
        deleted = self._objects.delete_expired(self._clock(), retention.max_age, retention.max_bytes)
        return StorageReport(tuple(self._objects.list_files()), deleted)

    def close(self) -> None:
        """Complete the open file, and upload it. Raises OSError."""
        self._folder.complete()
        if self._objects is not None:
            self._objects.upload(self._folder)

    def _recover(self) -> None:
        if not self._is_recovered:
            self._folder.recover()
            self._is_recovered = True
