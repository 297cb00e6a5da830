"""Telemetry as text: what was packed comes back, it never grows beyond its limit, and nothing else is taken for it."""

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
    one = st.builds(
        lambda replica, end, setting, batch, ms: ReplicaWindow(replica, end, setting, window(setting, batch, ms / 1000)),
        st.sampled_from("abc"),
        st.integers(1, 20).map(lambda n: 3000.0 * n),
        st.sampled_from(SETTINGS),
        st.sampled_from([1.0, 3.7, 40.0]),
        st.floats(4.0, 60.0),
    )
    return st.lists(one, max_size=12)


def filled(given: list[ReplicaWindow], **of: Any) -> TuningTelemetry:
    telemetry = TuningTelemetry(**of)
    for one in given:
        telemetry.add(one)
    return telemetry


def assert_alike(mine: TuningTelemetry, theirs: TuningTelemetry) -> None:
    assert mine.newest_window_end == theirs.newest_window_end
    assert mine.cells.keys() == theirs.cells.keys()
    for key, cell in mine.cells.items():
        other = theirs.cells[key]
        assert cell.windows == other.windows
        for name in ("request_steps", "step_seconds", "batch_sum", "prefill_sum", "draft_tokens_sum"):
            assert getattr(cell, name) == pytest.approx(getattr(other, name), rel=1e-5)
    for block, counterpart in zip(mine.blocks(), theirs.blocks(), strict=True):
        assert (block.start, block.setting) == (counterpart.start, counterpart.setting)
        assert_counted_alike(block.counters, counterpart.counters)


def assert_counted_alike(mine: Counters, theirs: Counters) -> None:
    assert mine.finished == theirs.finished
    assert mine.request_steps == pytest.approx(theirs.request_steps, rel=1e-5)
    assert mine.step_seconds == pytest.approx(theirs.step_seconds, rel=1e-5)
    for own, other in (
        (mine.time_to_first_token, theirs.time_to_first_token),
        (mine.time_per_output_token, theirs.time_per_output_token),
    ):
        assert own.edges == other.edges
        assert own.counts == other.counts
        assert own.sum == pytest.approx(other.sum, rel=1e-5)
    assert (mine.speculation is None) == (theirs.speculation is None)
    if mine.speculation and theirs.speculation:
        assert mine.speculation.accepted_per_position == pytest.approx(theirs.speculation.accepted_per_position, rel=1e-5)


# -------------------------------------------------------------------------------------------------------- what comes back
@given(readings())
def test_what_is_packed_comes_back_and_is_packed_to_the_same_text(given: list[ReplicaWindow]) -> None:
    telemetry = filled(given)
    found = unpack_telemetry(pack_telemetry(telemetry), telemetry.horizon, SCALE)
    assert found is not None
    assert_alike(found, telemetry)
    assert pack_telemetry(found) == pack_telemetry(telemetry)


@given(readings(), readings())
def test_parts_add_up_to_the_whole(earlier: list[ReplicaWindow], later: list[ReplicaWindow]) -> None:
    earlier, later = (sorted(part, key=lambda one: one.end) for part in (earlier, later))
    whole, part = filled(earlier + later), filled(earlier)
    part.merge(filled(later))
    assert_alike(part, whole)
    assert part.excluded_windows == whole.excluded_windows


def test_parts_of_another_scale_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="cannot be merged"):
        TuningTelemetry().merge(TuningTelemetry(scale=TelemetryScale(block_seconds=10.0)))


# ----------------------------------------------------------------------------------------------------------- what does not
def as_text(document: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(document).encode())).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "bm9uZQ==",
        as_text([]),
        as_text({"version": 2}),
        as_text("x"),
        base64.b64encode(zlib.compress(b"[" * 999)).decode(),
    ],
)
def test_what_cannot_be_read_is_as_good_as_none(text: str) -> None:
    assert unpack_telemetry(text, 24 * HOUR, SCALE) is None


def test_what_unfolds_to_more_than_can_be_is_not_unfolded() -> None:
    assert unpack_telemetry(base64.b64encode(zlib.compress(b" " * 100_000_000)).decode(), 24 * HOUR, SCALE) is None


def test_other_lengths_of_blocks_begin_anew() -> None:
    text = pack_telemetry(filled([ReplicaWindow("a", 60.0, K3, window(K3, 4, 0.01))]))
    assert unpack_telemetry(text, 24 * HOUR, SCALE) is not None
    assert unpack_telemetry(text, 24 * HOUR, TelemetryScale.from_decision_interval(60.0, 600.0)) is None


def places(document: Any) -> list[tuple[Any, Any]]:
    """Everything in it that could be another thing: its container and its key."""
    keys = document.keys() if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    found = [(document, key) for key in keys]
    return found + [place for key in keys for place in places(document[key])]


@given(st.integers(0, 2**32), st.sampled_from([None, "x", -1, 1e308, [], {}, 7, True, float("nan"), float("inf")]))
def test_whatever_a_hand_has_done_to_it_nothing_is_raised(seed: int, value: Any) -> None:
    document = telemetry_to_json(filled([ReplicaWindow("a", 60.0, one, window(one, 4, 0.01)) for one in SETTINGS]))
    found = places(document)
    container, key = found[seed % len(found)]
    container[key] = value
    unpack_telemetry(as_text(document), 24 * HOUR, SCALE)


# ------------------------------------------------------------------------------------------------------------- its limits
def test_too_much_loses_its_oldest_first() -> None:
    chance = random.Random(1)  # noqa: S311 - no secrets
    telemetry = TuningTelemetry()
    for hour in range(24):
        for replica in range(20):
            one = window(K3, chance.uniform(1, 60), chance.uniform(0.01, 0.02))
            telemetry.add(ReplicaWindow(f"pod-{replica}", hour * HOUR, K3, one))
    whole = pack_telemetry(telemetry)
    for limit in (len(whole), len(whole) // 2, len(whole) // 10, 700, 10):
        text = pack_telemetry(telemetry, limit)
        assert len(text) <= limit
        found = unpack_telemetry(text, telemetry.horizon, SCALE)
        if found is None:
            assert limit == 10
            continue
        kept, lost = found.cells.keys(), telemetry.cells.keys() - found.cells.keys()
        assert min((key.slot for key in kept), default=99) >= max((key.slot for key in lost), default=0)
        newest = [block.start for block in telemetry.blocks()][-len(list(found.blocks())) :]
        assert [block.start for block in found.blocks()] == (newest if list(found.blocks()) else [])


def test_reading_keeps_the_horizon() -> None:
    telemetry = filled(
        [ReplicaWindow("a", 1.0, K3, window(K3, 4, 0.01)), ReplicaWindow("a", 30 * HOUR, K3, window(K3, 4, 0.01))], horizon=1e9
    )
    document = telemetry_to_json(telemetry)
    found = telemetry_from_json(document, 24 * HOUR, SCALE)
    assert [block.start for block in found.blocks()] == [30 * HOUR]
    assert {key.slot for key in found.cells} == {7}
    assert isinstance(next(iter(found.cells)), StepCellKey)
