"""What vLLM counts, and when: one Counters per engine, updated as vLLM's frontend does after each engine step.

Names are vLLM's without `vllm:` and suffixes. Buckets and update rules are those of vLLM 0.32.0: vllm/v1/metrics/buckets.py,
stats.py (IterationStats), loggers.py (PrometheusStatLogger.record) and vllm/v1/spec_decode/metrics.py. In short:

* a step whose outputs are not empty is one observation of iteration_tokens: prompt tokens computed + tokens returned;
* inter_token_latency is observed once per request and step, whatever the number of tokens; the first output is TTFT instead;
* prompt tokens count when the first token comes; a request that the client leaves counts in no request_* family;
* a draft is counted with the tokens accepted before the answer is cut at its end, so generated <= 1 + accepted there.
"""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from aerie_lab.engine.performance_model.request import Request
from aerie_lab.engine.performance_model.step_sequence import IntArray

HistogramValues = npt.NDArray[np.floating[Any]] | IntArray | Sequence[int]
_MAX_PENDING_ARRAYS = 256

LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
ITERATION_TOKENS_BUCKETS = tuple(float(1 << power) for power in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
PARAMS_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `max_model_len`: buckets of the families that count a request's tokens.

    >>> token_buckets(20)
    (1.0, 2.0, 5.0, 10.0, 20.0)
    """
    series = (mantissa * 10.0**power for power in itertools.count() for mantissa in (1, 2, 5))
    return tuple(itertools.takewhile(lambda value: value <= max_model_len, series))


class Histogram:
    """Counts per bucket (the last one is +Inf) and their sum, as Prometheus keeps them but not yet cumulated.

    Values that come many at a time are sorted into buckets when someone looks: once per scrape instead of once per call.
    """

    __slots__ = ("_counts", "_edges", "_pending", "_total", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._edges = np.array(self.bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._total = 0.0
        self._pending: list[tuple[HistogramValues, int]] = []

    @property
    def counts(self) -> list[int]:
        """Observations by bucket."""
        self._flush_pending()
        return self._counts

    @property
    def total(self) -> float:
        """Sum of the values."""
        self._flush_pending()
        return self._total

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def copy(self) -> Self:
        copied = object.__new__(type(self))  # every scrape copies them all, and copy.copy is slow
        copied.bounds, copied._edges, copied._pending = self.bounds, self._edges, []
        copied._counts, copied._total = self.counts.copy(), self._total
        return copied

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times; a value on an edge belongs to the bucket that the edge closes."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._total += value * times

    def observe_many(self, values: HistogramValues, times: int = 1) -> None:
        """Count each of `values` `times` times. The array is retained for a while: do not change it afterwards."""
        self._pending.append((values, times))
        if len(self._pending) >= _MAX_PENDING_ARRAYS:
            self._flush_pending()

    def _flush_pending(self) -> None:
        if not self._pending:
            return
        pieces, each = zip(*self._pending, strict=True)
        self._pending.clear()
        values, times = np.concatenate(pieces), np.repeat(each, list(map(len, pieces)))
        for place, count in enumerate(np.bincount(self._edges.searchsorted(values), weights=times).tolist()):
            self._counts[place] += int(count)
        self._total += float(values @ times)


class Counters:
    """Everything that one engine has counted since it started, and its gauges as of the last step."""

    def __init__(self, max_model_len: int, draft_tokens: int | None) -> None:
        tokens = token_buckets(max_model_len)
        self.max_draft_tokens = draft_tokens
        """`num_speculative_tokens`; None: speculation is off, and its families are not on the page."""
        # gauges
        self.num_requests_running = 0
        self.num_requests_waiting = 0
        self.kv_cache_usage_perc = 0.0
        # counters
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.request_success = dict.fromkeys(FINISHED_REASONS, 0)
        self.spec_decode_num_draft_tokens = 0
        # histograms
        self.request_prompt_tokens = Histogram(tokens)
        self.request_generation_tokens = Histogram(tokens)
        self.iteration_tokens = Histogram(ITERATION_TOKENS_BUCKETS)
        self.request_max_num_generation_tokens = Histogram(tokens)
        self.request_params_n = Histogram(PARAMS_N_BUCKETS)
        self.request_params_max_tokens = Histogram(tokens)
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token_latency = Histogram(ITL_BUCKETS)
        self.request_time_per_output_token = Histogram(ITL_BUCKETS)
        self.e2e_request_latency = Histogram(LATENCY_BUCKETS)
        self.request_queue_time = Histogram(LATENCY_BUCKETS)
        self.request_inference_time = Histogram(LATENCY_BUCKETS)
        self.request_prefill_time = Histogram(LATENCY_BUCKETS)
        self.request_decode_time = Histogram(LATENCY_BUCKETS)
        self.request_num_preemptions = Histogram(PREEMPTIONS_BUCKETS)
        self.request_prefill_kv_computed_tokens = Histogram(tokens)
        # not on the page as such
        self.tokens_per_draft = Histogram(range(1, (draft_tokens or 0) + 1))
        """Drafts by the tokens that their step emitted: accepted ones and one of the target."""

    @property
    def spec_decode_num_drafts(self) -> int:
        return self.tokens_per_draft.count

    @property
    def spec_decode_num_accepted_tokens(self) -> int:
        return int(self.spec_decode_num_accepted_tokens_per_pos.sum())

    @property
    def spec_decode_num_accepted_tokens_per_pos(self) -> IntArray:
        at_least: IntArray = np.cumsum(self.tokens_per_draft.counts[:0:-1], dtype=np.int64)[::-1]
        return at_least

    def finish(self, request: Request) -> None:
        """A request has ended with its last token."""
        self.request_success[request.finish_reason or "stop"] += 1
        self.e2e_request_latency.observe(request.last_token_time - request.arrival_time)
        self.request_queue_time.observe(request.scheduled_time - request.arrival_time)
        self.request_prefill_time.observe(request.first_token_time - request.scheduled_time)
        self.request_inference_time.observe(request.last_token_time - request.scheduled_time)
        self.request_decode_time.observe(request.last_token_time - request.first_token_time)
        self.request_num_preemptions.observe(request.preemptions)
        self.request_prefill_kv_computed_tokens.observe(request.prompt_tokens - request.cached_tokens)
        self.request_prompt_tokens.observe(request.prompt_tokens)
        self.request_generation_tokens.observe(request.generated_tokens)
        self.request_time_per_output_token.observe(request.time_per_output_token)
        self.request_params_max_tokens.observe(request.max_tokens)
        self.request_max_num_generation_tokens.observe(request.generated_tokens)
        self.request_params_n.observe(1)

    def copy(self) -> Self:
        """Return a copy of the present values, as a scrape sees them."""
        copied = copy.copy(self)
        for name, value in vars(self).items():
            if not isinstance(value, int | float | None):
                setattr(copied, name, value.copy())
        return copied
