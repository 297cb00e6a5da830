"""Model of accepted draft tokens: by traffic class and by request, drifting with context, age and hour.

Position i of a draft is accepted with conditional probability q_i, given that all before it were. A request has an effect of
its own, normal on the logit scale and the same for all positions; drift shifts the logit further. What is accepted is a
prefix, so one uniform number u decides: accepted = #{i : u < S_i}, with the survival S_i = q_1 * ... * q_i.

Not modelled: dependence between the steps of one request beyond its effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of one class of traffic."""

    conditionals: tuple[float, ...]
    """q_1, q_2, ...: the chance that a position is accepted when those before it were. Later positions carry the last on."""
    spread: float = 0.0
    """Standard deviation of a request's effect on the logit scale."""

    def __post_init__(self) -> None:
        if not self.conditionals or not all(0.0 <= q <= 1.0 for q in self.conditionals):
            raise ValueError(f"conditionals are {self.conditionals}: give at least one, each from 0 to 1.")
        if self.spread < 0:
            raise ValueError(f"spread is {self.spread}: give a standard deviation, 0 or more.")

    def survival(self, draft_tokens: int, shift: float = 0.0) -> FloatArray:
        """S_1..S_drafts of a request whose effect and drift add up to `shift`."""
        survivals, survival = [], 1.0
        for logit in _logits(self.conditionals, draft_tokens):
            survival *= _logistic(logit + shift)
            survivals.append(survival)
        return np.array(survivals)

    def shift_logits(self, *shifts: float) -> Acceptance:
        """Return the class with conditionals shifted on the logit scale, as of another drafter; the last shift is repeated."""
        if not any(shifts):
            return self
        count = max(len(self.conditionals), len(shifts))
        moved = shifts[:count] + shifts[-1:] * (count - len(shifts))
        q = [_logistic(logit + shift) for logit, shift in zip(_logits(self.conditionals, count), moved, strict=True)]
        return Acceptance(tuple(q), self.spread)


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -500.0 else 0.0


@cache
def _logits(conditionals: tuple[float, ...], draft_tokens: int) -> tuple[float, ...]:
    """Return the logits of the first `draft_tokens` conditionals; the last one is repeated."""
    leading = conditionals[:draft_tokens]
    return tuple(map(_logit, leading + (conditionals[-1],) * (draft_tokens - len(leading))))


def _logit(q: float) -> float:
    return math.log(q) - math.log1p(-q) if 0 < q < 1 else math.copysign(math.inf, q - 0.5)


@dataclass(frozen=True)
class Drift:
    """Shift of the logit of every conditional, in addition to the request's own effect."""

    per_1k_context: float = 0.0
    """Per 1,000 tokens of context; drafters trained on short texts have it below 0."""
    per_hour_of_age: float = 0.0
    """Per hour since the engine started."""
    day_amplitude: float = 0.0
    """Amplitude of a sine over 24 hours, highest at a quarter of the day."""

    def logit_shift(self, context: float, age: float, time: float) -> float:
        """Return the shift for `context` tokens, `age` seconds since the start, and `time` seconds since midnight."""
        return (
            self.per_1k_context * context / 1000
            + self.per_hour_of_age * age / 3600
            + self.day_amplitude * math.sin(2 * math.pi * time / 86400)
        )

    def __bool__(self) -> bool:
        return bool(self.per_1k_context or self.per_hour_of_age or self.day_amplitude)


NO_DRIFT = Drift()


def expected_survival(acceptance: Acceptance, draft_tokens: int) -> FloatArray:
    """Return the limit of accepted_per_position / drafts for requests of a fixed number of tokens.

    A request with low acceptance needs more steps for its tokens, so it weighs more: with tau(z) the acceptance length of a
    request with effect z, the mean is over z with weight 1 / tau(z). Gauss-Hermite quadrature; the cut at a request's end,
    of order draft_tokens / tokens, is left out.
    """
    nodes, mass = _quadrature_nodes()
    survivals = np.array([acceptance.survival(draft_tokens, acceptance.spread * float(z)) for z in nodes])
    weights = mass / (1.0 + survivals.sum(axis=1))
    mean: FloatArray = (weights[:, None] * survivals).sum(axis=0) / weights.sum()
    return mean


@cache
def _quadrature_nodes() -> tuple[FloatArray, FloatArray]:
    nodes, mass = np.polynomial.hermite_e.hermegauss(41)  # numpy imports it on first use; a server never does
    return nodes, mass


def expected_length(acceptance: Acceptance, draft_tokens: int) -> float:
    """Return the acceptance length 1 + accepted / drafts that `expected_survival` implies, bonus token included."""
    return 1.0 + float(expected_survival(acceptance, draft_tokens).sum())


def conditionals_from_lengths(lengths: Mapping[int, float]) -> tuple[float, ...]:
    """Return conditionals from acceptance lengths by K (a published grid), equal ones where a K is skipped.

    >>> [round(q, 3) for q in conditionals_from_lengths({0: 1.0, 1: 1.8, 3: 2.88})]
    [0.8, 0.775, 0.775]
    """
    conditionals: list[float] = []
    survival, length = 1.0, 1.0
    for k, following in sorted(lengths.items()):
        gap = k - len(conditionals)
        if gap <= 0:
            continue
        low, high = 0.0, 1.0
        for _ in range(60):
            q = (low + high) / 2
            low, high = (q, high) if survival * sum(q**i for i in range(1, gap + 1)) < following - length else (low, q)
        conditionals += [low] * gap
        survival, length = survival * low**gap, following
    return tuple(conditionals)


def conditionals_from_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Return conditionals from unconditional per-position rates S_1, S_2, ... (accepted_per_position / drafts)."""
    before = [1.0, *rates[:-1]]
    if not all(0.0 <= rate <= last for rate, last in zip(rates, before, strict=True)):
        raise ValueError(f"rates are {tuple(rates)}: give shares from 0 to 1 that never rise from position to position.")
    return tuple(rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=True))


CLASS_ACCEPTANCE: dict[str, Acceptance] = {
    # Published per-position rates and lengths; the spread of a request is an assumption, because none is published.
    "chat": Acceptance(
        conditionals_from_rates((0.730, 0.521, 0.355)), 0.4
    ),  # EAGLE-3 8B, MT-bench: vLLM test_acceptance_length.py
    "code": Acceptance(
        conditionals_from_rates((0.76, 0.54, 0.39, 0.28, 0.21, 0.15, 0.12)), 0.4
    ),  # EAGLE-3 Llama 8B: PR 32374's author
    "math": Acceptance(conditionals_from_lengths({1: 1.813, 2: 2.444, 3: 2.929, 5: 3.6}), 0.4),  # Qwen3-32B grid, openmath
}
"""Acceptance of three classes of traffic under a fitting EAGLE 3 drafter."""
