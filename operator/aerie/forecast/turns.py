"""Forecasts trials by turns: under the traffic of users, or with equal requests in an isolated pod.

The windows of one length are drawn from a pool: pairs of windows of one pod, in which every request is simulated (`requests`).
Requests that run across a change are counted in both windows, with the drafter of each. Which pair of the pool a pod gets, and
in which order it has the drafters, is drawn for each run. So pairs are independent, as under a constant traffic.

In an isolated pod both windows of a pair have the same requests. The evaluator's own schedule decides for how long it sends, at
most IN_FLIGHT at a time. All of them end in their window here.

Guarantees: all effects meet the same windows and orders. Not guaranteed: that windows are lost, engines restart, or a drafter
affects the next one; here none does. The rule allows for a carry-over all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from aerie.analysis.switchback.design import Window
from aerie.analysis.switchback.plan import SwitchbackPlan
from aerie.evaluator.admission import IN_FLIGHT
from aerie.evaluator.turns import MEASURED_REQUESTS, TurnSchedule
from aerie.forecast.assumptions import TOKENS_PER_STEP, Requests
from aerie.forecast.outcomes import Bools, Floats, Outcomes
from aerie.forecast.requests import draw_evaluated_tokens, draw_factor, serve
from aerie.forecast.turns_rule import PairCounts, TurnsRule

MIN_POOL_PAIRS, MAX_POOL_PAIRS, POOL_REQUESTS = 150, 2000, 200_000
"""Least and most pairs of a pool, and the requests from which on it has the least."""
_POLL_SECONDS = 0.1


class _Pool(NamedTuple):
    """Pairs of windows of a pod: counts by pair and window, with a drafter without effect."""

    tokens: Floats
    steps: Floats
    finished: Floats


def forecast_user_turns(
    plan: SwitchbackPlan,
    requests: Requests,
    count_pods: Callable[[float], int],
    effects: Sequence[float],
    runs: int,
    seed: int,
    min_seconds: float = 0.0,
) -> list[Outcomes]:
    """Return the ends of trials under the traffic of users, by effect. Samples are pairs of windows, over all pods.

    `count_pods`: the pods on trial by the seconds since its start. `min_seconds`: time before which none promotes.
    """

    def draw_pool(window: Window, random: np.random.Generator) -> _Pool:
        pairs = _count_pool_pairs(2 * requests.per_second * window.length_seconds)
        begins = np.arange(2 * pairs) * window.length_seconds
        times = np.column_stack([begins + window.washout_seconds, begins + window.length_seconds]).ravel()
        return _Pool(*(np.diff(part.reshape(pairs, 2, 2), axis=-1)[..., 0] for part in serve(requests, 1, times, random)))

    simulation = _Simulation(plan, requests, count_pods, draw_pool, runs, seed, min_seconds)
    return [simulation.run(effect, requests.per_second / 2) for effect in effects]


def forecast_isolated_turns(
    plan: SwitchbackPlan, requests: Requests, arrivals_per_second: float, effects: Sequence[float], runs: int, seed: int
) -> list[Outcomes]:
    """Return the ends of trials in an isolated pod, by effect. Samples are pairs of windows.

    `arrivals_per_second`: copies of users' requests; infinite for a file of prompts.
    """

    def draw_pool(window: Window, random: np.random.Generator) -> _Pool:
        mean = _mean_sent_requests(requests, arrivals_per_second, window, random)
        pairs = _count_pool_pairs(2 * mean)
        counts = random.poisson(mean, pairs)
        place = np.repeat(np.arange(pairs), counts)
        tokens = draw_evaluated_tokens(requests, len(place), random)
        steps = tokens / TOKENS_PER_STEP * draw_factor(requests.deviation, len(place), random)
        arms = steps[:, None] * draw_factor(requests.pair_deviation / math.sqrt(2), (len(place), 2), random)
        by_window = [np.bincount(place, weights, pairs).astype(np.float64) for weights in (tokens, arms[:, 0], arms[:, 1])]
        return _Pool(
            np.column_stack([by_window[0]] * 2),
            np.column_stack(by_window[1:]),
            np.column_stack([counts, counts]).astype(np.float64),
        )

    simulation = _Simulation(plan, requests, lambda _: 1, draw_pool, runs, seed)
    return [simulation.run(effect, 0.0) for effect in effects]


def _count_pool_pairs(requests_per_pair: float) -> int:
    return round(min(max(POOL_REQUESTS / max(requests_per_pair, 1e-9), MIN_POOL_PAIRS), MAX_POOL_PAIRS))


def _mean_sent_requests(requests: Requests, arrivals_per_second: float, window: Window, random: np.random.Generator) -> float:
    """Return the mean number of requests that the evaluator sends in a window."""
    schedule = TurnSchedule(window.length_seconds)
    durations = draw_evaluated_tokens(requests, MEASURED_REQUESTS, random) / requests.tokens_per_second
    for seconds in durations:
        schedule.observe_duration(float(seconds))
    schedule.observe_turn("0/1", 0.0)
    schedule.observe_turn("0/2", _POLL_SECONDS)
    polls = range(math.ceil(window.length_seconds / _POLL_SECONDS))
    sending_seconds = _POLL_SECONDS * sum(schedule.may_send(poll * _POLL_SECONDS) for poll in polls)
    if math.isinf(arrivals_per_second):
        return IN_FLIGHT * (1 + sending_seconds / float(durations.mean()))
    load = arrivals_per_second * float(durations.mean())  # Erlang's loss formula: a copy that finds all places taken is dropped
    terms = [load**count / math.factorial(count) for count in range(IN_FLIGHT + 1)]
    return arrivals_per_second * sending_seconds * (1 - terms[-1] / sum(terms))


class _Simulation:
    """Trials with one plan, whose pods draw their windows from pools."""

    def __init__(
        self,
        plan: SwitchbackPlan,
        requests: Requests,
        count_pods: Callable[[float], int],
        draw_pool: Callable[[Window, np.random.Generator], _Pool],
        runs: int,
        seed: int,
        min_seconds: float = 0.0,
    ) -> None:
        self._plan, self._requests, self._count_pods, self._runs = plan, requests, count_pods, runs
        self._draw_pool, self._seed, self._min_seconds = draw_pool, seed, min_seconds
        self._pools: dict[float, _Pool] = {}

    def run(self, effect: float, requests_per_pod_second: float) -> Outcomes:
        """Return the ends of the trials of one effect. `requests_per_pod_second`: users' requests that the canary answers."""
        random, runs, plan = np.random.default_rng(self._seed), self._runs, self._plan
        rule = TurnsRule(plan, runs, self._min_seconds)
        samples, pod_seconds = np.zeros(runs), np.zeros(runs)
        was_canary: Bools = np.zeros((runs, 0), dtype=bool)
        pair = 0
        while (end := plan.schedule.window(2 * pair + 1).end_seconds) <= plan.max_duration_seconds and rule.is_open.any():
            window = plan.schedule.window(2 * pair)
            pods = self._count_pods(window.start_seconds)
            joined = np.zeros((runs, max(0, pods - was_canary.shape[1])), dtype=bool)  # with the stable drafter before
            was_canary = np.concatenate([was_canary, joined], axis=1)[:, :pods]
            canary_first = random.random((runs, (pods + 1) // 2)) < 0.5
            canary_first = np.stack([canary_first, ~canary_first], axis=-1).reshape(runs, -1)[:, :pods]  # partners
            counts = self._draw_counts(window, canary_first, effect, random)
            samples[rule.is_open] += pods
            pod_seconds[rule.is_open] += pods * (end - window.start_seconds)
            rule.close_pair(pair, counts, canary_first == was_canary)
            was_canary = ~canary_first
            pair += 1
        seconds = np.where(np.isnan(rule.end_seconds), plan.max_duration_seconds, rule.end_seconds)
        return Outcomes(rule.rolled_back, rule.promoted, seconds, samples, requests_per_pod_second * pod_seconds)

    def _draw_counts(self, window: Window, canary_first: Bools, effect: float, random: np.random.Generator) -> PairCounts:
        """Return the counts of a pair of windows, by drafter, run and pod."""
        length = window.length_seconds
        if length not in self._pools:
            self._pools[length] = self._draw_pool(window, np.random.default_rng((self._seed, round(1000 * length))))
        pool = self._pools[length]
        index = random.integers(len(pool.tokens), size=canary_first.shape)
        first, second = ([part[index, place] for part in pool] for place in (0, 1))
        tokens, steps, finished = (
            np.stack([np.where(canary_first, later, earlier), np.where(canary_first, earlier, later)])
            for earlier, later in zip(first, second, strict=True)
        )
        steps[1] /= 1 + effect
        times = draw_factor(self._requests.step_time_deviation, steps.shape, random)
        return PairCounts(tokens, steps, steps * times, finished)
