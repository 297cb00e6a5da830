"""What a setting would give on the load that was seen: draws from acceptance and step time, combined.

The measure is busy seconds per token: a replica that steps at batch B with K drafted tokens needs T(B, K) / (B tau(K)) seconds
for each token, tau the acceptance length. The gain of a setting is how many more tokens the same busy time would give, each batch
weighing as many tokens as were made at it:

    gain = sum_B w_B t_B(current) / sum_B w_B t_B(setting) - 1

so it is a gain in capacity; at one batch it is also the gain in a user's tokens per second. Not modelled: that faster steps leave
fewer requests in flight at the same arrivals, which makes the gain seen by users at light load a little larger.

Adaptive verification is taken as the best number of verified tokens at each batch, all K drafted, within a wide margin: published
measurements lie between -8 and +70 % of a fixed K (vLLM pull request 52362).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aerie.engine.speculation import Adaptive, Off, Schedule, Setting, Static, Tier
from aerie.tuning.acceptance import Acceptance
from aerie.tuning.candidates import MOST_TIERS, Engine, fits_graphs
from aerie.tuning.numeric import Array
from aerie.tuning.steptime import StepTime
from aerie.tuning.telemetry import Cell, Key

_ADAPTIVE_OVERHEAD = 0.04
_ADAPTIVE_SPREAD = 0.08
_GROUPS = 12
"""Of batches of about equal weight, between which a schedule may change."""
CAUTION = 0.3
WORTH_A_TIER = 0.003
"""Relative gain for which a schedule gets one more tier."""


@dataclass(frozen=True)
class Load:
    """How many requests were in the steps: rising batches, and the share of the request-steps at each."""

    batches: Array
    shares: Array

    @property
    def pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.batches.tolist(), self.shares.tolist(), strict=True))

    def quantile(self, share: float) -> float:
        """The batch that this share of the request-steps lies at or below."""
        index = int(np.searchsorted(np.cumsum(self.shares), share))
        return float(self.batches[min(index, len(self.batches) - 1)])


def load(cells: Mapping[Key, Cell], setting: Setting) -> Load:
    """The load under a setting, or under all if none of the cells is of it. Raises ValueError without cells."""
    if not cells:
        raise ValueError("without a window there is no load: check that the step time was fitted first.")
    own = [(key.batch_bin, cell) for key, cell in cells.items() if key.setting == setting]
    sums: dict[int, list[float]] = {}
    for index, cell in own or [(key.batch_bin, cell) for key, cell in cells.items()]:
        steps = sums.setdefault(index, [0.0, 0.0])
        steps[0] += cell.request_steps
        steps[1] += cell.batch
    rows = np.array([(batch / steps, steps) for _, (steps, batch) in sorted(sums.items())])
    return Load(rows[:, 0], rows[:, 1] / rows[:, 1].sum())


@dataclass(frozen=True)
class Forecast:
    """Draws for every K and every batch of the load."""

    load: Load
    seconds: Array
    """Draws by K by batch: a step."""
    lengths: Array
    """Draws by K: tokens of a request in a step."""
    draft_seconds: Array
    """By batch: one draft step."""
    adaptive_factor: Array
    """By draw."""

    @property
    def most(self) -> int:
        return int(self.lengths.shape[1]) - 1

    @property
    def per_token(self) -> Array:
        """Draws by K by batch: busy seconds per token."""
        found: Array = self.user_seconds / self.load.batches
        return found

    @property
    def user_seconds(self) -> Array:
        """Draws by K by batch: a user's seconds per token."""
        found: Array = self.seconds / self.lengths[:, :, None]
        return found

    def of(self, setting: Setting) -> Array:
        """Draws by batch: a user's seconds per token under a setting."""
        match setting:
            case Off():
                return self.user_seconds[:, 0]
            case Static(tokens):
                return self.user_seconds[:, tokens]
            case Schedule():
                tokens_at = [setting.tokens_at(max(1, round(batch))) for batch in self.load.batches.tolist()]
                return self.user_seconds[:, tokens_at, np.arange(len(tokens_at))]
            case Adaptive(tokens):
                unverified = np.arange(tokens, -1, -1)[:, None] * self.draft_seconds
                best: Array = ((self.seconds[:, : tokens + 1] + unverified) / self.lengths[:, : tokens + 1, None]).min(axis=1)
                return best * self.adaptive_factor[:, None]

    def busy_seconds(self, setting: Setting, current: Setting) -> Array:
        """Draws: busy seconds per token on the load, whose weights are the tokens made under the current setting."""
        made = self.load.shares * self.tokens_per_step(current)
        found: Array = (self.of(setting) / self.load.batches) @ (made / made.sum())
        return found

    def gain(self, setting: Setting, current: Setting) -> Array:
        """Draws of the gain over the current setting."""
        found: Array = self.busy_seconds(current, current) / self.busy_seconds(setting, current) - 1
        return found

    def cautious(self, engine: Engine, current: Setting) -> Array:
        """A user's seconds per token by K and batch, to choose by: against the current setting not the mean, but the point that
        is not passed with 1 - `CAUTION`. Infinite where a step would run without a captured graph.

        The best of several uncertain figures is overrated on average; what was measured needs no such allowance.
        """
        now = self.of(current)
        relative: Array = np.quantile(self.user_seconds / now[:, None, :], 1 - CAUTION, axis=0)
        return self._allowed(relative * now.mean(axis=0), engine)

    def schedule(self, engine: Engine, current: Setting) -> Schedule | None:
        """The best schedule, if one with two tiers or more is worth it: exact over the groups, by dynamic programming.

        Tiers of a dense target draft no more as the batch grows; those of a mixture of experts may.
        """
        groups = self._groups()
        made = self.load.shares * self.tokens_per_step(current) / self.load.batches
        cost = self.cautious(engine, current) * made
        by_group = np.stack([cost[:, low:high].sum(axis=1) for low, high in groups], axis=1)
        found = _tiers(by_group, falling=engine.experts is False)
        if found is None or len(found) < 2 or not any(tokens for _, tokens in found):
            return None
        tiers: list[Tier] = []
        for position, (last_group, tokens) in enumerate(found):
            edge = groups[last_group][1]
            first = tiers[-1].last + 1 if tiers else 1
            if position + 1 < len(found):
                last = int(np.sqrt(self.load.batches[edge - 1] * self.load.batches[edge]))
            else:
                last = int(np.ceil(self.load.batches[-1]))
            if last >= first:
                tiers.append(Tier(first, last, tokens))
        if len(tiers) < 2 or not any(tier.tokens for tier in tiers):
            return None
        return Schedule(tuple(tiers), max(tier.tokens for tier in tiers))

    def tokens_per_step(self, setting: Setting) -> Array:
        """Mean tokens of a request in a step, by batch."""
        lengths: Array = self.lengths.mean(axis=0)
        match setting:
            case Schedule():
                found = [lengths[setting.tokens_at(max(1, round(batch)))] for batch in self.load.batches.tolist()]
                return np.array(found)
            case Off():
                return np.full(len(self.load.batches), 1.0)
            case Static(tokens) | Adaptive(tokens):
                return np.full(len(self.load.batches), float(lengths[tokens]))

    def _allowed(self, by_tokens: Array, engine: Engine) -> Array:
        """Infinite where a step would run without a captured graph."""
        found = by_tokens.copy()
        for column, batch in enumerate(self.load.batches.tolist()):
            for tokens in range(1, self.most + 1):
                if not fits_graphs(engine, batch, tokens):
                    found[tokens, column] = np.inf
        return found

    def _groups(self) -> list[tuple[int, int]]:
        """Ranges of neighbouring batches of about equal weight."""
        ends = np.searchsorted(np.cumsum(self.load.shares), np.arange(1, _GROUPS) / _GROUPS) + 1
        edges = sorted({0, *ends.tolist(), len(self.load.batches)})
        return [(low, high) for low, high in itertools.pairwise(edges) if low < high <= len(self.load.batches)]


def forecast(seen: Load, lengths: Acceptance, step_time: StepTime, most: int, random: np.random.Generator) -> Forecast:
    """Draws for K = 0 to `most`, as many as there are of acceptance."""
    draws = len(lengths.survival)
    tokens = np.repeat(np.arange(most + 1), len(seen.batches)).astype(float)
    batches = np.tile(seen.batches, most + 1)
    seconds = step_time.draws(batches, tokens, draws, random).reshape(draws, most + 1, -1)
    factor = np.exp(_ADAPTIVE_OVERHEAD + _ADAPTIVE_SPREAD * random.standard_normal(draws))
    return Forecast(seen, seconds, lengths.lengths[:, : most + 1], step_time.draft_seconds(seen.batches), factor)


def _tiers(cost: Array, *, falling: bool) -> list[tuple[int, int]] | None:
    """(last group, tokens) of each tier at the least cost (tokens by groups), a further tier only where it is worth it."""
    levels, groups = cost.shape
    never = 1e6 * float(cost[np.isfinite(cost)].max())
    sums = np.concatenate([np.zeros((levels, 1)), np.cumsum(np.where(np.isfinite(cost), cost, never), axis=1)], axis=1)
    after = np.triu(np.ones((levels, levels), bool), 1) if falling else ~np.eye(levels, dtype=bool)  # [tokens, before]
    best = [sums.copy()]  # by tiers: tokens of the last by groups done
    best[0][:, 0] = never
    choices: list[tuple[Array, Array]] = []
    for _ in range(1, MOST_TIERS):
        ahead = np.where(after[:, :, None], best[-1][None], never)
        before, entry = ahead.argmin(axis=1), ahead.min(axis=1)
        # The last tier begins at `start`: [tokens, end, start]
        total = (entry - sums)[:, None, :] + sums[:, :, None]
        total = np.where(np.tri(groups + 1, k=-1, dtype=bool)[None], total, never)
        start = total.argmin(axis=2)
        choices.append((start, np.take_along_axis(before, start, axis=1)))
        best.append(total.min(axis=2))
    chosen = 0
    for count in range(1, MOST_TIERS):
        if best[count][:, groups].min() < best[chosen][:, groups].min() * (1 - WORTH_A_TIER):
            chosen = count
    tokens, end = int(best[chosen][:, groups].argmin()), groups
    if best[chosen][tokens, groups] >= never:
        return None
    found = [(end - 1, tokens)]
    for start, previous in reversed(choices[:chosen]):
        end, tokens = int(start[tokens, end]), int(previous[tokens, end])
        found.insert(0, (end - 1, tokens))
    return found
