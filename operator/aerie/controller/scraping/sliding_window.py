"""Sliding window over the samples of one pod.

    base ─────────────► middle ─────────────► newest
         at least a half         growing

The window is from base to newest. It slides on (middle becomes base) when its younger half is long enough and holds enough
requests to stand alone. So it covers the last few minutes under load, reaches further back under little load, and stays as it is
under none.

A window is warm once its base is later than the engine's first sample by the warm-up. The base only moves on after a half with
traffic.

Guarantees: after a restart of the engine, or a long time without an answer, the window starts over. Nothing is counted twice or
across a restart. It takes the memory of three samples, whatever happens. Not guaranteed: persistence over a restart of the
operator; metrics return with the second sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from aerie.engine.metrics.sample import CounterReset, Counters, Sample, diff_samples
from aerie.rollout.facts.arm_metrics import MetricSums

MIN_HALF_SECONDS = 150.0
"""Minimum duration of a half in seconds."""
MIN_HALF_REQUESTS = 500.0
"""Requests in a half, unless it lasts `MAX_HALF_SECONDS`. They keep the metrics of steady traffic steady."""
MAX_HALF_SECONDS = 1800.0
"""Seconds after which a half with any traffic ends."""


@dataclass(frozen=True, slots=True)
class _TimedSample:
    sampled_at: float
    sample: Sample


class SlidingWindow:
    """Sliding window of one pod. Times are in seconds of any one clock."""

    __slots__ = ("_base", "_first_sampled_at", "_middle", "_newest", "_run_id", "_sums", "_sums_newest")

    def __init__(self) -> None:
        self._run_id: str | None = None
        self._first_sampled_at = 0.0
        self._base: _TimedSample | None = None
        self._middle: _TimedSample | None = None
        self._newest: _TimedSample | None = None
        self._sums_newest: _TimedSample | None = None
        """Newest sample when `_sums` was computed."""
        self._sums: MetricSums | None = None

    def add(self, run_id: str, sample: Sample, sampled_at: float, stale_after_seconds: float) -> None:
        """Add a sample of this run of the container. The run is needed where the metrics lack the engine's start time."""
        timed_sample, newest = _TimedSample(sampled_at, sample), self._newest
        if (
            newest is None
            or self._middle is None
            or run_id != self._run_id
            or sampled_at - newest.sampled_at > stale_after_seconds
            or isinstance(diff_samples(newest.sample, sample), CounterReset)
        ):
            self._run_id, self._base, self._middle, self._newest = run_id, timed_sample, timed_sample, timed_sample
            self._first_sampled_at = sampled_at
            return
        self._newest = timed_sample
        half = diff_samples(self._middle.sample, sample)
        if not isinstance(half, CounterReset) and _is_half_complete(half, sampled_at - self._middle.sampled_at):
            self._base, self._middle = self._middle, timed_sample

    def counters(self, now: float, stale_after_seconds: float) -> Counters | None:
        """Return the increase of the counters in the window; None while there is none, or when the last sample is too old."""
        if (
            self._base is None
            or self._newest is None
            or self._newest is self._base
            or now - self._newest.sampled_at > stale_after_seconds
        ):
            return None
        difference = diff_samples(self._base.sample, self._newest.sample)
        return None if isinstance(difference, CounterReset) else difference

    def sums(self, now: float, stale_after_seconds: float, warmup_seconds: float) -> MetricSums | None:
        """Return the sums that the pod's metrics are computed from. They are computed once per sample."""
        if self._newest is None or now - self._newest.sampled_at > stale_after_seconds:
            return None
        if self._newest is not self._sums_newest:
            counters, self._sums_newest = self.counters(now, stale_after_seconds), self._newest
            is_warm = self._base is not None and self._base.sampled_at - self._first_sampled_at >= warmup_seconds
            self._sums = None if counters is None else MetricSums.from_window(counters, is_warm=is_warm)
        return self._sums


def _is_half_complete(half: Counters, seconds: float) -> bool:
    if seconds < MIN_HALF_SECONDS or half.request_steps <= 0:
        return False
    return half.first_tokens >= MIN_HALF_REQUESTS or seconds >= MAX_HALF_SECONDS
