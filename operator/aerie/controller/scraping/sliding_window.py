"""What was read off one pod: a few of its scrapes, and the window that they span.

    base ─────────────► middle ─────────────► newest
         at least a half         growing

The window is from base to newest. It slides on (middle becomes base) when its younger half is long enough and holds enough
requests to stand alone, so that it covers the last few minutes under load, reaches further back under little, and stays as it
is under none.

Guarantees: an engine that began anew, or did not answer for long, starts over; nothing is counted twice or across a restart.
Memory per pod is three scrapes, whatever happens. Not guaranteed: anything over a restart of the operator; figures come back
with the second scrape.
"""

from __future__ import annotations

from dataclasses import dataclass

from aerie.engine.metrics.sample import Counters, Reset, Sample, between
from aerie.rollout.facts.arm_metrics import Sums

HALF = 150.0
"""Seconds that a half lasts at least."""
REQUESTS = 500.0
"""Requests that a half holds, or else it lasts up to `LONGEST`: what keeps the figures of steady traffic steady."""
LONGEST = 1800.0
"""Seconds after which a half ends that had any traffic."""


@dataclass(frozen=True, slots=True)
class _Scrape:
    at: float
    sample: Sample


class Readings:
    """Of one pod. Times are in seconds of any one clock."""

    __slots__ = ("_base", "_middle", "_newest", "_run", "_summed", "_sums")

    def __init__(self) -> None:
        self._run: str | None = None
        self._base: _Scrape | None = None
        self._middle: _Scrape | None = None
        self._newest: _Scrape | None = None
        self._summed: _Scrape | None = None
        """The newest when `_sums` was taken."""
        self._sums: Sums | None = None

    def add(self, run: str, sample: Sample, at: float, stale_after: float) -> None:
        """One more scrape, of this run of the container: where a page does not say when its engine began, that tells."""
        scrape, newest = _Scrape(at, sample), self._newest
        if (
            newest is None
            or self._middle is None
            or run != self._run
            or at - newest.at > stale_after
            or isinstance(between(newest.sample, sample), Reset)
        ):
            self._run, self._base, self._middle, self._newest = run, scrape, scrape, scrape
            return
        self._newest = scrape
        half = between(self._middle.sample, sample)
        if not isinstance(half, Reset) and _enough(half, at - self._middle.at):
            self._base, self._middle = self._middle, scrape

    def window(self, now: float, stale_after: float) -> Counters | None:
        """What happened in the window; None while there is none, or when the last scrape is too long ago."""
        if self._base is None or self._newest is None or self._newest is self._base or now - self._newest.at > stale_after:
            return None
        found = between(self._base.sample, self._newest.sample)
        return None if isinstance(found, Reset) else found

    def sums(self, now: float, stale_after: float) -> Sums | None:
        """What its figures are made of; taken out of the window once for each scrape."""
        if self._newest is None or now - self._newest.at > stale_after:
            return None
        if self._newest is not self._summed:
            found, self._summed = self.window(now, stale_after), self._newest
            self._sums = None if found is None else Sums.of(found)
        return self._sums


def _enough(half: Counters, seconds: float) -> bool:
    if seconds < HALF or half.request_steps <= 0:
        return False
    return half.first_tokens >= REQUESTS or seconds >= LONGEST
