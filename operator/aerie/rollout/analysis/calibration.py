"""How the scores of blocks scatter where nothing differs: stable pods against stable pods, block by block, over days.

What it is for. Blocks follow each other in traffic that has a memory, so a mean of n blocks varies more than variance / n. How
much more cannot be told from a rollout's own few blocks; it can from a day of equal pods. Each closed block of the stable arm
gives, for each of its pods, the deviation from the mean of the others; 30 blocks are a batch. From the batches:

    inflation (phi)  = 30 * variance of batch means / variance of blocks, at least 1
    variance         = that of blocks, per pod: two arms of a and b pods differ with variance * (1/a + 1/b)
    offset_sd (tau)  = standard deviation of what pods differ by for good, the part that noise explains taken off

All are relative to the level of the metric. Not guaranteed: that tomorrow's traffic is like yesterday's. With less than a day
the inflation is drawn towards `CAUTIOUS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aerie.rollout.analysis.sequential import Prior

BATCH = 30
"""Blocks in a batch: an hour of two-minute blocks."""
KEPT = 48
"""Batches kept of a pod."""
ENOUGH = 24
"""Batches that are trusted by themselves."""
LEAST = 4
"""Batches from which on anything is said."""
PODS = 8
"""Pods that are followed at most."""
CAUTIOUS = 3.0
"""The inflation where no history tells it: that of traffic with a memory of some 8 minutes."""
FREEDOM = 20.0
"""Degrees of freedom that a full history's variance counts for: few enough that the rollout's own blocks soon outweigh it."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """What a history tells about blocks of equal arms, relative to the level of the metric."""

    inflation: float = CAUTIOUS
    variance: float = 0.0
    """Of a block, per pod."""
    freedom: float = 0.0
    """Degrees of freedom that the variance is worth; 0: nothing is known of it."""
    offset_sd: float = 0.0
    """Of a pod."""
    batches: int = 0
    """Hours, or as many blocks, that this rests on; 0: uncalibrated."""

    def prior(self, level: float, pods: tuple[int, int]) -> Prior:
        """The variance of a score at this level of the metric, with so many pods in the two arms."""
        return Prior(self.variance * level * level * (1 / pods[0] + 1 / pods[1]), self.freedom)

    def offset(self, level: float, pods: tuple[int, int]) -> float:
        """Standard deviation of the lasting difference of two equal arms."""
        return self.offset_sd * level * math.sqrt(1 / pods[0] + 1 / pods[1])

    def to_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Scatter:
        return cls(**found)


UNCALIBRATED = Scatter()


@dataclass(frozen=True, slots=True)
class _Pod:
    """Batches of one pod's deviations: (mean, variance) each, and the batch under way as count, sum and sum of squares."""

    batches: tuple[tuple[float, float], ...] = ()
    count: int = 0
    sum: float = 0.0
    squares: float = 0.0

    def add(self, deviation: float) -> _Pod:
        count, total, squares = self.count + 1, self.sum + deviation, self.squares + deviation * deviation
        if count < BATCH:
            return _Pod(self.batches, count, total, squares)
        mean = total / count
        variance = max(0.0, squares / count - mean * mean) * count / (count - 1)
        return _Pod((*self.batches, (float(f"{mean:.6g}"), float(f"{variance:.6g}")))[-KEPT:])


@dataclass(frozen=True, slots=True)
class History:
    """The deviations of stable pods in one metric, as batches."""

    pods: Mapping[str, _Pod] = field(default_factory=dict)

    def add(self, values: Mapping[str, float], relative: bool = True) -> History:
        """With one more block: the metric's value on each stable pod. Fewer than two pods tell nothing.

        Not `relative`: deviations are plain differences, as fits shares that are often 0; of the scatter, only the inflation
        has a meaning then. Pods that are gone stay while there is room, because what they told holds.
        """
        names = [name for name, value in sorted(values.items()) if value > 0 or not relative][:PODS]
        if len(names) < 2:
            return self
        total = math.fsum(values[name] for name in names)
        others = len(names) - 1
        scale = 1 / math.sqrt(1 + 1 / others)  # to one pod's part of the difference
        pods = dict(self.pods)
        for name in names:
            rest = (total - values[name]) / others
            deviation = scale * (values[name] / rest - 1 if relative else values[name] - rest)
            pods[name] = pods.pop(name, _Pod()).add(deviation)  # the latest last
        return History(dict(list(pods.items())[-PODS:]))

    def scatter(self) -> Scatter:
        """What the history tells so far."""
        told = [pod.batches for pod in self.pods.values() if len(pod.batches) >= LEAST]
        if not told:
            return UNCALIBRATED
        between = within = offsets = 0.0
        for batches in told:
            means = [mean for mean, _ in batches]
            middle = math.fsum(means) / len(means)
            spread = math.fsum((mean - middle) ** 2 for mean in means)
            between += spread / (len(means) - 1)
            within += math.fsum(v for _, v in batches) / len(batches) * (BATCH - 1) / BATCH + spread / len(means)
            offsets += middle * middle
        between, within, offsets = between / len(told), within / len(told), offsets / len(told)
        batches_of_all = max(len(batches) for batches in told)
        trust = min(1.0, batches_of_all / ENOUGH)
        measured = max(1.0, BATCH * between / within) if within > 0 else 1.0
        inflation = trust * measured + (1 - trust) * CAUTIOUS
        noise = math.fsum(between / len(batches) for batches in told) / len(told)
        return Scatter(
            inflation=inflation,
            variance=within,
            freedom=trust * FREEDOM if within > 0 else 0.0,
            offset_sd=math.sqrt(max(0.0, offsets - noise)),
            batches=batches_of_all,
        )

    def to_dict(self) -> dict[str, Any]:
        """Small: at most 8 pods of 48 batches."""
        return {
            name: {"batches": [list(batch) for batch in pod.batches], "open": [pod.count, pod.sum, pod.squares]}
            for name, pod in self.pods.items()
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> History:
        return cls(
            {
                name: _Pod(tuple((mean, variance) for mean, variance in pod["batches"]), *pod["open"])
                for name, pod in found.items()
            }
        )
