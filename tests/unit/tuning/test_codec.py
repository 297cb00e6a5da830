"""Telemetry as text: it is unpacked as it was packed, never exceeds its limit, and other texts are not unpacked."""

from __future__ import annotations

import base64
import json
import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.engine.metrics.sample import Counters
from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static
from aerie.tuning.telemetry import HOUR, ReplicaWindow, StepCellKey, TelemetryScale, TuningTelemetry
from aerie.tuning.worker.codec import pack_telemetry, telemetry_from_json, telemetry_to_json, unpack_telemetry
from tests.unit.tuning.windows import K3, window

SETTINGS: tuple[SpeculationSetting, ...] = (
    Off(),
    K3,
    Static(5),
    Schedule((ScheduleTier(1, 8, 4), ScheduleTier(9, 64, 0)), 4),
    Adaptive(7),
)
SCALE = TelemetryScale()


def readings() -> st.SearchStrategy[list[ReplicaWindow]]:
    window_strategy = st.builds(
        lambda replica, end, setting, batch, ms: ReplicaWindow(replica, end, setting, window(setting, batch, ms / 1000)),
        st.sampled_from("abc"),
        st.integers(1, 20).map(lambda n: 3000.0 * n),
        st.sampled_from(SETTINGS),
        st.sampled_from([1.0, 3.7, 40.0]),
        st.floats(4.0, 60.0),
    )
    return st.lists(window_strategy, max_size=12)


def fill(windows: list[ReplicaWindow], **options: Any) -> TuningTelemetry:
    telemetry = TuningTelemetry(**options)
    for replica_window in windows:
        telemetry.add(replica_window)
    return telemetry


def assert_equal(actual: TuningTelemetry, expected: TuningTelemetry) -> None:
    assert actual.newest_window_end == expected.newest_window_end
    assert actual.cells.keys() == expected.cells.keys()
    for key, cell in actual.cells.items():
        expected_cell = expected.cells[key]
        assert cell.windows == expected_cell.windows
        for name in ("request_steps", "step_seconds", "batch_sum", "prefill_sum", "draft_tokens_sum"):
            assert getattr(cell, name) == pytest.approx(getattr(expected_cell, name), rel=1e-5)
    for block, expected_block in zip(actual.blocks(), expected.blocks(), strict=True):
        assert (block.start, block.setting) == (expected_block.start, expected_block.setting)
        assert_counters_equal(block.counters, expected_block.counters)


def assert_counters_equal(actual: Counters, expected: Counters) -> None:
    assert actual.finished == expected.finished
    assert actual.request_steps == pytest.approx(expected.request_steps, rel=1e-5)
    assert actual.step_seconds == pytest.approx(expected.step_seconds, rel=1e-5)
    for actual_histogram, expected_histogram in (
        (actual.time_to_first_token, expected.time_to_first_token),
        (actual.time_per_output_token, expected.time_per_output_token),
    ):
        assert actual_histogram.edges == expected_histogram.edges
        assert actual_histogram.counts == expected_histogram.counts
        assert actual_histogram.sum == pytest.approx(expected_histogram.sum, rel=1e-5)
    assert (actual.speculation is None) == (expected.speculation is None)
    if actual.speculation and expected.speculation:
        assert actual.speculation.accepted_per_position == pytest.approx(expected.speculation.accepted_per_position, rel=1e-5)


# -------------------------------------------------------------------------------------------------------- what comes back
@given(readings())
def test_unpacked_telemetry_is_packed_to_the_same_text(windows: list[ReplicaWindow]) -> None:
    telemetry = fill(windows)
    unpacked = unpack_telemetry(pack_telemetry(telemetry), telemetry.horizon, SCALE)
    assert unpacked is not None
    assert_equal(unpacked, telemetry)
    assert pack_telemetry(unpacked) == pack_telemetry(telemetry)


@given(readings(), readings())
def test_merged_parts_equal_the_whole(earlier: list[ReplicaWindow], later: list[ReplicaWindow]) -> None:
    earlier, later = (sorted(part, key=lambda replica_window: replica_window.end) for part in (earlier, later))
    whole, part = fill(earlier + later), fill(earlier)
    part.merge(fill(later))
    assert_equal(part, whole)
    assert part.excluded_windows == whole.excluded_windows


def test_parts_of_another_scale_are_not_merged() -> None:
    with pytest.raises(ValueError, match="cannot be merged"):
        TuningTelemetry().merge(TuningTelemetry(scale=TelemetryScale(block_seconds=10.0)))


# ----------------------------------------------------------------------------------------------------------- what does not
def encode(document: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(document).encode())).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "bm9uZQ==",
        encode([]),
        encode({"version": 2}),
        encode("x"),
        base64.b64encode(zlib.compress(b"[" * 999)).decode(),
    ],
)
def test_invalid_text_is_not_unpacked(text: str) -> None:
    assert unpack_telemetry(text, 24 * HOUR, SCALE) is None


def test_text_that_decompresses_to_too_much_is_not_unpacked() -> None:
    assert unpack_telemetry(base64.b64encode(zlib.compress(b" " * 100_000_000)).decode(), 24 * HOUR, SCALE) is None


def test_text_with_another_block_length_is_not_unpacked() -> None:
    text = pack_telemetry(fill([ReplicaWindow("a", 60.0, K3, window(K3, 4, 0.01))]))
    assert unpack_telemetry(text, 24 * HOUR, SCALE) is not None
    assert unpack_telemetry(text, 24 * HOUR, TelemetryScale.from_decision_interval(60.0, 600.0)) is None


def places(document: Any) -> list[tuple[Any, Any]]:
    """Return the container and the key of every value in a JSON document."""
    keys = document.keys() if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    direct = [(document, key) for key in keys]
    return direct + [place for key in keys for place in places(document[key])]


@given(st.integers(0, 2**32), st.sampled_from([None, "x", -1, 1e308, [], {}, 7, True, float("nan"), float("inf")]))
def test_a_manually_edited_text_never_raises(seed: int, value: Any) -> None:
    document = telemetry_to_json(fill([ReplicaWindow("a", 60.0, setting, window(setting, 4, 0.01)) for setting in SETTINGS]))
    values = places(document)
    container, key = values[seed % len(values)]
    container[key] = value
    unpack_telemetry(encode(document), 24 * HOUR, SCALE)


# ------------------------------------------------------------------------------------------------------------- its limits
def test_a_limit_drops_the_oldest_cells_first() -> None:
    rng = random.Random(1)  # noqa: S311 - no secrets
    telemetry = TuningTelemetry()
    for hour in range(24):
        for replica in range(20):
            counters = window(K3, rng.uniform(1, 60), rng.uniform(0.01, 0.02))
            telemetry.add(ReplicaWindow(f"pod-{replica}", hour * HOUR, K3, counters))
    whole = pack_telemetry(telemetry)
    for limit in (len(whole), len(whole) // 2, len(whole) // 10, 700, 10):
        text = pack_telemetry(telemetry, limit)
        assert len(text) <= limit
        unpacked = unpack_telemetry(text, telemetry.horizon, SCALE)
        if unpacked is None:
            assert limit == 10
            continue
        retained, dropped = unpacked.cells.keys(), telemetry.cells.keys() - unpacked.cells.keys()
        assert min((key.slot for key in retained), default=99) >= max((key.slot for key in dropped), default=0)
        newest = [block.start for block in telemetry.blocks()][-len(list(unpacked.blocks())) :]
        assert [block.start for block in unpacked.blocks()] == (newest if list(unpacked.blocks()) else [])


def test_reading_keeps_the_horizon() -> None:
    telemetry = fill(
        [ReplicaWindow("a", 1.0, K3, window(K3, 4, 0.01)), ReplicaWindow("a", 30 * HOUR, K3, window(K3, 4, 0.01))], horizon=1e9
    )
    document = telemetry_to_json(telemetry)
    telemetry_read = telemetry_from_json(document, 24 * HOUR, SCALE)
    assert [block.start for block in telemetry_read.blocks()] == [30 * HOUR]
    assert {key.slot for key in telemetry_read.cells} == {7}
    assert isinstance(next(iter(telemetry_read.cells)), StepCellKey)
