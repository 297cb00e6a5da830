"""Thirty days in which no trial can succeed: how often one is started, its cost, and the message of the condition."""

from __future__ import annotations

import pytest

from benchmarks._tuning_days import simulate_days

pytestmark = pytest.mark.slow


@pytest.mark.nightly  # test_steady.py and tests/unit/controller/tuning have the pauses after a trial
def test_a_cluster_of_fixed_size_has_one_trial() -> None:
    totals = simulate_days("NoRoom")
    assert totals.trials == 1
    assert (totals.gpu_hours, totals.spent) == (0, 0)
    assert totals.pending_hours <= 2
    assert totals.condition_message.startswith("InsufficientCapacity: ")
    assert "capacity: Reuse" in totals.condition_message


def test_a_crashing_setting_is_tried_after_growing_pauses() -> None:
    totals = simulate_days("Crash")
    assert totals.trials == 5, "after 1, 2, 4 and 8 days"
    assert totals.condition_message.startswith("Cooldown: ")
    assert "K=5" in totals.condition_message
    assert 0 < totals.spent <= totals.gpu_hours + 2


@pytest.mark.nightly  # as above
def test_a_resource_without_tuning_gets_no_trial_pods() -> None:
    totals = simulate_days("Crash", mode="Recommend")
    assert (totals.trials, totals.gpu_hours, totals.pending_hours, totals.spent) == (0, 0, 0, 0)
    assert totals.condition_message.startswith("Recommended: ")
