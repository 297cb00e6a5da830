"""Adjusts a time metric for a pod's load, so that two pods can be compared as if they had the same load.

A pod that happens to get more requests runs larger batches, and each token takes longer. In an analysis that is noise, and mostly
the largest part of it: shares of pods vary by ten per cent, for half an hour at a time. So in each block the canary's value is
adjusted to the output, in tokens per second, of the control's pods,

    canary * (control's output per pod / canary's output per pod) ^ elasticity

and the elasticity comes from the calibration on stable pods. It is the increase of the metric, in per cent, on a pod that gave
one per cent more tokens in the same block. It increases as engines approach saturation, so it depends on the output itself. Hence
two numbers are fitted: y = slope x + curvature x^2, of logarithms, within blocks. In a simulated fleet of six pods the adjustment
leaves a sixth to two thirds of the long-run dispersion of blocks.

Guarantees: the elasticity is fixed before the first block of an analysis, so it favours no arm. It is 0, which changes nothing,
until stable pods have given enough blocks, and where it would be below 0. The latter occurs where slow pods get fewer requests,
as behind a balancer that routes by fewest requests: there the metric determines the requests and not the reverse.

Not guaranteed: that it holds for a canary of another speed, or a load far from the calibration's; the rest is noise as without
it. An arm that cannot keep up gives fewer tokens than were requested. The adjustment makes it appear slower, which it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from aerie.analysis.statistics.field_values import field_values

DECAY_BLOCKS = 60
"""Blocks after which the weight of a block has decayed to a third: two hours of two-minute blocks."""
MIN_CURVE_BLOCKS = 15
"""Effective blocks (the sum of the decayed weights) from which on a curve is available."""
MAX_ELASTICITY = 3.0
"""Largest elasticity that is used: near saturation a metric grows without bound."""


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """The metric's logarithm as a function of the output's, up to a constant.

    It is slope x + curvature x^2, where x = log(output / reference_output). The order of the fields is the saved format.
    """

    slope: float
    curvature: float
    reference_output: float
    """Tokens per second of a pod."""

    def elasticity(self, output: float, target_output: float) -> float:
        """Return the per cent by which the metric increases for one per cent more output, between two outputs (tokens/s)."""
        elasticity = self.slope + self.curvature * math.log(
            output / self.reference_output * target_output / self.reference_output
        )
        return min(max(elasticity, 0.0), MAX_ELASTICITY)

    def adjust(self, value: float, output: float, target_output: float) -> float:
        """Return the metric that was measured at this output of a pod, as it would be at the target output.

        Return it unchanged where either output is not above 0.
        """
        return (
            value * (target_output / output) ** self.elasticity(output, target_output)
            if output > 0 and target_output > 0
            else value
        )

    def to_list(self) -> list[float]:
        return field_values(self)


@dataclass(frozen=True, slots=True)
class LoadCurveFit:
    """The sums of a least-squares fit over blocks; the older a block, the less its weight.

    Sums are of products of x, its square z, and the metric's logarithm y, each minus its mean over the block's pods.
    The order of the fields is the saved format.
    """

    reference_output: float = 0.0
    block_count: float = 0.0
    """Effective blocks: the sum of their weights."""
    xx: float = 0.0
    xz: float = 0.0
    zz: float = 0.0
    xy: float = 0.0
    zy: float = 0.0

    def add_block(self, values: Mapping[str, float], outputs: Mapping[str, float]) -> LoadCurveFit:
        """Return the sums with one more block: metric and output of each pod. A block of fewer than two pods changes nothing."""
        pod_names = [name for name, value in values.items() if value > 0 and outputs.get(name, 0.0) > 0]
        if len(pod_names) < 2:
            return self
        reference_output = self.reference_output or outputs[pod_names[0]]
        log_outputs = [math.log(outputs[name] / reference_output) for name in pod_names]
        x, z, y = (
            _subtract_mean(log_outputs),
            _subtract_mean([log_output * log_output for log_output in log_outputs]),
            _subtract_mean([math.log(values[name]) for name in pod_names]),
        )
        decay = math.exp(-1 / DECAY_BLOCKS)
        return LoadCurveFit(
            reference_output,
            decay * self.block_count + 1,
            decay * self.xx + _dot_product(x, x),
            decay * self.xz + _dot_product(x, z),
            decay * self.zz + _dot_product(z, z),
            decay * self.xy + _dot_product(x, y),
            decay * self.zy + _dot_product(z, y),
        )

    @property
    def curve(self) -> LoadCurve | None:
        """The fitted curve; None before there are enough blocks."""
        if self.block_count < MIN_CURVE_BLOCKS or self.xx <= 0:
            return None
        determinant = self.xx * self.zz - self.xz * self.xz
        if determinant <= 1e-6 * self.xx * self.zz:  # outputs that hardly differ do not determine the curvature
            return LoadCurve(self.xy / self.xx, 0.0, self.reference_output)
        slope = (self.zz * self.xy - self.xz * self.zy) / determinant
        curvature = (self.xx * self.zy - self.xz * self.xy) / determinant
        return LoadCurve(slope, curvature, self.reference_output)

    def to_list(self) -> list[float]:
        return field_values(self)


def _subtract_mean(values: list[float]) -> list[float]:
    """Return the values minus their mean."""
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _dot_product(left: list[float], right: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(left, right, strict=True))
