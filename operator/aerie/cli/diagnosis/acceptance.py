"""Acceptance of draft tokens by position, and what another number of draft tokens would give.

Requests differ, so drafts of one request are alike; how much, one reading does not show. Every interval is therefore that of one
independent draft for each request: it holds however alike they are. On short answers it is three times wider than needed
(`benchmarks/results/wrong_drafters.json`, se_*).

    acceptance length   1 + accepted / drafts, from 1 to 1 + K
    S_i                 share of drafts accepted up to and including position i
    q_i                 S_i / S_{i-1}: share of those that got so far

Guarantees: pure. A position beyond K is marked as extrapolated, by the rule of `aerie.tuning.models.acceptance`: the last q, with
its uncertainty. Not modelled: drafts of a smaller K begin at easier positions of the text, so that its acceptance length is up to
3 % higher than here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aerie.engine.metrics.rates import Bounds, Unknown, acceptance_length, drafts_by_position
from aerie.engine.metrics.sample import Counters
from aerie.engine.speculation import SpeculationSetting, max_speculative_tokens
from aerie.tuning.models.acceptance import EXTRAPOLATION_LOGIT_SD

Z_95 = 1.96
"""Standard errors of a 95 % interval."""
EXTRAPOLATED_POSITIONS = 2
"""Positions beyond K for which a forecast is made."""


@dataclass(frozen=True)
class PositionAcceptance:
    """Acceptance at one position, which counts from 1."""

    position: int
    survival: float
    """S, the middle of its bounds."""
    conditional: Bounds
    """q, as far as the counters tell."""
    reached: float
    """Independent drafts that q is of, at least."""

    @property
    def interval(self) -> Bounds:
        """95 % interval of q."""
        low, high = self.conditional.low, self.conditional.high
        return Bounds(_wilson(low, self.reached)[0], _wilson(high, self.reached)[1])


@dataclass(frozen=True)
class TokensPerStep:
    """Expected acceptance length at one K."""

    draft_tokens: int
    length: float
    lower: float
    """Lower bound: equal to the length where positions were counted."""
    upper: float
    is_extrapolated: bool

    def gain_over(self, other: TokensPerStep) -> float:
        """Return the relative gain in tokens per step."""
        return self.length / other.length - 1


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of an engine."""

    length: Bounds
    """Acceptance length, as far as the counters tell."""
    interval: Bounds
    """95 % interval of the acceptance length."""
    positions: tuple[PositionAcceptance, ...]
    drafts: float
    mean_draft_tokens: float

    def lengths_by_tokens(self) -> tuple[TokensPerStep, ...]:
        """Return the acceptance length at K = 1, 2, ... to a little beyond the present K."""
        rows, length = [], 1.0
        for position in self.positions:
            length += position.survival
            rows.append(TokensPerStep(position.position, length, length, length, is_extrapolated=False))
        if not self.positions:
            return ()
        last = self.positions[-1]
        conditional = min(max((last.conditional.low + last.conditional.high) / 2, 1e-4), 1 - 1e-4)
        middle, low, high = (last.survival,) * 3
        lengths = [length] * 3
        for step in range(1, EXTRAPOLATED_POSITIONS + 1):
            spread = Z_95 * EXTRAPOLATION_LOGIT_SD * math.sqrt(step)
            middle *= conditional
            low, high = low * _shift_logit(conditional, -spread), high * _shift_logit(conditional, spread)
            lengths = [total + share for total, share in zip(lengths, (middle, low, high), strict=True)]
            rows.append(TokensPerStep(last.position + step, lengths[0], lengths[1], lengths[2], is_extrapolated=True))
        return tuple(rows)


def measure_acceptance(counters: Counters, setting: SpeculationSetting, request_count: float) -> Acceptance | Unknown:
    """Return the acceptance that the counters identify, or why they do not. `request_count`: requests that they are of."""
    length, offered = acceptance_length(counters, setting), drafts_by_position(counters, setting)
    if isinstance(length, Unknown):
        return length
    if isinstance(offered, Unknown):
        return offered
    assert counters.speculation is not None
    drafts, accepted = counters.speculation.drafts, counters.speculation.accepted_per_position
    units = max(1.0, min(request_count, drafts))
    deviation = _standard_deviation(drafts, accepted)
    margin = Z_95 * deviation / math.sqrt(units)
    ceiling = 1.0 + max_speculative_tokens(setting)
    positions, survival = [], 1.0
    for index, count in enumerate(accepted):
        before = accepted[index - 1] if index else 0.0
        # Drafts of a schedule, and drafts that end early, offer fewer tokens at deeper positions.
        reached = [
            getattr(offered[index], end)
            if not index
            else before * _ratio(getattr(offered[index], end), getattr(offered[index - 1], end))
            for end in ("high", "low")
        ]
        shares = sorted(min(1.0, _ratio(count, number)) for number in reached)
        conditional = Bounds(shares[0], shares[1] if min(reached) > 0 else 1.0)
        survival *= (conditional.low + conditional.high) / 2
        positions.append(PositionAcceptance(index + 1, survival, conditional, max(1.0, min(units, max(reached)))))
    # Where nothing was accepted, the deviation is 0, and the interval of the first position still is not.
    high = max(length.high + margin, 1.0 + (positions[0].interval.high if positions else 0.0))
    interval = Bounds(max(1.0, length.low - margin), min(ceiling, high))
    return Acceptance(length, interval, tuple(positions), drafts, counters.speculation.draft_tokens / drafts)


def _standard_deviation(drafts: float, accepted: Sequence[float]) -> float:
    """Return the standard deviation of a draft's accepted tokens: accepted_i - accepted_{i+1} drafts had exactly i of them."""
    mean = sum(accepted) / drafts
    square = sum((2 * position - 1) * count for position, count in enumerate(accepted, 1)) / drafts
    return math.sqrt(max(0.0, square - mean * mean))


def _wilson(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` independent trials (Wilson 1927)."""
    weight = Z_95 * Z_95 / count
    center = (share + weight / 2) / (1 + weight)
    margin = Z_95 * math.sqrt(max(0.0, share * (1 - share)) / count + weight / (4 * count)) / (1 + weight)
    return max(0.0, center - margin), min(1.0, center + margin)


def ratio_upper_bound(part: PositionAcceptance, whole: PositionAcceptance) -> float:
    """Return the upper end of the 95 % interval of the ratio of two positions' q: the delta method for its logarithm."""
    part_share, whole_share = part.conditional.high, whole.conditional.low
    if not whole_share or not part_share:
        return math.inf
    variance = sum((1 - share) / (share * item.reached) for share, item in ((part_share, part), (whole_share, whole)))
    return part_share / whole_share * math.exp(Z_95 * math.sqrt(variance))


def _shift_logit(share: float, shift: float) -> float:
    return 1 / (1 + math.exp(-(math.log(share) - math.log1p(-share) + shift)))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
