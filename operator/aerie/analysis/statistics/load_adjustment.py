"""How a metric of time goes with what a pod has to do, so that two pods can be compared as if they had the same to do.

A pod that happens to get more requests runs larger batches, and each token takes longer. In an analysis that is noise, and
mostly the greatest: shares of pods wander by ten per cent, for half an hour at a time. So of each block the canary's value is
taken to the output, in tokens per second, that the control's pods had,

    canary * (control's output per pod / canary's output per pod) ^ elasticity

and the elasticity is what stable pods tell in their history: by how many per cent the metric is higher on a pod that gave one
per cent more tokens in the same block. It is the greater the nearer engines are to all they can do, so it goes with the output
itself, and what is fitted are two numbers: y = slope x + bend x^2, of logarithms, within blocks. In a simulated fleet of six pods
that leaves a sixth to two thirds of what blocks differ by in the long run.

Guarantees: it is known before the first block of an analysis, so it favours no arm; 0, which changes nothing, until stable pods
have told enough, and where it would be below 0. That is where slow pods get fewer requests, as behind a balancer that sends by
fewest requests: there the metric tells who gets the requests and not the other way round.

Not guaranteed: that it holds for a canary of another speed, or a load far from the history's; what it leaves over is noise as
before. An arm that cannot keep up gives fewer tokens than it was asked for, and looks slower for it, which it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass

DECAY_BLOCKS = 60
"""Blocks after which a block counts a third: two hours of two-minute blocks."""
MIN_CURVE_BLOCKS = 15
"""Blocks, as many as then count, from which on it is told."""
MAX_ELASTICITY = 3.0
"""Near saturation a metric grows without bound; beyond this nothing is made up for."""


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """The metric's logarithm by the output's, up to a constant: slope x + bend x^2, where x = log(output / reference)."""

    slope: float
    curvature: float
    reference_output: float
    """Tokens per second of a pod."""

    def elasticity(self, output: float, target_output: float) -> float:
        """Per cent of the metric for a per cent of output, between two outputs."""
        found = self.slope + self.curvature * math.log(output / self.reference_output * target_output / self.reference_output)
        return min(max(found, 0.0), MAX_ELASTICITY)

    def adjust(self, value: float, output: float, target_output: float) -> float:
        """The metric that was measured at this output of a pod, as it would be at another; as it is where one has none."""
        return (
            value * (target_output / output) ** self.elasticity(output, target_output)
            if output > 0 and target_output > 0
            else value
        )

    def to_list(self) -> list[float]:
        return list(astuple(self))


@dataclass(frozen=True, slots=True)
class LoadCurveFit:
    """The sums of a least-squares fit over blocks, the older a block the less it counts. x and its square z, and the metric's
    logarithm y, each less its mean over the block's pods."""

    reference_output: float = 0.0
    blocks: float = 0.0
    xx: float = 0.0
    xz: float = 0.0
    zz: float = 0.0
    xy: float = 0.0
    zy: float = 0.0

    def add_block(self, values: Mapping[str, float], outputs: Mapping[str, float]) -> LoadCurveFit:
        """With one more block: metric and output of each pod."""
        pods = [name for name, value in values.items() if value > 0 and outputs.get(name, 0.0) > 0]
        if len(pods) < 2:
            return self
        reference = self.reference_output or outputs[pods[0]]
        logs = [math.log(outputs[name] / reference) for name in pods]
        x, z, y = (
            _subtract_mean(logs),
            _subtract_mean([log * log for log in logs]),
            _subtract_mean([math.log(values[name]) for name in pods]),
        )
        kept = math.exp(-1 / DECAY_BLOCKS)
        return LoadCurveFit(
            reference,
            kept * self.blocks + 1,
            kept * self.xx + _dot_product(x, x),
            kept * self.xz + _dot_product(x, z),
            kept * self.zz + _dot_product(z, z),
            kept * self.xy + _dot_product(x, y),
            kept * self.zy + _dot_product(z, y),
        )

    @property
    def curve(self) -> LoadCurve | None:
        """The fit; None while too little is known."""
        if self.blocks < MIN_CURVE_BLOCKS or self.xx <= 0:
            return None
        determinant = self.xx * self.zz - self.xz * self.xz
        if determinant <= 1e-6 * self.xx * self.zz:  # outputs that hardly differ tell no bend
            return LoadCurve(self.xy / self.xx, 0.0, self.reference_output)
        slope = (self.zz * self.xy - self.xz * self.zy) / determinant
        bend = (self.xx * self.zy - self.xz * self.xy) / determinant
        return LoadCurve(slope, bend, self.reference_output)

    def to_list(self) -> list[float]:
        return list(astuple(self))


def _subtract_mean(values: list[float]) -> list[float]:
    """Less their mean."""
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _dot_product(left: list[float], right: list[float]) -> float:
    return math.fsum(mine * theirs for mine, theirs in zip(left, right, strict=True))
