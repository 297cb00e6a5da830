"""Change points: detected where traffic changed, none from noise, and their use in the forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from aerie.engine.speculation import Static
from aerie.tuning.decision.forecast import estimate_load
from aerie.tuning.models.change_points import (
    DAY,
    MIN_LOAD_REGIME_BLOCKS,
    WEEK,
    BlockLoad,
    ChangePoints,
    detect_change_points,
    find_change_indices,
    population_stability_index,
    weight_next_day,
)
from aerie.tuning.telemetry import HOUR, ReplicaWindow, TelemetryBlock, TuningTelemetry
from tests.unit.tuning.windows import K3, window

BLOCK = 300.0
CALM = (0.8, 0.75, 0.7)
HARD = (0.65, 0.6, 0.6)
COLLAPSED = (0.8, 0.5, 0.2)


def make_blocks(
    batches: Sequence[float], conditionals: Sequence[Sequence[float]] = (CALM,), *, seed: int = 1, noise: float = 0.02
) -> list[TelemetryBlock]:
    """Make a block at each batch; conditionals by block, the last ones for the rest, with noise in the logit of each."""
    random = np.random.default_rng(seed)
    blocks = []
    for index, batch in enumerate(batches):
        own = conditionals[min(index, len(conditionals) - 1)]
        q = [1 / (1 + math.exp(-math.log(each / (1 - each)) - noise * random.standard_normal())) for each in own]
        noisy_batch = batch * math.exp(noise * random.standard_normal())
        blocks.append(TelemetryBlock(BLOCK * index, K3, window(K3, noisy_batch, 0.01, q, seconds=BLOCK)))
    return blocks


@pytest.mark.parametrize(
    ("after", "what"), [(HARD, "S1 went from 0.80 to 0.65"), (COLLAPSED, "the acceptance length of K=3 went")]
)
def test_a_change_in_acceptance_is_dated(after: Sequence[float], what: str) -> None:
    change_points = detect_change_points(make_blocks([8.0] * 60, [CALM] * 40 + [after]))
    assert change_points.acceptance is not None
    assert change_points.acceptance.timestamp == pytest.approx(40 * BLOCK, abs=BLOCK)
    assert what in change_points.acceptance.description
    assert change_points.load is None


def test_the_newest_of_several_changes_counts() -> None:
    series = make_blocks([8.0] * 90, [CALM] * 30 + [HARD] * 30 + [COLLAPSED])
    change_points = detect_change_points(series)
    assert change_points.acceptance is not None
    assert change_points.acceptance.timestamp == pytest.approx(60 * BLOCK, abs=BLOCK)
    assert [block.start for block in change_points.acceptance_blocks(series)] == [block.start for block in series[60:]]
    assert change_points.load_blocks(series) == series


def test_autocorrelated_noise_is_rarely_a_change() -> None:
    random = np.random.default_rng(3)
    false = 0
    for _ in range(200):
        shocks = 0.01 * random.standard_normal(288)
        values = np.empty(288)
        values[0] = shocks[0]
        for index in range(1, 288):
            values[index] = 0.6 * values[index - 1] + shocks[index]
        false += bool(find_change_indices(0.8 + values, 6, lambda before, after: abs(after.mean() - before.mean()) > 0.02))
    assert false <= 4


def test_a_shift_too_small_to_matter_is_no_change() -> None:
    assert detect_change_points(make_blocks([8.0] * 80, [CALM] * 40 + [(0.81, 0.75, 0.7)])) == ChangePoints()


def test_a_doubled_load_is_a_change_on_the_first_day() -> None:
    change_points = detect_change_points(make_blocks([10.0] * 48 + [20.0] * MIN_LOAD_REGIME_BLOCKS))
    assert change_points.load is not None
    assert change_points.load.timestamp == pytest.approx(48 * BLOCK, abs=BLOCK)
    assert "the batch went from 10.0 to 20" in change_points.load.description
    assert change_points.acceptance is None


def test_a_burst_is_no_regime() -> None:
    assert detect_change_points(make_blocks([10.0] * 48 + [20.0] * 3)).load is None


def diurnal(hours: float, level: float = 1.0) -> list[float]:
    return [level * 20 * 3 ** math.sin(2 * math.pi * index * BLOCK / DAY) for index in range(round(hours * HOUR / BLOCK))]


@pytest.mark.parametrize("hours", [24, 30, 33, 36, 39, 42, 45, 48])
def test_the_hours_of_a_day_are_no_change(hours: int) -> None:
    day = round(DAY / BLOCK)
    assert detect_change_points(make_blocks(diurnal(hours)[-day:])).load is None


def test_a_load_beyond_that_of_the_day_is_a_lasting_change() -> None:
    for hours in (2, 8):
        change_points = detect_change_points(make_blocks([*diurnal(24 - hours), *[150.0] * round(hours * HOUR / BLOCK)]))
        assert change_points.load is not None
        assert change_points.load.timestamp == pytest.approx((24 - hours) * HOUR, abs=2 * BLOCK)


def test_the_stability_index_is_computed_from_shares() -> None:
    before, after = np.array([1.1] * 50 + [2.1] * 50), np.array([1.1] * 80 + [2.1] * 20)
    assert population_stability_index(before, before) == pytest.approx(0)
    expected = 0.3 * math.log(0.8 / 0.5) - 0.3 * math.log(0.2 / 0.5)
    assert population_stability_index(before, after) == pytest.approx(expected, rel=0.1)


def make_telemetry(batches: Sequence[float]) -> TuningTelemetry:
    telemetry = TuningTelemetry()
    for index, batch in enumerate(batches):
        for replica, factor in (("a", 0.8), ("b", 1.25)):
            telemetry.add(ReplicaWindow(replica, BLOCK * index + 1, K3, window(K3, factor * batch, 0.01, seconds=BLOCK)))
    return telemetry


def test_the_load_since_a_change_has_the_spread_among_replicas() -> None:
    telemetry = make_telemetry([10.0] * 48 + [40.0] * 24)
    series = list(telemetry.blocks())
    change_points = detect_change_points(series)
    assert change_points.load is not None
    recent_load, whole_load = estimate_load(telemetry.cells, series, change_points), estimate_load(telemetry.cells, series)
    assert whole_load.quantile(0.2) < 15
    assert 20 < recent_load.quantile(0.02) < 35
    assert recent_load.quantile(0.5) == pytest.approx(40, rel=0.12)
    assert 45 < recent_load.quantile(0.98) < 75
    assert recent_load.shares.sum() == pytest.approx(1)


def test_the_next_day_is_weighted_by_the_last_day_and_the_weekday() -> None:
    rows = [BlockLoad(HOUR * hour, 1.0, 1.0) for hour in range(7 * 24 + 1)]
    newest = rows[-1].start
    ages = [newest - row.start for row, _ in weight_next_day(rows)]
    assert {age < DAY or WEEK - DAY < age <= WEEK for age in ages} == {True}
    assert len(ages) == 48
    shorter = weight_next_day(rows[-72:])
    assert [weight for _, weight in shorter[::24]] == [0.25, 0.5, 1.0]
    assert weight_next_day([]) == []


def test_another_setting_is_no_change_in_acceptance() -> None:
    before = make_blocks([8.0] * 30)
    after = [TelemetryBlock(BLOCK * (30 + i), Static(5), window(Static(5), 8, 0.01, CALM, seconds=BLOCK)) for i in range(30)]
    assert detect_change_points([*before, *after]).acceptance is None
