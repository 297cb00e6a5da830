"""Forecasts a trial by turns before it begins: chances of its outcomes and the time to them, by simulation.

A user who has not applied a change yet wants to know whether its traffic suffices for a verdict. Each simulated trial feeds
drawn scores into the tests that decide a real one: `SignFlipTest`, the plan's limits and alphas, its windows, the look at the
deadline and the least number of requests. Only the scores are assumed:

    steps per token of a window = level * exp(normal noise of standard deviation s * sqrt(f / requests of the window))

s is the deviation between requests. f is 1 where requests are much shorter than windows. Longer ones run in both windows of a
pair, and cancel there. With requests that end at a rate of 1 / D, the load at two moments has the correlation exp(-|t| / D), and
the difference of two windows with w counted seconds, whose starts are L apart, has

    f w = w - D (1 - exp(-w / D)) - D / 2 exp(-(L - w) / D) (1 - exp(-w / D))^2

A canary with an effect takes 1 / (1 + effect) of the steps, and a step takes equally long with both drafters. No request fails,
no window is lost, and the load is constant.

Guarantees: equal arguments give equal forecasts, and all effects are tried with the same random numbers. Not guaranteed: that
traffic is as assumed. Tenants, drift of the mix and failures are unknown before the trial. Partnerships beyond `MAX_UNITS` are
merged into larger units, which delays a verdict of large fleets a little.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from aerie.analysis.paired.power import GREEDY_NOISE
from aerie.analysis.state import VerdictOutcome
from aerie.analysis.statistics.shares import ShareCounts
from aerie.analysis.switchback.carryover import shown_share
from aerie.analysis.switchback.design import Window
from aerie.analysis.switchback.plan import (
    FAILURE_MARGIN,
    FAILURE_RATIO,
    PROMOTE_ALPHA,
    PROMOTE_DEADLINE_ALPHA,
    TIME_TO_FIRST_TOKEN,
    SwitchbackPlan,
)
from aerie.analysis.switchback.sign_flip import SignFlipTest

MAX_UNITS = 4
"""Units per pair of windows that are simulated."""
REQUEST_SIZE_DISPERSION = GREEDY_NOISE.size_dispersion
"""Mean square of a request's tokens over the square of their mean."""
USERS_DEVIATION = math.sqrt((0.067 + 0.0074) * REQUEST_SIZE_DISPERSION)
"""Deviation of users' requests: variances between prompts and of an arm, and the dispersion of sizes, on real vLLM (EAGLE 3 and
EAGLE 3.1, K = 3, temperature 0; `aerie.analysis.paired.power` has the dispersion). About 0.4."""
EQUAL_REQUESTS_DEVIATION = GREEDY_NOISE.deviation * math.sqrt(GREEDY_NOISE.size_dispersion / 2)
"""Deviation that remains where both drafters answer the same requests, for each of them."""
RUNS = 200
"""Simulated trials of each effect: a chance has a standard error of at most 3.5 percentage points."""
_PROMOTE_TESTS = ("EnoughTokens", "FastEnoughOutput")


@dataclass(frozen=True)
class PlannedTraffic:
    """What is assumed of the requests of a trial."""

    requests_per_second: float
    """Requests of a pod that count, per second of the counted part of a window."""
    deviation: float
    """Standard deviation of a request's steps per token between requests, relative to their mean and weighted by tokens."""
    memory_seconds: float
    """D: half of the mean duration of a request, weighted by tokens. 0 where all requests end in their window."""
    pods_at: Callable[[float], int]
    """Function that returns the number of pods on trial, by seconds since the start."""


@dataclass(frozen=True)
class TurnsForecast:
    """What trials with a canary of one effect end with. Times are those of trials that end with a verdict; None without any."""

    effect: float
    rollback_chance: float
    promotion_chance: float
    inconclusive_chance: float
    median_seconds: float | None
    p90_seconds: float | None
    median_pairs: int | None
    """Pairs of windows until the verdict, over all pods."""
    mean_canary_requests: float
    """Mean number of requests that the canary's drafter answers until the end of the trial, verdict or deadline."""


@dataclass(frozen=True)
class _Run:
    outcome: VerdictOutcome
    seconds: float
    pairs: int
    canary_requests: float


def forecast_turns(
    plan: SwitchbackPlan, traffic: PlannedTraffic, effect: float, min_seconds: float = 0.0, runs: int = RUNS
) -> TurnsForecast:
    """Return the forecast for a canary with this relative gain in tokens per step, above -1.

    `min_seconds`: time before which no trial promotes.
    """
    generators = (random.Random(f"{plan.seed}/{run}") for run in range(runs))  # noqa: S311 - a simulation
    results = [_simulate(plan, traffic, effect, min_seconds, generator) for generator in generators]
    decided = sorted((result for result in results if result.outcome != "Inconclusive"), key=lambda result: result.seconds)
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in ("Rollback", "Promote")}
    median, p90 = (decided[math.ceil(share * len(decided)) - 1] if decided else None for share in (0.5, 0.9))
    return TurnsForecast(
        effect,
        counts["Rollback"] / runs,
        counts["Promote"] / runs,
        (runs - len(decided)) / runs,
        median.seconds if median else None,
        p90.seconds if p90 else None,
        median.pairs if median else None,
        sum(result.canary_requests for result in results) / runs,
    )


def _simulate(plan: SwitchbackPlan, traffic: PlannedTraffic, effect: float, min_seconds: float, generator: random.Random) -> _Run:
    """Return the end of one trial."""
    tests = {name: test for name, test in plan.tests.items() if test.criterion.name != TIME_TO_FIRST_TOKEN}
    evidence = {name: SignFlipTest() for name in tests}
    rate, cost = traffic.requests_per_second, 1 / (1 + effect)
    least_requests = least_request_count() if plan.excludes_failures else 0
    pair = pairs = 0
    counted_requests = canary_requests = 0.0
    if rate <= 0:
        return _Run("Inconclusive", plan.max_duration_seconds, 0, 0.0)
    while plan.schedule.window(2 * pair + 1).end_seconds <= plan.max_duration_seconds:
        window = plan.schedule.window(2 * pair)
        end = plan.schedule.window(2 * pair + 1).end_seconds
        is_last = plan.schedule.window(2 * pair + 3).end_seconds > plan.max_duration_seconds
        pods = traffic.pods_at(window.start_seconds)
        units = min(math.ceil(pods / 2), MAX_UNITS)
        requests = rate * window.counted_seconds * pods / units
        noise = traffic.deviation * math.sqrt(_noise_share(window, traffic.memory_seconds) / requests)
        for _ in range(units):
            # Fixed numbers of draws, so that the trials of other effects see the same noise.
            stable, canary = (requests * math.exp(noise * generator.gauss() - noise**2 / 2) for _ in range(2))
            share = shown_share(window, plan.schedule.carryover_seconds, is_repeat=generator.random() < 0.5)
            canary *= cost
            for name, test in tests.items():
                upper, lower = (stable, canary) if test.criterion.is_inverse else (canary, stable)
                score = upper - (1 + test.limit * (share if test.is_attenuated else 1.0)) * lower
                evidence[name] = evidence[name].add_unit(test.sign * score, window.counted_seconds, plan.tuned_times)
        pair, pairs = pair + 1, pairs + pods
        counted_requests += requests * units
        canary_requests += rate * window.length_seconds * pods
        met = {name: evidence[name].is_significant(test.alpha) for name, test in tests.items()}
        if met["SlowerOutput"] or (met["FewerTokens"] and not met["FasterOutput"]):
            return _Run("Rollback", end, pairs, canary_requests)
        if is_last:
            for name in _PROMOTE_TESTS:
                met[name] |= evidence[name].is_significant_at_deadline(PROMOTE_DEADLINE_ALPHA)
        if (
            (met["EnoughTokens"] or met["FasterOutput"])
            and met["FastEnoughOutput"]
            and counted_requests >= least_requests
            and (end >= min_seconds or is_last)
        ):
            return _Run("Promote", end, pairs, canary_requests)
    return _Run("Inconclusive", plan.max_duration_seconds, pairs, canary_requests)


def _noise_share(window: Window, memory_seconds: float) -> float:
    """Return f: the share of the requests' noise that remains in the difference of a pair's windows."""
    if memory_seconds == 0:
        return 1.0
    counted, memory = window.counted_seconds, memory_seconds
    faded = -math.expm1(-counted / memory)
    covariance = memory / 2 * math.exp((counted - window.length_seconds) / memory) * faded * faded
    return max(0.0, counted - memory * faded - covariance) / counted


@cache
def least_request_count() -> int:
    """Return how many requests without a failure each drafter needs for a promotion, where both have as many."""
    requests = 1
    while not ShareCounts(0.0, requests, 0.0, requests).is_below(FAILURE_RATIO, FAILURE_MARGIN, PROMOTE_ALPHA):
        requests += 1
    return requests
