"""Durations as kubectl's users write them.

Guarantee: pure; the same grammar for each option.
"""

from __future__ import annotations

import re
from datetime import timedelta

_DURATION = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", re.ASCII)


def parse_duration(text: str) -> timedelta | None:
    """Return a duration written like 10m, 90s or 1h30m; None if it is written otherwise.

    >>> parse_duration("1h30m"), parse_duration("30")
    (datetime.timedelta(seconds=5400), None)
    """
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return timedelta(hours=hours, minutes=minutes, seconds=seconds)
