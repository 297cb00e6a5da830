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
from aerie.engine.speculation import Setting
from aerie.tuning.decision.forecast import Forecast, drafted
from aerie.tuning.decision.policy import Objectives
from aerie.tuning.models.numeric import Array, quantiles
from aerie.tuning.models.step_time import StepTime
from aerie.tuning.telemetry import Block

_LARGEST = 512.0
"""Requests in a step: vLLM's --max-num-seqs is 256 or more by default."""
_WITHOUT_HISTOGRAM = 1.25
"""Percentile of requests by that of batches, where no request has finished."""


@dataclass(frozen=True)
class Observed:
    """Percentiles of the requests under the current setting, in seconds; None where no request got that far."""

    time_per_output_token: float | None = None
    time_to_first_token: float | None = None


@dataclass(frozen=True)
class Latencies:
    """Of one setting, at the objectives' percentile of the requests."""

    time_per_output_token: tuple[float, float]
    """Seconds: the 50 % and 95 % points of the forecast."""
    time_to_first_token: tuple[float, float] | None
    holds: float
    """Probability that all objectives hold, or that the one of the time per output token does at a batch, what is less; 1 without
    any."""
    bearable: float
    """Probability that on the load that was seen each objective holds, or is missed by no more than it is now: what a canary may
    explore with."""


def observed(blocks: Iterable[Block], setting: Setting, percentile: int) -> Observed:
    """From the histograms of a setting's requests, interpolated inside a bucket."""
    counted = [block.counters for block in blocks if block.setting == setting]
    share = percentile / 100
    return Observed(
        _quantile([one.time_per_output_token for one in counted], share),
        _quantile([one.time_to_first_token for one in counted], share),
    )


def limit(drawn: Forecast, current: Setting, seen: Observed, objectives: Objectives) -> float:
    """Seconds a token at a batch, beyond which its requests break the objective; infinite without one."""
    if objectives.time_per_output_token is None:
        return math.inf
    # In a window requests differ by as much as they do without a histogram, however alike those of a whole day were.
    return objectives.time_per_output_token / max(_factor(drawn, current, seen, objectives), _WITHOUT_HISTOGRAM)


def latencies(
    drawn: Forecast, far: Forecast | None, setting: Setting, current: Setting, seen: Observed, objectives: Objectives
) -> Latencies:
    """The forecast of a setting's latencies. `far`: at batches that may come, up to the largest."""
    share = objectives.percentile / 100
    factor = _factor(drawn, current, seen, objectives)
    output = factor * _percentile(drawn, setting, current, share)
    holds = np.ones(len(output), dtype=bool)
    bearable = holds.copy()
    if objectives.time_per_output_token is not None:
        holds &= output <= objectives.time_per_output_token
        bearable &= holds | (output <= factor * _percentile(drawn, current, current, share))
    first: Array | None = None
    if seen.time_to_first_token is not None:
        busy = drawn.busy_seconds(setting, current) / drawn.busy_seconds(current, current)
        steps = _step(drawn, setting) / _step(drawn, current)
        first = seen.time_to_first_token * np.maximum(busy, steps)
        if objectives.time_to_first_token is not None:
            holds &= first <= objectives.time_to_first_token
            bearable &= first <= max(objectives.time_to_first_token, seen.time_to_first_token)
    seconds = limit(drawn, current, seen, objectives)
    by_batch = [float(one.keeps(setting, current, seconds).min()) for one in (drawn, far) if one is not None]
    points = None if first is None else _points(first)
    return Latencies(_points(output), points, float(min(holds.mean(), *by_batch)), float(min(bearable.mean(), by_batch[0])))


def _factor(drawn: Forecast, current: Setting, seen: Observed, objectives: Objectives) -> float:
    """Percentile of requests by that of batches."""
    if seen.time_per_output_token is None:
        return _WITHOUT_HISTOGRAM
    return seen.time_per_output_token / float(np.median(_percentile(drawn, current, current, objectives.percentile / 100)))


def _percentile(drawn: Forecast, setting: Setting, current: Setting, share: float) -> Array:
    """Draws of a user's seconds per token at the batch that this share of the request-steps is no slower than."""
    seconds = drawn.lived(setting, current)
    order = np.argsort(seconds.mean(axis=0))
    index = int(np.searchsorted(np.cumsum(drawn.load.shares[order]), share))
    found: Array = seconds[:, order[min(index, len(order) - 1)]]
    return found


def _step(drawn: Forecast, setting: Setting) -> Array:
    """Draws of the mean seconds of a step."""
    found: Array = (drawn.of(setting) * drawn.tokens_per_step(setting)) @ drawn.load.shares
    return found


def _points(values: Array) -> tuple[float, float]:
    middle, high = quantiles(values, 0.5, 0.95)
    return middle, high


def _quantile(histograms: Sequence[Histogram], share: float) -> float | None:
    """Of all together, or of those with the newest one's buckets; None where nothing tells it."""
    alike = [one for one in histograms if one.edges == histograms[-1].edges]
    if not alike:
        return None
    counts = tuple(sum(column) for column in zip(*(one.counts for one in alike), strict=True))
    found = Histogram(alike[-1].edges, counts, sum(one.sum for one in alike)).quantile(share)
    return found.estimate if found is not None and math.isfinite(found.high) else None


def stretched(step_time: StepTime, lengths: Array, setting: Setting, batch: float, factor: float) -> float:
    """By what share a user's time per output token grows when each replica has so many times the requests, from this mean batch
    on; infinite where no batch up to `_LARGEST` gives so many tokens. `lengths`: by K. Prefill is left out."""
    batches = np.geomspace(batch, max(_LARGEST, 2 * batch), 200)
    tokens = drafted(setting, batches)
    each = step_time.middle(batches, tokens.astype(float)) / lengths[tokens]
    enough = np.flatnonzero(batches / each >= factor * batch / each[0])
    return float(each[enough[0]] / each[0]) - 1 if len(enough) else math.inf
