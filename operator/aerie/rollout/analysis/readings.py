"""The few numbers of a scrape that an analysis keeps: small enough for a status, enough for every criterion.

Guarantee: a reading holds plain sums, so readings add up over pods and their differences are windows; what is a share of what is
said in `criteria`. A latency objective is moved to the nearest bucket edge, because a histogram knows nothing between edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from aerie.engine.histogram import Histogram
from aerie.engine.samples import Sample


@dataclass(frozen=True, slots=True)
class Kept:
    """Which numbers of a sample are kept; fixed when an analysis begins."""

    positions: int
    """Draft positions whose accepted tokens count."""
    output_edge: float | None = None
    """Bucket edge, in seconds, of the objective for time per output token; None without one."""
    first_edge: float | None = None
    """The same for time to first token."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums since an engine began, or in a window."""

    drafts: float = 0.0
    accepted: float = 0.0
    """Draft tokens accepted at the positions that count."""
    draft_tokens: float = 0.0
    decode_tokens: float = 0.0
    """Output tokens without first tokens."""
    decode_seconds: float = 0.0
    output_tokens: float = 0.0
    finished: float = 0.0
    cut: float = 0.0
    """Finished requests that reached their limit of tokens."""
    errors: float = 0.0
    preemptions: float = 0.0
    first_tokens: float = 0.0
    first_seconds: float = 0.0
    slow_first: float = 0.0
    """Requests whose first token took longer than the objective."""
    timed: float = 0.0
    """Finished requests whose time per output token was measured."""
    slow_output: float = 0.0
    """Those that took longer per output token than the objective."""
    request_steps: float = 0.0
    """Steps of the engine, once for each request in them."""
    iterations: float = 0.0
    """Steps of the engine."""
    given_up: float = 0.0
    """Requests that got their first token, do not run any more and are not finished: their clients went away. vLLM counts these
    nowhere (`request_success_total{finished_reason="abort"}` stays 0); it is a balance of counters and a gauge, and so may fall
    by a few requests from one page to the next. 0 where the page has no such gauge."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(other, name) for name in _NAMES))

    @property
    def busy_seconds(self) -> float:
        """How long the engine has worked: its steps, each as long as requests had to wait for one in the mean."""
        return self.iterations * self.decode_seconds / self.request_steps if self.request_steps > 0 else 0.0

    @property
    def fell(self) -> str | None:
        """The first sum that is negative: the engine began anew, or the page lies."""
        return next((name for name in _NAMES if getattr(self, name) < 0 and name != "given_up"), None)


_NAMES = tuple(field.name for field in fields(Counts))


@dataclass(frozen=True, slots=True)
class Reading:
    """One scrape of one pod."""

    counts: Counts
    load: float | None
    """Requests running and waiting; None where the page does not say."""
    started: float | None
    engines: int
    waiting: float | None = None
    """Those of the load that have no first token yet; None where the page does not say."""

    def to_dict(self) -> dict[str, object]:
        """Zeros left out."""
        counts = {name: value for name, value in asdict(self.counts).items() if value}
        return {"counts": counts, "load": self.load, "started": self.started, "engines": self.engines, "waiting": self.waiting}

    @classmethod
    def from_dict(cls, found: dict[str, object]) -> Reading:
        counts = found["counts"]
        assert isinstance(counts, dict)
        return cls(Counts(**counts), found["load"], found["started"], found["engines"], found.get("waiting"))  # type: ignore[arg-type]


def read(sample: Sample, kept: Kept) -> Reading:
    """What is kept of a sample."""
    counters, gauges, speculation = sample.counters, sample.gauges, sample.counters.speculation
    known = [gauge for gauge in (gauges.running, gauges.waiting) if gauge is not None]
    counts = Counts(
        drafts=speculation.drafts if speculation else 0.0,
        accepted=sum(speculation.accepted_per_position[: kept.positions]) if speculation else 0.0,
        draft_tokens=speculation.draft_tokens if speculation else 0.0,
        # Two counters of one page are not of one instant, so the difference may fall back by a few tokens.
        decode_tokens=max(0.0, counters.generation_tokens - counters.first_tokens),
        decode_seconds=counters.step_seconds,
        output_tokens=counters.generation_tokens,
        finished=sum(counters.finished.values()),
        cut=counters.finished.get("length", 0.0),
        errors=counters.finished.get("error", 0.0),
        preemptions=counters.preemptions,
        first_tokens=counters.first_tokens,
        first_seconds=counters.time_to_first_token.sum,
        slow_first=_beyond(counters.time_to_first_token, kept.first_edge),
        timed=counters.time_per_output_token.count,
        slow_output=_beyond(counters.time_per_output_token, kept.output_edge),
        request_steps=counters.request_steps,
        iterations=counters.iterations,
        given_up=0.0 if gauges.running is None else counters.first_tokens - sum(counters.finished.values()) - gauges.running,
    )
    return Reading(counts, sum(known) if known else None, sample.started, len(sample.engines), gauges.waiting)


def nearest_edge(limit: float, edges: Sequence[float]) -> float:
    """The finite bucket edge nearest to an objective, by ratio: the one at which both arms are counted.

    >>> nearest_edge(0.04, (0.01, 0.025, 0.05, math.inf))
    0.05
    """
    finite = [edge for edge in edges if 0 < edge < math.inf]
    if not finite or not limit > 0:
        raise ValueError(f"an objective of {limit} s has no edge among {tuple(edges)}.")
    return min(finite, key=lambda edge: abs(math.log(edge / limit)))


def _beyond(histogram: Histogram, edge: float | None) -> float:
    """Observations beyond an edge; 0 without one. Raises ValueError when the histogram does not have it."""
    if edge is None:
        return 0.0
    if edge not in histogram.edges:
        raise ValueError(f"the engine's buckets {histogram.edges} have no edge at {edge} s: give both arms the same buckets.")
    return histogram.count - histogram.counts[histogram.edges.index(edge)]
