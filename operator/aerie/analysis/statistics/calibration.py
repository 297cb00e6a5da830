"""Dispersion of block scores where nothing differs: stable pods against stable pods, block by block, over days.

Traffic is correlated in time, so a mean of n blocks varies more than variance / n. A rollout's own few blocks cannot show how
much more; a day of equal pods can. Each closed block of the stable arm gives, for each of its pods, the deviation from the mean
of the other pods. 30 blocks are a batch. From the batches follow:

    inflation (phi)  = 30 * variance of batch means / variance of blocks, at least 1
    variance         = that of blocks, per pod: two arms of a and b pods differ with variance * (1/a + 1/b)
    pod_effect_sd    = standard deviation (tau) of the permanent differences of pods, without what noise explains; of m pods it
                       has m - 1 degrees of freedom, so that two pods that happen to be alike prove little

All are relative to the level of the metric. With less than a day the inflation is shrunk towards `DEFAULT_INFLATION`.

Guarantees: a history drops old batches and stays small. Batches of deleted pods are retained until other pods have enough of
them, so a promotion, which replaces every pod, does not discard the history. A block further off than
`OUTLIER_STANDARD_DEVIATIONS` counts as one that is just so far off, so no single block spoils a day.

Not guaranteed: that tomorrow's traffic is like yesterday's. Outliers cannot be recognised among the first blocks of a history.
Correlation over more than a batch does not show: with blocks of seconds, a batch is a minute.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aerie.analysis.statistics.confidence_sequence import VariancePrior

BLOCKS_PER_BATCH = 30
"""Blocks in a batch: an hour of two-minute blocks."""
MAX_BATCHES_PER_POD = 48
"""Most batches retained of a pod."""
FULL_TRUST_BATCHES = 24
"""Batches of a pod from which on the measured inflation is used without shrinkage."""
MIN_BATCHES = 4
"""Batches of a pod from which on the pod counts in an estimate."""
MAX_FOLLOWED_PODS = 8
"""Most pods that are followed; half of them may be deleted pods."""
OUTLIER_STANDARD_DEVIATIONS, MIN_BLOCKS_FOR_MOMENTS = 6.0, 10
"""Standard deviations at which a deviation is clipped; and blocks that are needed to estimate the standard deviation."""
DEFAULT_INFLATION = 3.0
"""Inflation without calibration: that of traffic with a correlation time of some 8 minutes."""
FULL_HISTORY_DEGREES_OF_FREEDOM = 20.0
"""Degrees of freedom of a full history's variance: few enough that the rollout's own blocks soon outweigh it."""


@dataclass(frozen=True, slots=True)
class PodEffect:
    """Permanent difference of equal pods, or of two arms of them."""

    sd: float
    degrees_of_freedom: float
    """Degrees of freedom of the standard deviation: a prior's, by a scaled inverse chi-squared distribution."""


@dataclass(frozen=True, slots=True)
class Dispersion:
    """Dispersion of blocks of equal arms by a history, relative to the level of the metric."""

    inflation: float = DEFAULT_INFLATION
    variance: float = 0.0
    """Variance of a block, per pod."""
    degrees_of_freedom: float = 0.0
    """Degrees of freedom of the variance; 0: it is unknown."""
    pod_effect_sd: float = 0.0
    """Standard deviation of the permanent difference of a pod."""
    pod_effect_degrees_of_freedom: float = 0.0
    """Degrees of freedom of `pod_effect_sd`: one less than the pods that it was estimated from; 0: it is unknown."""
    batch_count: int = 0
    """Batches that this rests on (an hour each, with two-minute blocks); 0: uncalibrated."""

    def variance_prior(self, level: float, pod_counts: tuple[int, int]) -> VariancePrior:
        """Return the variance of a score at this level of the metric, with these numbers of pods in the two arms."""
        return VariancePrior(self.variance * level * level * (1 / pod_counts[0] + 1 / pod_counts[1]), self.degrees_of_freedom)

    def pooled_pod_effect(self, prior: PodEffect) -> PodEffect:
        """Return the permanent difference of a pod, relative to the level, from the prior and the calibration."""
        degrees_of_freedom = prior.degrees_of_freedom + self.pod_effect_degrees_of_freedom
        if degrees_of_freedom <= 0:
            return PodEffect(0.0, math.inf)
        squares = prior.degrees_of_freedom * prior.sd**2 + self.pod_effect_degrees_of_freedom * self.pod_effect_sd**2
        return PodEffect(math.sqrt(squares / degrees_of_freedom), degrees_of_freedom)

    def pod_effect(self, prior: PodEffect, level: float, pod_counts: tuple[int, int]) -> PodEffect:
        """Return the permanent difference of two equal arms at this level of the metric, from the prior and the calibration."""
        pod = self.pooled_pod_effect(prior)
        return replace(pod, sd=level * pod.sd * math.sqrt(1 / pod_counts[0] + 1 / pod_counts[1]))

    def to_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Dispersion:
        return cls(**document)


UNCALIBRATED_DISPERSION = Dispersion()

_BATCH_FORMAT = struct.Struct("<2f")
"""Mean and variance of a batch."""


@dataclass(frozen=True, slots=True)
class _PodDeviations:
    """Deviations of one pod: its closed batches, and the open batch as count, sum and sum of squares."""

    packed_batches: bytes = b""
    """(mean, variance) of each batch, as 32-bit floats: 384 bytes for two days."""
    open_count: int = 0
    open_sum: float = 0.0
    open_squares: float = 0.0
    missed_blocks: int = 0
    """Consecutive blocks, up to the last, that the pod was not part of."""

    @property
    def batches(self) -> list[tuple[float, float]]:
        """Closed batches as (mean, variance), the oldest first."""
        return list(_BATCH_FORMAT.iter_unpack(self.packed_batches))

    @property
    def batch_count(self) -> int:
        """Number of closed batches."""
        return len(self.packed_batches) // _BATCH_FORMAT.size

    def recent_moments(self) -> tuple[float, float] | None:
        """Return mean and variance of the recent deviations; None while there are too few."""
        if self.packed_batches:
            mean, variance = _BATCH_FORMAT.unpack_from(self.packed_batches, len(self.packed_batches) - _BATCH_FORMAT.size)
            return mean, variance
        return _moments(self.open_count, self.open_sum, self.open_squares) if self.open_count >= MIN_BLOCKS_FOR_MOMENTS else None

    def add_missed_block(self) -> _PodDeviations:
        """Return the deviations after a block without the pod."""
        return replace(self, missed_blocks=self.missed_blocks + 1)

    def add_deviation(self, deviation: float) -> _PodDeviations:
        """Return the deviations after a block with this deviation of the pod."""
        count, total, squares = self.open_count + 1, self.open_sum + deviation, self.open_squares + deviation * deviation
        if count < BLOCKS_PER_BATCH:
            return _PodDeviations(self.packed_batches, count, total, squares)
        closed = self.packed_batches + _BATCH_FORMAT.pack(*_moments(count, total, squares))
        return _PodDeviations(closed[-MAX_BATCHES_PER_POD * _BATCH_FORMAT.size :])

    def to_dict(self) -> dict[str, Any]:
        document = {
            "closed": base64.b64encode(self.packed_batches).decode(),
            "open": [self.open_count, self.open_sum, self.open_squares],
        }
        return document | ({"missed": self.missed_blocks} if self.missed_blocks else {})

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> _PodDeviations:
        closed = base64.b64decode(document["closed"], validate=True)
        if len(closed) % _BATCH_FORMAT.size:
            raise ValueError(f"{len(closed)} bytes are no batches of {_BATCH_FORMAT.size} each.")
        count, total, squares = document["open"]
        return cls(closed, count, total, squares, document.get("missed", 0))


_NO_DEVIATIONS = _PodDeviations()


def deviations_from_others(values: Mapping[str, float], relative: bool = True) -> dict[str, float]:
    """Return each pod's deviation from the mean of the others, scaled to one pod's part of that difference.

    There are two pods or more. If not `relative`, deviations are plain differences.
    """
    total, other_count = math.fsum(values.values()), len(values) - 1
    scale = 1 / math.sqrt(1 + 1 / other_count)
    others_means = {name: (total - value) / other_count for name, value in values.items()}
    return {
        name: scale * (value / others_means[name] - 1 if relative else value - others_means[name])
        for name, value in values.items()
    }


def _lower_median(values: list[float]) -> float:
    """Return the lower median, so that of two pods an outlier does not count; 0 of no values."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


def _moments(count: int, total: float, squares: float) -> tuple[float, float]:
    """Return mean and sample variance of `count` numbers, from their sum and sum of squares."""
    mean = total / count
    return mean, max(0.0, squares / count - mean * mean) * count / (count - 1)


@dataclass(frozen=True, slots=True)
class DeviationHistory:
    """Deviations of stable pods in one metric, as batches."""

    pods: Mapping[str, _PodDeviations] = field(default_factory=dict)

    def add_block(self, values: Mapping[str, float], relative: bool = True) -> DeviationHistory:
        """Return the history with one more block: the metric's value on each stable pod.

        A block of fewer than two pods changes nothing. If not `relative`, deviations are plain differences, as fits shares that
        are often 0; then only the inflation of the dispersion has a meaning.
        """
        present = {name: value for name, value in sorted(values.items()) if value > 0 or not relative}
        if len(present) < 2:
            return self
        followed = self._select_followed_pods(present)
        pods = {name: self.pods[name].add_missed_block() for name in followed if name not in present}
        names = [name for name in followed if name in present]
        if len(names) < 2:  # deleted pods still have all the places
            return DeviationHistory(pods)
        deviations = deviations_from_others({name: present[name] for name in names}, relative)
        recent_moments = {name: pod.recent_moments() for name, pod in self.pods.items()}
        usual_variance = _lower_median([moments[1] for moments in recent_moments.values() if moments])
        max_distance = OUTLIER_STANDARD_DEVIATIONS * math.sqrt(usual_variance)
        for name, deviation in deviations.items():
            mean, _ = recent_moments.get(name) or (0.0, 0.0)
            clipped = min(max(deviation, mean - max_distance), mean + max_distance) if max_distance > 0 else deviation
            pods[name] = self.pods.get(name, _NO_DEVIATIONS).add_deviation(clipped)
        return DeviationHistory(pods)

    def _select_followed_pods(self, present: Mapping[str, float]) -> list[str]:
        """Return the pods to follow from now on: those already followed, then new ones, up to the limit.

        A pod that was absent for a batch's worth of blocks is deleted. Its batches are retained until a present pod has enough.
        """
        present_pods_suffice = any(self.pods[name].batch_count >= FULL_TRUST_BATCHES for name in self.pods if name in present)
        deleted = [name for name, pod in self.pods.items() if pod.missed_blocks >= BLOCKS_PER_BATCH and name not in present]
        usable = [name for name in deleted if self.pods[name].batch_count >= MIN_BATCHES and not present_pods_suffice]
        retained = sorted(usable, key=lambda name: -self.pods[name].batch_count)[: MAX_FOLLOWED_PODS // 2]
        followed = [name for name in self.pods if name not in deleted or name in retained]
        return [*followed, *(name for name in present if name not in self.pods)][:MAX_FOLLOWED_PODS]

    def estimate_dispersion(self) -> Dispersion:
        """Return the dispersion of blocks by the history so far; `UNCALIBRATED_DISPERSION` while no pod has enough batches."""
        batches_by_pod = [pod.batches for pod in self.pods.values() if pod.batch_count >= MIN_BATCHES]
        if not batches_by_pod:
            return UNCALIBRATED_DISPERSION
        batch_mean_variance = block_variance = squared_offset = 0.0
        for batches in batches_by_pod:
            means = [mean for mean, _ in batches]
            pod_mean = math.fsum(means) / len(means)
            squares = math.fsum((mean - pod_mean) ** 2 for mean in means)
            variance_in_batches = math.fsum(variance for _, variance in batches) / len(batches)
            batch_mean_variance += squares / (len(means) - 1)
            block_variance += variance_in_batches * (BLOCKS_PER_BATCH - 1) / BLOCKS_PER_BATCH + squares / len(means)
            squared_offset += pod_mean * pod_mean
        pod_count = len(batches_by_pod)
        batch_mean_variance, block_variance = batch_mean_variance / pod_count, block_variance / pod_count
        squared_offset /= pod_count
        max_batch_count = max(len(batches) for batches in batches_by_pod)
        trust = min(1.0, max_batch_count / FULL_TRUST_BATCHES)
        measured_inflation = max(1.0, BLOCKS_PER_BATCH * batch_mean_variance / block_variance) if block_variance > 0 else 1.0
        offset_noise = math.fsum(batch_mean_variance / len(batches) for batches in batches_by_pod) / pod_count
        return Dispersion(
            inflation=trust * measured_inflation + (1 - trust) * DEFAULT_INFLATION,
            variance=block_variance,
            degrees_of_freedom=trust * FULL_HISTORY_DEGREES_OF_FREEDOM if block_variance > 0 else 0.0,
            pod_effect_sd=math.sqrt(max(0.0, squared_offset - offset_noise)),
            pod_effect_degrees_of_freedom=max(1.0, pod_count - 1.0),
            batch_count=max_batch_count,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the history as a small dict: at most 8 pods of 48 batches."""
        return {name: pod.to_dict() for name, pod in self.pods.items()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DeviationHistory:
        return cls({name: _PodDeviations.from_dict(pod) for name, pod in document.items()})
