"""Names of files, and which of them are deleted.

    20260301T140509Z-1f0c2a9b.jsonl          a complete file: the time of its beginning, and a part that is unique
    20260301T140509Z-1f0c2a9b.jsonl.open     the file that is being written

Guarantees: pure. Only files with such a name are ever deleted. None is kept for longer than the retention after its beginning, so
no prompt in it is. What remains fits the maximum size; the newest files remain. Not guaranteed: any of it while the clock is
wrong. A file that began at a time in the future is kept until the retention after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

OPEN_SUFFIX = ".open"
_NAME = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{8}\.jsonl")
_TIME_FORMAT = "%Y%m%dT%H%M%SZ"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete file."""

    name: str
    size: int


def build_name(began_at: datetime, unique: str) -> str:
    """Return the name of a file. `unique`: eight hexadecimal characters."""
    return f"{began_at.astimezone(UTC).strftime(_TIME_FORMAT)}-{unique}.jsonl"


def parse_name(name: str) -> datetime | None:
    """Return when a file began; None for a file that is not the recorder's."""
    match = _NAME.fullmatch(name)
    try:
        return datetime.strptime(match[1], _TIME_FORMAT).replace(tzinfo=UTC) if match else None
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class StorageReport:
    """What is stored after the retention was applied."""

    files: Sequence[StoredFile]
    deleted_files: int


def separate_expired(
    files: Iterable[StoredFile], now: datetime, max_age: timedelta, max_bytes: int
) -> tuple[list[StoredFile], list[StoredFile]]:
    """Return the files to keep, the newest first, and those to delete, the oldest first."""
    own = [(began_at, file) for file in files if (began_at := parse_name(file.name)) is not None]
    own.sort(key=lambda entry: (entry[0], entry[1].name), reverse=True)
    retained: list[StoredFile] = []
    expired: list[StoredFile] = []
    total_bytes = 0
    for began_at, file in own:
        total_bytes += file.size
        is_expired = total_bytes > max_bytes or now - began_at >= max_age
        (expired if is_expired else retained).append(file)
    return retained, expired[::-1]
