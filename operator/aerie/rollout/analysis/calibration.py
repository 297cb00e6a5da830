"""How the scores of blocks scatter where nothing differs: stable pods against stable pods, block by block, over days.

What it is for. Blocks follow each other in traffic that has a memory, so a mean of n blocks varies more than variance / n. How
much more cannot be told from a rollout's own few blocks; it can from a day of equal pods. Each closed block of the stable arm
gives, for each of its pods, the deviation from the mean of the others; 30 blocks are a batch. From the batches:

    inflation (phi)  = 30 * variance of batch means / variance of blocks, at least 1
    variance         = that of blocks, per pod: two arms of a and b pods differ with variance * (1/a + 1/b)
    offset_sd (tau)  = standard deviation of what pods differ by for good, the part that noise explains taken off; of m pods it
                       has m - 1 degrees of freedom, so that two pods that happen to be alike prove little

All are relative to the level of the metric. With less than a day the inflation is drawn towards `CAUTIOUS`.

Guarantees: it forgets, batch by batch, and stays small. What pods told that are gone holds until others have told as much, so
that a promotion, which replaces every pod, does not begin anew. A block that is far off counts as one that is `ODD` standard
deviations off, so that no single one spoils a day. Not guaranteed: that tomorrow's traffic is like yesterday's; and among a
history's first blocks nothing tells what is odd. What is alike for longer than a batch does not show: with blocks of seconds, a
batch is a minute.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
"""Pods that are followed at most; half of the places may be those of pods that are gone."""
ODD, FEW = 6.0, 10
"""Standard deviations beyond which a block counts as one that is just so far off; and blocks that tell what these are."""
CAUTIOUS = 3.0
"""The inflation where no history tells it: that of traffic with a memory of some 8 minutes."""
FREEDOM = 20.0
"""Degrees of freedom that a full history's variance counts for: few enough that the rollout's own blocks soon outweigh it."""


@dataclass(frozen=True, slots=True)
class Offsets:
    """By what pods, or two arms of them, differ for good though nothing is wrong."""

    sd: float
    freedom: float
    """Degrees of freedom that the standard deviation is worth: a prior's, by a scaled inverse chi-squared distribution."""


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
    offset_freedom: float = 0.0
    """Degrees of freedom of that: one less than the pods that it is of; 0: nothing is known of it."""
    batches: int = 0
    """Hours, or as many blocks, that this rests on; 0: uncalibrated."""

    def prior(self, level: float, pods: tuple[int, int]) -> Prior:
        """The variance of a score at this level of the metric, with so many pods in the two arms."""
        return Prior(self.variance * level * level * (1 / pods[0] + 1 / pods[1]), self.freedom)

    def offset(self, prior: Offsets, level: float, pods: tuple[int, int]) -> Offsets:
        """The lasting difference of two equal arms at this level of the metric, from the prior and what pods have told."""
        freedom = prior.freedom + self.offset_freedom
        if freedom <= 0:
            return Offsets(0.0, math.inf)
        squares = prior.freedom * prior.sd**2 + self.offset_freedom * self.offset_sd**2
        return Offsets(level * math.sqrt(squares / freedom * (1 / pods[0] + 1 / pods[1])), freedom)

    def to_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Scatter:
        return cls(**found)


UNCALIBRATED = Scatter()


_PAIR = struct.Struct("<2f")


@dataclass(frozen=True, slots=True)
class _Pod:
    """Of one pod's deviations, the closed batches, and the batch under way as count, sum and sum of squares."""

    closed: bytes = b""
    """(mean, variance) of each batch, as 32-bit floats: 384 bytes for two days."""
    count: int = 0
    sum: float = 0.0
    squares: float = 0.0
    missed: int = 0
    """Blocks in a row, up to the last, that it was not part of."""

    @property
    def batches(self) -> list[tuple[float, float]]:
        return list(_PAIR.iter_unpack(self.closed))

    @property
    def length(self) -> int:
        """Closed batches."""
        return len(self.closed) // _PAIR.size

    def usual(self) -> tuple[float, float] | None:
        """Mean and variance of its deviations lately; None while it has too few."""
        if self.closed:
            mean, variance = _PAIR.unpack_from(self.closed, len(self.closed) - _PAIR.size)
            return mean, variance
        return _moments(self.count, self.sum, self.squares) if self.count >= FEW else None

    def away(self) -> _Pod:
        """After a block without it."""
        return replace(self, missed=self.missed + 1)

    def add(self, deviation: float) -> _Pod:
        """After a block with it."""
        count, total, squares = self.count + 1, self.sum + deviation, self.squares + deviation * deviation
        if count < BATCH:
            return _Pod(self.closed, count, total, squares)
        closed = self.closed + _PAIR.pack(*_moments(count, total, squares))
        return _Pod(closed[-KEPT * _PAIR.size :])

    def to_dict(self) -> dict[str, Any]:
        found = {"closed": base64.b64encode(self.closed).decode(), "open": [self.count, self.sum, self.squares]}
        return found | ({"missed": self.missed} if self.missed else {})

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> _Pod:
        closed = base64.b64decode(found["closed"], validate=True)
        if len(closed) % _PAIR.size:
            raise ValueError(f"{len(closed)} bytes are no batches of {_PAIR.size} each.")
        count, total, squares = found["open"]
        return cls(closed, count, total, squares, found.get("missed", 0))


_EMPTY = _Pod()


def _middle(values: list[float]) -> float:
    """The lower one of the middle, so that of two pods an odd one does not count; 0 of none."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def _moments(count: int, total: float, squares: float) -> tuple[float, float]:
    """Mean and variance."""
    mean = total / count
    return mean, max(0.0, squares / count - mean * mean) * count / (count - 1)


@dataclass(frozen=True, slots=True)
class History:
    """The deviations of stable pods in one metric, as batches."""

    pods: Mapping[str, _Pod] = field(default_factory=dict)

    def add(self, values: Mapping[str, float], relative: bool = True) -> History:
        """With one more block: the metric's value on each stable pod. Fewer than two pods tell nothing.

        Not `relative`: deviations are plain differences, as fits shares that are often 0; of the scatter, only the inflation
        has a meaning then.
        """
        here = {name: value for name, value in sorted(values.items()) if value > 0 or not relative}
        if len(here) < 2:
            return self
        followed = self._followed(here)
        pods = {name: self.pods[name].away() for name in followed if name not in here}
        names = [name for name in followed if name in here]
        if len(names) < 2:  # pods that are gone have all the places as yet
            return History(pods)
        total = math.fsum(here[name] for name in names)
        others = len(names) - 1
        scale = 1 / math.sqrt(1 + 1 / others)  # to one pod's part of the difference
        usual = {name: pod.usual() for name, pod in self.pods.items()}
        furthest = ODD * math.sqrt(_middle([known[1] for known in usual.values() if known]))
        for name in names:
            rest = (total - here[name]) / others
            deviation = scale * (here[name] / rest - 1 if relative else here[name] - rest)
            if furthest > 0:
                mean, _ = usual.get(name) or (0.0, 0.0)
                deviation = min(max(deviation, mean - furthest), mean + furthest)
            pods[name] = self.pods.get(name, _EMPTY).add(deviation)
        return History(pods)

    def _followed(self, here: Mapping[str, float]) -> list[str]:
        """The pods to go on with: those that are known, then new ones, as far as there is room.

        A pod that was not in a batch's worth of blocks is gone. What it told is kept until a pod that is here has told enough.
        """
        enough = any(self.pods[name].length >= ENOUGH for name in self.pods if name in here)
        gone = [name for name, pod in self.pods.items() if pod.missed >= BATCH and name not in here]
        telling = [name for name in gone if self.pods[name].length >= LEAST and not enough]
        kept = sorted(telling, key=lambda name: -self.pods[name].length)[: PODS // 2]
        known = [name for name in self.pods if name not in gone or name in kept]
        return [*known, *(name for name in here if name not in self.pods)][:PODS]

    def scatter(self) -> Scatter:
        """What the history tells so far."""
        told = [pod.batches for pod in self.pods.values() if pod.length >= LEAST]
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
            offset_freedom=max(1.0, len(told) - 1.0),
            batches=batches_of_all,
        )

    def to_dict(self) -> dict[str, Any]:
        """Small: at most 8 pods of 48 batches."""
        return {name: pod.to_dict() for name, pod in self.pods.items()}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> History:
        return cls({name: _Pod.from_dict(pod) for name, pod in found.items()})
