"""Ends of simulated rollouts and their summary."""

from __future__ import annotations

import numpy as np
import pytest

from aerie.forecast.outcomes import Outcomes, summarize


def outcomes(ends: str, *, seconds: float = 60.0) -> Outcomes:
    """Return outcomes by letters: r rolled back, p promoted, i inconclusive; run n takes n + 1 times the seconds."""
    letters = np.array(list(ends))
    times = seconds * np.arange(1, len(letters) + 1)
    return Outcomes(letters == "r", letters == "p", times, times / 10, times * 2)


def test_summary_is_of_rollouts_with_a_verdict() -> None:
    summary = summarize(0.03, outcomes("ppri"))
    assert (summary.promotion_chance, summary.rollback_chance, summary.inconclusive_chance) == (0.5, 0.25, 0.25)
    assert (summary.median_seconds, summary.p90_seconds, summary.median_samples) == (120.0, 180.0, 12)
    assert summary.mean_user_requests == 300.0  # of all four


def test_summary_without_a_verdict_has_no_times() -> None:
    summary = summarize(0.0, outcomes("ii"))
    assert summary.inconclusive_chance == 1
    assert summary.median_seconds is summary.p90_seconds is summary.median_samples is None


def test_standard_error_is_not_0_for_what_never_happened() -> None:
    summary = summarize(0.0, outcomes("p" * 1000))
    assert 0 < summary.standard_error(0.0) < 0.002
    assert summary.standard_error(1.0) == pytest.approx(summary.standard_error(0.0))
    assert summary.standard_error(0.5) == pytest.approx(0.0158, abs=0.0001)


def test_what_is_not_rolled_back_continues() -> None:
    total = outcomes("rpi").then(outcomes("ppr", seconds=600.0))
    assert total.rolled_back.tolist() == [True, False, True]
    assert total.promoted.tolist() == [False, True, False]
    assert total.seconds.tolist() == [60.0, 120.0 + 1200.0, 180.0 + 1800.0]
    assert total.user_requests.tolist() == [120.0, 240.0 + 2400.0, 360.0 + 3600.0]


def test_the_stage_with_fewer_runs_decides_their_number() -> None:
    assert outcomes("pppp").then(outcomes("pi")).runs == outcomes("pi").then(outcomes("pppp")).runs == 2
