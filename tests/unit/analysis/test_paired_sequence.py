"""The confidence sequence over pairs: equal to its definition, monotone, at any correlation; tests and bounds agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aerie.analysis.paired.sequence import (
    Level,
    effective_bucket_count,
    effective_pair_count,
    ratio_bounds,
    score_moments,
)
from aerie.analysis.paired.sums import BUCKETS, PairSums

LOWER, UPPER = Level(0.01, 100.0), Level(0.025, 300.0)
PAIR = st.tuples(st.integers(0, BUCKETS - 1), st.floats(0.1, 100), st.floats(0.1, 100))


def sum_pairs(pairs: list[tuple[int, float, float]]) -> PairSums:
    sums = PairSums()
    for pair in pairs:
        sums = sums.add_pair(*pair)
    return sums


def draw_pairs(
    count: int, ratio: float, *, seed: int = 1, noise: float = 0.1, cluster_size: int = 1
) -> list[tuple[int, float, float]]:
    """Return pairs of requests that differ much more than the drafters do. Pairs of a cluster are equal."""
    random = np.random.default_rng(seed)
    pairs = []
    for _ in range(count // cluster_size):
        control = random.lognormal(3.0, 1.0)
        canary = ratio * control * random.lognormal(-noise * noise / 2, noise)
        pairs += [(int(random.integers(BUCKETS)), canary, control)] * cluster_size
    return pairs


@given(st.lists(PAIR, min_size=2, max_size=60), st.floats(0.5, 2))
def test_moments_equal_their_definition(pairs: list[tuple[int, float, float]], ratio: float) -> None:
    assume(len({bucket for bucket, *_ in pairs}) > 1)
    moments = score_moments(sum_pairs(pairs), ratio)
    scores = np.array([a - ratio * b for _, a, b in pairs])
    buckets = np.array([bucket for bucket, *_ in pairs])
    counts = np.bincount(buckets, minlength=BUCKETS)
    by_bucket = np.bincount(buckets, scores, minlength=BUCKETS)
    effective = len(pairs) ** 2 / (counts**2).sum()
    variance = max(((by_bucket - counts * scores.mean()) ** 2).sum(), (scores**2).sum()) * effective / (effective - 1)
    scale = np.abs(scores).sum()
    assert moments.score_sum == pytest.approx(scores.sum(), abs=1e-9 * scale)
    assert moments.variance == pytest.approx(variance, rel=1e-6)
    assert moments.degrees_of_freedom == pytest.approx(effective - 1)
    assert moments.effective_pairs == pytest.approx(len(pairs) * (scores**2).sum() / variance, rel=1e-6)


@given(st.lists(st.tuples(PAIR, st.integers(0, BUCKETS - 1)), min_size=2, max_size=60), st.floats(0.5, 2))
def test_time_slots_only_add_variance(pairs: list[tuple[tuple[int, float, float], int]], ratio: float) -> None:
    sums, slots = sum_pairs([pair for pair, _ in pairs]), sum_pairs([(slot, *pair[1:]) for pair, slot in pairs])
    alone, both = score_moments(sums, ratio), score_moments(sums, ratio, slots)
    if len({slot for _, slot in pairs}) == 1:
        assert both.degrees_of_freedom == 0, "a single slot shows nothing"
        assert not both.is_significant(1, LOWER)
    elif alone.degrees_of_freedom:
        assert both.variance >= alone.variance
        assert both.degrees_of_freedom <= alone.degrees_of_freedom


@pytest.mark.parametrize(("by_slot", "limits"), [(True, (0, 8)), (False, (20, 200))])
def test_waves_of_other_work_are_not_taken_for_a_slower_drafter(by_slot: bool, limits: tuple[int, int]) -> None:
    """200 evaluations of equal drafters, in pods that are slower or faster by 20 % for some ten seconds at a time: without slots,
    they look unlike; 5 of 100 may at both levels."""
    random, wrong = np.random.default_rng(1), 0
    for _ in range(200):
        sums, slots = PairSums(), PairSums()
        for slot in range(30):
            waves = random.normal(0, 0.2, 2)
            for _ in range(10):
                canary, control = random.lognormal(waves, 0.1)
                bucket = int(random.integers(BUCKETS))
                sums, slots = sums.add_pair(bucket, canary, control), slots.add_pair(slot, canary, control)
            moments = score_moments(sums, 1.0, slots if by_slot else None)
            if slot > 1 and (moments.is_significant(1, LOWER) or moments.is_significant(-1, UPPER)):
                wrong += 1
                break
    assert limits[0] <= wrong <= limits[1]


@given(st.integers(2, 400), st.floats(0.8, 1.2), st.integers(0, 99))
def test_bounds_contain_the_estimate_and_agree_with_the_tests(count: int, ratio: float, seed: int) -> None:
    sums = sum_pairs(draw_pairs(count, ratio, seed=seed))
    lower, upper = ratio_bounds(sums, LOWER, UPPER)
    assert lower <= sums.canary_total / sums.control_total <= upper
    if lower > 0:
        assert score_moments(sums, lower * 0.999).is_significant(1, LOWER)
        assert not score_moments(sums, lower * 1.001).is_significant(1, LOWER)
    if math.isfinite(upper):
        assert score_moments(sums, upper * 1.001).is_significant(-1, UPPER)
        assert not score_moments(sums, upper * 0.999).is_significant(-1, UPPER)


def test_pairs_of_one_cluster_are_never_evidence() -> None:
    sums = sum_pairs([(5, 1.0, 2.0)] * 1000)
    assert effective_bucket_count(sums) == 1
    assert ratio_bounds(sums, UPPER, UPPER) == (0.0, math.inf)


def test_equal_pairs_of_a_cluster_count_once() -> None:
    single, copied = (sum_pairs(draw_pairs(count, 1.0, cluster_size=size)) for count, size in ((200, 1), (4000, 20)))
    width, copied_width = (np.diff(ratio_bounds(sums, UPPER, UPPER))[0] for sums in (single, copied))
    assert copied_width == pytest.approx(width, rel=0.15)


def test_what_requests_differ_by_cancels() -> None:
    """Requests differ by a factor of e: one standard deviation. Bounds are as narrow as the noise of the pairs."""
    lower, upper = ratio_bounds(sum_pairs(draw_pairs(400, 0.97)), UPPER, UPPER)
    assert 0.92 < lower < 0.97 < upper < 1.0


def test_answers_in_the_same_steps_accept_without_noise_and_roll_nothing_back() -> None:
    """The same drafter under another name, at temperature 0."""
    sums = sum_pairs(draw_pairs(100, 1.0, noise=0.0))
    assert not score_moments(sums, 1.0).is_significant(1, LOWER)
    assert score_moments(sums, 1 / 0.98).is_significant(-1, UPPER)


def test_a_single_long_answer_is_worth_a_single_pair() -> None:
    assert effective_pair_count(sum_pairs([(1, 2.0, 2.0)] * 7)) == pytest.approx(7)
    assert effective_pair_count(sum_pairs([(1, 2.0, 2.0)] * 7 + [(2, 1e6, 1e6)])) == pytest.approx(1, rel=1e-3)
    assert effective_pair_count(PairSums()) == effective_bucket_count(PairSums()) == 0


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95])
def test_an_equal_drafter_is_worse_with_a_chance_of_alpha_at_most_at_any_correlation(correlation: float) -> None:
    """100 runs at alpha 0.05, peeked at after each 20 of 400 pairs."""
    random, wrong = np.random.default_rng(4), 0
    for _ in range(100):
        shared, *arms = random.normal(0, 0.4, (3, 400))
        canary, control = (np.exp(3 + math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * values) for values in arms)
        sums = PairSums()
        for index in range(400):
            sums = sums.add_pair(int(random.integers(BUCKETS)), float(canary[index]), float(control[index]))
            if index % 20 == 19 and score_moments(sums, 1.0).is_significant(1, Level(0.05, 300.0)):
                wrong += 1
                break
    assert wrong <= 10
