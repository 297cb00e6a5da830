"""Forecasts a shadow evaluation of canary pods: canary and control answer the same requests.

Answers are as long on both arms, and their steps differ by the deviation between two answers (`requests.pair_deviation`). Each
request is a cluster of its own. Both pods differ permanently in the time of a step.

Guarantee: all effects meet the same pairs. Not guaranteed: answers that differ, requests that fail or are skipped; here none is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.sums import BUCKETS
from aerie.evaluator.admission import IN_FLIGHT
from aerie.forecast.assumptions import TOKENS_PER_STEP, Requests
from aerie.forecast.outcomes import Outcomes
from aerie.forecast.pairs_rule import PairedSumsOfRuns, check_times, decide_pairs
from aerie.forecast.requests import draw_evaluated_tokens, draw_factor

_TOKENS_OF_MEAN = 100_000


def compute_pair_rate(requests: Requests, arrivals_per_second: float) -> float:
    """Return the pairs per second: as many as arrive, or as both engines answer with IN_FLIGHT requests at a time.

    `arrivals_per_second`: copies of users' requests; infinite for a file of prompts.
    """
    tokens = draw_evaluated_tokens(requests, _TOKENS_OF_MEAN, np.random.default_rng(0))
    return min(arrivals_per_second, IN_FLIGHT * requests.tokens_per_second / float(tokens.mean()))


def forecast_pairs(
    plan: PairedPlan,
    requests: Requests,
    pairs_per_second: float,
    effects: Sequence[float],
    runs: int,
    seed: int,
) -> list[Outcomes]:
    """Return the ends of evaluations, by effect. Samples are pairs of answers. No user is served by the new drafter."""
    random = np.random.default_rng(seed)
    sums, previous_time = PairedSumsOfRuns.create(runs), 0.0
    pod_factors = draw_factor(requests.pod_deviation, (2, runs, 1), random)
    deadline = plan.max_duration_seconds
    results = [
        Outcomes(np.zeros(runs, bool), np.zeros(runs, bool), np.full(runs, deadline), np.zeros(runs), np.zeros(runs))
        for _ in effects
    ]
    pairs = 0
    for time in check_times(deadline):
        count = math.floor(time * pairs_per_second) - pairs
        if count == 0:
            continue
        pairs += count
        shape = (runs, count)
        tokens = draw_evaluated_tokens(requests, shape, random)
        common = tokens / TOKENS_PER_STEP * draw_factor(requests.deviation, shape, random) / 2  # equal lengths weigh by a half
        canary, control = common * draw_factor(requests.pair_deviation / math.sqrt(2), (2, *shape), random)
        times = draw_factor(requests.step_time_deviation, (2, *shape), random) * pod_factors
        bucket = random.integers(BUCKETS, size=shape)
        sums.add(bucket, (canary, control), (canary * times[0], control * times[1]), (previous_time, time))
        previous_time = time
        for effect, result in zip(effects, results, strict=True):
            is_open = ~(result.rolled_back | result.promoted)
            if not is_open.any():
                continue
            rollback, accepted = (is_open & ends for ends in decide_pairs(sums, effect, plan, time))
            result.rolled_back[rollback] = True
            result.promoted[accepted] = True
            result.seconds[rollback | accepted] = time
            result.samples[is_open] = pairs
        if all((result.rolled_back | result.promoted).all() for result in results):
            break
    return results
