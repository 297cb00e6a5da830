"""The few numbers of a scrape that an analysis keeps: small enough for a status, enough for every criterion.

Guarantee: a snapshot holds plain sums, so snapshots add up over pods and their differences are windows. `criteria` defines which
sum is a share of which. A latency objective is moved to the nearest bucket edge, because a histogram has no counts between edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.sample import Sample


@dataclass(frozen=True, slots=True)
class SampleProjection:
    """The numbers of a sample that are kept; fixed when an analysis begins."""

    draft_positions: int
    """Draft positions whose accepted tokens are counted."""
    time_per_output_token_edge: float | None = None
    """Bucket edge, in seconds, of the objective for time per output token; None without one."""
    time_to_first_token_edge: float | None = None
    """Bucket edge, in seconds, of the objective for time to first token; None without one."""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Sums since an engine started, or in a window."""

    drafts: float = 0.0
    accepted_tokens: float = 0.0
    """Draft tokens accepted at the positions that are counted."""
    draft_tokens: float = 0.0
    decode_tokens: float = 0.0
    """Output tokens other than first tokens."""
    decode_seconds: float = 0.0
    output_tokens: float = 0.0
    finished_requests: float = 0.0
    truncated_requests: float = 0.0
    """Finished requests that reached their token limit."""
    failed_requests: float = 0.0
    preemptions: float = 0.0
    first_tokens: float = 0.0
    first_token_seconds: float = 0.0
    slow_first_token_requests: float = 0.0
    """Requests whose first token took longer than the objective."""
    timed_requests: float = 0.0
    """Finished requests whose time per output token was measured."""
    slow_output_requests: float = 0.0
    """Requests among `timed_requests` that took longer per output token than the objective."""
    request_steps: float = 0.0
    """Steps of the engine, once for each request in them."""
    iterations: float = 0.0
    """Steps of the engine."""
    abandoned_requests: float = 0.0
    """Requests that got their first token, no longer run and are not finished: their clients disconnected. vLLM counts these
    nowhere (`request_success_total{finished_reason="abort"}` stays 0). The value is a balance of counters and a gauge, so it may
    decrease by a few requests from one scrape to the next. 0 where the exposition has no such gauge."""

    def __add__(self, other: EngineCounts) -> EngineCounts:
        return EngineCounts(*(getattr(self, name) + getattr(other, name) for name in _COUNT_FIELDS))

    def __sub__(self, other: EngineCounts) -> EngineCounts:
        return EngineCounts(*(getattr(self, name) - getattr(other, name) for name in _COUNT_FIELDS))

    @property
    def busy_seconds(self) -> float:
        """Seconds that the engine has worked: its steps, each as long as requests waited for one on average."""
        return self.iterations * self.decode_seconds / self.request_steps if self.request_steps > 0 else 0.0

    @property
    def decreased_counter(self) -> str | None:
        """The first sum that is negative: the engine restarted, or the exposition is invalid. None where none is."""
        return next((name for name in _COUNT_FIELDS if getattr(self, name) < 0 and name != "abandoned_requests"), None)


_COUNT_FIELDS = tuple(field.name for field in fields(EngineCounts))


@dataclass(frozen=True, slots=True)
class CounterSnapshot:
    """The counters of one scrape of one pod."""

    counts: EngineCounts
    load: float | None
    """Requests running and waiting; None where the exposition does not have them."""
    process_start_time: float | None
    engine_count: int
    waiting_requests: float | None = None
    """Requests of the load that have no first token yet; None where the exposition does not have them."""


def read_counters(sample: Sample, projection: SampleProjection) -> CounterSnapshot:
    """Return the numbers of a sample that the projection keeps."""
    counters, gauges, speculation = sample.counters, sample.gauges, sample.counters.speculation
    load_gauges = [gauge for gauge in (gauges.running_requests, gauges.waiting_requests) if gauge is not None]
    counts = EngineCounts(
        drafts=speculation.drafts if speculation else 0.0,
        accepted_tokens=sum(speculation.accepted_per_position[: projection.draft_positions]) if speculation else 0.0,
        draft_tokens=speculation.draft_tokens if speculation else 0.0,
        # Two counters of one exposition are not of one instant, so the difference may decrease by a few tokens.
        decode_tokens=max(0.0, counters.generation_tokens - counters.first_tokens),
        decode_seconds=counters.step_seconds,
        output_tokens=counters.generation_tokens,
        finished_requests=sum(counters.finished.values()),
        truncated_requests=counters.finished.get("length", 0.0),
        failed_requests=counters.finished.get("error", 0.0),
        preemptions=counters.preemptions,
        first_tokens=counters.first_tokens,
        first_token_seconds=counters.time_to_first_token.sum,
        slow_first_token_requests=_count_over_edge(counters.time_to_first_token, projection.time_to_first_token_edge),
        timed_requests=counters.time_per_output_token.count,
        slow_output_requests=_count_over_edge(counters.time_per_output_token, projection.time_per_output_token_edge),
        request_steps=counters.request_steps,
        iterations=counters.iterations,
        abandoned_requests=0.0
        if gauges.running_requests is None
        else counters.first_tokens - sum(counters.finished.values()) - gauges.running_requests,
    )
    return CounterSnapshot(
        counts, sum(load_gauges) if load_gauges else None, sample.process_start_time, len(sample.engines), gauges.waiting_requests
    )


def nearest_bucket_edge(objective_seconds: float, edges: Sequence[float]) -> float:
    """Return the finite bucket edge nearest to an objective, by ratio: the edge at which both arms are counted.

    Raise ValueError where there is none, or the objective is not above 0.

    >>> nearest_bucket_edge(0.04, (0.01, 0.025, 0.05, math.inf))
    0.05
    """
    finite = [edge for edge in edges if 0 < edge < math.inf]
    if not finite or not objective_seconds > 0:
        raise ValueError(f"an objective of {objective_seconds} s has no edge among {tuple(edges)}.")
    return min(finite, key=lambda edge: abs(math.log(edge / objective_seconds)))


def _count_over_edge(histogram: Histogram, edge: float | None) -> float:
    """Return the number of observations beyond an edge; 0 without one. Raise ValueError when the histogram lacks the edge."""
    if edge is None:
        return 0.0
    if edge not in histogram.edges:
        raise ValueError(f"the engine's buckets {histogram.edges} have no edge at {edge} s: give both arms the same buckets.")
    return histogram.count - histogram.counts[histogram.edges.index(edge)]
