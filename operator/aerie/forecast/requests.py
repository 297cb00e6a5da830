"""Draws requests by the assumptions, and what engines count of them.

Guarantee: equal generators give equal counts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from aerie.forecast.assumptions import TOKENS_PER_STEP, Requests
from aerie.forecast.outcomes import Floats

MAX_ANSWER_TOKENS = 256.0
"""Tokens at which the evaluator cuts answers: the default of `aerie evaluator --max-tokens`."""
_BURN_DURATIONS = 12.0
"""Mean durations of requests before the first time, so that requests are in progress."""


class Served(NamedTuple):
    """What engines have counted at some times since before the first of them; differences are counts between two times."""

    tokens: Floats
    steps: Floats
    """Verification steps with a drafter without effect."""
    finished: Floats


def draw_tokens(requests: Requests, shape: int | tuple[int, ...], random: np.random.Generator) -> Floats:
    """Return lengths of answers."""
    return requests.tokens * draw_factor(math.sqrt(requests.size_dispersion - 1), shape, random)


def draw_evaluated_tokens(requests: Requests, shape: int | tuple[int, ...], random: np.random.Generator) -> Floats:
    """Return lengths of answers to requests of the evaluator, without the first token, which the prefill gives."""
    return np.clip(draw_tokens(requests, shape, random), 2.0, MAX_ANSWER_TOKENS) - 1


def draw_factor(deviation: float, shape: int | tuple[int, ...], random: np.random.Generator) -> Floats:
    """Return log-normal factors with mean 1 and this relative standard deviation."""
    sigma2 = math.log1p(deviation * deviation)
    return np.asarray(np.exp(random.normal(-sigma2 / 2, math.sqrt(sigma2), shape)))


def serve(requests: Requests, pods: float, times: Floats, random: np.random.Generator) -> Served:
    """Return what pods have counted at these ascending times, in seconds from 0 on."""
    burn, end = _BURN_DURATIONS * requests.seconds, float(times[-1])
    count = random.poisson(requests.per_second * pods * (burn + end))
    begins = random.uniform(-burn, end, count)
    ends = begins + draw_tokens(requests, count, random) / requests.tokens_per_second
    factors = draw_factor(requests.deviation, count, random)
    speed = requests.tokens_per_second
    return Served(
        speed * _integrate(begins, ends, np.ones(count), times),
        speed / TOKENS_PER_STEP * _integrate(begins, ends, factors, times),
        np.searchsorted(np.sort(ends), times, side="right").astype(np.float64),
    )


def _integrate(begins: Floats, ends: Floats, weights: Floats, times: Floats) -> Floats:
    """Return the sum of weight * (seconds of a request until then), at each time."""
    total = np.zeros(len(times))
    for edges, sign in ((begins, 1.0), (ends, -1.0)):
        order = np.argsort(edges)
        place = np.searchsorted(edges[order], times, side="right")
        weight_sums, moments = (np.concatenate([[0.0], np.cumsum(values[order])]) for values in (weights, weights * edges))
        total += sign * (weight_sums[place] * times - moments[place])
    return total
