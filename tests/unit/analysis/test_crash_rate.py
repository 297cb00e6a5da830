"""Crash rates: how crashes count, and how rarely equal arms are reported as different."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aerie.analysis.statistics.crash_rate import CrashCounts

ALPHA = 0.002


@pytest.mark.parametrize(
    ("canary", "control", "hours", "more"),
    [
        (1, 0, 0.5, False),
        (2, 0, 0.5, True),
        (2, 0, 1.0, True),
        (2, 1, 1.0, False),
        (2, 2, 1.0, False),
        (4, 0, 16.0, True),
        (1, 0, 0.1, False),
        (8, 8, 4.0, False),
        (0, 3, 1.0, False),
    ],
)
def test_canary_is_worse_after_more_crashes(canary: int, control: int, hours: float, more: bool) -> None:
    assert CrashCounts(canary, control, hours, hours).is_canary_worse(ALPHA) is more


def test_a_single_crash_is_suspicious_and_one_of_both_is_not() -> None:
    assert CrashCounts(1, 0, 0.5, 0.5).is_suspicious
    assert not CrashCounts(1, 1, 0.5, 0.5).is_suspicious
    assert not CrashCounts(0, 0, 0.5, 0.5).is_suspicious


@pytest.mark.parametrize(("weekly", "most"), [(0.1, 0.002), (1.0, 0.005), (5.0, 0.07)])
def test_equal_engines_are_rarely_reported_as_worse(weekly: float, most: float) -> None:
    """Two arms of 8 pods for a day, each pod with `weekly` crashes a week, evaluated after every crash. Few
    engines crash five times a week; then the level is exceeded."""
    random = np.random.default_rng(1)
    wrong = 0
    for _ in range(2000):
        events = sorted((float(hour), arm) for arm in (0, 1) for hour in random.uniform(0, 24, random.poisson(8 * weekly / 7)))
        counts = [0, 0]
        for hour, arm in events:
            counts[arm] += 1
            if CrashCounts(counts[0], counts[1], 8 * hour, 8 * hour).is_canary_worse(ALPHA):
                wrong += 1
                break
    assert wrong <= most * 2000


def test_restarts_are_counted_once_and_older_ones_are_not() -> None:
    crash_counts = CrashCounts().add_restarts({"a": 7}, {}).add_restarts({"a": 7}, {}).add_restarts({"a": 9, "b": 1}, {"c": 2})
    assert (crash_counts.canary_crashes, crash_counts.control_crashes) == (4, 1)
    assert crash_counts.add_exposure(2, 3, 1800.0).canary_pod_hours == 1.0
    assert CrashCounts(**json.loads(json.dumps(crash_counts.to_dict()))) == crash_counts
