"""Forecasts of shadow evaluations by pairs: the rule on arrays against the operator's functions, and other forecasts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.analysis.paired.answers import AnswerCounts
from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.power import GREEDY_NOISE, forecast_verdict
from aerie.analysis.paired.state import PairBatch, PairedState, add_batches
from aerie.analysis.paired.sums import BUCKETS, PairSums, time_slot_bucket
from aerie.analysis.paired.verdict import evaluate_pairs
from aerie.evaluator.admission import IN_FLIGHT
from aerie.forecast.assumptions import Requests
from aerie.forecast.outcomes import Floats, Outcomes
from aerie.forecast.pairs import compute_pair_rate, forecast_pairs
from aerie.forecast.pairs_rule import PairedSumsOfRuns, decide_pairs

STEADY = Requests(1.0, tokens=40.0, step_time_deviation=0.0, pod_deviation=0.0)


def forecast(effect: float, requests: Requests = STEADY, rate: float = 1.0, runs: int = 200, **plan: object) -> Outcomes:
    return forecast_pairs(replace(PairedPlan(), **plan), requests, rate, [effect], runs, 1)[0]  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([-0.2, -0.02, 0.0, 0.02, 0.2]), st.booleans(), st.booleans(), st.booleans())
def test_rule_is_the_operators(seed: int, effect: float, tokens: bool, time: bool, same_engine: bool) -> None:
    random = np.random.default_rng(seed)
    plan = PairedPlan(same_engine=same_engine, compares_tokens=tokens, compares_time=time)
    count = int(random.integers(20, 400))
    bucket = random.integers(BUCKETS, size=(1, count))
    common = random.lognormal(3, 0.8, (1, count))
    noise = random.choice([0.02, 0.1, 0.3])
    canary, control, canary_seconds, control_seconds = common * random.lognormal(0, noise, (4, 1, count))
    canary_seconds *= random.choice([0.8, 1.0, 1.3])
    sums, duration = PairedSumsOfRuns.create(1), float(random.uniform(30, 900))
    sums.add(bucket, (canary, control), (canary_seconds, control_seconds), (0.0, duration))
    rolled_back, accepted = decide_pairs(sums, effect, plan, 1.0)

    def sums_of(part: Floats, other: Floats, buckets: Sequence[int]) -> PairSums:
        sums = PairSums()
        for index, bucket in enumerate(buckets):
            sums = sums.add_pair(bucket, float(part[0, index]) / (1 + effect), float(other[0, index]))
        return sums

    clusters, times = bucket[0].tolist(), (canary_seconds, control_seconds)
    slots = [time_slot_bucket(duration * index / count) for index in range(count)]
    batch = PairBatch(
        1,
        sums_of(canary, control, clusters),
        sums_of(*times, clusters),
        sums_of(*times, slots),
        AnswerCounts(),
        {},
        count,
        0,
    )
    _, verdict = evaluate_pairs(add_batches(PairedState(), "a", [batch]), plan, 60.0)
    assert (bool(rolled_back[0]), bool(accepted[0])) == (verdict.outcome == "Rollback", verdict.outcome == "Promote")


@pytest.mark.parametrize("effect", [-0.1, -0.03, 0.0, 0.03])
def test_the_median_is_that_of_the_expected_path(effect: float) -> None:
    """aerie.analysis.paired.power forecasts without simulation, for pairs whose times are equal. Longest answers are not cut."""
    expected = forecast_verdict(PairedPlan(), effect, GREEDY_NOISE)
    assert expected is not None
    outcomes = forecast(effect, compares_time=False, max_duration_seconds=14400.0)
    assert (outcomes.rolled_back if expected[0] == "Rollback" else outcomes.promoted).mean() > 0.95
    assert expected[1] / 1.5 <= np.median(outcomes.samples) <= 1.5 * expected[1]


def test_pods_that_differ_in_time_need_more_pairs() -> None:
    equal, unlike = (forecast(0.0, replace(STEADY, pod_deviation=deviation)) for deviation in (0.0, 0.05))
    assert unlike.promoted.mean() < equal.promoted.mean()


def test_more_pairs_per_second_take_no_longer() -> None:
    seconds = [float(np.median(forecast(0.0, rate=rate).seconds)) for rate in (0.05, 0.5, 5.0)]
    assert seconds == sorted(seconds, reverse=True)


def test_without_pairs_nothing_is_accepted() -> None:
    outcomes = forecast(0.3, rate=0.0)
    assert not (outcomes.promoted | outcomes.rolled_back).any()
    assert (outcomes.seconds == 14400).all()


def test_the_pair_rate_is_that_of_the_slower_of_users_and_engines() -> None:
    requests = Requests(1.0, seconds=5.0, tokens=100.0)
    assert compute_pair_rate(requests, 0.2) == 0.2
    assert 3.2 < compute_pair_rate(requests, math.inf) < 4.8  # 16 at a time, of 5 s; the longest are cut
    assert compute_pair_rate(replace(requests, tokens=10_000.0), math.inf) == pytest.approx(IN_FLIGHT * 2000 / 255, rel=0.01)
