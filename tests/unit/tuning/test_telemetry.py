"""What a tuner remembers, what it leaves out, and that it never remembers more than its horizon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aerie.engine.speculation import Adaptive, Off, Setting, Static
from aerie.tuning.telemetry import (
    BLOCK_SECONDS,
    CELL_SECONDS,
    HOUR,
    MOST_SENTENCES,
    OTHER_REASONS,
    Reading,
    Scale,
    Telemetry,
    batch_bin,
    bin_center,
    wrong_setting,
)
from tests.unit.tuning.windows import K3, window


def test_a_cell_has_the_sums_of_its_windows() -> None:
    telemetry = Telemetry()
    for index, batch in enumerate((8.0, 8.1)):
        telemetry.add(Reading("a", 60.0 * (index + 1), K3, window(K3, batch, 0.01)))
    ((key, cell),) = telemetry.cells.items()
    assert (key.replica, key.setting, key.batch_bin) == ("a", K3, batch_bin(8.0))
    assert cell.windows == 2
    assert cell.batch / cell.request_steps == pytest.approx(8.05, abs=0.01)
    assert cell.step_seconds / cell.request_steps == pytest.approx(0.01)
    assert cell.drafted / cell.request_steps == pytest.approx(3)


def test_blocks_are_sums_over_replicas() -> None:
    telemetry = Telemetry()
    one = window(K3, 4.0, 0.01)
    for replica in "abc":
        telemetry.add(Reading(replica, 30.0, K3, one))
    (block,) = telemetry.blocks()
    assert block.counters.request_steps == pytest.approx(3 * one.request_steps)
    assert block.start == 0.0


@pytest.mark.parametrize("batch", [1, 3, 17, 400])
def test_a_bin_is_a_quarter_of_an_octave(batch: float) -> None:
    assert bin_center(batch_bin(batch)) == pytest.approx(batch, rel=0.1)


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        (Reading("a", 60.0, K3, window(K3, 4, 0.01), age=100.0), "younger than 10 minutes"),
        (Reading("a", 60.0, K3, window(K3, 4, 0.01, preemptions=1.0)), "preempted"),
        (Reading("a", 60.0, K3, window(K3, 4, 0.01, seconds=0.2)), "fewer than 50 steps"),
        (Reading("a", 60.0, K3, window(K3, 4, 12.0, seconds=3600.0)), "stalled"),
        (Reading("a", 60.0, Adaptive(3), window(K3, 4, 0.01)), "trims drafts"),
    ],
)
def test_windows_that_would_mislead_have_no_step_time_but_acceptance(reading: Reading, reason: str) -> None:
    telemetry = Telemetry()
    telemetry.add(reading)
    assert not telemetry.cells
    assert [reason in sentence for sentence in telemetry.left_out] == [True]
    assert len(list(telemetry.blocks())) == 1


def test_with_several_api_servers_the_batch_is_not_known() -> None:
    telemetry = Telemetry(api_servers=2)
    telemetry.add(Reading("a", 60.0, K3, window(K3, 4, 0.01)))
    assert not telemetry.cells
    assert "--api-server-count=1" in next(iter(telemetry.left_out))


@pytest.mark.parametrize(
    ("running", "declared", "reason"),
    [
        (Static(5), Static(3), "built for 5 draft tokens"),
        (Off(), Static(3), "does not count drafts"),
        (Static(3), Off(), "the engine drafts"),
    ],
)
def test_an_engine_that_runs_another_setting_is_noticed(running: Setting, declared: Setting, reason: str) -> None:
    sentence = wrong_setting(window(running, 4, 0.01), declared)
    assert sentence is not None
    assert reason in sentence
    assert wrong_setting(window(running, 4, 0.01), running) is None
    telemetry = Telemetry()
    telemetry.add(Reading("a", 60.0, declared, window(running, 4, 0.01)))
    assert not telemetry.cells
    assert not list(telemetry.blocks())


def test_other_buckets_in_one_block_are_left_out() -> None:
    telemetry = Telemetry()
    one = window(K3, 4, 0.01)
    other = replace(one, time_to_first_token=replace(one.time_to_first_token, edges=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, float("inf"))))
    telemetry.add(Reading("a", 60.0, K3, one))
    telemetry.add(Reading("b", 60.0, K3, other))
    assert any("count in different ways" in sentence for sentence in telemetry.left_out)


def test_memory_ends_at_the_horizon() -> None:
    telemetry = Telemetry(horizon=2 * CELL_SECONDS)
    one = window(K3, 4, 0.01)
    for index in range(200):
        telemetry.add(Reading("a", BLOCK_SECONDS * 2 * index, K3, one))
    newest = telemetry.newest
    assert newest is not None
    assert min(block.start for block in telemetry.blocks()) >= newest - telemetry.horizon - BLOCK_SECONDS
    assert {key.slot for key in telemetry.cells} <= {newest // CELL_SECONDS - back for back in range(3)}


def test_a_window_without_a_request_costs_nothing() -> None:
    telemetry = Telemetry()
    one = window(K3, 4, 0.01)
    telemetry.add(Reading("a", 60.0, K3, one - one))
    assert telemetry == Telemetry()


def test_the_lengths_follow_from_how_often_is_decided_and_how_far_back_is_looked() -> None:
    assert Scale.of(1800.0, 24 * HOUR) == Scale()
    assert Scale.of(60.0, 600.0) == Scale(10.0, 100.0, 20.0)
    assert Scale.of(300.0, 24 * HOUR).block == 300.0, "no more than 288 blocks"
    assert Scale.of(6 * HOUR, 168 * HOUR) == Scale(HOUR, 28 * HOUR, 600.0)


def test_other_lengths_are_kept_to() -> None:
    telemetry = Telemetry(600.0, scale=Scale.of(60.0, 600.0))
    for index in range(100):
        telemetry.add(Reading("a", 10.0 * index + 5, K3, window(K3, 4, 0.01, seconds=10.0), age=10.0 * index))
    assert len(list(telemetry.blocks())) == 61
    assert telemetry.left_out == {"the engine was younger than 20 s.": 2}
    assert {key.slot for key in telemetry.cells} == {3, 4, 5, 6, 7, 8, 9}


def test_reasons_do_not_grow_without_end() -> None:
    telemetry = Telemetry()
    for index in range(200):
        telemetry.leave_out(f"it says {index}.")
    assert len(telemetry.left_out) == MOST_SENTENCES + 1
    assert telemetry.left_out[OTHER_REASONS] == 200 - MOST_SENTENCES
