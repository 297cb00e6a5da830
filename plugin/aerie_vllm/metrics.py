"""The plugin's metrics, in the registry that vLLM's `/metrics` shows.

Guarantees: a counter of a drafter is what vLLM counted while that drafter was loaded, so the drafters' counters add up to vLLM's
own. Labels have few values: drafters that were loaded in this process, and the reasons in the code. Not guaranteed: anything with
several API servers, whose registries are not this one; a drafter does not change in place there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from aerie_vllm import counters
from aerie_vllm.counters import Counts, WindowLog
from aerie_vllm.worker_protocol import Drafter

_PAUSE_BUCKETS = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_COUNTERS = {
    "drafts": (counters.DRAFTS, "Verification steps with draft tokens."),
    "draft_tokens": (counters.DRAFT_TOKENS, "Draft tokens that were verified."),
    "accepted_tokens": (counters.ACCEPTED_TOKENS, "Draft tokens that were accepted."),
    "generation_tokens": (counters.GENERATION_TOKENS, "Output tokens."),
    "requests": (counters.REQUESTS, "Requests that ended."),
}
_SUMMARIES = {
    "time_to_first_token_seconds": (counters.TIME_TO_FIRST_TOKEN, "Time to the first token."),
    "time_per_output_token_seconds": (counters.TIME_PER_OUTPUT_TOKEN, "Time per output token of requests that ended."),
}


class DrafterState(Protocol):
    """The state that is shown."""

    windows: WindowLog

    @property
    def own(self) -> Drafter | None: ...

    @property
    def loaded(self) -> Drafter | None: ...


class Metrics:
    """The counters that calls of the endpoint increase."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._swaps = Counter("aerie_drafter_swaps", "Changes of the drafter in the running engine.", registry=registry)
        self._swap_seconds = Histogram(
            "aerie_drafter_swap_seconds",
            "Time in which no request advanced because the drafter changed.",
            buckets=_PAUSE_BUCKETS,
            registry=registry,
        )
        self._rejections = Counter(
            "aerie_drafter_refusals", "Calls of the endpoint that were rejected or failed.", ["reason"], registry=registry
        )

    def observe_swap(self, seconds: float) -> None:
        """Count a swap."""
        self._swaps.inc()
        self._swap_seconds.observe(seconds)

    def count_rejection(self, reason: str) -> None:
        """Count a call that was rejected or failed."""
        self._rejections.labels(reason).inc()


class DrafterCollector(Collector):
    """What is loaded, and what vLLM counted for each drafter."""

    def __init__(self, state: DrafterState) -> None:
        self._state = state

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the families depend on what was loaded."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        info = GaugeMetricFamily("aerie_drafter_info", "The loaded drafter.", labels=["digest", "kind", "own"])
        own, loaded = self._state.own, self._state.loaded
        if own is not None and loaded is not None:
            info.add_metric([loaded["digest"], loaded["kind"], str(loaded["digest"] == own["digest"]).lower()], 1.0)
        yield info
        totals = self._state.windows.total_by_digest()
        for name, (series, documentation) in _COUNTERS.items():
            counter = CounterMetricFamily(f"aerie_drafter_{name}", documentation, labels=["digest"])
            for digest, counts in totals.items():
                counter.add_metric([digest], _sum(counts, series))
            yield counter
        for name, (series, documentation) in _SUMMARIES.items():
            summary = SummaryMetricFamily(f"aerie_drafter_{name}", documentation, labels=["digest"])
            for digest, counts in totals.items():
                summary.add_metric([digest], round(_sum(counts, f"{series}_count")), _sum(counts, f"{series}_sum"))
            yield summary


def _sum(counts: Counts, series: str) -> float:
    return sum(counts.get(series, {}).values())
