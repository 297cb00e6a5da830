"""What users would see under a setting: time per output token and to the first token, against the objectives.

An objective is for a percentile of the requests, and that of the time per output token is to hold at the largest load too: at
each batch it holds, or a token takes no longer than now.

The percentile of requests is taken over the batches of the load, and scaled by what requests really had under the current setting
(their histogram) over what the forecast says of it: requests differ by more than the batch. Time to the first token is queueing
and prefill, which no setting changes by itself; it is taken to stretch with the steps and with the busy seconds per token,
whichever stretches more. Not modelled: a queue that tips over, or empties.

And what users see while replicas are out: the others get their requests, run larger batches, and each token takes longer.
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
"""Percentile of requests by that of batches, where no request has finished."""


@dataclass(frozen=True)
class ObservedLatencies:
    """Percentiles of the requests under the current setting, in seconds; None where no request got that far."""

    time_per_output_token: float | None = None
    time_to_first_token: float | None = None


@dataclass(frozen=True)
class LatencyForecast:
    """Of one setting, at the objectives' percentile of the requests."""

    time_per_output_token: tuple[float, float]
    """Seconds: the 50 % and 95 % points of the forecast."""
    time_to_first_token: tuple[float, float] | None
    probability_met: float
    """Probability that all objectives hold, or that the one of the time per output token does at a batch, what is less; 1 without
    any."""
    probability_no_worse: float
    """Probability that on the load that was seen each objective holds, or is missed by no more than it is now: what a canary may
    explore with."""


def measure_latencies(blocks: Iterable[TelemetryBlock], setting: SpeculationSetting, percentile: int) -> ObservedLatencies:
    """From the histograms of a setting's requests, interpolated inside a bucket."""
    counted = [block.counters for block in blocks if block.setting == setting]
    share = percentile / 100
    return ObservedLatencies(
        _merged_quantile([one.time_per_output_token for one in counted], share),
        _merged_quantile([one.time_to_first_token for one in counted], share),
    )


def max_token_seconds(
    forecast: Forecast, current: SpeculationSetting, observed_latencies: ObservedLatencies, objectives: LatencyObjectives
) -> float:
    """Seconds a token at a batch, beyond which its requests break the objective; infinite without one."""
    if objectives.time_per_output_token is None:
        return math.inf
    # In a window requests differ by as much as they do without a histogram, however alike those of a whole day were.
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
    """The forecast of a setting's latencies. `far`: at batches that may come, up to the largest."""
    share = objectives.percentile / 100
    factor = _percentile_factor(forecast, current, observed_latencies, objectives)
    output = factor * _token_seconds_at_share(forecast, setting, current, share)
    holds = np.ones(len(output), dtype=bool)
    bearable = holds.copy()
    if objectives.time_per_output_token is not None:
        holds &= output <= objectives.time_per_output_token
        bearable &= holds | (output <= factor * _token_seconds_at_share(forecast, current, current, share))
    first: FloatArray | None = None
    if observed_latencies.time_to_first_token is not None:
        busy = forecast.busy_seconds(setting, current) / forecast.busy_seconds(current, current)
        steps = _mean_step_seconds(forecast, setting) / _mean_step_seconds(forecast, current)
        first = observed_latencies.time_to_first_token * np.maximum(busy, steps)
        if objectives.time_to_first_token is not None:
            holds &= first <= objectives.time_to_first_token
            bearable &= first <= max(objectives.time_to_first_token, observed_latencies.time_to_first_token)
    seconds = max_token_seconds(forecast, current, observed_latencies, objectives)
    by_batch = [
        float(one.probability_within_by_batch(setting, current, seconds).min())
        for one in (forecast, headroom_forecast)
        if one is not None
    ]
    points = None if first is None else _median_and_p95(first)
    return LatencyForecast(
        _median_and_p95(output), points, float(min(holds.mean(), *by_batch)), float(min(bearable.mean(), by_batch[0]))
    )


def _percentile_factor(
    drawn: Forecast, current: SpeculationSetting, seen: ObservedLatencies, objectives: LatencyObjectives
) -> float:
    """Percentile of requests by that of batches."""
    if seen.time_per_output_token is None:
        return _DEFAULT_PERCENTILE_FACTOR
    return seen.time_per_output_token / float(
        np.median(_token_seconds_at_share(drawn, current, current, objectives.percentile / 100))
    )


def _token_seconds_at_share(
    drawn: Forecast, setting: SpeculationSetting, current: SpeculationSetting, share: float
) -> FloatArray:
    """Draws of a user's seconds per token at the batch that this share of the request-steps is no slower than."""
    seconds = drawn.rate_matched_token_seconds(setting, current)
    order = np.argsort(seconds.mean(axis=0))
    index = int(np.searchsorted(np.cumsum(drawn.load.shares[order]), share))
    found: FloatArray = seconds[:, order[min(index, len(order) - 1)]]
    return found


def _mean_step_seconds(drawn: Forecast, setting: SpeculationSetting) -> FloatArray:
    """Draws of the mean seconds of a step."""
    found: FloatArray = (drawn.token_seconds(setting) * drawn.tokens_per_step(setting)) @ drawn.load.shares
    return found


def _median_and_p95(values: FloatArray) -> tuple[float, float]:
    middle, high = quantiles(values, 0.5, 0.95)
    return middle, high


def _merged_quantile(histograms: Sequence[Histogram], share: float) -> float | None:
    """Of all together, or of those with the newest one's buckets; None where nothing tells it."""
    alike = [one for one in histograms if one.edges == histograms[-1].edges]
    if not alike:
        return None
    counts = tuple(sum(column) for column in zip(*(one.counts for one in alike), strict=True))
    found = Histogram(alike[-1].edges, counts, sum(one.sum for one in alike)).quantile(share)
    return found.estimate if found is not None and math.isfinite(found.high) else None


def load_slowdown(
    step_time: StepTimeModel, acceptance_lengths: FloatArray, setting: SpeculationSetting, batch: float, load_factor: float
) -> float:
    """By what share a user's time per output token grows when each replica has so many times the requests, from this mean batch
    on; infinite where no batch up to `_LARGEST` gives so many tokens. `lengths`: by K. Prefill is left out."""
    batches = np.geomspace(batch, max(_MAX_BATCH, 2 * batch), 200)
    tokens = draft_tokens_by_batch(setting, batches)
    each = step_time.central_step_seconds(batches, tokens.astype(float)) / acceptance_lengths[tokens]
    enough = np.flatnonzero(batches / each >= load_factor * batch / each[0])
    return float(each[enough[0]] / each[0]) - 1 if len(enough) else math.inf
