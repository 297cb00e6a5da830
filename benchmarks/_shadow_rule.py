"""Simulated shadow evaluations under the rule of `aerie.forecast.pairs_rule`: all effects on the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aerie.analysis.paired.plan import PairedPlan
from aerie.forecast.pairs_rule import PairedSumsOfRuns, check_times, decide_pairs
from benchmarks._canary_model import Bools, Floats
from benchmarks._shadow_model import PairStream, ShadowTraffic


class Outcomes(NamedTuple):
    """The outcome of each run, with the minutes and the pairs after which it came; NaN without."""

    rolled_back: Bools
    promoted: Bools
    minutes: Floats
    pairs: Floats


def decide(
    traffic: ShadowTraffic, effects: Sequence[float], plan: PairedPlan, runs: int, random: np.random.Generator
) -> list[Outcomes]:
    """Return the outcomes of the runs, by effect."""
    stream, sums, previous_time = PairStream(traffic, runs, random), PairedSumsOfRuns.create(runs), 0.0
    results = [Outcomes(np.zeros(runs, bool), np.zeros(runs, bool), *(np.full(runs, np.nan) for _ in range(2))) for _ in effects]
    pairs = 0
    for time in check_times(plan.max_duration_seconds):
        count = round(time * traffic.pairs_per_second) - pairs
        if count == 0:
            continue
        parts = stream.draw(count, time)
        sums.add(
            parts.bucket,
            (parts.canary_steps, parts.control_steps),
            (parts.canary_seconds, parts.control_seconds),
            (previous_time, time),
        )
        previous_time = time
        pairs += count
        for effect, result in zip(effects, results, strict=True):
            is_open = ~(result.rolled_back | result.promoted)
            if is_open.any():
                rollback, accepted = (is_open & ends for ends in decide_pairs(sums, effect, plan, time))
                result.rolled_back[rollback] = True
                result.promoted[accepted] = True
                result.minutes[rollback | accepted] = time / 60
                result.pairs[rollback | accepted] = pairs
        if all((result.rolled_back | result.promoted).all() for result in results):
            break
    return results
