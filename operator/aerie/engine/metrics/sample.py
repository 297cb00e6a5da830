"""One scrape of an engine as typed numbers, and what happened between two of them.

Guarantees: the difference of two scrapes of one run is never negative; a restart in between is a `Reset`, never a rate. Counters
add up over pods and over adjacent windows. What the numbers of a window mean is in `windows`, how a page is read in `page`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from aerie.engine.metrics.histogram import Histogram


@dataclass(frozen=True, slots=True)
class SpeculationCounters:
    """Counters of speculation since the engine began, or of a window."""

    drafts: float
    draft_tokens: float
    accepted: float
    """Draft tokens accepted, bonus tokens not among them."""
    accepted_per_position: tuple[float, ...]
    """Drafts accepted up to and including the first, second, ... draft token; as many as the engine was built for."""


@dataclass(frozen=True, slots=True)
class Counters:
    """All that only grows: since the engine began in a `Sample`, in between as the difference of two.

    Their sum is that of pods or of adjacent windows, their difference a window. Both raise ValueError where the two cannot be of
    one kind: other buckets, other positions, or speculation in only one of them.
    """

    generation_tokens: float
    """First tokens included."""
    prompt_tokens: float
    computed_prompt_tokens: float
    """Prompt tokens not found in any cache."""
    prefix_cache_queries: float
    """Tokens."""
    prefix_cache_hits: float
    """Tokens."""
    preemptions: float
    finished: Mapping[str, float]
    """Finished requests by reason: stop, length, abort, error, ..."""
    request_steps: float
    """Engine steps times requests that got output in them, first tokens left out: the count of `Metric.INTER_TOKEN_LATENCY`."""
    step_seconds: float
    """The intervals of those request-steps together."""
    iterations: float
    """Engine iterations with output, once for each API-server process that got some."""
    queued_requests: float
    """Finished requests; those that `queue_seconds` is of."""
    queue_seconds: float
    time_to_first_token: Histogram
    """Seconds; one observation per request."""
    time_per_output_token: Histogram
    """Seconds; one observation per finished request, 0 where it had one token."""
    speculation: SpeculationCounters | None = None
    """None when the engine does not speculate."""

    @property
    def first_tokens(self) -> float:
        """Requests that got their first token."""
        return self.time_to_first_token.count

    def __add__(self, other: Counters) -> Counters:
        return _combine_counters(self, other, 1)

    def __sub__(self, other: Counters) -> Counters:
        return _combine_counters(self, other, -1)


@dataclass(frozen=True, slots=True)
class Gauges:
    """All that is as it was at the moment of the scrape; None where the page does not say.

    With several API-server processes a gauge is missing until the engine first sets it.
    """

    running_requests: float | None
    """Requests in the batch, of all engines."""
    waiting_requests: float | None
    """Requests not yet in it, of all engines."""
    kv_cache_usage: float | None
    """Share 0..1 of the KV cache in use, of the fullest engine."""
    kv_tokens: float | None
    """Tokens that the KV cache of all engines holds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape of one pod."""

    counters: Counters
    gauges: Gauges
    engines: frozenset[str]
    """The `engine` labels: one per data-parallel rank behind this page."""
    process_start_time: float | None = None
    """When the process began, in seconds of Unix time. None where the page does not say: with several API-server processes, and
    with vLLM's front end in Rust."""


@dataclass(frozen=True, slots=True)
class CounterReset:
    """Two scrapes that are not of one and the same run of one engine; the sentence says how that shows."""

    message: str


def diff_samples(before: Sample, after: Sample) -> Counters | CounterReset:
    """What happened between two scrapes of one pod, or that the engine began anew in between.

    A restart shows by its start time where the page has one, else by a counter that fell: a restart that is first scraped after
    every counter has passed its old value goes unseen there, so compare the container's restart count too.
    """
    if (
        before.process_start_time is not None
        and after.process_start_time is not None
        and before.process_start_time != after.process_start_time
    ):
        return CounterReset(
            f"the engine was restarted: it began at {after.process_start_time:.0f}, before that at {before.process_start_time:.0f}."
        )
    if before.engines != after.engines:
        return CounterReset(f"the engines behind the page changed from {sorted(before.engines)} to {sorted(after.engines)}.")
    try:
        window = after.counters - before.counters
    except ValueError as error:
        return CounterReset(f"the two scrapes are of different engines: {error}")
    if fell := _find_decreased_counter(window):
        return CounterReset(f"the engine was restarted: {fell} fell.")
    return window


_CounterSet = TypeVar("_CounterSet", "Counters", "SpeculationCounters")


def _combine_counters(left: _CounterSet, right: _CounterSet, sign: int) -> _CounterSet:
    """Field by field: left + sign * right."""
    return type(left)(
        **{f.name: _combine_values(f.name, getattr(left, f.name), getattr(right, f.name), sign) for f in fields(left)}
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
            return tuple(mine + sign * theirs for mine, theirs in zip(left, right, strict=True))
        case Mapping(), Mapping():
            return {key: left.get(key, 0.0) + sign * right.get(key, 0.0) for key in (*left, *(right.keys() - left.keys()))}
        case _:
            return left + sign * right


def _find_decreased_counter(part: Counters | SpeculationCounters) -> str | None:
    """The name of a counter that is negative, if any."""
    for one in fields(part):
        value = getattr(part, one.name)
        match value:
            case None:
                numbers: tuple[float, ...] = ()
            case SpeculationCounters():
                if fell := _find_decreased_counter(value):
                    return fell
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
            return one.name.replace("_", " ")
    return None
