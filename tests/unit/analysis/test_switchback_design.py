"""The order of drafters in a trial by turns: balanced, reproducible, and independent of the other pods."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.switchback.design import (
    MAX_CARRYOVER_SECONDS,
    MAX_FIRST_WINDOW_SECONDS,
    MIN_CARRYOVER_SECONDS,
    MIN_STAGE_PAIRS,
    MIN_STAGE_SECONDS,
    MIN_WINDOW_SECONDS,
    WindowSchedule,
    begins_with_repeat,
    drafter_in_window,
    partnership,
    schedule_windows,
)

SEEDS = st.text(max_size=12)
PODS = st.integers(0, 40)
PAIRS = st.integers(0, 2000)
SCHEDULES = st.builds(WindowSchedule, st.floats(4.0, 120.0), st.floats(30.0, 120.0))


@given(SEEDS, PODS, PAIRS)
def test_a_pair_has_one_window_with_each_drafter(seed: str, pod: int, pair: int) -> None:
    assert {drafter_in_window(seed, pod, 2 * pair + position) for position in (0, 1)} == {"stable", "canary"}


@given(SEEDS, st.integers(1, 12), st.integers(0, 4000))
def test_half_of_the_pods_use_each_drafter_at_every_moment(seed: str, pods: int, window: int) -> None:
    counts = Counter(drafter_in_window(seed, pod, window) for pod in range(pods))
    assert abs(counts["stable"] - counts["canary"]) == pods % 2


@given(SEEDS, PODS, st.integers(0, 4000))
def test_partners_have_opposite_drafters(seed: str, pod: int, window: int) -> None:
    assert partnership(2 * pod) == partnership(2 * pod + 1)
    assert drafter_in_window(seed, 2 * pod, window) != drafter_in_window(seed, 2 * pod + 1, window)


def test_orders_are_the_same_in_every_process() -> None:
    orders = "".join(drafter_in_window("a seed", 0, window)[0] for window in range(24))
    assert orders == "cssccssccsscsccscscscscs"


def test_orders_of_pairs_and_partnerships_are_fair_and_independent() -> None:
    """10,000 coins: no share of two or three of them is more than 4 standard errors off."""
    coins = {(pod, pair): drafter_in_window("fair", pod, 2 * pair) == "canary" for pod in (0, 2) for pair in range(5000)}
    assert sum(coins.values()) == pytest.approx(5000, abs=200)
    for (pod, lag), other_pod in itertools.product(((0, 0), (0, 1), (2, 1), (0, 2)), (0, 2)):
        if (pod, lag) == (other_pod, 0):
            continue
        equal = [coins[pod, pair] == coins[other_pod, pair + lag] for pair in range(4998)]
        assert sum(equal) == pytest.approx(2499, abs=142)


def test_half_of_the_pairs_begin_with_a_repeat() -> None:
    repeats = [begins_with_repeat("repeats", 0, pair) for pair in range(5000)]
    assert sum(repeats) == pytest.approx(2500, abs=142)


# ----------------------------------------------------------------------------------------------------------------- schedule
@given(SCHEDULES, st.integers(0, 3000))
def test_windows_follow_each_other_and_pairs_are_of_one_length(schedule: WindowSchedule, number: int) -> None:
    window, following = schedule.window(number), schedule.window(number + 1)
    assert following.start_seconds == pytest.approx(window.end_seconds)
    assert following.length_seconds >= window.length_seconds
    if number % 2 == 0:
        assert following.length_seconds == window.length_seconds
    assert 0 < window.washout_seconds <= window.length_seconds / 2


@given(SCHEDULES)
def test_there_are_many_pairs_of_a_length_and_minutes_of_them_before_windows_are_longer(schedule: WindowSchedule) -> None:
    windows = (schedule.window(number) for number in itertools.count())
    for length, stage in itertools.groupby(windows, lambda window: window.length_seconds):
        if length == schedule.longest_window_seconds:
            break
        pairs = sum(1 for _ in stage) / 2
        assert pairs >= MIN_STAGE_PAIRS
        assert 2 * pairs * length >= MIN_STAGE_SECONDS
        assert pairs == MIN_STAGE_PAIRS or 2 * (pairs - 1) * length < MIN_STAGE_SECONDS, "no longer than it has to be"


@given(SCHEDULES, st.floats(0.0, 1e5))
def test_the_window_at_a_time_contains_it(schedule: WindowSchedule, seconds: float) -> None:
    window = schedule.window_at(seconds)
    assert window.start_seconds <= seconds < window.end_seconds
    assert schedule.window(window.number) == window


def test_a_time_before_the_trial_has_no_window() -> None:
    with pytest.raises(ValueError, match="before the trial"):
        WindowSchedule(10.0, 30.0).window_at(-1.0)


def test_windows_grow_until_they_exclude_a_carryover() -> None:
    schedule = WindowSchedule(10.0, 30.0)
    lengths = [10.0] * 40 + [20.0] * 20 + [40.0] * 16 + [60.0] * 24
    assert [schedule.window(number).length_seconds for number in range(100)] == lengths
    assert schedule.window(200).washout_seconds == 20.0


@given(st.floats(0.0, 1e4), st.floats(0.0, 1e5))
def test_lengths_are_bounded_whatever_the_traffic(rate: float, seconds: float) -> None:
    schedule = schedule_windows(rate, seconds)
    assert MIN_WINDOW_SECONDS <= schedule.first_window_seconds <= MAX_FIRST_WINDOW_SECONDS
    assert MIN_CARRYOVER_SECONDS <= schedule.carryover_seconds <= MAX_CARRYOVER_SECONDS


@pytest.mark.parametrize(
    ("rate", "seconds", "first"), [(6.0, 1.0, 4.0), (20.0, 15.0, 15.0), (1.0, 15.0, 15.0), (0.2, 15.0, 60.0)]
)
def test_the_shortest_windows_hold_enough_requests(rate: float, seconds: float, first: float) -> None:
    assert schedule_windows(rate, seconds) == WindowSchedule(first, 30.0)
