"""Requests that two drafters answer, in virtual time and many runs at once: the parts of the pairs, as an evaluator sums them.

The model. A prompt is of one of two classes; the chance per drafted token is Beta with mean 0.8 or 0.6 (kappa 8), which gives its
acceptance length at K = 3. Answers have log-normal lengths (median 80 tokens, sigma 1.1), cut at 256 tokens by the evaluator. The
share of the first class drifts: over the day, and as AR(1) with 20 minutes of memory.

Each arm's steps deviate from the prompt's by a relative variance of 0.0037 + v / tokens, Student's t with 4 degrees of freedom.
The constants are those of real pairs (bundle, K = 3, 41 tokens a mean answer), by temperature:

| temperature | acceptance length | variance between prompts | variance of an arm | correlation of the two answers |
|-------------|-------------------|--------------------------|--------------------|--------------------------------|
| 0           | 2.2               | 0.067                    | 0.0074             | 0.90                           |
| 0.7         | 1.57              | 0.013                    | 0.020              | 0.40                           |
| 1           | 1.37              | 0.0067                   | 0.020              | 0.25                           |

At temperatures above 0 the lengths of the two answers differ, too. In mixed traffic each temperature has a third of the requests.

A tenth of the requests are copies of 50 frequent prompts, and 3 % are retries of the request before. At temperature 0, a copy
gives the same pair again. Sticky tenants: 200 with Zipf shares, of which some 40 are active for 15 minutes at a time. They differ
in classes, in difficulty, and by 1 % in what the canary gains. A tenant names a cluster; without tenants, the prompt does.

A drafter that is better by delta takes 1 / (1 + delta) of the steps for the same tokens, so its effect is exact in every pair. A
step takes 20 ms, with 10 % of noise per answer; each pod deviates by 1.24 % permanently, so two of them by 1.75 %. Where pods
share processors with other work, all answers of a pod deviate by another 20 %, as AR(1) with 10 seconds of memory. Processors of
a virtual machine, measured second by second, had 15 to 20 % at a bad time.

Pairs per second: nine tenths of what arrives at the pods, up to `ENGINE_PAIRS_PER_SECOND`. An evaluator has 16 requests at a
time at both engines. With 50 steps/s a mean answer of 104 tokens takes a second, which gives 14 pairs/s; the model assumes 12.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aerie.analysis.paired.sums import BUCKETS
from benchmarks._canary_model import Floats

Ints = npt.NDArray[np.int64]

PODS = 4
ENGINE_PAIRS_PER_SECOND = 12.0
USABLE_SHARE = 0.9
"""Share of mirrored requests that give a pair."""
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 80.0, 1.1, 256.0
CLASS_MEANS, KAPPA = (0.8, 0.6), 8.0
INTERACTION, LENGTH_NOISE = 0.0037, 0.4
TEMPERATURES = (0.0, 0.7, 1.0)
NOISE = np.array([0.15, 0.67, 0.67])
"""v, by temperature."""
LEVELS, PROMPT_SPREADS = -np.log([2.2, 1.57, 1.37]), np.array([1.0, 0.44, 0.32])
"""Logarithm of steps per token, and how much prompts differ in it, relative to temperature 0; by temperature."""
ACTIVE_TENANTS, SESSION_SECONDS = 40, 900.0
FREQUENT_PROMPTS, COPY_SHARE, RETRY_SHARE = 50, 0.1, 0.03
WAVE_SD, WAVE_SECONDS = 0.2, 10.0
"""Deviation of a pod's times where it shares processors, and the memory of that."""
STEP_SECONDS, STEP_NOISE, POD_SD = 0.02, 0.1, 0.0175 / math.sqrt(2)
DAY, MEMORY = 86400.0, 1200.0


@dataclass(frozen=True)
class ShadowTraffic:
    """Requests of a cell."""

    rate: float = 1.0
    """Requests per second and pod."""
    tenants: int = 0
    """Tenants, which are the clusters; 0 for requests of none."""
    temperatures: tuple[int, ...] = (0,)
    """Indexes of `TEMPERATURES` that the requests have, in equal shares."""
    prompts: int = 0
    """Prompts of a file that is repeated (`Prompts`); 0 for mirrored requests."""
    shares_processors: bool = False
    """Whether other work slows down the pods at times."""
    tenant_gain_sd: float = 0.01
    """Standard deviation between tenants of what the canary gains."""

    @property
    def pairs_per_second(self) -> float:
        if self.prompts:
            return ENGINE_PAIRS_PER_SECOND
        return min(USABLE_SHARE * self.rate * PODS, ENGINE_PAIRS_PER_SECOND)


class PairParts(NamedTuple):
    """Parts (a, b) of pairs, by run and pair, for a canary that is equal on average."""

    bucket: Ints
    canary_steps: Floats
    control_steps: Floats
    canary_seconds: Floats
    control_seconds: Floats


class _Prompts(NamedTuple):
    """Prompts and what both arms make of them at temperature 0."""

    log_steps: Floats
    """Logarithm of the steps per token."""
    tokens: Floats
    noise: Floats
    """Deviations of both arms, in standard deviations: (2, ...)."""


@cache
def log_steps_table(points: int = 4096) -> Floats:
    """Return the logarithm of steps per token at evenly spaced ranks of a class's chances."""
    grid = (np.arange(100_000) + 0.5) / 100_000
    rows = []
    for mean in CLASS_MEANS:
        logs = (mean * KAPPA - 1) * np.log(grid) + ((1 - mean) * KAPPA - 1) * np.log1p(-grid)
        mass = np.cumsum(np.exp(logs - logs.max()))
        chance = np.interp((np.arange(points) + 0.5) / points, mass / mass[-1], grid)
        rows.append(-np.log(1 + chance + chance**2 + chance**3))
    return np.stack(rows)


def arm_variance(temperature: Ints, tokens: Floats) -> Floats:
    """Return the relative variance of an arm's steps; `temperature` is an index of `TEMPERATURES`."""
    return np.asarray(INTERACTION + NOISE[temperature] / tokens)


class PairStream:
    """The pairs of some runs, in the order of time."""

    def __init__(self, traffic: ShadowTraffic, runs: int, random: np.random.Generator) -> None:
        self._traffic, self._random, self._runs = traffic, random, runs
        self._drift = random.normal(0, 0.3, runs)
        self._phase = random.uniform(0, DAY)
        self._pods = np.exp(random.normal(0, POD_SD, (2, runs)))
        if traffic.prompts:
            self._file = self._draw_prompts((runs, traffic.prompts), np.full((runs, 1), -0.7), 0.0)
            self._file_buckets = random.integers(BUCKETS, size=(runs, traffic.prompts))
            self._file_temperatures = random.choice(traffic.temperatures, (runs, traffic.prompts))
        self._frequent = self._draw_prompts((runs, FREQUENT_PROMPTS), np.full((runs, 1), -0.7), 0.0)
        self._frequent_buckets = random.integers(BUCKETS, size=(runs, FREQUENT_PROMPTS))
        tenants = (runs, max(1, traffic.tenants))
        self._tenant_weights = 1 / np.arange(1, tenants[1] + 1)
        self._tenant_buckets = random.integers(BUCKETS, size=tenants)
        self._tenant_class, self._tenant_difficulty = (
            random.normal(0, 1.5, tenants),
            random.normal(0, 0.1, tenants),
        )
        self._tenant_gain = random.normal(0, traffic.tenant_gain_sd, tenants)
        self._session = -1
        self._active: Floats = np.zeros(tenants)
        self._count = 0
        self._wave = random.normal(0, WAVE_SD, (2, runs)) if traffic.shares_processors else np.zeros((2, runs))
        self._second = 0.0

    def draw(self, count: int, second: float) -> PairParts:
        """Return the next `count` pairs of each run; they arrive `second` seconds after the start of the evaluation."""
        traffic, random, shape = self._traffic, self._random, (self._runs, count)
        gain: Floats = np.zeros(shape)
        if traffic.prompts:
            index = np.broadcast_to((self._count + np.arange(count)) % traffic.prompts, shape)
            prompts = _take(self._file, index)
            bucket, temperature = (np.take_along_axis(each, index, 1) for each in (self._file_buckets, self._file_temperatures))
        else:
            prompts, bucket, gain = self._draw_mirrored(shape, second)
            temperature = random.choice(traffic.temperatures, shape)
        self._count += count
        sampled = temperature > 0
        noise = np.where(sampled, self._draw_noise((2, *shape)), prompts.noise)
        length = np.where(sampled, np.exp(random.normal(0, LENGTH_NOISE, (2, *shape))), 1.0)
        tokens = np.clip(prompts.tokens * length, 2.0, MAX_TOKENS) - 1
        log_steps = LEVELS[temperature] + PROMPT_SPREADS[temperature] * (prompts.log_steps - LEVELS[0])
        log_steps = log_steps + noise * np.sqrt(arm_variance(temperature, tokens))
        steps = tokens * np.clip(np.exp(log_steps), 0.25, 1.0)
        steps[0] *= np.exp(-gain)
        seconds = steps * STEP_SECONDS * np.exp(random.normal(0, STEP_NOISE, (2, *shape))) * self._pods[..., None]
        if traffic.shares_processors:
            seconds *= np.exp(self._draw_waves(count, second))
        share = tokens[::-1] / tokens.sum(axis=0)
        return PairParts(bucket, *(steps * share), *(seconds * share))

    def _draw_waves(self, count: int, second: float) -> Floats:
        """Return the deviations of both pods at the next pairs, which arrive evenly until `second`: (2, runs, pairs)."""
        waves = np.empty((2, self._runs, count))
        decay = math.exp(-(second - self._second) / count / WAVE_SECONDS)
        self._second = second
        for pair in range(count):
            noise = self._random.normal(0, WAVE_SD, self._wave.shape)
            self._wave = decay * self._wave + math.sqrt(1 - decay * decay) * noise
            waves[..., pair] = self._wave
        return waves

    def _draw_mirrored(self, shape: tuple[int, int], second: float) -> tuple[_Prompts, Ints, Floats]:
        """Return mirrored requests, with their buckets and what the canary gains in them."""
        random, runs = self._random, np.arange(self._runs)[:, None]
        decay = math.exp(-shape[1] / self._traffic.pairs_per_second / MEMORY)
        self._drift = decay * self._drift + math.sqrt(1 - decay * decay) * random.normal(0, 0.3, self._runs)
        logit = (-0.7 + self._drift + 0.3 * math.sin(2 * math.pi * (self._phase + second) / DAY))[:, None]
        gain: Floats = np.zeros(shape)
        bucket = random.integers(BUCKETS, size=shape)
        if self._traffic.tenants:
            tenant = self._draw_tenants(shape, second)
            prompts = self._draw_prompts(shape, logit + self._tenant_class[runs, tenant], self._tenant_difficulty[runs, tenant])
            bucket, gain = self._tenant_buckets[runs, tenant], self._tenant_gain[runs, tenant]
        else:
            prompts = self._draw_prompts(shape, logit, 0.0)
        copied = random.random(shape) < COPY_SHARE
        index = random.integers(FREQUENT_PROMPTS, size=shape)
        prompts = _choose(copied, _take(self._frequent, index), prompts)
        if not self._traffic.tenants:
            bucket = np.where(copied, np.take_along_axis(self._frequent_buckets, index, 1), bucket)
        retried = random.random(shape) < RETRY_SHARE
        retried[:, 0] = False
        before = np.maximum(np.arange(shape[1]) - 1, 0)
        prompts = _choose(retried, _Prompts(*(part[..., before] for part in prompts)), prompts)
        return prompts, np.where(retried, bucket[:, before], bucket), np.where(retried, gain[:, before], gain)

    def _draw_tenants(self, shape: tuple[int, int], second: float) -> Ints:
        """Return the tenant of each request, one of those that are active now."""
        session = int(second // SESSION_SECONDS)
        if session != self._session:
            self._session = session
            tenants = self._traffic.tenants
            active = self._random.random((self._runs, tenants)) < ACTIVE_TENANTS / tenants
            active[np.arange(self._runs), self._random.integers(tenants, size=self._runs)] = True
            weights = np.cumsum(active * self._tenant_weights, axis=1)
            self._active = weights / weights[:, -1:]
        drawn = self._random.random(shape)
        return np.stack([np.searchsorted(row, values) for row, values in zip(self._active, drawn, strict=True)])

    def _draw_prompts(self, shape: tuple[int, int], logit: Floats, difficulty: Floats | float) -> _Prompts:
        """Return prompts; `logit` is of the share of the first class."""
        second_class = (self._random.random(shape) > 1 / (1 + np.exp(-logit))).astype(np.int64)
        table = log_steps_table()
        log_steps = table[second_class, self._random.integers(table.shape[1], size=shape)] + difficulty
        tokens = MEDIAN_TOKENS * np.exp(SPREAD * self._random.normal(size=shape))
        return _Prompts(log_steps, tokens, self._draw_noise((2, *shape)))

    def _draw_noise(self, shape: tuple[int, ...]) -> Floats:
        """Return heavy-tailed noise of variance 1."""
        return self._random.standard_t(4, shape) / math.sqrt(2)


def _take(prompts: _Prompts, index: Ints) -> _Prompts:
    return _Prompts(
        np.take_along_axis(prompts.log_steps, index, 1),
        np.take_along_axis(prompts.tokens, index, 1),
        np.take_along_axis(prompts.noise, np.broadcast_to(index, (2, *index.shape)), 2),
    )


def _choose(condition: npt.NDArray[np.bool_], chosen: _Prompts, other: _Prompts) -> _Prompts:
    return _Prompts(*(np.where(condition, left, right) for left, right in zip(chosen, other, strict=True)))
