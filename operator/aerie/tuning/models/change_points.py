"""Detect when traffic became as it is now: change points in acceptance and in load.

Counts from before a change do not describe the present. Acceptance is estimated from the blocks since its newest change. So is
the load, unless a day of it is known. The cost of a step depends on neither and keeps all its windows.

    one value per block:    o o o o o o o o | x x x x x        a change in the mean, if the step between the two sides is larger
                              before        ^   after          than `MIN_CHANGE_STANDARD_ERRORS` and than a minimum size

The standard error is that of means of correlated neighbours (long-run variance, Bartlett weights, as in Newey and West 1987). It
is taken around the two means and not around one, so that a change does not hide itself. The search is for the newest change: it
examines ever longer ends of the series until one contains a change, so that an older change does not hide it.

* Acceptance: S_1 of all fixed settings and of each schedule, and the acceptance length of each fixed setting. The latter shows a
  collapse of later positions when the first position is unchanged.
* Load: the logarithm of the batch. A change has a population stability index above 0.2 and moves the batch by
  `MIN_LOAD_CHANGE_OCTAVES`. If a day is known, its hours are the plan: a change counts only if the last hour is outside the range
  of all hours before it. So a morning is no change, and a load that doubles permanently is one.

Guarantees: with fewer than `MIN_ACCEPTANCE_REGIME_BLOCKS` (for load, `MIN_LOAD_REGIME_BLOCKS`) on either side there is no change.
Not guaranteed: that a slow drift is detected.
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
"""Blocks on either side of a change in acceptance. Six are a regime in which acceptance can be estimated."""
MIN_LOAD_REGIME_BLOCKS = 12
"""Blocks on either side of a change in load: a busy quarter of an hour is no change."""
MIN_CHANGE_STANDARD_ERRORS = 5.0
"""Standard errors. The largest of hundreds of positions is tested, with a standard error that is itself estimated."""
MIN_ACCEPTANCE_CHANGE = 0.03
"""Minimum change in S_1, and minimum relative change of the acceptance length. Smaller ones do not alter the decision."""
MIN_LOAD_CHANGE_OCTAVES = 0.25
"""Octaves of the batch."""
MIN_NOVEL_LOAD_OCTAVES = 0.5
"""Octaves outside the range of the whole day. An hour of a steep morning is half of that."""
_SEARCH_GROWTH_FACTOR = 1.5
UNSTABLE_PSI = 0.2
"""Population stability index from which on two samples usually count as different populations."""
DAY = 24 * HOUR
WEEK = 7 * DAY
_DAY_TOLERANCE = 0.1
"""Share of a day that may be missing."""
_MIN_BLOCK_DRAFTS = 50.0
"""Drafts of a block, as the minimum for estimating a share."""


@dataclass(frozen=True)
class ChangePoint:
    """One detected change."""

    timestamp: float
    """Seconds of Unix time."""
    description: str
    """The value before and after, as text."""


@dataclass(frozen=True)
class ChangePoints:
    """The newest change in acceptance and in load."""

    acceptance: ChangePoint | None = None
    """Newest change in acceptance; None if all blocks are alike."""
    load: ChangePoint | None = None

    @property
    def newest_timestamp(self) -> float | None:
        """Time of the newest change in traffic, in seconds of Unix time; None without a change."""
        return max((change.timestamp for change in (self.acceptance, self.load) if change is not None), default=None)

    def acceptance_blocks(self, blocks: Sequence[TelemetryBlock]) -> list[TelemetryBlock]:
        """Return the blocks since the newest change in acceptance."""
        return [block for block in blocks if self.acceptance is None or block.start >= self.acceptance.timestamp]

    def load_blocks(self, blocks: Sequence[TelemetryBlock]) -> list[TelemetryBlock]:
        """Return the blocks since the newest change in load."""
        return [block for block in blocks if self.load is None or block.start >= self.load.timestamp]


def detect_change_points(blocks: Sequence[TelemetryBlock]) -> ChangePoints:
    """Detect the newest changes in blocks that are sorted by time, the oldest first."""
    return ChangePoints(_acceptance_change_point(blocks), _load_change_point(blocks))


# ----------------------------------------------------------------------------------------------------------- acceptance
def _acceptance_change_point(blocks: Sequence[TelemetryBlock]) -> ChangePoint | None:
    fixed_blocks = [block for block in blocks if isinstance(block.setting, Static)]
    changes = [_newest_ratio_change(fixed_blocks, _first_position_counts, "S1")]
    for setting in dict.fromkeys(block.setting for block in blocks):
        if isinstance(setting, Adaptive):
            continue
        setting_blocks = [block for block in blocks if block.setting == setting]
        if isinstance(setting, Static):
            changes.append(
                _newest_ratio_change(
                    setting_blocks, _acceptance_length_counts, f"the acceptance length of {describe_setting(setting)}"
                )
            )
        else:
            changes.append(_newest_ratio_change(setting_blocks, _first_position_counts, f"S1 of {describe_setting(setting)}"))
    return max((change for change in changes if change is not None), key=lambda change: change.timestamp, default=None)


def _newest_ratio_change(
    blocks: Sequence[TelemetryBlock], counts: Callable[[TelemetryBlock], tuple[float, float]], name: str
) -> ChangePoint | None:
    """Find the newest change in a ratio by block, which `counts` returns as numerator and denominator."""
    sums: dict[float, tuple[float, float]] = {}
    for block in blocks:
        part, whole = counts(block)
        previous = sums.get(block.start, (0.0, 0.0))
        sums[block.start] = previous[0] + part, previous[1] + whole
    rows = [(start, part / whole) for start, (part, whole) in sorted(sums.items()) if whole >= _MIN_BLOCK_DRAFTS]
    values = np.array([value for _, value in rows])

    def is_large(before: FloatArray, after: FloatArray) -> bool:
        old = float(before.mean())
        return abs(float(after.mean()) - old) >= MIN_ACCEPTANCE_CHANGE * max(1.0, old)

    changes = find_change_indices(values, MIN_ACCEPTANCE_REGIME_BLOCKS, is_large)
    if not changes:
        return None
    index, previous_index = changes[0], changes[1] if len(changes) > 1 else 0
    old, new = float(values[previous_index:index].mean()), float(values[index:].mean())
    return ChangePoint(rows[index][0], f"{name} went from {old:.2f} to {new:.2f}")


def _first_position_counts(block: TelemetryBlock) -> tuple[float, float]:
    speculation = block.counters.speculation
    if speculation is None or not speculation.accepted_per_position:
        return 0.0, 0.0
    return speculation.accepted_per_position[0], speculation.drafts


def _acceptance_length_counts(block: TelemetryBlock) -> tuple[float, float]:
    speculation = block.counters.speculation
    return (0.0, 0.0) if speculation is None else (speculation.accepted + speculation.drafts, speculation.drafts)


# ----------------------------------------------------------------------------------------------------------------- load
@dataclass(frozen=True)
class BlockLoad:
    """Load of one block, all settings together: its mean batch and its request-steps."""

    start: float
    batch: float
    request_steps: float


def summarize_block_loads(blocks: Sequence[TelemetryBlock]) -> list[BlockLoad]:
    """Return the loads of the blocks in which steps were made, sorted by time."""
    sums: dict[float, tuple[float, float]] = {}
    for block in blocks:
        previous = sums.get(block.start, (0.0, 0.0))
        sums[block.start] = previous[0] + block.counters.request_steps, previous[1] + block.counters.iterations
    return [
        BlockLoad(start, request_steps / iterations, request_steps)
        for start, (request_steps, iterations) in sorted(sums.items())
        if request_steps and iterations
    ]


def is_day_covered(blocks: Sequence[TelemetryBlock], horizon: float = DAY) -> bool:
    """Return whether the blocks cover the hours of a day, or the whole horizon if that is shorter."""
    rows = summarize_block_loads(blocks)
    return bool(rows) and rows[-1].start - rows[0].start >= (1 - _DAY_TOLERANCE) * min(DAY, horizon)


def weight_next_day(block_loads: Sequence[BlockLoad]) -> list[tuple[BlockLoad, float]]:
    """Return the block loads that represent the coming day, with their weights.

    If a week is known, they are the last day and the same day a week ago. Otherwise they are all known loads, and each older day
    has half the weight of the next one.
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

    def is_large(before: FloatArray, after: FloatArray) -> bool:
        difference = abs(float(np.median(after) - np.median(before)))
        return difference >= MIN_LOAD_CHANGE_OCTAVES and population_stability_index(before, after) > UNSTABLE_PSI

    changes = find_change_indices(values, MIN_LOAD_REGIME_BLOCKS, is_large)
    if is_day_covered(blocks):
        changes = [index for index in changes if _is_novel_load(values[:index], values[-MIN_LOAD_REGIME_BLOCKS:])]
    if not changes:
        return None
    index = changes[0]
    old, new = (2 ** float(np.median(side)) for side in (values[:index], values[index:]))
    return ChangePoint(rows[index].start, f"the batch went from {old:.1f} to {new:.1f}")


def _is_novel_load(before: FloatArray, now: FloatArray) -> bool:
    """Return whether the load is outside the range of all loads before."""
    low, high = np.quantile(before, [0.02, 0.98])
    median = float(np.median(now))
    return bool(median > high + MIN_NOVEL_LOAD_OCTAVES or median < low - MIN_NOVEL_LOAD_OCTAVES)


def population_stability_index(before: FloatArray, after: FloatArray) -> float:
    """Return the population stability index of two samples, in bins of half an octave. Empty bins count as half an
    observation."""
    bins = np.concatenate([before, after])
    edges = np.arange(math.floor(2 * bins.min()) / 2, bins.max() + 1.0, 0.5)
    shares = []
    for sample in (before, after):
        counts = np.maximum(np.histogram(sample, edges)[0].astype(float), 0.5)
        shares.append(counts / counts.sum())
    return float(((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum())


# --------------------------------------------------------------------------------------------------------- change points
def find_change_indices(values: FloatArray, min_side: int, is_large: Callable[[FloatArray, FloatArray], bool]) -> list[int]:
    """Return the indices at which the mean changed, the newest first."""
    indices: list[int] = []
    while (index := _newest_change_index(values, min_side, is_large)) is not None:
        indices.append(index)
        values = values[:index]
    return indices


def _newest_change_index(values: FloatArray, min_side: int, is_large: Callable[[FloatArray, FloatArray], bool]) -> int | None:
    count, length = len(values), 2 * min_side
    while True:
        length = min(length, count)
        index = _strongest_change_index(values[count - length :], min_side, is_large)
        if index is not None:
            return count - length + index
        if length == count:
            return None
        length = math.ceil(_SEARCH_GROWTH_FACTOR * length)


def _strongest_change_index(values: FloatArray, min_side: int, is_large: Callable[[FloatArray, FloatArray], bool]) -> int | None:
    count = len(values)
    if count < 2 * min_side:
        return None
    indices = np.arange(min_side, count - min_side + 1)
    sums = np.cumsum(values)
    differences = (sums[-1] - sums[indices - 1]) / (count - indices) - sums[indices - 1] / indices
    scaled = np.abs(differences) * np.sqrt(indices * (count - indices) / count)
    best = int(scaled.argmax())
    index = int(indices[best])
    before, after = values[:index], values[index:]
    if not is_large(before, after):
        return None
    residuals = np.concatenate([before - before.mean(), after - after.mean()])
    errors = MIN_CHANGE_STANDARD_ERRORS * (
        1 + 2 * MIN_ACCEPTANCE_REGIME_BLOCKS / count
    )  # with fewer values the error is less certain
    return index if scaled[best] > errors * math.sqrt(_long_run_variance(residuals)) else None


def _long_run_variance(residuals: FloatArray) -> float:
    """Return the long-run variance of a mean's scaled error, from residuals around two means."""
    count = len(residuals)
    max_lag = max(1, round(count ** (1 / 3)))
    long_run = float(residuals @ residuals) / max(count - 2, 1)
    variance = long_run
    for lag in range(1, max_lag + 1):
        autocovariance = float(residuals[lag:] @ residuals[:-lag]) / max(count - 2, 1)
        long_run += 2 * (1 - lag / (max_lag + 1)) * autocovariance
    return max(long_run, 0.25 * variance, 1e-12)
