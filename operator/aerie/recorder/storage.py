"""The files and their storage as the pipeline uses them, from two threads.

    writing    append ─► prepare, at intervals ─► complete
    keeping    upload and apply_retention, at intervals

    folder     the volume itself: complete files stay where they were written
    bucket     a folder of the pod, whose complete files are uploaded; while that fails, the folder fills to a limit

Guarantees: a store that hangs or fails delays no line. Files that wait for their upload are limited by MAX_SPOOLED_BYTES, and by
the retention. Files that a process has left open are completed, whichever it was, so that the retention reaches them. A folder in
which nothing can be written is still uploaded and deleted from. All functions block; those of a row above are called by one
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from aerie.recorder.files import PromptFolder
from aerie.recorder.objects import Bucket, PromptObjects
from aerie.recorder.retention import StorageReport

MAX_SPOOLED_BYTES = 96 * 2**20
"""Size of the files in the folder of the pod from which on nothing is written; below the size limit of the volume."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept."""

    max_age: timedelta
    max_bytes: int


class Storage:
    """The storage. `bucket`: None for a folder of a volume. `clock`: the present time."""

    def __init__(self, folder: Path, bucket: Bucket | None, retention: Retention, clock: Callable[[], datetime]) -> None:
        self._folder = PromptFolder(folder, clock)
        self._objects = PromptObjects(bucket) if bucket is not None else None
        self._retention, self._clock = retention, clock
        self._is_recovered = False

    @property
    def writes_without_keeping(self) -> bool:
        """Whether lines can be written while `upload` and `apply_retention` fail."""
        return self._objects is not None

    def append(self, line: bytes) -> None:
        """Write a line. Raises OSError: it is not written."""
        if not self._is_recovered:
            self._recover()
        self._check_spool(len(line))
        try:
            self._folder.append(line)
        except OSError:
            self._is_recovered = False
            raise

    def prepare(self) -> None:
        """Complete the open file if it is due, and abandoned ones. Raises OSError if that fails, or nothing could be written."""
        self._folder.rotate()
        self._recover()
        self._folder.check()
        self._check_spool(1)

    def complete(self) -> None:
        """Complete the open file. Raises OSError."""
        self._folder.complete()

    def upload(self) -> None:
        """Upload the complete files, if they are for a bucket. Raises OSError."""
        if self._objects is not None:
            self._objects.upload(self._folder)

    def apply_retention(self) -> StorageReport:
        """Delete what exceeds the retention. Raises OSError."""
        max_age, max_bytes = self._retention.max_age, self._retention.max_bytes
        report = self._folder.delete_expired(max_age, max_bytes)
        return report if self._objects is None else self._objects.delete_expired(self._clock(), max_age, max_bytes)

    def _recover(self) -> None:
        self._folder.recover()
        self._is_recovered = True

    def _check_spool(self, further_bytes: int) -> None:
        if self._objects is None:
            return
        waiting = self._folder.open_bytes + sum(file.size for file in self._folder.list_files())
        if waiting + further_bytes > MAX_SPOOLED_BYTES:
            raise OSError(f"{waiting // 2**20} MiB of files wait for their upload, and {MAX_SPOOLED_BYTES // 2**20} MiB may")
