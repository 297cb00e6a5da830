"""Names of files, and which of them are deleted.

    20260301T140509Z-1f0c2a9b.jsonl          a complete file: the time of its beginning, and a part that is unique
    20260301T140509Z-1f0c2a9b.jsonl.open     the file that is being written

Guarantees: pure. Only files with such a name are ever deleted. None is kept for longer than the retention after its beginning, so
no prompt in it is. What remains fits the maximum size; the newest files remain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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


def select_expired(files: Iterable[StoredFile], now: datetime, max_age: timedelta, max_bytes: int) -> list[str]:
    """Return the names of the files to delete, the oldest first."""
    own = [(began_at, file) for file in files if (began_at := parse_name(file.name)) is not None]
    own.sort(key=lambda entry: (entry[0], entry[1].name), reverse=True)
    kept_bytes, expired = 0, []
    for began_at, file in own:
        kept_bytes += file.size
        if kept_bytes > max_bytes or now - began_at >= max_age:
            expired.append(file.name)
    return expired[::-1]
