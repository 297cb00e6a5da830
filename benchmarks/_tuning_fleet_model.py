"""Counters of a replica in a window, from the rate of its requests: the engine model of the fleet simulation, on arrays.

The model. Requests come by Poisson and share the engine: a step of b requests takes T(b, K), gives each of them tau(K) tokens,
and prefill takes its share of the time. The number of requests in the engine is then a birth-death process whose stationary
distribution does not depend on how lengths are distributed (processor sharing, Kelly 1979),

    pi(b) ~ prod_{j <= b} rate * length * T(j, K_j) / (j tau(K_j) (1 - prefill)),        b <= 256

from which a window's steps, batch, step time, drafts and accepted tokens follow, also for a schedule and across a capture cliff.
A window differs from that by the work that arrives in it, by the acceptance of its requests, and by the GPU.

The difference from the step-level simulator is measured (`_tuning_fleet_calibration`). Not modelled: preemption, prefix caches
and contexts (a step's cost of cached tokens goes with the batch), requests that wait while 256 run: they are shed, and demand
alone counts them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.sample import Counters, SpeculationCounters
from aerie.engine.speculation import SpeculationSetting, max_speculative_tokens
from aerie.tuning.decision.forecast import draft_tokens_by_batch
from aerie_lab.engine.acceptance import CLASS_ACCEPTANCE, Acceptance, expected_survival
from aerie_lab.engine.step import StepTime

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int_]

MOST = 7
"""Draft tokens."""
BATCH = 256
"""vLLM's --max-num-seqs."""
ANSWER, ANSWER_SPREAD = 300.0, 0.7
"""Tokens of an answer: mean, and standard deviation of its logarithm."""
PROMPT = 400.0
"""Computed tokens of a prompt."""
CLOCK = 0.005
"""Standard deviation of the logarithm of a window's step time, of unknown cause."""
USERS = 0.2
"""Standard deviation of the logarithm of requests' time per output token within a window."""
_SHED = 0.005
_ROUNDS = 4
_B = np.arange(1, BATCH + 1, dtype=float)
_SHIFTS = np.linspace(-4.0, 1.0, 41)


# --------------------------------------------------------------------------------------------------------------- acceptance
@cache
def _survivals(name: str) -> Floats:
    """Return the limit of accepted_per_position / drafts of one class, shift by K by position."""
    kind = CLASS_ACCEPTANCE[name]
    survivals = np.zeros((len(_SHIFTS), MOST + 1, MOST))
    for row, shift in enumerate(_SHIFTS.tolist()):
        shifted = Acceptance(kind.shift_logits(shift).conditionals, kind.spread) if shift else kind
        for tokens in range(1, MOST + 1):
            survivals[row, tokens, :tokens] = expected_survival(shifted, tokens)
    return survivals


def survival(name: str, shifts: Floats) -> Floats:
    """Return the survival, time by K by position, of one class of traffic whose conditionals are shifted on the logit scale."""
    survivals = _survivals(name)
    place = np.clip((shifts - _SHIFTS[0]) / (_SHIFTS[1] - _SHIFTS[0]), 0, len(_SHIFTS) - 1.001)
    low = place.astype(int)
    part = (place - low)[:, None, None]
    return np.asarray(survivals[low] * (1 - part) + survivals[low + 1] * part)


def mix_classes(first: Floats, second: Floats, share: Floats) -> Floats:
    """Mix two classes, the second with a share of the tokens, weighted by their steps."""
    steps = [(1 - share)[:, None] / lengths(first), share[:, None] / lengths(second)]
    total = steps[0] + steps[1]
    return np.asarray((first * steps[0][:, :, None] + second * steps[1][:, :, None]) / total[:, :, None])


def lengths(survivals: Floats) -> Floats:
    """Return the acceptance length by K."""
    return np.asarray(1.0 + survivals.sum(axis=-1))


# ------------------------------------------------------------------------------------------------------------------ the target
@dataclass(frozen=True)
class Target:
    """The true cost of a step."""

    seconds: Floats
    """K by batch 1 to `BATCH`."""
    prefill: float
    """Seconds of a computed prompt token."""

    @classmethod
    def of(cls, step_time: StepTime, factor: float = 1.0, context: float = 600.0) -> Target:
        """Make the target of a step-level profile, `factor` times as slow, with `context` cached tokens a request."""
        seconds = [
            [step_time.fixed_seconds(b, k) + step_time.seconds_per_cached_token * context * b for b in range(1, BATCH + 1)]
            for k in range(MOST + 1)
        ]
        jitter = math.exp(step_time.log_sd**2 / 2)
        return cls(factor * jitter * np.array(seconds), factor * step_time.seconds_per_prompt_token)

    def rate(self, batch: float, tokens: int, length: float) -> float:
        """Return the requests per second that keep about `batch` requests in a step."""
        seconds = float(np.interp(batch, _B, self.seconds[tokens]))
        alone = batch * length / (seconds * (ANSWER - 1))
        return alone / (1 + self.prefill * PROMPT * alone)


# ------------------------------------------------------------------------------------------------------------------- states
@dataclass(frozen=True)
class Rows:
    """Windows of replicas that run one setting; all by row, rates per second."""

    iterations: Floats
    steps: Floats
    """Request-steps."""
    running: Floats
    """Mean requests in the engine."""
    tokens: Floats
    """Tokens per second without first tokens."""
    by_tokens: Floats
    """Row by K: request-steps."""
    full: Floats
    """Share of the time in which no request is admitted."""
    at: Floats
    """Row by batch: request-steps."""

    @property
    def per_token(self) -> Floats:
        """A user's seconds per token."""
        return np.asarray(self.running / np.maximum(self.tokens, 1e-9))


def steady(target: Target, setting: SpeculationSetting, rates: Floats, survivals: Floats, slowness: Floats | float = 1.0) -> Rows:
    """Compute the stationary state at rates of requests (row) and survivals (row by K by position)."""
    tokens = draft_tokens_by_batch(setting, _B)
    seconds = target.seconds[tokens, np.arange(BATCH)]
    slow = np.broadcast_to(np.asarray(slowness, dtype=float), rates.shape)
    gained = lengths(survivals)[:, tokens]
    step = seconds * slow[:, None]
    chances = np.empty_like(step)
    rows, admitted = np.arange(len(rates)), rates
    for _ in range(_ROUNDS):  # shed requests have no prefill
        free = 1 - np.minimum(0.9, slow[rows] * target.prefill * PROMPT * admitted[rows])
        step[rows] = seconds * (slow[rows] / free)[:, None]
        chances[rows] = _stationary(step[rows], rates[rows], gained[rows])
        admitted = rates * (1 - chances[:, -1])
        rows = np.flatnonzero(chances[:, -1] > _SHED)
        if not len(rows):
            break
    iterations = chances / step
    steps = iterations * _B
    by_tokens = steps @ (tokens[:, None] == np.arange(MOST + 1)).astype(float)
    return Rows(
        iterations.sum(axis=1),
        steps.sum(axis=1),
        chances @ _B,
        (steps * gained).sum(axis=1),
        by_tokens,
        chances[:, -1],
        steps,
    )


def _stationary(step: Floats, rates: Floats, gained: Floats) -> Floats:
    """Return the share of the time, row by batch."""
    odds = np.cumsum(np.log(step * (np.maximum(rates, 1e-9) * (ANSWER - 1))[:, None] / (gained * _B)), axis=1)
    top = np.maximum(odds.max(axis=1), 0.0)[:, None]
    weights = np.exp(odds - top)
    return np.asarray(weights / (weights.sum(axis=1) + np.exp(-top[:, 0]))[:, None])


# ------------------------------------------------------------------------------------------------------------------ windows
@dataclass(frozen=True)
class Disturbed:
    """Differences of windows from the stationary state, by row."""

    work: Floats
    """Factor on the rate."""
    survivals: Floats
    clock: Floats
    """Factor on the step time."""


def disturb(rates: Floats, survivals: Floats, seconds: float, random: np.random.Generator, clock: float = CLOCK) -> Disturbed:
    """Draw windows of `seconds` seconds: number, length and acceptance of their requests."""
    requests = np.maximum(rates * seconds, 1.0)
    spread = np.sqrt((1 + _variation(ANSWER_SPREAD)) / requests)
    work = np.maximum(1 + spread * random.standard_normal(len(rates)), 0.02)
    # A request's effect on the logit, averaged over those of the window; d log S_i / d logit = sum (1 - q_j).
    shift = 0.4 * spread * random.standard_normal(len(rates))
    before = np.concatenate([np.ones((*survivals.shape[:2], 1)), survivals[:, :, :-1]], axis=2)
    q = np.divide(survivals, before, out=np.zeros_like(survivals), where=before > 1e-12)
    slopes = np.cumsum(np.where(survivals > 0, 1 - q, 0.0), axis=2)
    shifted = survivals * np.exp(shift[:, None, None] * slopes)
    shifted = np.minimum.accumulate(np.minimum(shifted, 1.0), axis=2)
    return Disturbed(work, shifted, np.exp(clock * random.standard_normal(len(rates))))


def _variation(spread: float) -> float:
    """Return the square of the coefficient of variation of a log-normal distribution."""
    return math.expm1(spread**2)


def counters(
    rows: Rows,
    seconds: float,
    survivals: Floats,
    rates: Floats,
    setting: SpeculationSetting,
    edges: Sequence[float],
    waits: Floats,
) -> list[Counters]:
    """Return the counters of each row in `seconds` seconds, as scraped. `edges`: finite buckets of the latencies; `waits`: mean
    seconds to the first token."""
    most = max_speculative_tokens(setting)
    requests = rates * (1 - rows.full) * seconds
    drafting = rows.by_tokens[:, 1:].sum(axis=1) * seconds
    draft_tokens = rows.by_tokens @ np.arange(MOST + 1) * seconds
    accepted = np.einsum("nk,nki->ni", rows.by_tokens, survivals)[:, :most] * seconds
    output = _cumulative(requests, rows.per_token, edges)
    first = _cumulative(requests, waits, edges)
    bounds = (*edges, math.inf)
    windows = []
    table = np.stack(
        [requests, rows.tokens * seconds, rows.steps * seconds, rows.running * seconds, rows.iterations * seconds], axis=1
    ).tolist()
    for i, (arrived, tokens, steps, busy, iterations) in enumerate(table):
        speculation = None
        if most:
            accepted_by_position = tuple(accepted[i].tolist())
            speculation = SpeculationCounters(
                float(drafting[i]), float(draft_tokens[i]), sum(accepted_by_position), accepted_by_position
            )
        windows.append(
            Counters(
                generation_tokens=tokens + arrived,
                prompt_tokens=PROMPT * arrived,
                computed_prompt_tokens=PROMPT * arrived,
                prefix_cache_queries=0.0,
                prefix_cache_hits=0.0,
                preemptions=0.0,
                finished={"stop": arrived},
                request_steps=steps,
                step_seconds=busy,
                iterations=iterations,
                queued_requests=arrived,
                queue_seconds=0.0,
                time_to_first_token=Histogram(bounds, tuple(first[i].tolist()), arrived * float(waits[i])),
                time_per_output_token=Histogram(bounds, tuple(output[i].tolist()), arrived * float(rows.per_token[i])),
                speculation=speculation,
            )
        )
    return windows


def _cumulative(requests: Floats, means: Floats, edges: Sequence[float]) -> Floats:
    """Return the cumulative counts, row by bucket: log-normal around the mean."""
    centre = np.log(np.maximum(means, 1e-6)) - USERS**2 / 2
    z = (np.log(np.array(edges))[None, :] - centre[:, None]) / USERS
    below = 1 / (1 + np.exp(-np.clip(1.702 * z, -60, 60)))  # the logistic curve nearest to the normal one
    return np.concatenate([below, np.ones((len(means), 1))], axis=1) * requests[:, None]
