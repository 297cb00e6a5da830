"""Which requests are recorded: a random share of them, up to a number in each minute.

Where the share of a minute was more than its number, the next minute has a smaller share. Otherwise, with many requests, all
recorded ones would be from the first seconds of a minute, and of the clients who send then.

Guarantees: pure, by the caller's clock and random numbers. In each minute of the clock at most `max_per_minute` requests are
admitted. A request that is not admitted is not read. Not guaranteed: that `max_per_minute` are admitted in a minute that has
fewer requests than the minute before.
"""

from __future__ import annotations

from aerie.recorder.skip_reasons import SkipReason

_MINUTE_SECONDS = 60.0


class Sampler:
    """Draws requests. `rate`: share from 0 to 1."""

    def __init__(self, rate: float, max_per_minute: int) -> None:
        self._rate, self._max_per_minute = rate, max_per_minute
        self._minute: float | None = None
        self._drawn = self._admitted = 0
        self._reduced_rate = rate
        """Share of this minute."""

    def admit(self, draw: float, now: float) -> SkipReason | None:
        """Return why a request is not recorded; None where it is. `draw`: random number from 0 to below 1. `now`: seconds."""
        if draw >= self._rate:
            return SkipReason.NOT_SAMPLED
        minute = now // _MINUTE_SECONDS
        if minute != self._minute:
            is_next = self._minute is not None and minute == self._minute + 1
            expected = self._drawn if is_next else 0
            self._reduced_rate = self._rate * min(1.0, self._max_per_minute / max(1, expected))
            self._minute, self._drawn, self._admitted = minute, 0, 0
        self._drawn += 1
        if draw >= self._reduced_rate or self._admitted >= self._max_per_minute:
            return SkipReason.OVER_LIMIT
        self._admitted += 1
        return None
