"""Forecast the effect of a setting on the observed load: draws from acceptance and step time, combined.

The measure is the time that users wait for a token. At batch B with K draft tokens a request gets a token in T(B, K) / tau(K)
seconds, with tau the acceptance length. The gain of a setting is by how much faster tokens come to the same requests:

    gain = sum_B w_B t(B, current) / sum_B w_B t(B', setting) - 1,        B' / t(B', setting) = B / t(B, current)

with w_B the tokens that were made at a batch, over B, so that each batch counts by the time that engines spend at it.

By Little's law the same requests per second leave fewer of them in a step if tokens come faster. The batch then becomes B', and
the gain is larger than at the same batch; the busier the engine, the more. A canary is compared at the same share of the requests
too, so it shows this same gain. Not modelled: a queue that empties, or becomes unstable.

Adaptive verification is modelled as the best number of verified tokens at each batch, with all K tokens drafted, within a wide
margin. Published measurements lie between -8 and +70 % of a fixed K (vLLM pull request 52362).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static, max_speculative_tokens
from aerie.tuning.decision.candidates import MAX_SCHEDULE_TIERS, EngineConfig
from aerie.tuning.decision.load_distribution import LoadDistribution
from aerie.tuning.models.acceptance import AcceptanceModel
from aerie.tuning.models.numeric import FloatArray, IntArray
from aerie.tuning.models.step_time import StepTimeModel

_ADAPTIVE_OVERHEAD = 0.04
"""Mean of the logarithm of adaptive verification's overhead; its standard deviation follows."""
_ADAPTIVE_SPREAD = 0.08
_SCHEDULE_BATCH_GROUPS = 12
"""Groups of batches of about equal weight, between which a schedule may change."""
_MAX_GROUP_REGRET = 0.05
"""Maximum loss of a schedule in any group against the best K there, if a schedule within that limit exists."""
_MIN_BATCH_FACTOR, _MAX_BATCH_FACTOR = 1 / 1.5, 3.0
"""Range of factors on the batch at an equal request rate. Growth of the batch has a larger effect than its reduction."""
_FULL_BATCH_SHARE = 0.95
"""Share of `max_num_seqs` from which on requests are assumed to queue."""
_BATCH_FACTORS = np.concatenate([np.geomspace(_MIN_BATCH_FACTOR, 1.0, 7), np.geomspace(1.0, _MAX_BATCH_FACTOR, 11)[1:]])
EXCEEDANCE_PROBABILITY = 0.3
"""Probability that a token takes longer than the seconds by which a schedule is chosen."""
MIN_TIER_GAIN = 0.003
"""Minimum relative gain of a further tier in a schedule."""


@dataclass(frozen=True)
class Forecast:
    """Draws of step time and acceptance for every K and every batch of a load."""

    load: LoadDistribution
    step_seconds: FloatArray
    """Draws by K by batch: seconds of a step."""
    acceptance_lengths: FloatArray
    """Draws by K: tokens of a request in a step."""
    draft_step_seconds: FloatArray
    """Seconds of one draft step, by batch."""
    adaptive_factor: FloatArray
    """Draws of the overhead factor of adaptive verification."""
    max_num_seqs: float = math.inf
    """Maximum number of requests that an engine runs at a time."""
    _rate_matched_cache: dict[tuple[SpeculationSetting, SpeculationSetting], FloatArray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def max_speculative_tokens(self) -> int:
        """Largest K of the forecast."""
        return int(self.acceptance_lengths.shape[1]) - 1

    @cached_property
    def token_seconds_by_draft_tokens(self) -> FloatArray:
        """Draws by K by batch: a user's seconds per token."""
        seconds: FloatArray = self.step_seconds / self.acceptance_lengths[:, :, None]
        return seconds

    def token_seconds(self, setting: SpeculationSetting) -> FloatArray:
        """Return draws by batch: a user's seconds per token under a setting."""
        match setting:
            case Off():
                return self.token_seconds_by_draft_tokens[:, 0]
            case Static(tokens):
                return self.token_seconds_by_draft_tokens[:, tokens]
            case Schedule():
                return self.token_seconds_by_draft_tokens[
                    :, draft_tokens_by_batch(setting, self.load.batches), np.arange(len(self.load.batches))
                ]
            case Adaptive(tokens):
                unverified_seconds = np.arange(tokens, -1, -1)[:, None] * self.draft_step_seconds
                best_seconds: FloatArray = (
                    (self.step_seconds[:, : tokens + 1] + unverified_seconds) / self.acceptance_lengths[:, : tokens + 1, None]
                ).min(axis=1)
                return best_seconds * self.adaptive_factor[:, None]

    def busy_seconds(self, setting: SpeculationSetting, current: SpeculationSetting) -> FloatArray:
        """Return draws of a replica's busy seconds per token on the load, weighted by the tokens made under the current
        setting."""
        tokens_made = self.load.shares * self.tokens_per_step(current)
        seconds: FloatArray = (self.token_seconds(setting) / self.load.batches) @ (tokens_made / tokens_made.sum())
        return seconds

    def rate_matched_token_seconds(self, setting: SpeculationSetting, current: SpeculationSetting) -> FloatArray:
        """Return draws by batch: a user's seconds per token under a setting, at the request rate that makes this batch under the
        current one.

        The batch is multiplied by the smallest factor f, from `_MIN_BATCH_FACTOR` to `_MAX_BATCH_FACTOR`, at which f B / t(f B,
        setting) reaches that rate. Where the engine already runs as many requests as it may, queued ones take the free slots and
        the batch stays.
        """
        pair = (setting, current)
        if pair not in self._rate_matched_cache:
            self._rate_matched_cache[pair] = self._compute_rate_matched(setting, current)
        return self._rate_matched_cache[pair]

    def _compute_rate_matched(self, setting: SpeculationSetting, current: SpeculationSetting) -> FloatArray:
        current_seconds, setting_seconds, batches = self.token_seconds(current), self.token_seconds(setting), self.load.batches
        if setting == current or len(batches) < 2:
            return setting_seconds
        is_full = batches >= _FULL_BATCH_SHARE * self.max_num_seqs
        factors = np.where(is_full, 1.0, np.minimum(_BATCH_FACTORS[:, None], np.maximum(self.max_num_seqs / batches, 1.0)))
        seconds_by_factor = (setting_seconds @ _interpolation_weights(batches, factors).T).reshape(
            len(setting_seconds), len(_BATCH_FACTORS), len(batches)
        )
        excess = seconds_by_factor - factors * current_seconds[:, None, :]
        is_enough = excess <= 0
        right = np.where(is_enough.any(axis=1), is_enough.argmax(axis=1), len(_BATCH_FACTORS) - 1)[:, None]
        left = np.maximum(right - 1, 0)
        above, below = (np.take_along_axis(excess, index, axis=1)[:, 0] for index in (left, right))
        end_seconds = np.take_along_axis(seconds_by_factor, right, axis=1)[:, 0]
        is_inside = (above > 0) & (below <= 0)
        share = above / np.where(is_inside, above - below, 1.0)
        columns = np.arange(len(batches))
        low, high = factors[left[:, 0], columns], factors[right[:, 0], columns]
        factor = low + share * (high - low)
        seconds: FloatArray = np.where(is_inside, factor * current_seconds, end_seconds)
        return seconds

    def gain(self, setting: SpeculationSetting, current: SpeculationSetting) -> FloatArray:
        """Return draws of the gain over the current setting."""
        weights = self.load.shares * self.tokens_per_step(current) / self.load.batches
        gain: FloatArray = (self.token_seconds(current) @ weights) / (
            self.rate_matched_token_seconds(setting, current) @ weights
        ) - 1
        return gain

    def cautious_token_seconds(self, engine: EngineConfig, current: SpeculationSetting) -> FloatArray:
        """Return a user's seconds per token by K and batch, for the choice of a schedule; infinite where a step has no captured
        graph.

        Relative to the current setting it is not the mean, but the value that is exceeded with `EXCEEDANCE_PROBABILITY`. The best
        of several uncertain values is overestimated on average; a measured one needs no such allowance.
        """
        current_seconds = self.token_seconds(current)
        relative: FloatArray = np.quantile(
            self.token_seconds_by_draft_tokens / current_seconds[:, None, :], 1 - EXCEEDANCE_PROBABILITY, axis=0
        )
        return self._mask_uncaptured(relative * current_seconds.mean(axis=0), engine)

    def build_schedule(self, engine: EngineConfig, current: SpeculationSetting, max_loss: float = math.inf) -> Schedule | None:
        """Return the best schedule, if one with at least two tiers is worth it: exact over the batch groups, by dynamic
        programming.

        Tiers of a dense target never draft more as the batch grows; those of a mixture of experts may. `max_loss`: maximum loss
        in a group against the current setting, if a schedule within that limit exists.
        """
        groups = self._batch_groups(_SCHEDULE_BATCH_GROUPS)
        weights = self.load.shares * self.tokens_per_step(current) / self.load.batches
        cost = self.cautious_token_seconds(engine, current) * weights
        group_costs = np.stack([cost[:, low:high].sum(axis=1) for low, high in groups], axis=1)
        is_dense = engine.is_moe is False
        low_regret_costs = np.where(group_costs > (1 + _MAX_GROUP_REGRET) * group_costs.min(axis=0), np.inf, group_costs)
        current_cost = self.token_seconds(current).mean(axis=0) * weights
        current_group_costs = np.array([current_cost[low:high].sum() for low, high in groups])
        safe_costs = np.where(group_costs > (1 + max_loss) * current_group_costs, np.inf, low_regret_costs)
        candidates = (_optimal_tiers(costs, falling=is_dense) for costs in (safe_costs, low_regret_costs, group_costs))
        group_tiers = next(filter(None, candidates), None)
        if group_tiers is None or len(group_tiers) < 2 or not any(tokens for _, tokens in group_tiers):
            return None
        return self._schedule_from_group_tiers(group_tiers, groups)

    def _schedule_from_group_tiers(
        self, group_tiers: Sequence[tuple[int, int]], groups: Sequence[tuple[int, int]]
    ) -> Schedule | None:
        """Return the schedule of (last group, tokens) of each tier; None if fewer than two tiers remain."""
        tiers: list[ScheduleTier] = []
        for position, (last_group, tokens) in enumerate(group_tiers):
            edge = groups[last_group][1]
            first = tiers[-1].last + 1 if tiers else 1
            if position + 1 < len(group_tiers):
                last = int(np.sqrt(self.load.batches[edge - 1] * self.load.batches[edge]))
            else:
                last = int(np.ceil(self.load.batches[-1]))
            if last >= first:
                tiers.append(ScheduleTier(first, last, tokens))
        if len(tiers) < 2 or not any(tier.tokens for tier in tiers):
            return None
        return Schedule(tuple(tiers), max(tier.tokens for tier in tiers))

    def tokens_per_step(self, setting: SpeculationSetting) -> FloatArray:
        """Return the mean tokens of a request in a step, by batch."""
        tokens: FloatArray = self.acceptance_lengths.mean(axis=0)[draft_tokens_by_batch(setting, self.load.batches)]
        return tokens

    def _mask_uncaptured(self, values: FloatArray, engine: EngineConfig) -> FloatArray:
        """Return the values by K and batch, infinite where a step with drafts would run without a captured graph."""
        if engine.max_captured_tokens is None:
            return values
        tokens = np.arange(self.max_speculative_tokens + 1)[:, None]
        masked: FloatArray = np.where(
            (tokens > 0) & (self.load.batches * (tokens + 1) > engine.max_captured_tokens), np.inf, values
        )
        return masked

    def worst_fifth_gain(self, setting: SpeculationSetting, current: SpeculationSetting) -> float:
        """Return the median gain over the current setting in the fifth of the request-steps where it is lowest."""
        seconds, current_seconds = self.rate_matched_token_seconds(setting, current), self.token_seconds(current)
        weights = self.load.shares * self.tokens_per_step(current) / self.load.batches
        return min(
            float(np.median((current_seconds[:, low:high] @ weights[low:high]) / (seconds[:, low:high] @ weights[low:high]))) - 1
            for low, high in self._batch_groups(5)
        )

    def gain_by_batch(self, setting: SpeculationSetting, current: SpeculationSetting) -> FloatArray:
        """Return the median gain over the current setting at each batch."""
        gains: FloatArray = np.median(self.token_seconds(current) / self.rate_matched_token_seconds(setting, current), axis=0) - 1
        return gains

    def probability_within_by_batch(self, setting: SpeculationSetting, current: SpeculationSetting, seconds: float) -> FloatArray:
        """Return the probability by batch that a token takes at most `seconds`, or no longer than under the current setting."""
        token_seconds = self.rate_matched_token_seconds(setting, current)
        within = (token_seconds <= seconds) | (token_seconds <= self.token_seconds(current))
        probability: FloatArray = within.mean(axis=0)
        return probability

    def build_guarded_schedule(
        self, setting: SpeculationSetting, current: SpeculationSetting, first_batch: int, last_batch: float
    ) -> Schedule | None:
        """Return a schedule of the setting from `first_batch` to `last_batch`, and of the current setting at all other batches.

        An infinite `last_batch` includes all larger batches. The result is None if only one tier remains, if none drafts, or if
        it would take more tiers than a schedule may have.
        """
        high = math.ceil(self.load.batches[-1] if last_batch == math.inf else last_batch)
        tiers = [*_tiers_in_range(current, 1, first_batch - 1), *_tiers_in_range(setting, first_batch, high)]
        if last_batch < math.inf:
            tiers += _tiers_in_range(current, high + 1, 2 * high)
        joined: list[ScheduleTier] = []
        for tier in tiers:
            if joined and joined[-1].tokens == tier.tokens:
                joined[-1] = replace(joined[-1], last=tier.last)
            else:
                joined.append(tier)
        max_k = max(tier.tokens for tier in joined)
        return Schedule(tuple(joined), max_k) if 1 < len(joined) <= MAX_SCHEDULE_TIERS and max_k > 0 else None

    def _batch_groups(self, count: int) -> list[tuple[int, int]]:
        """Return ranges of neighbouring batches of about equal weight."""
        ends = np.searchsorted(np.cumsum(self.load.shares), np.arange(1, count) / count) + 1
        edges = sorted({0, *ends.tolist(), len(self.load.batches)})
        return [(low, high) for low, high in itertools.pairwise(edges) if low < high <= len(self.load.batches)]


@dataclass(frozen=True)
class LoadExtrapolation:
    """Forecasts at loads that may occur, for when a day of load is not known (`extrapolate_load`)."""

    range_forecast: Forecast
    """Forecast at the lowest and the highest batch, where no candidate may be worse than the current setting."""
    headroom_forecast: Forecast
    """Forecast at the highest batch, and at the one up to which the objectives have to hold."""


def build_forecast(
    load: LoadDistribution,
    acceptance: AcceptanceModel,
    step_time: StepTimeModel,
    max_k: int,
    random: np.random.Generator,
    max_num_seqs: float = math.inf,
) -> Forecast:
    """Draw the forecast for K = 0 to `max_k`, with as many draws as the acceptance model has.

    `max_num_seqs`: maximum number of requests that an engine runs at a time.
    """
    draws = len(acceptance.survival)
    tokens = np.repeat(np.arange(max_k + 1), len(load.batches)).astype(float)
    batches = np.tile(load.batches, max_k + 1)
    seconds = step_time.draw_step_seconds(batches, tokens, draws, random).reshape(draws, max_k + 1, -1)
    factor = np.exp(_ADAPTIVE_OVERHEAD + _ADAPTIVE_SPREAD * random.standard_normal(draws))
    return Forecast(
        load, seconds, acceptance.lengths[:, : max_k + 1], step_time.draft_step_seconds(load.batches), factor, max_num_seqs
    )


def _tiers_in_range(setting: SpeculationSetting, first: int, last: int) -> list[ScheduleTier]:
    """Return what a setting drafts at a range of batches, as tiers."""
    if last < first:
        return []
    tiers = setting.tiers if isinstance(setting, Schedule) else (ScheduleTier(1, last, max_speculative_tokens(setting)),)
    tiers = (*tiers[:-1], replace(tiers[-1], last=max(tiers[-1].last, last)))  # the last tier also applies to larger batches
    return [
        ScheduleTier(max(tier.first, first), min(tier.last, last), tier.tokens)
        for tier in tiers
        if tier.first <= last and tier.last >= first
    ]


def draft_tokens_by_batch(setting: SpeculationSetting, batches: FloatArray) -> IntArray:
    """Return the draft tokens in a step, by batch."""
    if not isinstance(setting, Schedule):
        return np.full(len(batches), max_speculative_tokens(setting))
    last_batches = np.array([tier.last for tier in setting.tiers[:-1]])
    tokens: IntArray = np.array([tier.tokens for tier in setting.tiers])[np.searchsorted(last_batches, np.rint(batches))]
    return tokens


def _interpolation_weights(batches: FloatArray, factors: FloatArray) -> FloatArray:
    """Return weights that turn values at increasing batches into values at factors of these batches (factors by batches).

    They interpolate linearly. Below the lowest batch its value applies. Above the highest batch the line through its value and
    that at half of it is extrapolated.
    """
    targets = (factors * batches).ravel()
    index = np.clip(np.searchsorted(batches, targets) - 1, 0, len(batches) - 2)
    left = np.where(targets > batches[-1], np.searchsorted(batches[:-2], batches[-1] / 2), index)
    right = np.where(targets > batches[-1], len(batches) - 1, index + 1)
    share = np.maximum((targets - batches[left]) / (batches[right] - batches[left]), 0.0)
    weights = np.zeros((len(targets), len(batches)))
    rows = np.arange(len(targets))
    weights[rows, left] += 1 - share
    weights[rows, right] += share
    return weights


def _optimal_tiers(cost: FloatArray, *, falling: bool) -> list[tuple[int, int]] | None:
    """Return (last group, tokens) of each tier at the lowest cost (tokens by groups); a further tier only where it is worth it.

    With `falling`, tokens never rise from one tier to the next.
    """
    levels, groups = cost.shape
    prohibitive = 1e6 * float(cost[np.isfinite(cost)].max())
    sums = np.concatenate([np.zeros((levels, 1)), np.cumsum(np.where(np.isfinite(cost), cost, prohibitive), axis=1)], axis=1)
    may_follow = np.triu(np.ones((levels, levels), bool), 1) if falling else ~np.eye(levels, dtype=bool)  # [tokens, before]
    best = [sums.copy()]  # by number of tiers: tokens of the last tier by groups covered
    best[0][:, 0] = prohibitive
    choices_by_count: list[tuple[FloatArray, FloatArray]] = []
    for _ in range(1, MAX_SCHEDULE_TIERS):
        costs_before = np.where(may_follow[:, :, None], best[-1][None], prohibitive)
        best_before, entry_cost = costs_before.argmin(axis=1), costs_before.min(axis=1)
        # The last tier begins at `start`; axes: [tokens, end, start].
        total = (entry_cost - sums)[:, None, :] + sums[:, :, None]
        total = np.where(np.tri(groups + 1, k=-1, dtype=bool)[None], total, prohibitive)
        start = total.argmin(axis=2)
        choices_by_count.append((start, np.take_along_axis(best_before, start, axis=1)))
        best.append(total.min(axis=2))
    best_count = 0
    for count in range(1, MAX_SCHEDULE_TIERS):
        if best[count][:, groups].min() < best[best_count][:, groups].min() * (1 - MIN_TIER_GAIN):
            best_count = count
    tokens, end = int(best[best_count][:, groups].argmin()), groups
    if best[best_count][tokens, groups] >= prohibitive:
        return None
    tiers = [(end - 1, tokens)]
    for start, previous in reversed(choices_by_count[:best_count]):
        end, tokens = int(start[tokens, end]), int(previous[tokens, end])
        tiers.insert(0, (end - 1, tokens))
    return tiers
