"""Thirty days in which no trial can succeed: how often it is tried all the same, what that costs, and what a person reads."""

from __future__ import annotations

from benchmarks._tuning_days import lived


def test_a_cluster_of_fixed_size_is_asked_for_room_once() -> None:
    found = lived("NoRoom")
    assert found.trials == 1
    assert (found.gpu_hours, found.spent) == (0, 0)
    assert found.pending_hours <= 2
    assert found.told.startswith("InsufficientCapacity: ")
    assert "capacity: Reuse" in found.told


def test_a_setting_that_crashes_is_tried_after_ever_longer_pauses() -> None:
    found = lived("Crash")
    assert found.trials == 5, "after 1, 2, 4 and 8 days"
    assert found.told.startswith("Cooldown: ")
    assert "K=5" in found.told
    assert 0 < found.spent <= found.gpu_hours + 2


def test_who_wrote_nothing_about_tuning_pays_for_no_pod() -> None:
    found = lived("Crash", mode="Recommend")
    assert (found.trials, found.gpu_hours, found.pending_hours, found.spent) == (0, 0, 0, 0)
    assert found.told.startswith("Recommended: ")
