"""The file that is written, and complete files in a folder.

    append ─► NAME.jsonl.open ─(after ROTATE_SECONDS or ROTATE_BYTES)─► NAME.jsonl

Guarantees: a line is complete or absent. It is with the system when `append` returns, so SIGKILL loses at most the line that is
being written, and `recover` removes what is left of it. After a line that could not be written, the file gets no other. A file
without the suffix `.open` is complete and synced, and never changes. The open file is locked: another process that has the folder
too leaves it alone. Each may delete what the other sees. Not guaranteed: after a crash of the machine, lines of the open file.

All functions block. One thread calls those that write: `append`, `rotate`, `complete`, `recover`. Another may call the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from aerie.recorder.prompts import MAX_LINE_BYTES
from aerie.recorder.retention import OPEN_SUFFIX, StorageReport, StoredFile, build_name, parse_name, separate_expired

ROTATE_BYTES = 16 * 2**20
"""Size from which on a file is complete."""
ROTATE_AFTER = timedelta(minutes=10)
"""Age from which on a file is complete."""
MIN_FREE_BYTES = MAX_LINE_BYTES
"""Free space without which nothing is written."""
_FILE_MODE, _FOLDER_MODE = 0o640, 0o750
_TAIL_BYTES = 64 * 1024


class _OpenFile:
    """The file that is being written, locked. Raises OSError."""

    def __init__(self, folder: Path, began_at: datetime) -> None:
        self.began_at, self.size = began_at, 0
        self.path = folder / (build_name(began_at, secrets.token_hex(4)) + OPEN_SUFFIX)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, _FILE_MODE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._descriptor).st_nlink == 0:  # it was not locked yet, so it looked abandoned
                raise OSError(f"another process has removed {self.path.name}")
        except OSError:
            self.abandon()
            raise

    def append(self, line: bytes) -> None:
        """Write a line. After an error the file may have a part of it, and has to be abandoned."""
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")
        self.size += len(line)

    def abandon(self) -> None:
        """Leave the file to `recover`."""
        os.close(self._descriptor)

    def complete(self) -> None:
        """Give the file its final name."""
        try:
            os.fsync(self._descriptor)
            _rename_to_final(self.path)
        finally:
            os.close(self._descriptor)


class PromptFolder:
    """The files in a folder. `clock`: the present time."""

    def __init__(self, folder: Path, clock: Callable[[], datetime]) -> None:
        self.folder, self._clock = folder, clock
        self._open: _OpenFile | None = None

    def recover(self) -> None:
        """Create the folder, and complete the files that were abandoned by this or another process. Raises OSError."""
        self.folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        for path in sorted(self.folder.iterdir()):
            if path.name.endswith(OPEN_SUFFIX) and parse_name(path.name.removesuffix(OPEN_SUFFIX)) is not None:
                _complete_abandoned(path)

    def check(self) -> None:
        """Raise OSError if nothing can be written now."""
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.folder} cannot be written")
        if shutil.disk_usage(self.folder).free < MIN_FREE_BYTES:
            raise OSError(f"{self.folder} has less than {MIN_FREE_BYTES // 2**20} MiB of free space")

    def append(self, line: bytes) -> None:
        """Write a line. Raises OSError: it is not written, or is the last of a file that has to be recovered."""
        if self._open is None:
            self._open = _OpenFile(self.folder, self._clock())
        try:
            self._open.append(line)
        except OSError:
            self._open.abandon()
            self._open = None
            raise
        self.rotate()

    def rotate(self) -> None:
        """Complete the open file if it is large or old enough, or began later than now. Raises OSError."""
        file = self._open
        if file is None:
            return
        age = self._clock() - file.began_at
        if file.size >= ROTATE_BYTES or not timedelta(0) <= age < ROTATE_AFTER:
            self.complete()

    def complete(self) -> None:
        """Complete the open file, if there is one. Raises OSError: the file has to be recovered."""
        file, self._open = self._open, None
        if file is not None:
            file.complete()

    @property
    def open_bytes(self) -> int:
        """Size of the open file."""
        return self._open.size if self._open is not None else 0

    def list_files(self) -> list[StoredFile]:
        """Return the complete files. Raises OSError."""
        return list(self._iter_files())

    def _iter_files(self) -> Iterator[StoredFile]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if parse_name(entry.name) is not None and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # another process has deleted it
                        yield StoredFile(entry.name, entry.stat(follow_symlinks=False).st_size)

    def delete_expired(self, max_age: timedelta, max_bytes: int) -> StorageReport:
        """Delete what exceeds the retention. Raises OSError."""
        retained, expired = separate_expired(self.list_files(), self._clock(), max_age, max_bytes - ROTATE_BYTES)
        for file in expired:
            (self.folder / file.name).unlink(missing_ok=True)
        return StorageReport(retained, len(expired))


def _complete_abandoned(path: Path) -> None:
    """Remove the incomplete line at the end of a file that no process has open, and give the file its final name."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError), path.open("rb+") as stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.stat()  # absent if another process has completed it meanwhile
        end = _find_end_of_lines(stream.fileno())
        if end == 0:
            path.unlink()
            return
        stream.truncate(end)
        os.fsync(stream.fileno())
        _rename_to_final(path)


def _find_end_of_lines(descriptor: int) -> int:
    """Return the offset after the last line feed; 0 without one."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(0, end - _TAIL_BYTES)
        last_feed = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if last_feed >= 0:
            return begin + last_feed + 1
        end = begin
    return 0


def _rename_to_final(path: Path) -> None:
    path.rename(path.with_name(path.name.removesuffix(OPEN_SUFFIX)))
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
