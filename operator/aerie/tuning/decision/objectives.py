"""Forecast the latencies that users would see under a setting, and compare them with the objectives.

The latencies are the time per output token and the time to the first token. An objective is for a percentile of the requests. The
objective of the time per output token has to hold at the largest load too: at each batch it holds, or a token takes no longer
than now.

The percentile of requests is the percentile over the batches of the load, times a factor, because requests differ by more than
the batch. The factor is the measured latency under the current setting (the requests' histogram) over its forecast. Time to the
first token is queueing and prefill, which no setting changes directly. It is assumed to grow with the step time or with the busy
seconds per token, whichever grows more. Not modelled: a queue that becomes unstable, or empties.

A further forecast is the slowdown while replicas are unavailable: the other replicas receive their requests and run larger
batches, so each token takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.engine.metrics.histogram import Histogram
from aerie.engine.speculation import SpeculationSetting
from aerie.tuning.decision.forecast import Forecast, draft_tokens_by_batch
from aerie.tuning.decision.policy import LatencyObjectives
from aerie.tuning.models.numeric import FloatArray, quantiles
from aerie.tuning.models.step_time import StepTimeModel
from aerie.tuning.telemetry import TelemetryBlock

_MAX_BATCH = 512.0
"""Requests in a step: vLLM's --max-num-seqs is 256 or more by default."""
_DEFAULT_PERCENTILE_FACTOR = 1.25
"""Ratio of the percentile of requests to that of batches, if no request has finished."""


@dataclass(frozen=True)
class ObservedLatencies:
    """Percentiles of the requests under the current setting, in seconds; None if no request reached that point."""

    time_per_output_token: float | None = None
    time_to_first_token: float | None = None


@dataclass(frozen=True)
class LatencyForecast:
    """Latencies of one setting, at the objectives' percentile of the requests."""

    time_per_output_token: tuple[float, float]
    """Seconds: the 50 % and 95 % quantiles of the forecast."""
    time_to_first_token: tuple[float, float] | None
    probability_met: float
    """Probability that all objectives hold, or the lowest probability at any batch that the objective of the time per output
    token holds, whichever is lower; 1 without objectives."""
    probability_no_worse: float
    """Probability that on the observed load each objective holds, or is missed by no more than now; the condition for an
    exploration canary."""


def measure_latencies(blocks: Iterable[TelemetryBlock], setting: SpeculationSetting, percentile: int) -> ObservedLatencies:
    """Return the latencies in the histograms of a setting's requests, interpolated inside a bucket."""
    block_counters = [block.counters for block in blocks if block.setting == setting]
    share = percentile / 100
    return ObservedLatencies(
        _merged_quantile([counters.time_per_output_token for counters in block_counters], share),
        _merged_quantile([counters.time_to_first_token for counters in block_counters], share),
    )


def max_token_seconds(
    forecast: Forecast, current: SpeculationSetting, observed_latencies: ObservedLatencies, objectives: LatencyObjectives
) -> float:
    """Return the seconds per token at a batch beyond which its requests break the objective; infinite without an objective."""
    if objectives.time_per_output_token is None:
        return math.inf
    # Within a window requests differ at least by the default factor, even if those of a whole day are more alike.
    return objectives.time_per_output_token / max(
        _percentile_factor(forecast, current, observed_latencies, objectives), _DEFAULT_PERCENTILE_FACTOR
    )


def forecast_latencies(
    forecast: Forecast,
    headroom_forecast: Forecast | None,
    setting: SpeculationSetting,
    current: SpeculationSetting,
    observed_latencies: ObservedLatencies,
    objectives: LatencyObjectives,
) -> LatencyForecast:
    """Forecast a setting's latencies.

    `headroom_forecast`: the forecast at higher batches that may occur, up to the highest one.
    """
    share = objectives.percentile / 100
    factor = _percentile_factor(forecast, current, observed_latencies, objectives)
    output_seconds = factor * _token_seconds_at_share(forecast, setting, current, share)
    is_met = np.ones(len(output_seconds), dtype=bool)
    is_no_worse = is_met.copy()
    if objectives.time_per_output_token is not None:
        is_met &= output_seconds <= objectives.time_per_output_token
        is_no_worse &= is_met | (output_seconds <= factor * _token_seconds_at_share(forecast, current, current, share))
    first_token_seconds: FloatArray | None = None
    if observed_latencies.time_to_first_token is not None:
        busy_ratio = forecast.busy_seconds(setting, current) / forecast.busy_seconds(current, current)
        step_ratio = _mean_step_seconds(forecast, setting) / _mean_step_seconds(forecast, current)
        first_token_seconds = observed_latencies.time_to_first_token * np.maximum(busy_ratio, step_ratio)
        if objectives.time_to_first_token is not None:
            is_met &= first_token_seconds <= objectives.time_to_first_token
            is_no_worse &= first_token_seconds <= max(objectives.time_to_first_token, observed_latencies.time_to_first_token)
    max_seconds = max_token_seconds(forecast, current, observed_latencies, objectives)
    by_batch = [
        float(batches.probability_within_by_batch(setting, current, max_seconds).min())
        for batches in (forecast, headroom_forecast)
        if batches is not None
    ]
    first_token_quantiles = None if first_token_seconds is None else _median_and_p95(first_token_seconds)
    return LatencyForecast(
        _median_and_p95(output_seconds),
        first_token_quantiles,
        float(min(is_met.mean(), *by_batch)),
        float(min(is_no_worse.mean(), by_batch[0])),
    )


def _percentile_factor(
    forecast: Forecast, current: SpeculationSetting, observed_latencies: ObservedLatencies, objectives: LatencyObjectives
) -> float:
    """Return the ratio of the percentile of requests to that of batches."""
    if observed_latencies.time_per_output_token is None:
        return _DEFAULT_PERCENTILE_FACTOR
    return observed_latencies.time_per_output_token / float(
        np.median(_token_seconds_at_share(forecast, current, current, objectives.percentile / 100))
    )


def _token_seconds_at_share(
    forecast: Forecast, setting: SpeculationSetting, current: SpeculationSetting, share: float
) -> FloatArray:
    """Return draws of a user's seconds per token at the batch that is as slow as this share of the request-steps, or slower."""
    seconds = forecast.rate_matched_token_seconds(setting, current)
    order = np.argsort(seconds.mean(axis=0))
    index = int(np.searchsorted(np.cumsum(forecast.load.shares[order]), share))
    draws: FloatArray = seconds[:, order[min(index, len(order) - 1)]]
    return draws


def _mean_step_seconds(forecast: Forecast, setting: SpeculationSetting) -> FloatArray:
    """Return draws of the mean seconds of a step."""
    draws: FloatArray = (forecast.token_seconds(setting) * forecast.tokens_per_step(setting)) @ forecast.load.shares
    return draws


def _median_and_p95(values: FloatArray) -> tuple[float, float]:
    median, p95 = quantiles(values, 0.5, 0.95)
    return median, p95


def _merged_quantile(histograms: Sequence[Histogram], share: float) -> float | None:
    """Return the quantile of all histograms with the newest one's buckets; None without observations, or beyond the last
    bucket."""
    mergeable = [histogram for histogram in histograms if histogram.edges == histograms[-1].edges]
    if not mergeable:
        return None
    counts = tuple(sum(column) for column in zip(*(histogram.counts for histogram in mergeable), strict=True))
    merged = Histogram(mergeable[-1].edges, counts, sum(histogram.sum for histogram in mergeable))
    quantile = merged.quantile(share)
    return quantile.estimate if quantile is not None and math.isfinite(quantile.high) else None


def load_slowdown(
    step_time: StepTimeModel, acceptance_lengths: FloatArray, setting: SpeculationSetting, batch: float, load_factor: float
) -> float:
    """Return by what share a user's time per output token grows when each replica receives `load_factor` times the requests.

    `batch` is the mean batch before. The result is infinite if no batch up to `_MAX_BATCH` gives so many tokens.
    `acceptance_lengths`: by K. Prefill is left out.
    """
    batches = np.geomspace(batch, max(_MAX_BATCH, 2 * batch), 200)
    tokens = draft_tokens_by_batch(setting, batches)
    seconds = step_time.central_step_seconds(batches, tokens.astype(float)) / acceptance_lengths[tokens]
    sufficient = np.flatnonzero(batches / seconds >= load_factor * batch / seconds[0])
    return float(seconds[sufficient[0]] / seconds[0]) - 1 if len(sufficient) else math.inf
