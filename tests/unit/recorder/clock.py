"""A clock that tests set."""

from __future__ import annotations

from datetime import UTC, datetime

NOW = datetime(2026, 3, 1, 14, 5, 9, tzinfo=UTC)


class Clock:
    """The present time is `now`."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now
