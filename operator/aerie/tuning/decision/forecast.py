"""What a setting would give on the load that was seen: draws from acceptance and step time, combined.

The measure is what users wait for a token: at batch B with K drafted tokens a request gets one in T(B, K) / tau(K) seconds, tau
the acceptance length. The gain of a setting is by how much faster tokens come to the same requests:

    gain = sum_B w_B t(B, current) / sum_B w_B t(B', setting) - 1,        B' / t(B', setting) = B / t(B, current)

with w_B the tokens that were made at a batch, over B, so that each batch counts by the time that engines spend at it.

By Little's law the same requests per second leave fewer of them in a step where tokens come faster, so the batch becomes B', and
the gain is larger than at the same batch; the busier the engine, the more. A canary is compared at the same share of the requests
too, so that it shows this very gain. Not modelled: a queue that empties, or tips over.

Adaptive verification is taken as the best number of verified tokens at each batch, all K drafted, within a wide margin: published
measurements lie between -8 and +70 % of a fixed K (vLLM pull request 52362).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from aerie.engine.speculation import Adaptive, Off, Schedule, ScheduleTier, SpeculationSetting, Static, max_speculative_tokens
from aerie.tuning.decision.candidates import MAX_SCHEDULE_TIERS, EngineConfig
from aerie.tuning.models.acceptance import AcceptanceModel
from aerie.tuning.models.change_points import DAY, BlockLoad, ChangePoints, summarize_block_loads, weight_next_day
from aerie.tuning.models.numeric import FloatArray, IntArray
from aerie.tuning.models.step_time import StepTimeModel
from aerie.tuning.telemetry import StepCell, StepCellKey, TelemetryBlock, batch_bin

_ADAPTIVE_OVERHEAD = 0.04
_ADAPTIVE_SPREAD = 0.08
_SCHEDULE_BATCH_GROUPS = 12
"""Of batches of about equal weight, between which a schedule may change."""
_MAX_GROUP_REGRET = 0.05
"""What a schedule may lose in any of them against the best K there, if there is one that does not lose more."""
_NORMAL_NODES, _NORMAL_NODE_WEIGHTS = (-2.857, -1.356, 0.0, 1.356, 2.857), (0.0113, 0.2221, 0.5332, 0.2221, 0.0113)
"""Five points that stand for a normal distribution (Gauss and Hermite's)."""
UNSEEN_LOAD_FACTOR = 2.0
"""Times by which a load may leave what was seen of it, as long as that is less than a day."""
LOAD_HEADROOM_FACTOR = 4.0
"""Times by which it may rise, as far as the objectives go: what is chosen at night must not break them at noon."""
_MIN_BATCH_FACTOR, _MAX_BATCH_FACTOR = 1 / 1.5, 3.0
"""Times the batch that are reckoned with: more is made of what makes a batch grow than of what makes it shrink."""
_FULL_BATCH_SHARE = 0.95
"""Share of the most requests from which on others are taken to wait."""
_BATCH_FACTORS = np.concatenate([np.geomspace(_MIN_BATCH_FACTOR, 1.0, 7), np.geomspace(1.0, _MAX_BATCH_FACTOR, 11)[1:]])
EXCEEDANCE_PROBABILITY = 0.3
MIN_TIER_GAIN = 0.003
"""Relative gain for which a schedule gets one more tier."""


@dataclass(frozen=True)
class LoadDistribution:
    """How many requests were in the steps: rising batches, and the share of the request-steps at each."""

    batches: FloatArray
    shares: FloatArray

    @property
    def pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.batches.tolist(), self.shares.tolist(), strict=True))

    def quantile(self, share: float) -> float:
        """The batch that this share of the request-steps lies at or below."""
        index = int(np.searchsorted(np.cumsum(self.shares), share))
        return float(self.batches[min(index, len(self.batches) - 1)])


def extrapolate_load(recent_load: LoadDistribution, earlier_load: LoadDistribution) -> tuple[LoadDistribution, LoadDistribution]:
    """Where the load of a day is not known, the least and the largest batch that may come: beyond what was seen of it, and as
    before it began. And that largest one with the one up to which the objectives have to hold."""
    least = min(recent_load.quantile(0.05) / UNSEEN_LOAD_FACTOR, earlier_load.quantile(0.05))
    most = max(UNSEEN_LOAD_FACTOR * recent_load.quantile(0.95), earlier_load.quantile(0.95))
    noon = max(LOAD_HEADROOM_FACTOR * recent_load.quantile(0.95), most + 1.0)
    half = np.array([0.5, 0.5])
    return LoadDistribution(np.array([max(1.0, least), most]), half), LoadDistribution(np.array([most, noon]), half)


def estimate_load(
    cells: Mapping[StepCellKey, StepCell], blocks: Sequence[TelemetryBlock] = (), change_points: ChangePoints | None = None
) -> LoadDistribution:
    """The load to come: that of all windows, or of the blocks that tell it (`regimes`). Raises ValueError without cells.

    A block knows its mean batch only. How much the windows and replicas in it differ is taken from all cells: what their batches
    scatter more than the means of the blocks do, as a log-normal factor.
    """
    if not cells:
        raise ValueError("without a window there is no load: check that the step time was fitted first.")
    everything = summarize_block_loads(blocks)
    chosen = everything if change_points is None else summarize_block_loads(change_points.load_blocks(blocks))
    long = bool(everything) and everything[-1].start - everything[0].start > 1.5 * DAY
    if not chosen or (len(chosen) == len(everything) and not long):
        return _bin_load((key.batch_bin, cell.batch / cell.request_steps, cell.request_steps) for key, cell in cells.items())
    return _spread_block_loads(weight_next_day(chosen), _within_block_variance(cells, everything))


def estimate_recent_load(
    cells: Mapping[StepCellKey, StepCell], blocks: Sequence[TelemetryBlock], start: float
) -> LoadDistribution | None:
    """The load of the blocks from a moment on; None where there are none."""
    everything = summarize_block_loads(blocks)
    chosen = [(row, 1.0) for row in everything if row.start >= start]
    return _spread_block_loads(chosen, _within_block_variance(cells, everything)) if chosen else None


def _within_block_variance(cells: Mapping[StepCellKey, StepCell], rows: Sequence[BlockLoad]) -> float:
    """Variance of the batch's logarithm within a block."""
    seen = np.array([(cell.batch / cell.request_steps, cell.request_steps) for cell in cells.values()])
    means = np.array([(row.batch, row.request_steps) for row in rows])
    return max(0.0, _log_variance(seen) - _log_variance(means))


def _spread_block_loads(weighed: Iterable[tuple[BlockLoad, float]], variance: float) -> LoadDistribution:
    """Of blocks with their weights, and what batches differ by within one."""
    rows: list[tuple[int, float, float]] = []
    for row, weight in weighed:
        for place, share in zip(_NORMAL_NODES, _NORMAL_NODE_WEIGHTS, strict=True):
            batch = row.batch * math.exp(variance / 2 + math.sqrt(variance) * place)  # as the request-steps see it
            rows.append((batch_bin(batch), batch, weight * share * row.request_steps))
    return _bin_load(rows)


def _bin_load(rows: Iterable[tuple[int, float, float]]) -> LoadDistribution:
    """Of (bin, batch, request-steps)."""
    sums: dict[int, list[float]] = {}
    for index, batch, weight in rows:
        found = sums.setdefault(index, [0.0, 0.0])
        found[0] += weight
        found[1] += weight * batch
    table = np.array([(batch / weight, weight) for _, (weight, batch) in sorted(sums.items()) if weight > 0])
    return LoadDistribution(table[:, 0], table[:, 1] / table[:, 1].sum())


def _log_variance(rows: FloatArray) -> float:
    """Of (value, weight)."""
    logs, weights = np.log(rows[:, 0]), rows[:, 1] / rows[:, 1].sum()
    return float(weights @ (logs - weights @ logs) ** 2)


@dataclass(frozen=True)
class Forecast:
    """Draws for every K and every batch of the load."""

    load: LoadDistribution
    step_seconds: FloatArray
    """Draws by K by batch: a step."""
    acceptance_lengths: FloatArray
    """Draws by K: tokens of a request in a step."""
    draft_step_seconds: FloatArray
    """By batch: one draft step."""
    adaptive_factor: FloatArray
    """By draw."""
    max_num_seqs: float = math.inf
    """The most requests that an engine runs at a time."""
    _rate_matched_cache: dict[tuple[SpeculationSetting, SpeculationSetting], FloatArray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def max_speculative_tokens(self) -> int:
        return int(self.acceptance_lengths.shape[1]) - 1

    @cached_property
    def token_seconds_by_draft_tokens(self) -> FloatArray:
        """Draws by K by batch: a user's seconds per token."""
        found: FloatArray = self.step_seconds / self.acceptance_lengths[:, :, None]
        return found

    def token_seconds(self, setting: SpeculationSetting) -> FloatArray:
        """Draws by batch: a user's seconds per token under a setting."""
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
                unverified = np.arange(tokens, -1, -1)[:, None] * self.draft_step_seconds
                best: FloatArray = (
                    (self.step_seconds[:, : tokens + 1] + unverified) / self.acceptance_lengths[:, : tokens + 1, None]
                ).min(axis=1)
                return best * self.adaptive_factor[:, None]

    def busy_seconds(self, setting: SpeculationSetting, current: SpeculationSetting) -> FloatArray:
        """Draws: a replica's busy seconds per token on the load, whose weights are the tokens made under the current setting."""
        made = self.load.shares * self.tokens_per_step(current)
        found: FloatArray = (self.token_seconds(setting) / self.load.batches) @ (made / made.sum())
        return found

    def rate_matched_token_seconds(self, setting: SpeculationSetting, current: SpeculationSetting) -> FloatArray:
        """Draws by batch: a user's seconds per token under a setting, with the requests that make this batch under the current
        one: those at the least factor f on the batch for which f B / t(f B, setting) is enough, from `_FEWEST` to `_MOST`.
        Where as many run as may, others wait to take their places, and the batch stays."""
        pair = (setting, current)
        if pair not in self._rate_matched_cache:
            self._rate_matched_cache[pair] = self._compute_rate_matched(setting, current)
        return self._rate_matched_cache[pair]

    def _compute_rate_matched(self, setting: SpeculationSetting, current: SpeculationSetting) -> FloatArray:
        now, then, batches = self.token_seconds(current), self.token_seconds(setting), self.load.batches
        if setting == current or len(batches) < 2:
            return then
        full = batches >= _FULL_BATCH_SHARE * self.max_num_seqs
        factors = np.where(full, 1.0, np.minimum(_BATCH_FACTORS[:, None], np.maximum(self.max_num_seqs / batches, 1.0)))
        at = (then @ _interpolation_weights(batches, factors).T).reshape(len(then), len(_BATCH_FACTORS), len(batches))
        over = at - factors * now[:, None, :]
        enough = over <= 0
        right = np.where(enough.any(axis=1), enough.argmax(axis=1), len(_BATCH_FACTORS) - 1)[:, None]
        left = np.maximum(right - 1, 0)
        above, below = (np.take_along_axis(over, place, axis=1)[:, 0] for place in (left, right))
        end = np.take_along_axis(at, right, axis=1)[:, 0]
        inside = (above > 0) & (below <= 0)
        share = above / np.where(inside, above - below, 1.0)
        columns = np.arange(len(batches))
        low, high = factors[left[:, 0], columns], factors[right[:, 0], columns]
        factor = low + share * (high - low)
        found: FloatArray = np.where(inside, factor * now, end)
        return found

    def gain(self, setting: SpeculationSetting, current: SpeculationSetting) -> FloatArray:
        """Draws of the gain over the current setting."""
        made = self.load.shares * self.tokens_per_step(current) / self.load.batches
        found: FloatArray = (self.token_seconds(current) @ made) / (self.rate_matched_token_seconds(setting, current) @ made) - 1
        return found

    def cautious_token_seconds(self, engine: EngineConfig, current: SpeculationSetting) -> FloatArray:
        """A user's seconds per token by K and batch, to choose by: against the current setting not the mean, but the point that
        is not passed with 1 - `CAUTION`. Infinite where a step would run without a captured graph.

        The best of several uncertain figures is overrated on average; what was measured needs no such allowance.
        """
        now = self.token_seconds(current)
        relative: FloatArray = np.quantile(
            self.token_seconds_by_draft_tokens / now[:, None, :], 1 - EXCEEDANCE_PROBABILITY, axis=0
        )
        return self._mask_uncaptured(relative * now.mean(axis=0), engine)

    def build_schedule(self, engine: EngineConfig, current: SpeculationSetting, max_loss: float = math.inf) -> Schedule | None:
        """The best schedule, if one with two tiers or more is worth it: exact over the groups, by dynamic programming.

        Tiers of a dense target draft no more as the batch grows; those of a mixture of experts may. `lost`: what it may lose in a
        group against the current setting, if there is one that does not lose more.
        """
        groups = self._batch_groups(_SCHEDULE_BATCH_GROUPS)
        made = self.load.shares * self.tokens_per_step(current) / self.load.batches
        cost = self.cautious_token_seconds(engine, current) * made
        by_group = np.stack([cost[:, low:high].sum(axis=1) for low, high in groups], axis=1)
        falling = engine.is_moe is False
        steady = np.where(by_group > (1 + _MAX_GROUP_REGRET) * by_group.min(axis=0), np.inf, by_group)
        held = self.token_seconds(current).mean(axis=0) * made
        now = np.array([held[low:high].sum() for low, high in groups])
        safe = np.where(by_group > (1 + max_loss) * now, np.inf, steady)
        found = next(filter(None, (_optimal_tiers(costs, falling=falling) for costs in (safe, steady, by_group))), None)
        if found is None or len(found) < 2 or not any(tokens for _, tokens in found):
            return None
        tiers: list[ScheduleTier] = []
        for position, (last_group, tokens) in enumerate(found):
            edge = groups[last_group][1]
            first = tiers[-1].last + 1 if tiers else 1
            if position + 1 < len(found):
                last = int(np.sqrt(self.load.batches[edge - 1] * self.load.batches[edge]))
            else:
                last = int(np.ceil(self.load.batches[-1]))
            if last >= first:
                tiers.append(ScheduleTier(first, last, tokens))
        if len(tiers) < 2 or not any(tier.tokens for tier in tiers):
            return None
        return Schedule(tuple(tiers), max(tier.tokens for tier in tiers))

    def tokens_per_step(self, setting: SpeculationSetting) -> FloatArray:
        """Mean tokens of a request in a step, by batch."""
        found: FloatArray = self.acceptance_lengths.mean(axis=0)[draft_tokens_by_batch(setting, self.load.batches)]
        return found

    def _mask_uncaptured(self, by_tokens: FloatArray, engine: EngineConfig) -> FloatArray:
        """Infinite where a step would run without a captured graph, unless it drafts nothing."""
        if engine.max_captured_tokens is None:
            return by_tokens
        tokens = np.arange(self.max_speculative_tokens + 1)[:, None]
        found: FloatArray = np.where(
            (tokens > 0) & (self.load.batches * (tokens + 1) > engine.max_captured_tokens), np.inf, by_tokens
        )
        return found

    def worst_fifth_gain(self, setting: SpeculationSetting, current: SpeculationSetting) -> float:
        """The gain over the current setting, half of the draws above it, in the fifth of the request-steps where it is least."""
        ours, now = self.rate_matched_token_seconds(setting, current), self.token_seconds(current)
        made = self.load.shares * self.tokens_per_step(current) / self.load.batches
        return min(
            float(np.median((now[:, low:high] @ made[low:high]) / (ours[:, low:high] @ made[low:high]))) - 1
            for low, high in self._batch_groups(5)
        )

    def gain_by_batch(self, setting: SpeculationSetting, current: SpeculationSetting) -> FloatArray:
        """The gain over the current setting at each batch, half of the draws above it."""
        found: FloatArray = np.median(self.token_seconds(current) / self.rate_matched_token_seconds(setting, current), axis=0) - 1
        return found

    def probability_within_by_batch(self, setting: SpeculationSetting, current: SpeculationSetting, seconds: float) -> FloatArray:
        """By batch: probability that a token takes no longer than so many seconds, or than under the current setting."""
        ours = self.rate_matched_token_seconds(setting, current)
        found: FloatArray = ((ours <= seconds) | (ours <= self.token_seconds(current))).mean(axis=0)
        return found

    def build_guarded_schedule(
        self, setting: SpeculationSetting, current: SpeculationSetting, first_batch: int, last_batch: float
    ) -> Schedule | None:
        """The setting from a first batch to a last one (infinite: on all that are larger), and the current one on the others.
        None where that is neither, or would take more tiers than a schedule is to have."""
        high = math.ceil(self.load.batches[-1] if last_batch == math.inf else last_batch)
        tiers = [*_tiers_in_range(current, 1, first_batch - 1), *_tiers_in_range(setting, first_batch, high)]
        if last_batch < math.inf:
            tiers += _tiers_in_range(current, high + 1, 2 * high)
        joined: list[ScheduleTier] = []
        for one in tiers:
            if joined and joined[-1].tokens == one.tokens:
                joined[-1] = replace(joined[-1], last=one.last)
            else:
                joined.append(one)
        most = max(one.tokens for one in joined)
        return Schedule(tuple(joined), most) if 1 < len(joined) <= MAX_SCHEDULE_TIERS and most > 0 else None

    def _batch_groups(self, count: int) -> list[tuple[int, int]]:
        """Ranges of neighbouring batches of about equal weight."""
        ends = np.searchsorted(np.cumsum(self.load.shares), np.arange(1, count) / count) + 1
        edges = sorted({0, *ends.tolist(), len(self.load.batches)})
        return [(low, high) for low, high in itertools.pairwise(edges) if low < high <= len(self.load.batches)]


@dataclass(frozen=True)
class LoadExtrapolation:
    """What may come, where the load of a day is not known (`unseen`)."""

    range_forecast: Forecast
    """At the least and the largest batch, at which nothing may be worse than now."""
    headroom_forecast: Forecast
    """At the largest one, and at the one up to which the objectives have to hold."""


def build_forecast(
    load: LoadDistribution,
    acceptance: AcceptanceModel,
    step_time: StepTimeModel,
    max_k: int,
    random: np.random.Generator,
    max_num_seqs: float = math.inf,
) -> Forecast:
    """Draws for K = 0 to `most`, as many as there are of acceptance. `room`: the most requests that an engine runs at a time."""
    draws = len(acceptance.survival)
    tokens = np.repeat(np.arange(max_k + 1), len(load.batches)).astype(float)
    batches = np.tile(load.batches, max_k + 1)
    seconds = step_time.draw_step_seconds(batches, tokens, draws, random).reshape(draws, max_k + 1, -1)
    factor = np.exp(_ADAPTIVE_OVERHEAD + _ADAPTIVE_SPREAD * random.standard_normal(draws))
    return Forecast(
        load, seconds, acceptance.lengths[:, : max_k + 1], step_time.draft_step_seconds(load.batches), factor, max_num_seqs
    )


def _tiers_in_range(setting: SpeculationSetting, first: int, last: int) -> list[ScheduleTier]:
    """What a setting drafts at the batches of a range, as tiers."""
    if last < first:
        return []
    tiers = setting.tiers if isinstance(setting, Schedule) else (ScheduleTier(1, last, max_speculative_tokens(setting)),)
    tiers = (*tiers[:-1], replace(tiers[-1], last=max(tiers[-1].last, last)))  # the last one's goes on beyond it
    return [
        ScheduleTier(max(one.first, first), min(one.last, last), one.tokens)
        for one in tiers
        if one.first <= last and one.last >= first
    ]


def draft_tokens_by_batch(setting: SpeculationSetting, batches: FloatArray) -> IntArray:
    """Draft tokens in a step, by batch."""
    if not isinstance(setting, Schedule):
        return np.full(len(batches), max_speculative_tokens(setting))
    last = np.array([tier.last for tier in setting.tiers[:-1]])
    found: IntArray = np.array([tier.tokens for tier in setting.tiers])[np.searchsorted(last, np.rint(batches))]
    return found


def _interpolation_weights(batches: FloatArray, factors: FloatArray) -> FloatArray:
    """Weights that make values at rising batches those at factors of them (factors by batches): linear between them, as at the
    least below it, and above the largest as from half of that on."""
    wanted = (factors * batches).ravel()
    place = np.clip(np.searchsorted(batches, wanted) - 1, 0, len(batches) - 2)
    left = np.where(wanted > batches[-1], np.searchsorted(batches[:-2], batches[-1] / 2), place)
    right = np.where(wanted > batches[-1], len(batches) - 1, place + 1)
    share = np.maximum((wanted - batches[left]) / (batches[right] - batches[left]), 0.0)
    found = np.zeros((len(wanted), len(batches)))
    rows = np.arange(len(wanted))
    found[rows, left] += 1 - share
    found[rows, right] += share
    return found


def _optimal_tiers(cost: FloatArray, *, falling: bool) -> list[tuple[int, int]] | None:
    """(last group, tokens) of each tier at the least cost (tokens by groups), a further tier only where it is worth it."""
    levels, groups = cost.shape
    never = 1e6 * float(cost[np.isfinite(cost)].max())
    sums = np.concatenate([np.zeros((levels, 1)), np.cumsum(np.where(np.isfinite(cost), cost, never), axis=1)], axis=1)
    after = np.triu(np.ones((levels, levels), bool), 1) if falling else ~np.eye(levels, dtype=bool)  # [tokens, before]
    best = [sums.copy()]  # by tiers: tokens of the last by groups done
    best[0][:, 0] = never
    choices: list[tuple[FloatArray, FloatArray]] = []
    for _ in range(1, MAX_SCHEDULE_TIERS):
        ahead = np.where(after[:, :, None], best[-1][None], never)
        before, entry = ahead.argmin(axis=1), ahead.min(axis=1)
        # The last tier begins at `start`: [tokens, end, start]
        total = (entry - sums)[:, None, :] + sums[:, :, None]
        total = np.where(np.tri(groups + 1, k=-1, dtype=bool)[None], total, never)
        start = total.argmin(axis=2)
        choices.append((start, np.take_along_axis(before, start, axis=1)))
        best.append(total.min(axis=2))
    chosen = 0
    for count in range(1, MAX_SCHEDULE_TIERS):
        if best[count][:, groups].min() < best[chosen][:, groups].min() * (1 - MIN_TIER_GAIN):
            chosen = count
    tokens, end = int(best[chosen][:, groups].argmin()), groups
    if best[chosen][tokens, groups] >= never:
        return None
    found = [(end - 1, tokens)]
    for start, previous in reversed(choices[:chosen]):
        end, tokens = int(start[tokens, end]), int(previous[tokens, end])
        found.insert(0, (end - 1, tokens))
    return found
