"""Bounds that hold at every moment: against the same mathematics done in another way, and by how often they are wrong."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.statistics.confidence_sequence import (
    PairedMoments,
    RareEvents,
    SequenceParameters,
    VariancePrior,
    alpha_with_deadline,
    blocks_until_half_width,
    critical_t_squared,
    half_width,
    mean_lower_bound,
    mean_upper_bound,
    mixture_precision,
    ratio_bounds,
    t_test_e_value,
)

VALUES = st.floats(0.5, 10.0)
PAIRS = st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=40)


def pairs_of(values: list[tuple[float, float]]) -> PairedMoments:
    pairs = PairedMoments()
    for canary, control in values:
        pairs = pairs.add_pair(canary, control)
    return pairs


# ------------------------------------------------------------------------------------------------------------------ moments
@given(PAIRS, st.floats(0.5, 2.0), st.floats(-1.0, 1.0))
def test_moments_are_those_of_the_scores(values: list[tuple[float, float]], ratio: float, offset: float) -> None:
    scores = [canary - ratio * control - offset for canary, control in values]
    pairs = pairs_of(values)
    assert pairs.count == len(values)
    assert pairs.score_mean(ratio, offset) == pytest.approx(statistics.fmean(scores), abs=1e-9)
    assert pairs.score_variance(ratio) == pytest.approx(statistics.variance(scores), rel=1e-6, abs=1e-9)


def test_moments_do_not_cancel_far_from_zero() -> None:
    far = pairs_of([(1e8 + x, 1e8) for x in (0.0, 1.0, 2.0)])
    assert far.score_variance(1.0) == pytest.approx(1.0)


# --------------------------------------------------------------------------------------------------------------- t sequence
@pytest.mark.parametrize(
    ("tightest", "widths"),
    [
        (30, {8: 1.88, 10: 1.28, 15: 0.85, 20: 0.69, 30: 0.54, 60: 0.37, 120: 0.265}),
        (10, {5: 3.08, 6: 1.90, 8: 1.30, 10: 1.07, 15: 0.81, 20: 0.68, 30: 0.55, 60: 0.39, 120: 0.28}),
    ],
)
def test_half_widths_of_unit_variance(tightest: float, widths: dict[int, float]) -> None:
    tuned = SequenceParameters(0.05, tightest)
    assert {n: half_width(n, 1.0, tuned) for n in widths} == pytest.approx(widths, abs=6e-3)


def test_half_width_of_too_few_blocks_is_infinite() -> None:
    assert [n for n in range(1, 20) if half_width(n, 1.0, SequenceParameters(0.05, 30)) == math.inf] == [1, 2, 3, 4, 5, 6]
    assert half_width(2, 1.0, SequenceParameters(0.05, 10, inflation=2.0)) == math.inf


def integrate_e_value(t: float, n: int, g: float) -> float:
    """Integrate the e-value as a mixture: the density of the t statistic of n normal values with effect d in units of their
    deviation, over that of effect 0, averaged over d ~ N(0, g). Both integrals by the midpoint rule."""
    freedom = n - 1
    s = (np.arange(2000) + 0.5) / 2000 * 4  # sample deviation over true deviation: chi / sqrt(freedom)
    log = (freedom - 1) * np.log(s) - freedom * s**2 / 2
    chi = np.exp(log - log.max())
    edge = 10 * math.sqrt(g)
    effects = (np.arange(2001) + 0.5) / 2001 * 2 * edge - edge
    mixture = np.exp(-(effects**2) / (2 * g))
    mixture /= mixture.sum()

    def density(effect: np.ndarray) -> np.ndarray:
        exponents = (t * s - effect[:, None] * math.sqrt(n)) ** 2 / 2
        return np.asarray((s * chi * np.exp(-exponents)).sum(axis=1))

    return float((mixture * density(effects)).sum() / density(np.zeros(1))[0])


@pytest.mark.parametrize("n", [2, 5, 30])
@pytest.mark.parametrize("t", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("g", [0.1, 0.633])
def test_e_value_is_the_mixture(t: float, n: int, g: float) -> None:
    assert t_test_e_value(t * t, n, n - 1, g) == pytest.approx(integrate_e_value(t, n, g), rel=2e-3)


@given(st.floats(1.5, 500), st.floats(0, 40), st.floats(0.01, 2), st.floats(0.001, 0.2))
def test_critical_is_where_the_e_value_reaches_the_level(blocks: float, more: float, g: float, alpha: float) -> None:
    t_squared = critical_t_squared(blocks, blocks - 1 + more, g, alpha)
    if t_squared < math.inf:
        assert t_test_e_value(t_squared, blocks, blocks - 1 + more, g) == pytest.approx(1 / alpha, rel=1e-6)
    else:
        assert t_test_e_value(1e12, blocks, blocks - 1 + more, g) <= 1 / alpha * (1 + 1e-6)


def test_half_width_is_smallest_near_the_tightest_block_count() -> None:
    widths = {blocks: half_width(60, 1.0, SequenceParameters(0.05, blocks)) for blocks in (6, 60, 600)}
    assert min(widths, key=widths.__getitem__) == 60
    assert mixture_precision(0.10, 10) == pytest.approx(0.633, abs=1e-3)


TUNINGS = st.builds(
    SequenceParameters,
    alpha=st.floats(0.001, 0.1),
    tightest_block_count=st.floats(5, 50),
    inflation=st.floats(1, 4),
    prior=st.builds(VariancePrior, st.floats(0.001, 1.0), st.sampled_from([0.0, 10.0, 20.0])),
    pod_effect_sd=st.sampled_from([0.0, 0.05]),
)


@given(PAIRS, TUNINGS)
def test_ratio_bounds_are_where_the_tests_turn(values: list[tuple[float, float]], tuned: SequenceParameters) -> None:
    pairs = pairs_of(values)
    low, high = ratio_bounds(pairs, tuned, tuned)
    estimate = pairs.canary_mean / pairs.control_mean
    assert low <= estimate <= high
    if math.isfinite(high):
        step = 1e-6 * (1 + abs(high)) + 1e-3 * (high - estimate)
        assert mean_upper_bound(pairs, high + step, 0.0, tuned) < 0 <= mean_upper_bound(pairs, high - step, 0.0, tuned) + 1e-9
        assert mean_lower_bound(pairs, low - step, 0.0, tuned) > 0 >= mean_lower_bound(pairs, low + step, 0.0, tuned) - 1e-9


@given(st.floats(0.05, 2.0), TUNINGS)
def test_blocks_until_is_the_first_count_that_is_enough(distance: float, tuned: SequenceParameters) -> None:
    count = blocks_until_half_width(distance, 1.0, tuned)
    if count is None:
        assert half_width(20_000, 1.0, tuned) > distance or distance <= 1.96 * tuned.pod_effect_sd
    else:
        assert half_width(count, 1.0, tuned) <= distance < half_width(count - 1, 1.0, tuned)


def crossing_rate(scores: np.ndarray, tuned: SequenceParameters) -> float:
    """Return the share of runs (rows) in which the lower bound of the mean was ever above 0."""
    n = np.arange(1, scores.shape[1] + 1)
    mean = np.cumsum(scores, axis=1) / n
    with np.errstate(invalid="ignore"):
        deviation = np.sqrt(np.maximum((np.cumsum(scores**2, axis=1) - n * mean**2) / np.maximum(n - 1, 1), 0))
        width = np.array([half_width(count, 1.0, tuned) for count in n.tolist()])
        return float((mean > deviation * width)[:, 1:].any(axis=1).mean())


def test_false_alarms_stay_below_alpha_over_two_thousand_peeks() -> None:
    scores = np.random.default_rng(1).standard_normal((4000, 2000))
    assert 0.025 < crossing_rate(scores, SequenceParameters(0.05, 30)) <= 0.05
    assert 0.003 < crossing_rate(scores, SequenceParameters(0.01, 10)) <= 0.01


def test_autocorrelated_blocks_need_inflation() -> None:
    random, keep = np.random.default_rng(2), 0.5
    scores = random.standard_normal((3000, 1000))
    for index in range(1, scores.shape[1]):
        scores[:, index] = keep * scores[:, index - 1] + math.sqrt(1 - keep**2) * scores[:, index]
    inflation = (1 + keep) / (1 - keep)
    assert crossing_rate(scores, SequenceParameters(0.05, 30)) > 0.2
    assert crossing_rate(scores, SequenceParameters(0.05, 30, inflation)) <= 0.05


def test_half_width_includes_lasting_differences_of_pods() -> None:
    certain = SequenceParameters(0.05, 30, pod_effect_sd=0.1)
    assert half_width(10_000, 1.0, certain) > 0.196
    assert half_width(10, 1.0, certain) == pytest.approx(math.hypot(half_width(10, 1.0, SequenceParameters(0.05, 30)), 0.196))


# ------------------------------------------------------------------------------------------------------------- with an end
@pytest.mark.parametrize("horizon", [20, 60, 120])
@pytest.mark.parametrize("tightest", [20, 30])
def test_alpha_is_spent_by_the_deadline(horizon: int, tightest: int) -> None:
    scores = np.random.default_rng(3).standard_normal((20_000, horizon))
    level = alpha_with_deadline(0.03, horizon, tightest)
    assert 0.03 < level <= 0.06
    assert crossing_rate(scores, SequenceParameters(level, tightest)) <= 0.03


def test_most_of_alpha_is_spent_where_the_deadline_is_far() -> None:
    scores = np.random.default_rng(4).standard_normal((20_000, 120))
    assert 0.02 < crossing_rate(scores, SequenceParameters(alpha_with_deadline(0.03, 120, 20), 20)) <= 0.03


def test_without_an_end_nothing_is_added() -> None:
    assert alpha_with_deadline(0.03, 1e6, 20) == 0.03


# ------------------------------------------------------------------------------------------------------------- rare events
@given(st.integers(0, 30), st.integers(0, 30), st.floats(0.05, 0.95))
def test_the_e_value_of_counts_is_the_mixture(canary: int, control: int, share: float) -> None:
    shares = (np.arange(20_000) + 0.5) / 20_000
    ratios = (shares / share) ** canary * ((1 - shares) / (1 - share)) ** control
    assert RareEvents().add_block(canary, control, share).e_value == pytest.approx(float(ratios.mean()), rel=1e-3)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_counts_are_wrong_no_more_often_than_alpha(share: float) -> None:
    """Exact test: the distribution of the canary's count, event by event, without the runs that have crossed."""
    alpha, probabilities, crossed = 0.05, {0: 1.0}, 0.0
    for event_count in range(1, 301):
        next_probabilities: dict[int, float] = {}
        for count, chance in probabilities.items():
            next_probabilities[count] = next_probabilities.get(count, 0.0) + chance * (1 - share)
            next_probabilities[count + 1] = next_probabilities.get(count + 1, 0.0) + chance * share
        stopped = [
            count
            for count in next_probabilities
            if RareEvents().add_block(count, event_count - count, share).is_canary_worse(alpha)
        ]
        crossed += sum(next_probabilities.pop(count) for count in stopped)
        probabilities = next_probabilities
    assert 0.002 < crossed <= alpha


def test_events_of_blocks_with_other_shares_add_up() -> None:
    together = RareEvents().add_block(3, 1, 0.5).add_block(2, 2, 0.25)
    assert (together.canary_events, together.control_events, together.expected_canary_events) == (5, 3, 3.0)
    assert together.log_null == pytest.approx(4 * math.log(0.5) + 2 * math.log(0.25) + 2 * math.log(0.75))


def test_fewer_events_are_no_alarm() -> None:
    assert RareEvents().add_block(0, 100, 0.5).e_value > 1e6
    assert not RareEvents().add_block(0, 100, 0.5).is_canary_worse(0.05)
    assert RareEvents().add_block(100, 0, 0.5).is_canary_worse(0.05)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_has_to_leave_something_for_both(share: float) -> None:
    with pytest.raises(ValueError, match="lies between 0 and 1"):
        RareEvents().add_block(1, 1, share)
