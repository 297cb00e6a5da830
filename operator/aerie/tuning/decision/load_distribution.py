"""Loads for a forecast: the one to expect from the observed windows, and those that may occur where a day of it is not known.

Guarantees: a load has increasing batches, and shares that add up to 1. Not guaranteed: that the future load is like the observed
one; `extrapolate_load` goes beyond it by fixed factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.tuning.models.change_points import DAY, BlockLoad, ChangePoints, summarize_block_loads, weight_next_day
from aerie.tuning.models.numeric import FloatArray
from aerie.tuning.telemetry import StepCell, StepCellKey, TelemetryBlock, batch_bin

_NORMAL_NODES, _NORMAL_NODE_WEIGHTS = (-2.857, -1.356, 0.0, 1.356, 2.857), (0.0113, 0.2221, 0.5332, 0.2221, 0.0113)
"""Five points and their weights that represent a normal distribution (Gauss-Hermite)."""
UNSEEN_LOAD_FACTOR = 2.0
"""Factor by which a load may leave its observed range while less than a day of it is known."""
LOAD_HEADROOM_FACTOR = 4.0
"""Factor by which a load may rise for the objectives: a setting chosen at night must not break them at noon."""


@dataclass(frozen=True)
class LoadDistribution:
    """Distribution of requests over steps: increasing batches, and the share of the request-steps at each."""

    batches: FloatArray
    shares: FloatArray

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """The batches with their shares of the request-steps."""
        return list(zip(self.batches.tolist(), self.shares.tolist(), strict=True))

    def quantile(self, share: float) -> float:
        """Return the batch at or below which this share of the request-steps lies."""
        index = int(np.searchsorted(np.cumsum(self.shares), share))
        return float(self.batches[min(index, len(self.batches) - 1)])


def extrapolate_load(recent_load: LoadDistribution, earlier_load: LoadDistribution) -> tuple[LoadDistribution, LoadDistribution]:
    """Return two extrapolated loads, for when a day of load is not known.

    The first has the lowest and the highest batch that may occur: outside the range observed recently, and as large as the range
    of the earlier load. The second has that highest batch, and the one up to which the objectives have to hold.
    """
    lowest = min(recent_load.quantile(0.05) / UNSEEN_LOAD_FACTOR, earlier_load.quantile(0.05))
    highest = max(UNSEEN_LOAD_FACTOR * recent_load.quantile(0.95), earlier_load.quantile(0.95))
    headroom = max(LOAD_HEADROOM_FACTOR * recent_load.quantile(0.95), highest + 1.0)
    equal_shares = np.array([0.5, 0.5])
    return LoadDistribution(np.array([max(1.0, lowest), highest]), equal_shares), LoadDistribution(
        np.array([highest, headroom]), equal_shares
    )


def estimate_load(
    cells: Mapping[StepCellKey, StepCell], blocks: Sequence[TelemetryBlock] = (), change_points: ChangePoints | None = None
) -> LoadDistribution:
    """Estimate the future load: that of all windows, or of the blocks that represent it (`change_points`).

    Raises ValueError without cells. A block knows its mean batch only. The variation between windows and replicas within a block
    comes from all cells: the variance of their batches beyond that of the blocks' means, as a log-normal factor.
    """
    if not cells:
        raise ValueError("without a window there is no load: check that the step time was fitted first.")
    all_blocks = summarize_block_loads(blocks)
    relevant = all_blocks if change_points is None else summarize_block_loads(change_points.load_blocks(blocks))
    is_long = bool(all_blocks) and all_blocks[-1].start - all_blocks[0].start > 1.5 * DAY
    if not relevant or (len(relevant) == len(all_blocks) and not is_long):
        return _bin_load((key.batch_bin, cell.batch_sum / cell.request_steps, cell.request_steps) for key, cell in cells.items())
    return _spread_block_loads(weight_next_day(relevant), _within_block_variance(cells, all_blocks))


def estimate_recent_load(
    cells: Mapping[StepCellKey, StepCell], blocks: Sequence[TelemetryBlock], start: float
) -> LoadDistribution | None:
    """Return the load of the blocks from a time on; None if there are no such blocks."""
    all_blocks = summarize_block_loads(blocks)
    recent = [(row, 1.0) for row in all_blocks if row.start >= start]
    return _spread_block_loads(recent, _within_block_variance(cells, all_blocks)) if recent else None


def _within_block_variance(cells: Mapping[StepCellKey, StepCell], block_loads: Sequence[BlockLoad]) -> float:
    """Return the variance of the batch's logarithm within a block."""
    cell_batches = np.array([(cell.batch_sum / cell.request_steps, cell.request_steps) for cell in cells.values()])
    block_batches = np.array([(block_load.batch, block_load.request_steps) for block_load in block_loads])
    return max(0.0, _log_variance(cell_batches) - _log_variance(block_batches))


def _spread_block_loads(weighted_loads: Iterable[tuple[BlockLoad, float]], variance: float) -> LoadDistribution:
    """Return the load of weighted blocks, each spread by the variance within a block."""
    weighted_batches: list[tuple[int, float, float]] = []
    for block_load, weight in weighted_loads:
        for node, share in zip(_NORMAL_NODES, _NORMAL_NODE_WEIGHTS, strict=True):
            batch = block_load.batch * math.exp(variance / 2 + math.sqrt(variance) * node)  # mean over request-steps
            weighted_batches.append((batch_bin(batch), batch, weight * share * block_load.request_steps))
    return _bin_load(weighted_batches)


def _bin_load(rows: Iterable[tuple[int, float, float]]) -> LoadDistribution:
    """Return the load of rows of (bin, batch, request-steps)."""
    sums: dict[int, list[float]] = {}
    for index, batch, weight in rows:
        bin_sums = sums.setdefault(index, [0.0, 0.0])
        bin_sums[0] += weight
        bin_sums[1] += weight * batch
    table = np.array([(batch / weight, weight) for _, (weight, batch) in sorted(sums.items()) if weight > 0])
    return LoadDistribution(table[:, 0], table[:, 1] / table[:, 1].sum())


def _log_variance(rows: FloatArray) -> float:
    """Return the variance of the logarithm, for rows of (value, weight)."""
    logs, weights = np.log(rows[:, 0]), rows[:, 1] / rows[:, 1].sum()
    return float(weights @ (logs - weights @ logs) ** 2)
