"""Telemetry of the tuner: what it contains, what it excludes, and its horizon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aerie.engine.speculation import Adaptive, Off, SpeculationSetting, Static
from aerie.tuning.telemetry import (
    BATCH_BINS_PER_OCTAVE,
    BLOCK_SECONDS,
    CELL_SECONDS,
    HOUR,
    MAX_EXCLUSION_REASONS,
    OTHER_EXCLUSION_REASONS,
    ReplicaWindow,
    TelemetryScale,
    TuningTelemetry,
    batch_bin,
    setting_mismatch_reason,
)
from tests.unit.tuning.windows import K3, window


def test_a_cell_has_the_sums_of_its_windows() -> None:
    telemetry = TuningTelemetry()
    for index, batch in enumerate((8.0, 8.1)):
        telemetry.add(ReplicaWindow("a", 60.0 * (index + 1), K3, window(K3, batch, 0.01)))
    ((key, cell),) = telemetry.cells.items()
    assert (key.replica, key.setting, key.batch_bin) == ("a", K3, batch_bin(8.0))
    assert cell.windows == 2
    assert cell.batch_sum / cell.request_steps == pytest.approx(8.05, abs=0.01)
    assert cell.step_seconds / cell.request_steps == pytest.approx(0.01)
    assert cell.draft_tokens_sum / cell.request_steps == pytest.approx(3)


def test_blocks_are_sums_over_replicas() -> None:
    telemetry = TuningTelemetry()
    counters = window(K3, 4.0, 0.01)
    for replica in "abc":
        telemetry.add(ReplicaWindow(replica, 30.0, K3, counters))
    (block,) = telemetry.blocks()
    assert block.counters.request_steps == pytest.approx(3 * counters.request_steps)
    assert block.start == 0.0


@pytest.mark.parametrize("batch", [1, 3, 17, 400])
def test_a_bin_is_a_quarter_of_an_octave(batch: float) -> None:
    assert 2.0 ** (batch_bin(batch) / BATCH_BINS_PER_OCTAVE) == pytest.approx(batch, rel=0.1)


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        (ReplicaWindow("a", 60.0, K3, window(K3, 4, 0.01), engine_age_seconds=100.0), "younger than 10 minutes"),
        (ReplicaWindow("a", 60.0, K3, window(K3, 4, 0.01, preemptions=1.0)), "preempted"),
        (ReplicaWindow("a", 60.0, K3, window(K3, 4, 0.01, seconds=0.2)), "fewer than 50 steps"),
        (ReplicaWindow("a", 60.0, K3, window(K3, 4, 12.0, seconds=3600.0)), "stalled"),
        (ReplicaWindow("a", 60.0, Adaptive(3), window(K3, 4, 0.01)), "trims drafts"),
    ],
)
def test_misleading_windows_have_acceptance_but_no_step_time(reading: ReplicaWindow, reason: str) -> None:
    telemetry = TuningTelemetry()
    telemetry.add(reading)
    assert not telemetry.cells
    assert [reason in sentence for sentence in telemetry.excluded_windows] == [True]
    assert len(list(telemetry.blocks())) == 1


def test_several_api_servers_leave_the_batch_unknown() -> None:
    telemetry = TuningTelemetry(api_servers=2)
    telemetry.add(ReplicaWindow("a", 60.0, K3, window(K3, 4, 0.01)))
    assert not telemetry.cells
    assert "--api-server-count=1" in next(iter(telemetry.excluded_windows))


@pytest.mark.parametrize(
    ("running", "declared", "reason"),
    [
        (Static(5), Static(3), "built for 5 draft tokens"),
        (Off(), Static(3), "does not count drafts"),
        (Static(3), Off(), "the engine drafts"),
    ],
)
def test_an_engine_with_another_setting_is_detected(
    running: SpeculationSetting, declared: SpeculationSetting, reason: str
) -> None:
    sentence = setting_mismatch_reason(window(running, 4, 0.01), declared)
    assert sentence is not None
    assert reason in sentence
    assert setting_mismatch_reason(window(running, 4, 0.01), running) is None
    telemetry = TuningTelemetry()
    telemetry.add(ReplicaWindow("a", 60.0, declared, window(running, 4, 0.01)))
    assert not telemetry.cells
    assert not list(telemetry.blocks())


def test_other_buckets_in_one_block_are_excluded() -> None:
    telemetry = TuningTelemetry()
    counters = window(K3, 4, 0.01)
    other = replace(
        counters, time_to_first_token=replace(counters.time_to_first_token, edges=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, float("inf")))
    )
    telemetry.add(ReplicaWindow("a", 60.0, K3, counters))
    telemetry.add(ReplicaWindow("b", 60.0, K3, other))
    assert any("report different counters" in sentence for sentence in telemetry.excluded_windows)


def test_telemetry_ends_at_the_horizon() -> None:
    telemetry = TuningTelemetry(horizon=2 * CELL_SECONDS)
    counters = window(K3, 4, 0.01)
    for index in range(200):
        telemetry.add(ReplicaWindow("a", BLOCK_SECONDS * 2 * index, K3, counters))
    newest = telemetry.newest_window_end
    assert newest is not None
    assert min(block.start for block in telemetry.blocks()) >= newest - telemetry.horizon - BLOCK_SECONDS
    assert {key.slot for key in telemetry.cells} <= {newest // CELL_SECONDS - back for back in range(3)}


def test_a_window_without_requests_is_ignored() -> None:
    telemetry = TuningTelemetry()
    counters = window(K3, 4, 0.01)
    telemetry.add(ReplicaWindow("a", 60.0, K3, counters - counters))
    assert telemetry == TuningTelemetry()


def test_the_scale_follows_from_interval_and_horizon() -> None:
    assert TelemetryScale.from_decision_interval(1800.0, 24 * HOUR) == TelemetryScale()
    assert TelemetryScale.from_decision_interval(60.0, 600.0) == TelemetryScale(10.0, 100.0, 20.0)
    assert TelemetryScale.from_decision_interval(300.0, 24 * HOUR).block_seconds == 300.0, "no more than 288 blocks"
    assert TelemetryScale.from_decision_interval(6 * HOUR, 168 * HOUR) == TelemetryScale(HOUR, 28 * HOUR, 600.0)


def test_telemetry_follows_its_scale() -> None:
    telemetry = TuningTelemetry(600.0, scale=TelemetryScale.from_decision_interval(60.0, 600.0))
    for index in range(100):
        telemetry.add(
            ReplicaWindow("a", 10.0 * index + 5, K3, window(K3, 4, 0.01, seconds=10.0), engine_age_seconds=10.0 * index)
        )
    assert len(list(telemetry.blocks())) == 61
    assert telemetry.excluded_windows == {"the engine was younger than 20 s.": 2}
    assert {key.slot for key in telemetry.cells} == {3, 4, 5, 6, 7, 8, 9}


def test_the_number_of_exclusion_reasons_is_bounded() -> None:
    telemetry = TuningTelemetry()
    for index in range(200):
        telemetry.record_exclusion(f"it says {index}.")
    assert len(telemetry.excluded_windows) == MAX_EXCLUSION_REASONS + 1
    assert telemetry.excluded_windows[OTHER_EXCLUSION_REASONS] == 200 - MAX_EXCLUSION_REASONS
