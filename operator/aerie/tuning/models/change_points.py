"""Since when traffic is what it is now: change-points in acceptance and in load.

What was counted before a change tells nothing of now: acceptance is taken since the newest change in it, and so is the load,
unless a day of it is known. The cost of a step depends on neither and keeps all its windows.

    blocks, a figure each:  o o o o o o o o | x x x x x        a change in the mean where the step between the two sides is
                              before        ^   after          more than `CERTAIN` of its standard errors and of some size

The standard error is of means of neighbours that are alike (long-run variance, Bartlett weights, as in Newey and West 1987),
around the two means and not one, so that a change does not hide itself. Sought is the newest change: ever longer ends of the
series are looked at until one holds a change, so that an older one does not hide it.

* Acceptance: S_1 of all fixed settings and of each schedule, and the acceptance length of each fixed setting, which shows where
  later positions collapse and the first does not.
* Load: the logarithm of the batch; a change has a population stability index above 0.2 and moves the batch by `LOAD_MOVED`.
  Where a day is known, its hours are the plan: a change counts only if the last hour is unlike all that was before it. So a
  morning is none, and a load that doubles for good is.

Guarantees: with fewer blocks than `LEAST` on either side there is no change. Not guaranteed: to tell a slow drift from none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.engine.speculation import Adaptive, Static, describe_setting
from aerie.tuning.models.numeric import FloatArray
from aerie.tuning.telemetry import HOUR, TelemetryBlock

MIN_ACCEPTANCE_REGIME_BLOCKS = 6
"""Blocks on either side of a change in acceptance; six make a regime that acceptance can be told in."""
MIN_LOAD_REGIME_BLOCKS = 12
"""Blocks on either side of a change in load: a busy quarter of an hour is none."""
MIN_CHANGE_STANDARD_ERRORS = 5.0
"""Standard errors: the largest of hundreds of places is asked for, with an error that is itself estimated."""
MIN_ACCEPTANCE_CHANGE = 0.03
"""What a change in S_1 is at least, and of the acceptance length relative to it; smaller ones move no choice."""
MIN_LOAD_CHANGE_OCTAVES = 0.25
"""Octaves of the batch."""
MIN_NOVEL_LOAD_OCTAVES = 0.5
"""Octaves beyond all of the day; an hour of a steep morning is half of that."""
_SEARCH_GROWTH_FACTOR = 1.5
UNSTABLE_PSI = 0.2
"""Population stability index from which two samples are commonly said to be of different populations."""
DAY = 24 * HOUR
WEEK = 7 * DAY
_DAY_TOLERANCE = 0.1
"""Of a day, that may lack in one."""
_MIN_BLOCK_DRAFTS = 50.0
"""Of a block, to tell a share from."""


@dataclass(frozen=True)
class ChangePoint:
    """Something moved."""

    timestamp: float
    """Seconds of Unix time."""
    description: str
    """From what to what."""


@dataclass(frozen=True)
class ChangePoints:
    """What holds now, since when."""

    acceptance: ChangePoint | None = None
    """The newest change in it; None: all blocks are alike."""
    load: ChangePoint | None = None

    @property
    def newest_timestamp(self) -> float | None:
        """When traffic has changed last."""
        return max((one.timestamp for one in (self.acceptance, self.load) if one is not None), default=None)

    def acceptance_blocks(self, blocks: Sequence[TelemetryBlock]) -> list[TelemetryBlock]:
        """Those that tell the acceptance of now."""
        return [block for block in blocks if self.acceptance is None or block.start >= self.acceptance.timestamp]

    def load_blocks(self, blocks: Sequence[TelemetryBlock]) -> list[TelemetryBlock]:
        """Those that tell the load to come."""
        return [block for block in blocks if self.load is None or block.start >= self.load.timestamp]


def detect_change_points(blocks: Sequence[TelemetryBlock]) -> ChangePoints:
    """Of blocks in their order, the oldest first."""
    return ChangePoints(_acceptance_change_point(blocks), _load_change_point(blocks))


# ----------------------------------------------------------------------------------------------------------- acceptance
def _acceptance_change_point(blocks: Sequence[TelemetryBlock]) -> ChangePoint | None:
    fixed = [block for block in blocks if isinstance(block.setting, Static)]
    found = [_newest_ratio_change(fixed, _first_position_counts, "S1")]
    for setting in dict.fromkeys(block.setting for block in blocks):
        if isinstance(setting, Adaptive):
            continue
        own = [block for block in blocks if block.setting == setting]
        if isinstance(setting, Static):
            found.append(
                _newest_ratio_change(own, _acceptance_length_counts, f"the acceptance length of {describe_setting(setting)}")
            )
        else:
            found.append(_newest_ratio_change(own, _first_position_counts, f"S1 of {describe_setting(setting)}"))
    return max((one for one in found if one is not None), key=lambda one: one.timestamp, default=None)


def _newest_ratio_change(
    blocks: Sequence[TelemetryBlock], figure: Callable[[TelemetryBlock], tuple[float, float]], name: str
) -> ChangePoint | None:
    """The newest change in a figure, which is a sum over another one."""
    at: dict[float, tuple[float, float]] = {}
    for block in blocks:
        part, whole = figure(block)
        known = at.get(block.start, (0.0, 0.0))
        at[block.start] = known[0] + part, known[1] + whole
    rows = [(start, part / whole) for start, (part, whole) in sorted(at.items()) if whole >= _MIN_BLOCK_DRAFTS]
    values = np.array([value for _, value in rows])

    def large(before: FloatArray, after: FloatArray) -> bool:
        old = float(before.mean())
        return abs(float(after.mean()) - old) >= MIN_ACCEPTANCE_CHANGE * max(1.0, old)

    changes = find_change_indices(values, MIN_ACCEPTANCE_REGIME_BLOCKS, large)
    if not changes:
        return None
    index, since = changes[0], changes[1] if len(changes) > 1 else 0
    old, new = float(values[since:index].mean()), float(values[index:].mean())
    return ChangePoint(rows[index][0], f"{name} went from {old:.2f} to {new:.2f}")


def _first_position_counts(block: TelemetryBlock) -> tuple[float, float]:
    spoken = block.counters.speculation
    if spoken is None or not spoken.accepted_per_position:
        return 0.0, 0.0
    return spoken.accepted_per_position[0], spoken.drafts


def _acceptance_length_counts(block: TelemetryBlock) -> tuple[float, float]:
    spoken = block.counters.speculation
    return (0.0, 0.0) if spoken is None else (spoken.accepted + spoken.drafts, spoken.drafts)


# ----------------------------------------------------------------------------------------------------------------- load
@dataclass(frozen=True)
class BlockLoad:
    """The requests in the steps of one block, all settings together."""

    start: float
    batch: float
    request_steps: float


def summarize_block_loads(blocks: Sequence[TelemetryBlock]) -> list[BlockLoad]:
    """Of the blocks in which steps were made, in their order."""
    sums: dict[float, tuple[float, float]] = {}
    for block in blocks:
        known = sums.get(block.start, (0.0, 0.0))
        sums[block.start] = known[0] + block.counters.request_steps, known[1] + block.counters.iterations
    return [
        BlockLoad(start, made / iterations, made) for start, (made, iterations) in sorted(sums.items()) if made and iterations
    ]


def is_day_covered(blocks: Sequence[TelemetryBlock], horizon: float = DAY) -> bool:
    """Whether the hours of a day are among the blocks, or all that is kept where that is less."""
    rows = summarize_block_loads(blocks)
    return bool(rows) and rows[-1].start - rows[0].start >= (1 - _DAY_TOLERANCE) * min(DAY, horizon)


def weight_next_day(block_loads: Sequence[BlockLoad]) -> list[tuple[BlockLoad, float]]:
    """What the coming day is taken to be like: rows with their weights.

    With a week behind, as the last day and as the same day a week ago; else as all that was, an older day half as much as the
    next one.
    """
    if not block_loads:
        return []
    ages = [block_loads[-1].start - row.start for row in block_loads]
    if ages[0] >= WEEK - _DAY_TOLERANCE * DAY:
        return [(row, 1.0) for row, age in zip(block_loads, ages, strict=True) if age < DAY or WEEK - DAY < age <= WEEK]
    return [(row, 0.5 ** (age // DAY)) for row, age in zip(block_loads, ages, strict=True)]


def _load_change_point(blocks: Sequence[TelemetryBlock]) -> ChangePoint | None:
    rows = summarize_block_loads(blocks)
    values = np.log2([row.batch for row in rows])

    def large(before: FloatArray, after: FloatArray) -> bool:
        moved = abs(float(np.median(after) - np.median(before)))
        return moved >= MIN_LOAD_CHANGE_OCTAVES and population_stability_index(before, after) > UNSTABLE_PSI

    changes = find_change_indices(values, MIN_LOAD_REGIME_BLOCKS, large)
    if is_day_covered(blocks):
        changes = [index for index in changes if _is_novel_load(values[:index], values[-MIN_LOAD_REGIME_BLOCKS:])]
    if not changes:
        return None
    index = changes[0]
    old, new = (2 ** float(np.median(part)) for part in (values[:index], values[index:]))
    return ChangePoint(rows[index].start, f"the batch went from {old:.1f} to {new:.1f}")


def _is_novel_load(before: FloatArray, now: FloatArray) -> bool:
    """Whether the load is beyond all that was."""
    low, high = np.quantile(before, [0.02, 0.98])
    middle = float(np.median(now))
    return bool(middle > high + MIN_NOVEL_LOAD_OCTAVES or middle < low - MIN_NOVEL_LOAD_OCTAVES)


def population_stability_index(before: FloatArray, after: FloatArray) -> float:
    """The population stability index of two samples, in bins of half an octave; empty bins are taken as half a count."""
    bins = np.concatenate([before, after])
    edges = np.arange(math.floor(2 * bins.min()) / 2, bins.max() + 1.0, 0.5)
    shares = []
    for sample in (before, after):
        counts = np.maximum(np.histogram(sample, edges)[0].astype(float), 0.5)
        shares.append(counts / counts.sum())
    return float(((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum())


# --------------------------------------------------------------------------------------------------------- change-points
def find_change_indices(values: FloatArray, min_side: int, is_large: Callable[[FloatArray, FloatArray], bool]) -> list[int]:
    """Where the mean changed, the newest first."""
    found: list[int] = []
    while (index := _newest_change_index(values, min_side, is_large)) is not None:
        found.append(index)
        values = values[:index]
    return found


def _newest_change_index(values: FloatArray, least: int, large: Callable[[FloatArray, FloatArray], bool]) -> int | None:
    count, length = len(values), 2 * least
    while True:
        length = min(length, count)
        index = _strongest_change_index(values[count - length :], least, large)
        if index is not None:
            return count - length + index
        if length == count:
            return None
        length = math.ceil(_SEARCH_GROWTH_FACTOR * length)


def _strongest_change_index(values: FloatArray, least: int, large: Callable[[FloatArray, FloatArray], bool]) -> int | None:
    count = len(values)
    if count < 2 * least:
        return None
    places = np.arange(least, count - least + 1)
    sums = np.cumsum(values)
    steps_up = (sums[-1] - sums[places - 1]) / (count - places) - sums[places - 1] / places
    scaled = np.abs(steps_up) * np.sqrt(places * (count - places) / count)
    best = int(scaled.argmax())
    index = int(places[best])
    before, after = values[:index], values[index:]
    if not large(before, after):
        return None
    residuals = np.concatenate([before - before.mean(), after - after.mean()])
    errors = MIN_CHANGE_STANDARD_ERRORS * (
        1 + 2 * MIN_ACCEPTANCE_REGIME_BLOCKS / count
    )  # of few values the error is known the less
    return index if scaled[best] > errors * math.sqrt(_long_run_variance(residuals)) else None


def _long_run_variance(residuals: FloatArray) -> float:
    """Of a mean's scaled error, from values around two means."""
    count = len(residuals)
    reach = max(1, round(count ** (1 / 3)))
    found = float(residuals @ residuals) / max(count - 2, 1)
    variance = found
    for lag in range(1, reach + 1):
        alike = float(residuals[lag:] @ residuals[:-lag]) / max(count - 2, 1)
        found += 2 * (1 - lag / (reach + 1)) * alike
    return max(found, 0.25 * variance, 1e-12)
