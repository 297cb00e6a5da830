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

from aerie.engine.metrics.sample import CounterReset, Counters, Sample, diff_samples
from aerie.rollout.facts.arm_metrics import MetricSums

MIN_HALF_SECONDS = 150.0
"""Seconds that a half lasts at least."""
MIN_HALF_REQUESTS = 500.0
"""Requests that a half holds, or else it lasts up to `LONGEST`: what keeps the figures of steady traffic steady."""
MAX_HALF_SECONDS = 1800.0
"""Seconds after which a half ends that had any traffic."""


@dataclass(frozen=True, slots=True)
class _TimedSample:
    sampled_at: float
    sample: Sample


class SlidingWindow:
    """Of one pod. Times are in seconds of any one clock."""

    __slots__ = ("_base", "_middle", "_newest", "_run_id", "_sums", "_sums_newest")

    def __init__(self) -> None:
        self._run_id: str | None = None
        self._base: _TimedSample | None = None
        self._middle: _TimedSample | None = None
        self._newest: _TimedSample | None = None
        self._sums_newest: _TimedSample | None = None
        """The newest when `_sums` was taken."""
        self._sums: MetricSums | None = None

    def add(self, run_id: str, sample: Sample, sampled_at: float, stale_after_seconds: float) -> None:
        """One more scrape, of this run of the container: where a page does not say when its engine began, that tells."""
        scrape, newest = _TimedSample(sampled_at, sample), self._newest
        if (
            newest is None
            or self._middle is None
            or run_id != self._run_id
            or sampled_at - newest.sampled_at > stale_after_seconds
            or isinstance(diff_samples(newest.sample, sample), CounterReset)
        ):
            self._run_id, self._base, self._middle, self._newest = run_id, scrape, scrape, scrape
            return
        self._newest = scrape
        half = diff_samples(self._middle.sample, sample)
        if not isinstance(half, CounterReset) and _is_half_complete(half, sampled_at - self._middle.sampled_at):
            self._base, self._middle = self._middle, scrape

    def counters(self, now: float, stale_after_seconds: float) -> Counters | None:
        """What happened in the window; None while there is none, or when the last scrape is too long ago."""
        if (
            self._base is None
            or self._newest is None
            or self._newest is self._base
            or now - self._newest.sampled_at > stale_after_seconds
        ):
            return None
        found = diff_samples(self._base.sample, self._newest.sample)
        return None if isinstance(found, CounterReset) else found

    def sums(self, now: float, stale_after_seconds: float) -> MetricSums | None:
        """What its figures are made of; taken out of the window once for each scrape."""
        if self._newest is None or now - self._newest.sampled_at > stale_after_seconds:
            return None
        if self._newest is not self._sums_newest:
            found, self._sums_newest = self.counters(now, stale_after_seconds), self._newest
            self._sums = None if found is None else MetricSums.from_window(found)
        return self._sums


def _is_half_complete(half: Counters, seconds: float) -> bool:
    if seconds < MIN_HALF_SECONDS or half.request_steps <= 0:
        return False
    return half.first_tokens >= MIN_HALF_REQUESTS or seconds >= MAX_HALF_SECONDS
