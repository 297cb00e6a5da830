"""Simulated blocks of canary and control, like those of the counters of engines, for rollouts with known properties.

    shared by all pods     load, tokens per step, time per token and time to first token drift, with a memory of an hour
    of one pod             the same vary from block to block, and time differs permanently
    of the canary          factors on each of them, and failures, overload, crashes

A request has a number of output tokens (lognormal). Drafts follow from that and from acceptance: a text fixes its tokens and not
its drafts. A block's dispersion on one pod has a part that decreases with the number of requests, and one with a memory of some
minutes, which is the same at any rate; as a ratio of standard deviations the latter is `FLOOR`. Tokens per step and times are
drawn independently of each other, and neither goes with the load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aerie.analysis.measurement.blocks import ArmCounts, BlockRule, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts

Floats = NDArray[np.float64]

MEMORY, SHARED_MEMORY = 480.0, 3600.0
"""Seconds after which the deviation of a pod, or that of all pods, has decayed to about a third."""
FLOOR = math.sqrt(0.1)
"""Part of the dispersion that does not decrease with the number of requests; with 120 of them, blocks of 2 minutes and the memory
above, 1.7 blocks count as one."""
REQUESTS = 120.0
"""Requests of the block for which the dispersion is specified."""
DISPERSIONS = {"per_step": 0.043, "time": 0.03, "first": 0.10}
"""Relative standard deviation of one pod's block of `REQUESTS` requests."""
DRIFTS = {"load": 0.10, "per_step": 0.05, "time": 0.05, "first": 0.10}
"""Relative standard deviation of the drift of all pods."""
PER_STEP, TIME, FIRST = 2.4, 0.010, 0.2
"""The control's tokens per step, seconds per output token and seconds to the first token."""
TOKENS, TOKENS_SPREAD = 400.0, 0.8
"""Mean output tokens of a request, and standard deviation of their logarithm."""
TIMES_SPREAD = 0.25
"""Standard deviation of the logarithm of requests' times per output token within a block, for shares beyond an objective."""
CUT, PREEMPTED = 0.05, 0.002
"""Share of the requests that reach their limit of tokens, and preemptions per request."""


@dataclass(frozen=True)
class Traffic:
    """Traffic of both arms."""

    rate: float = 1.0
    """Requests per second on a pod."""
    pods_sd: float = 0.0
    """Standard deviation of the permanent differences of pods in time."""
    block: float = 120.0
    """Seconds of a block."""
    grid: float = 120.0
    """Seconds between two scrapes that may end a block."""
    edge: float | None = None
    """Seconds per output token beyond which a request is counted."""
    beyond: float | None = None
    """Share of the control's requests beyond it; None: computed from their times."""


@dataclass(frozen=True)
class Canary:
    """True properties of a canary, as factors on the control's values."""

    per_step: float = 1.0
    time: float = 1.0
    """Time per output token."""
    first: float = 1.0
    positions: float = 1.0
    """Factor on accepted tokens at the positions that both arms draft."""
    beyond: float | None = None
    """Share of its requests beyond the objective; None: the control's, or computed from their times."""
    failing: float = 0.0
    """Share of its requests that fail."""
    given_up: float = 0.0
    """Share that is abandoned before the first token, from `onset` on; then the others wait `WAIT` seconds for it, and each token
    takes twice as long."""
    onset: float = math.inf
    """Seconds."""
    crashes_every: float = math.inf
    """Mean seconds that a pod's engine runs before it crashes."""
    tokens: tuple[int, int] = (3, 3)
    """Tokens that canary and control draft at a time."""


EQUAL = Canary()
WAIT, SLOWER = 15.0, 2.0

FIELDS = (
    *(
        "drafts",
        "accepted_tokens",
        "draft_tokens",
        "decode_tokens",
        "decode_seconds",
        "output_tokens",
        "finished_requests",
        "truncated_requests",
        "failed_requests",
    ),
    *(
        "preemptions",
        "first_tokens",
        "first_token_seconds",
        "timed_requests",
        "slow_output_requests",
        "request_steps",
        "iterations",
    ),
)


def drifts(traffic: Traffic, seconds: float, random: np.random.Generator) -> dict[str, Floats]:
    """Draw the drift of all pods: a factor for each `grid` seconds."""
    count, rho = round(seconds / traffic.grid), math.exp(-traffic.grid / SHARED_MEMORY)
    series = draw_correlated(random, count, len(DRIFTS), rho)
    return {name: factor(series[:, index], sd) for index, (name, sd) in enumerate(DRIFTS.items())}


def draw_correlated(random: np.random.Generator, count: int, series: int, rho: float) -> Floats:
    """Draw normal series whose neighbours correlate by rho, in columns."""
    values = random.standard_normal((count, series))
    rest = math.sqrt(1 - rho * rho)
    for index in range(1, count):
        values[index] = rho * values[index - 1] + rest * values[index]
    return values


def factor(normal: Floats, sd: float | Floats) -> Floats:
    """Return a lognormal factor with mean 1."""
    return np.asarray(np.exp(sd * normal - np.square(sd) / 2))


def split_dispersion(traffic: Traffic, of: str) -> tuple[float, float]:
    """Return the standard deviations, in one grid interval, of the part that depends on the requests and of the other part."""
    whole, requests = DISPERSIONS[of], traffic.rate * traffic.grid
    return whole * math.sqrt((1 - FLOOR**2) * REQUESTS / requests), FLOOR * whole


def simulate(
    traffic: Traffic, pods: int, shared: Mapping[str, Floats], random: np.random.Generator, canary: Canary = EQUAL, arm: int = 0
) -> Floats:
    """Simulate the counts of an arm's pods by grid interval, as (interval, pod, FIELDS). `arm`: index into `canary.tokens`."""
    count = len(shared["load"])
    shape = (count, pods)
    lasting = factor(random.standard_normal(pods), traffic.pods_sd)
    rho = math.exp(-traffic.grid / MEMORY)
    swings = {}
    for of in DISPERSIONS:
        own, slow = split_dispersion(traffic, of)
        swings[of] = factor(random.standard_normal(shape), own) * factor(draw_correlated(random, count, pods, rho), slow)
        swings[of] *= shared[of][:, None]
    arrived = random.poisson(np.broadcast_to(traffic.rate * traffic.grid * shared["load"][:, None], shape))
    ends = traffic.grid * np.arange(1, count + 1)[:, None]
    overloaded = np.clip((ends - canary.onset) / traffic.grid, 0.0, 1.0) * np.ones(shape)  # part of the interval
    begun = arrived - random.binomial(arrived, canary.given_up * overloaded)
    tokens = np.maximum(begun, _tokens(begun, random))
    decoded = tokens - begun
    per_step = np.maximum(1.0, PER_STEP * canary.per_step * swings["per_step"])
    time = TIME * canary.time * swings["time"] * lasting * (1 + (SLOWER - 1) * overloaded)
    steps = decoded / per_step
    drawn = canary.tokens[arm]
    waits = FIRST * canary.first * swings["first"] * lasting
    share = _beyond(traffic, canary, time)
    values = {
        "drafts": steps,
        "accepted_tokens": (decoded - steps) * canary.positions,
        "draft_tokens": drawn * steps,
        "decode_tokens": decoded,
        "decode_seconds": decoded * time,
        "output_tokens": tokens,
        "finished_requests": begun,
        "truncated_requests": random.binomial(begun, CUT),
        "failed_requests": random.binomial(begun, canary.failing),
        "preemptions": random.poisson(PREEMPTED * begun),
        "first_tokens": begun,
        "first_token_seconds": begun * (waits * (1 - overloaded) + WAIT * overloaded),
        "timed_requests": begun,
        "slow_output_requests": random.binomial(begun, share),
        "request_steps": steps,
        "iterations": traffic.grid / np.maximum(time * per_step, 1e-4),
    }
    return np.stack([np.broadcast_to(values[name], shape) for name in FIELDS], axis=-1).astype(float)


def _tokens(requests: NDArray[np.int64], random: np.random.Generator) -> Floats:
    """Draw the output tokens of `requests` requests: a sum of lognormals, itself nearly lognormal (Fenton-Wilkinson)."""
    some = np.maximum(requests, 1)
    sd = np.sqrt(np.log1p(math.expm1(TOKENS_SPREAD**2) / some))
    return np.asarray(np.round(requests * TOKENS * factor(random.standard_normal(requests.shape), sd)))


def _beyond(traffic: Traffic, canary: Canary, time: Floats) -> Floats:
    """Return the share of the requests beyond the objective."""
    configured_share = canary.beyond if canary.beyond is not None else traffic.beyond
    if configured_share is not None:
        return np.full(time.shape, configured_share)
    if traffic.edge is None:
        return np.zeros(time.shape)
    far = (np.log(traffic.edge / time) + TIMES_SPREAD**2 / 2) / TIMES_SPREAD
    return np.asarray(np.vectorize(math.erfc)(far / math.sqrt(2)) / 2)


def side(counts: Floats, seconds: float, complete: Sequence[int], name: str) -> ArmCounts | None:
    """Return one arm's counts of a block, given as (pod, FIELDS), of the pods with a complete window."""
    if not complete:
        return None
    by_pod = {f"{name}-{pod}": EngineCounts(**dict(zip(FIELDS, counts[pod].tolist(), strict=True))) for pod in complete}
    total = sum(by_pod.values(), EngineCounts())
    load = (total.decode_seconds + total.first_token_seconds) / seconds / len(complete)
    return ArmCounts(len(complete), total, load, by_pod)


def close(
    traffic: Traffic, canary: Floats | None, control: Floats, rule: BlockRule, stable: Floats | None = None
) -> list[ClosedBlock]:
    """Close blocks of grid intervals by the rule; without a canary, those of stable pods. `stable`: the pods beside a control."""
    arms = [("canary", canary), ("control", control), ("stable", stable)]
    blocks, begin = [], 0
    for end in range(1, len(control) + 1):
        if (end - begin) * traffic.grid < rule.block_seconds:
            continue
        seconds = (end - begin) * traffic.grid
        sides = [
            None if counts is None else side(counts[begin:end].sum(axis=0), seconds, range(counts.shape[1]), name)
            for name, counts in arms
        ]
        if all(counts is None or rule.has_enough(counts) for counts in sides[:2]):
            blocks.append(ClosedBlock(begin * traffic.grid, end * traffic.grid, sides[0], sides[1], stable=sides[2]))
            begin = end
    return blocks


# ---------------------------------------------------------------------------------------------------------------------- crashes
LOADS = 180.0
"""Seconds until a pod serves, at first or after a crash."""


@dataclass
class Life:
    """Start and crashes of a pod's engine."""

    serves: float
    """Seconds at which it begins to serve."""
    crashes: list[float] = field(default_factory=list)

    @classmethod
    def draw(cls, serves: float, until: float, every: float, random: np.random.Generator) -> Life:
        life, now = cls(serves), serves
        while every < math.inf and (now := now + random.exponential(every)) < until:
            life.crashes.append(now)
            now += LOADS
        return life

    def is_complete(self, began: float, ended: float) -> bool:
        """Whether it served during the whole interval."""
        return self.serves <= began and not any(began - LOADS < crash <= ended for crash in self.crashes)

    def restarts(self, now: float) -> int:
        return sum(crash <= now for crash in self.crashes)
