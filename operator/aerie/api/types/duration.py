"""Durations as the resource writes them: "15s", "2m", "1h30m", "500ms".

The grammar is that of the Gateway API (GEP-2257, https://gateway-api.sigs.k8s.io/geps/gep-2257/): one to four integers of at
most five digits, each with one of the units h, m, s, ms. It is a subset of the grammar of Go's time.ParseDuration and CEL's
duration(). So a schema rule, a Go client and this module read the same duration.

Guarantees: `format_duration` writes every duration that `parse_duration` reads in the shortest usual form.
`parse_duration(format_duration(d)) == d` for every whole number of milliseconds up to `MAX_DURATION`.
"""

from __future__ import annotations

import re
from datetime import timedelta

DURATION_PATTERN = r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"
"""The grammar, for Python's `re` and for RE2 alike."""

MAX_DURATION_CHARACTERS = 28
"""Characters of the longest text that DURATION_PATTERN matches."""

MAX_DURATION = timedelta(hours=99999, minutes=59, seconds=59, milliseconds=999)
"""Longest duration that `format_duration` writes."""

_DURATION = re.compile(DURATION_PATTERN)
_DURATION_PART = re.compile(r"([0-9]+)(h|ms|m|s)")
_UNIT_LENGTHS = {
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}


def parse_duration(text: str) -> timedelta:
    """Return the duration of `text`. Raises ValueError with a message.

    >>> parse_duration("1h30m")
    datetime.timedelta(seconds=5400)
    """
    if _DURATION.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a duration: write whole numbers with h, m, s or ms, such as 30s, 5m or 1h30m")
    return sum((int(number) * _UNIT_LENGTHS[unit] for number, unit in _DURATION_PART.findall(text)), timedelta())


def format_duration(duration: timedelta) -> str:
    """Return `duration` in the shortest usual form. Raises ValueError for one that the grammar cannot express.

    >>> format_duration(timedelta(minutes=90)), format_duration(timedelta(0))
    ('1h30m', '0s')
    """
    rest, microseconds = divmod(duration, timedelta(milliseconds=1))
    if microseconds or not timedelta(0) <= duration <= MAX_DURATION:
        raise ValueError(f"{duration!r} cannot be written: a duration is whole milliseconds, from 0s to {MAX_DURATION}")
    parts = []
    for unit, size in _UNIT_LENGTHS.items():
        count, rest = divmod(rest, size // timedelta(milliseconds=1))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
