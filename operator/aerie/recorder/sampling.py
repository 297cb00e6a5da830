"""Which requests are recorded: a random share of them, up to a number in each minute.

Guarantees: pure, by the caller's clock and random numbers. In each minute of the clock at most `max_per_minute` requests are
admitted. A request that is not admitted is not read.
"""

from __future__ import annotations

from aerie.recorder.skip_reasons import SkipReason

_MINUTE_SECONDS = 60.0


class Sampler:
    """Draws requests. `rate`: share from 0 to 1."""

    def __init__(self, rate: float, max_per_minute: int) -> None:
        self._rate, self._max_per_minute = rate, max_per_minute
        self._minute: float | None = None
        self._admitted = 0

    def admit(self, draw: float, now: float) -> SkipReason | None:
        """Return why a request is not recorded; None where it is. `draw`: random number from 0 to below 1. `now`: seconds."""
        if draw >= self._rate:
            return SkipReason.NOT_SAMPLED
        minute = now // _MINUTE_SECONDS
        if minute != self._minute:
            self._minute, self._admitted = minute, 0
        if self._admitted >= self._max_per_minute:
            return SkipReason.OVER_LIMIT
        self._admitted += 1
        return None
