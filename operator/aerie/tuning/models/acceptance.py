"""Estimate how many draft tokens would be accepted at every K, with the uncertainty, from the engines' counters.

With S_i = q_1 * ... * q_i, each conditional q_i is estimated from the blocks in which position i was offered:

    q_i = sum(accepted_i) / sum(accepted_{i-1} * offered_i / offered_{i-1}),    accepted_0 = offered_0 = offered_1

* Another K does not just give fewer of these positions. A text fixes how many tokens are written, not how many drafts it takes.
  The larger K is, the fewer drafts pass easy text, so the drafts begin at harder positions of the text and every S_i is lower.
  Let a text's effect move the logit of all q_i alike, with variance v. A position of the text has the weight 1 / tau_K, with
  tau_K the acceptance length there, so to first order

      logit q_i(K) = logit q_i(K') - v * (g_K - g_K'),    g_K = d log tau_K / d logit q = sum(S_k * sum(1 - q_j, j <= k)) / tau_K

  For a standard deviation of requests of 0.4 and 0.8, predicted acceptance lengths are within 0.05 and 0.25 % of the true ones.
  That holds from any of K = 1..7 to any smaller K. Uncorrected ones are up to 1.0 and 3.4 % too low. Texts of easy and hard runs
  look like a v of 1 to 2. If two K ran at the same time, S_1 at both identifies v. Otherwise v follows its prior alone
  (`TEXT_VARIANCE_PRIOR_MEAN`).
* Dummy and cut drafts (`aerie.engine.metrics.rates`) only bound `offered`. Every draw takes one position between the bounds.
* Blocks are clustered: requests are alike within minutes. The spread is a dependent multiplier bootstrap over blocks (Buehlmann
  1993; Kuensch 1989), whose weights correlate over m^(1/3) neighbours: m blocks, Bartlett weights, as in Newey and West 1987.
* Schedules with three or more numbers of draft tokens bound `offered` too, widely beyond the first position. They count only if
  the other blocks are too few. Adaptive verification never counts.
* A position that was never offered extrapolates the last conditional: logit q_{K+h} = logit q_K + a random walk of sd 0.5 a step.
  On 32 published acceptance vectors that rule misses the next S by 0.016 on average; a constant acceptance rate misses it by
  0.029. Text that gets that far is easier by the same v, so each step goes up by v * (1 - q_K). That offsets most of the
  reduction for the harder positions of a larger K.

Not modelled: acceptance that differs by batch or context length. The blocks of a schedule mix both; they count under their mean
number of draft tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.engine.metrics.rates import Unknown, drafts_by_position
from aerie.engine.speculation import Adaptive, Schedule, SpeculationSetting
from aerie.tuning.models.numeric import FloatArray, IntArray, logistic, logit
from aerie.tuning.telemetry import TelemetryBlock

MIN_ACCEPTANCE_BLOCKS = 6
"""Half an hour in blocks of five minutes. Fewer blocks do not show how much acceptance varies."""
MIN_ACCEPTANCE_DRAFTS = 2000.0
EXTRAPOLATION_LOGIT_SD = 0.5
"""Standard deviation of logit q from one position to the next where no position was offered."""
TEXT_VARIANCE_PRIOR_MEAN = 0.15
"""Mean of the exponential prior of v: 0.3 % of acceptance length for each further draft position, and as uncertain.

Requests that differ by 0.4 on the logit have this effect; nobody publishes how much they differ. With a larger mean, more draft
tokens than now look worse than they are on the published grids, and too few are chosen: with 0.28, 1.1 % of throughput is lost
instead of 0.7 %.
"""
_TEXT_VARIANCE_GRID = np.linspace(0.0, 3.0, 301)
_POD_LOGIT_SD = 0.005
"""Standard deviation of a permanent difference between pods in the logit of S_1. It also limits the precision of the
difference between two settings."""
_MIN_SENSITIVITY_DIFFERENCE = 1e-3
"""Difference of g up to which two settings count as one."""


@dataclass(frozen=True)
class AcceptanceModel:
    """Draws of the acceptance by position."""

    survival: FloatArray
    """Draws by positions: S_1, S_2, ... of each draw, for drafts that begin at the same positions of the text as the counted
    ones."""
    lengths: FloatArray
    """Draws by K = 0, 1, 2, ...: the acceptance length at each K, bonus token included. The drafts of each K begin at other
    positions of the text."""
    text_variance: FloatArray
    """Draws of v: how much texts differ."""
    observed_positions: int
    """Number of positions that drafts reached. Beyond them the last conditional is extrapolated."""
    block_count: int
    draft_count: float

    def length(self, tokens: int) -> FloatArray:
        """Return the draws of the acceptance length at K = `tokens`."""
        lengths: FloatArray = self.lengths[:, tokens]
        return lengths


def fit_acceptance(
    blocks: Iterable[TelemetryBlock], max_k: int, draws: int, random: np.random.Generator
) -> AcceptanceModel | Unknown:
    """Fit acceptance up to K = `max_k` to all blocks in which drafts were verified."""
    all_usable, exclusion_reason = _select_usable_blocks(blocks)
    usable = [row for row in all_usable if not _has_bounded_positions(row[0].setting)]
    if not _has_enough_drafts(usable):
        usable = all_usable
    drafts = _count_drafts(usable)
    if not _has_enough_drafts(usable):
        why = f": {exclusion_reason}" if exclusion_reason and not usable else "."
        blocks_text = "1 block of time" if len(usable) == 1 else f"{len(usable)} blocks of time"
        return Unknown(
            f"acceptance was counted in {blocks_text} with {drafts:.0f} drafts, and {MIN_ACCEPTANCE_BLOCKS} with "
            f"{MIN_ACCEPTANCE_DRAFTS:.0f} are needed to estimate how much it varies{why}"
        )
    draft_lengths = _mean_draft_lengths(usable)
    deepest = max(max_k, math.ceil(draft_lengths.max()))
    accepted, high, low = _position_counts(usable, deepest)
    observed = int(np.count_nonzero(high.sum(axis=0) > 0))
    weights = _bootstrap_weights([block.start for block, _ in usable], draws, random)
    position_in_bounds = random.random((draws, 1))  # 0: the upper bound of `offered`; 1: the lower one
    accepted, high, low = accepted[:, :observed], high[:, :observed], low[:, :observed]
    total_accepted, total_high, total_low = (np.maximum(counts.sum(axis=0), 1e-9) for counts in (accepted, high, low))
    centre = np.clip(total_accepted / (total_high + position_in_bounds * (total_low - total_high)), 1e-4, 1 - 1e-4)
    conditionals = np.clip(total_accepted / total_high, 1e-4, 1 - 1e-4)
    influence = (accepted - conditionals * high) / total_high
    logits = logit(centre) + weights @ influence / (conditionals * (1 - conditionals))
    steps = EXTRAPOLATION_LOGIT_SD * random.standard_normal((draws, deepest - observed))
    weights_by_k = _interpolation_weights(draft_lengths, deepest)
    extrapolated = np.concatenate([conditionals, np.repeat(conditionals[-1:], deepest - observed)])
    offered = (high[:, 0] + low[:, 0]) / 2
    times = np.unique([block.start for block, _ in usable], return_inverse=True)[1]
    sensitivity = weights_by_k @ _length_sensitivity(extrapolated)
    text_variance = _draw_text_variance(times, accepted[:, 0], offered, sensitivity, weights, random.random(draws))
    steps += (text_variance * (1 - conditionals[-1]))[:, None]  # text that gets so far is easier
    logits = np.concatenate([logits, logits[:, -1:] + np.cumsum(steps, axis=1)], axis=1)
    # Shift each position to K = 0, where every token has the same weight.
    shares = (high / total_high).T @ weights_by_k
    shares = np.concatenate([shares, np.repeat(shares[-1:], deepest - observed, axis=0)])
    shift = text_variance[:, None] * _length_sensitivity(logistic(logits))
    logits_at_zero = logits + shift @ shares.T
    survival = np.cumprod(logistic(logits[:, :max_k]), axis=1)
    lengths = _lengths_by_k(logits_at_zero, shift, max_k)
    return AcceptanceModel(survival, lengths, text_variance, min(observed, max_k), len(usable), drafts)


def _lengths_by_k(logits_at_zero: FloatArray, shift: FloatArray, max_k: int) -> FloatArray:
    """Return draws by K of the acceptance length: the logits at K = 0, shifted to each K."""
    lengths = np.ones((len(logits_at_zero), max_k + 1))
    for k in range(1, max_k + 1):
        lengths[:, k] += np.cumprod(logistic(logits_at_zero[:, :k] - shift[:, k, None]), axis=1).sum(axis=1)
    return lengths


_OfferedBounds = Sequence[tuple[float, float]]


def _has_bounded_positions(setting: SpeculationSetting) -> bool:
    """Return whether the counters only bound how many drafts reached a position; other blocks are then more informative."""
    return isinstance(setting, Schedule) and len(setting.nonzero_token_counts) > 2


def _has_enough_drafts(usable: Sequence[tuple[TelemetryBlock, _OfferedBounds]]) -> bool:
    return len(usable) >= MIN_ACCEPTANCE_BLOCKS and _count_drafts(usable) >= MIN_ACCEPTANCE_DRAFTS


def _count_drafts(usable: Sequence[tuple[TelemetryBlock, _OfferedBounds]]) -> float:
    return sum(block.counters.speculation.drafts for block, _ in usable if block.counters.speculation)


def _select_usable_blocks(blocks: Iterable[TelemetryBlock]) -> tuple[list[tuple[TelemetryBlock, _OfferedBounds]], str]:
    """Return the blocks whose drafts by position are known, with the bounds of those drafts, and why the last other block is
    unusable."""
    usable: list[tuple[TelemetryBlock, _OfferedBounds]] = []
    exclusion_reason = ""
    for block in blocks:
        if isinstance(block.setting, Adaptive):
            exclusion_reason = "adaptive verification books what it trimmed as not accepted."
            continue
        offered = drafts_by_position(block.counters, block.setting)
        if isinstance(offered, Unknown):
            exclusion_reason = offered.message
            continue
        usable.append((block, [(bounds.low, bounds.high) for bounds in offered]))
    return usable, exclusion_reason


def _mean_draft_lengths(usable: Sequence[tuple[TelemetryBlock, _OfferedBounds]]) -> FloatArray:
    """Return the mean tokens of a draft, by block."""
    counters = [block.counters.speculation for block, _ in usable]
    lengths = [
        min(len(speculation.accepted_per_position), speculation.draft_tokens / speculation.drafts)
        for speculation in counters
        if speculation is not None
    ]
    return np.maximum(1.0, lengths)


def _interpolation_weights(lengths: FloatArray, deepest: int) -> FloatArray:
    """Return weights by block and K = 0, 1, 2, ... that interpolate values at whole K to each block's draft length."""
    weights: FloatArray = np.maximum(0.0, 1.0 - np.abs(lengths[:, None] - np.arange(deepest + 1)))
    return weights


def _length_sensitivity(conditionals: FloatArray) -> FloatArray:
    """Return g by K = 0, 1, 2, ...: the relative growth of the acceptance length when the logit of every conditional is higher
    by 1."""
    survival = np.cumprod(conditionals, axis=-1)
    length_change = np.cumsum(survival * np.cumsum(1 - conditionals, axis=-1), axis=-1)
    sensitivity = length_change / (1 + np.cumsum(survival, axis=-1))
    return np.concatenate([np.zeros((*sensitivity.shape[:-1], 1)), sensitivity], axis=-1)


def _draw_text_variance(
    times: IntArray, accepted: FloatArray, offered: FloatArray, sensitivity: FloatArray, weights: FloatArray, ranks: FloatArray
) -> FloatArray:
    """Draw v from its prior and from S_1 of blocks of different K at the same time.

    Between two times traffic moves by more than the effect of v, so only differences within one time count: a regression of the
    logit on g with a level for each time. `sensitivity` is g by block, `ranks` are the draws' uniform ranks in the posterior.
    """
    total = np.bincount(times, offered)
    deviation = sensitivity - (np.bincount(times, offered * sensitivity) / total)[times]
    paired = np.abs(deviation) > _MIN_SENSITIVITY_DIFFERENCE
    count = len(np.unique(times[paired]))
    log_posterior = -_TEXT_VARIANCE_GRID / TEXT_VARIANCE_PRIOR_MEAN
    if count >= MIN_ACCEPTANCE_BLOCKS:
        share = float(np.clip(accepted.sum() / offered.sum(), 1e-4, 1 - 1e-4))
        slope = share * (1 - share) * offered
        information = float((slope * deviation**2).sum())
        residuals = accepted - offered * (np.bincount(times, accepted) / total)[times]
        estimate = -float(deviation @ residuals) / information
        errors = weights @ (deviation * (residuals + estimate * deviation * slope)) / information
        # The error of so few times is itself uncertain: the variance of Student's t.
        # All blocks of those times: of two settings the one with nearly all drafts lies so near their mean that it is not paired.
        spread = float(np.ptp(sensitivity[np.isin(times, times[paired])]))
        variance = float(errors.var()) * (count - 1) / (count - 3) + (_POD_LOGIT_SD / spread) ** 2
        log_posterior = log_posterior - (_TEXT_VARIANCE_GRID - estimate) ** 2 / (2 * variance)
    mass = np.cumsum(np.exp(log_posterior - log_posterior.max()))
    return np.interp(ranks, mass / mass[-1], _TEXT_VARIANCE_GRID)


def _position_counts(
    usable: Sequence[tuple[TelemetryBlock, _OfferedBounds]], max_positions: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return, by block and position, the accepted tokens, and the upper and lower bound of the drafts that offered the
    position."""
    accepted, high, low = (np.zeros((len(usable), max_positions)) for _ in range(3))
    for row, (block, offered) in enumerate(usable):
        assert block.counters.speculation is not None
        counts = block.counters.speculation.accepted_per_position
        for position in range(min(max_positions, len(counts))):
            accepted_before = counts[position - 1] if position else 0.0
            for index, bounds in ((1, high), (0, low)):
                reached = offered[position][index]
                bounds[row, position] = (
                    reached if position == 0 else accepted_before * _ratio(reached, offered[position - 1][index])
                )
            # Counts beyond the bounds come from rounding, or from a request that returned after a preemption.
            low[row, position] = min(max(low[row, position], counts[position]), high[row, position])
            accepted[row, position] = min(counts[position], high[row, position])
    return accepted, high, low


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _bootstrap_weights(starts: Sequence[float], draws: int, random: np.random.Generator) -> FloatArray:
    """Return draws of the blocks' weights, around 0: neighbours correlate, and blocks of one time have one weight whatever
    their setting."""
    times = sorted(set(starts))
    count = len(times)
    reach = max(1, round(count ** (1 / 3)))
    noise = np.cumsum(random.standard_normal((draws, count + reach)), axis=1)
    correlated = (noise[:, reach:] - noise[:, :-reach]) / math.sqrt(reach)
    correlated *= math.sqrt(count / max(count - 1, 1))
    index = {time: column for column, time in enumerate(times)}
    weights: FloatArray = correlated[:, [index[start] for start in starts]]
    return weights
