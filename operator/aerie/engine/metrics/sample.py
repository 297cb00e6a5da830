"""One scrape of an engine as typed numbers, and the difference between two scrapes.

Guarantees: the difference of two scrapes of one run is never negative. A restart in between is a `CounterReset`, never a rate.
Counters add up over pods and over adjacent windows. `rates` interprets the numbers of a window; `exposition` parses a response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from aerie.engine.metrics.histogram import Histogram


@dataclass(frozen=True, slots=True)
class SpeculationCounters:
    """Counters of speculation since the engine started, or of a window."""

    drafts: float
    draft_tokens: float
    accepted: float
    """Accepted draft tokens, without bonus tokens."""
    accepted_per_position: tuple[float, ...]
    """Drafts accepted up to and including the first, second, ... draft token; one entry for each position of the engine's K."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Everything that only grows: in a `Sample` since the engine started, in a window as the difference of two samples.

    A sum combines pods or adjacent windows; a difference is a window. Both raise ValueError if the two are incompatible:
    different buckets, different positions, or speculation in only one of them.
    """

    generation_tokens: float
    """Output tokens, first tokens included."""
    prompt_tokens: float
    computed_prompt_tokens: float
    """Prompt tokens that were in no cache."""
    prefix_cache_queries: float
    """Prompt tokens looked up."""
    prefix_cache_hits: float
    """Prompt tokens found."""
    preemptions: float
    finished: Mapping[str, float]
    """Finished requests by reason: stop, length, abort, error, ..."""
    request_steps: float
    """Engine steps times requests that got output in them, first tokens excluded: the count of `Metric.INTER_TOKEN_LATENCY`."""
    step_seconds: float
    """Total of the intervals of those request-steps."""
    iterations: float
    """Engine iterations with output, counted once for each API-server process that got output."""
    queued_requests: float
    """Finished requests, whose queueing times add up to `queue_seconds`."""
    queue_seconds: float
    time_to_first_token: Histogram
    """Seconds; one observation per request."""
    time_per_output_token: Histogram
    """Seconds; one observation per finished request, 0 for a request of one token."""
    speculation: SpeculationCounters | None = None
    """None if the engine does not speculate."""

    @property
    def first_tokens(self) -> float:
        """Number of requests that got their first token."""
        return self.time_to_first_token.count

    def __add__(self, other: Counters) -> Counters:
        return _combine_counters(self, other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return _combine_counters(self, other, -1)


@dataclass(frozen=True, slots=True)
class Gauges:
    """Values at the time of the scrape; None if the exposition does not contain them.

    With several API-server processes a gauge is missing until the engine first sets it.
    """

    running_requests: float | None
    """Requests in the batch, of all engines."""
    waiting_requests: float | None
    """Requests not yet in the batch, of all engines."""
    kv_cache_usage: float | None
    """Share 0..1 of the KV cache in use, of the fullest engine."""
    kv_tokens: float | None
    """Capacity of the KV cache of all engines, in tokens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of one pod."""

    counters: Counters
    gauges: Gauges
    engines: frozenset[str]
    """Values of the label `engine`: one for each data-parallel rank behind this metrics endpoint."""
    process_start_time: float | None = None
    """Start of the process, in seconds of Unix time. None if the exposition lacks it: with several API-server processes, and
    with vLLM's front end in Rust."""


@dataclass(frozen=True, slots=True)
class CounterReset:
    """Two scrapes that are not of the same run of one engine; the message names the evidence."""

    message: str


def diff_samples(before: Sample, after: Sample) -> Counters | CounterReset:
    """Return the counters between two scrapes of one pod, or that the engine restarted in between.

    The start time reveals a restart if the exposition has one. Otherwise a counter that fell reveals it. A restart is missed
    there if the first scrape after it comes when every counter has passed its old value, so compare the container's restart count
    too.
    """
    if (
        before.process_start_time is not None
        and after.process_start_time is not None
        and before.process_start_time != after.process_start_time
    ):
        return CounterReset(
            f"the engine was restarted: it began at {after.process_start_time:.0f}, before that at "
            f"{before.process_start_time:.0f}."
        )
    if before.engines != after.engines:
        return CounterReset(f"the engines of the response changed from {sorted(before.engines)} to {sorted(after.engines)}.")
    try:
        window = after.counters - before.counters
    except ValueError as error:
        return CounterReset(f"the two scrapes are of different engines: {error}")
    if decreased_counter := _find_decreased_counter(window):
        return CounterReset(f"the engine was restarted: {decreased_counter} fell.")
    return window


_CounterSet = TypeVar("_CounterSet", "Counters", "SpeculationCounters")


def _combine_counters(left: _CounterSet, right: _CounterSet, sign: int) -> _CounterSet:
    """Return left + sign * right, field by field."""
    return type(left)(
        **{
            counter.name: _combine_values(counter.name, getattr(left, counter.name), getattr(right, counter.name), sign)
            for counter in fields(left)
        }
    )


def _combine_values(name: str, left: Any, right: Any, sign: int) -> Any:
    match left, right:
        case None, None:
            return None
        case (None, _) | (_, None):
            raise ValueError(f"only one of them has {name}.")
        case SpeculationCounters(), SpeculationCounters():
            return _combine_counters(left, right, sign)
        case Histogram(), Histogram():
            return left + right if sign > 0 else left - right
        case tuple(), tuple():
            if len(left) != len(right):
                raise ValueError(f"{len(left)} and {len(right)} positions were drafted.")
            return tuple(left_count + sign * right_count for left_count, right_count in zip(left, right, strict=True))
        case Mapping(), Mapping():
            return {key: left.get(key, 0.0) + sign * right.get(key, 0.0) for key in (*left, *(right.keys() - left.keys()))}
        case _:
            return left + sign * right


def _find_decreased_counter(counters: Counters | SpeculationCounters) -> str | None:
    """Return the name of a counter that is negative; None without one."""
    for counter in fields(counters):
        value = getattr(counters, counter.name)
        match value:
            case None:
                numbers: tuple[float, ...] = ()
            case SpeculationCounters():
                if decreased_counter := _find_decreased_counter(value):
                    return decreased_counter
                numbers = ()
            case Histogram():
                steps = zip((0.0, *value.counts), value.counts, strict=False)
                numbers = (*(upper - lower for lower, upper in steps), value.sum)
            case tuple():
                numbers = value
            case Mapping():
                numbers = tuple(value.values())
            case _:
                numbers = (value,)
        if any(number < 0 for number in numbers):
            return counter.name.replace("_", " ")
    return None
