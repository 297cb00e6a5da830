"""Other rules to choose K, on the same grids: their K at every batch, or their regret in a day of exploration.

Each rule gets its inputs without noise, in its favour: acceptance as published, and for the profiled tables the grid's own
cells. Regret is that of `_tuning_replay.Published.regret`. A missing K is replaced by the nearest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from aerie.tuning.decision.candidates import fits_captured_graphs
from benchmarks._tuning_replay import ENGINE, Published

Rule = Callable[[Published], list[int]]
"""The K at each batch."""


def fixed(tokens: int) -> Rule:
    """Return the rule of one K for all batches."""
    return lambda grid: [tokens] * len(grid.batches)


def constant_cost(share: float) -> Rule:
    """Return the rule that maximizes AL(K) / (1 + c K): a draft token costs a constant share of a step at every batch."""

    def rule(grid: Published) -> list[int]:
        best = max(grid.tokens, key=lambda k: grid.lengths[k] / (1 + share * k))
        return [best] * len(grid.batches)

    return rule


def ema(slots: bool) -> Rule:
    """SGLang's --speculative-adaptive (adaptive_spec_params.py), at its fixed point: the tier nearest to the accepted drafts of a
    step + 1, from K = 3 on, a lower one only below it by more than 0.25. With `slots` its default tiers by batch size."""
    tiers = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}

    def settle(grid: Published, allowed: tuple[int, ...]) -> int:
        tokens = min(allowed, key=lambda k: abs(k - grid.start))
        for _ in range(10):
            target = _length(grid, tokens)
            nearest = min(allowed, key=lambda k: abs(k - target))
            if nearest < tokens and target > tokens - 0.25:
                nearest = tokens
            if nearest == tokens:
                break
            tokens = nearest
        return tokens

    def rule(grid: Published) -> list[int]:
        if not slots:
            return [settle(grid, tiers[1])] * len(grid.batches)
        slots_by_batch = [max(edge for edge in tiers if edge <= max(batch, 1)) for batch in grid.batches]
        return [settle(grid, tiers[slot]) for slot in slots_by_batch]

    return rule


def _length(grid: Published, tokens: int) -> float:
    known_tokens = sorted(grid.lengths)
    return float(np.interp(tokens, known_tokens, [grid.lengths[k] for k in known_tokens]))


def profiled(floor: bool) -> Rule:
    """vLLM's generate_config.py (pull request 32374): steps measured at K 0, 1, 3, 5 and B 1, 16, 64 and the largest, before any
    traffic; linear between them, or with `floor` the nearest measured batch below. Then the most AL(K) / ITL(B, K)."""

    def rule(grid: Published) -> list[int]:
        batches = sorted({*(b for b in (1, 16, 64) if b in grid.batches), grid.batches[0], grid.batches[-1]})
        tokens = sorted({*(k for k in (0, 1, 3, 5) if k in grid.tokens), 0})
        seconds = np.array([[grid.step_time.fixed_seconds(b, k) for b in batches] for k in tokens])
        chosen = []
        for batch in grid.batches:
            if floor:
                column = max(i for i, b in enumerate(batches) if b <= batch)
                at_batch = seconds[:, column]
            else:
                at_batch = np.array([np.interp(batch, batches, row) for row in seconds])
            interval = {k: float(np.interp(k, tokens, at_batch)) for k in grid.tokens if k <= tokens[-1]}
            candidates = [k for k in interval if k == 0 or fits_captured_graphs(ENGINE, batch, k)]
            rates = {k: grid.lengths[k] / interval[k] for k in candidates}
            chosen.append(max(rates, key=lambda k: rates[k]))
        return chosen

    return rule


RULES: dict[str, tuple[str, Rule]] = {
    **{f"fixed{k}": (f"fixed K = {k}", fixed(k)) for k in (0, 1, 2, 3, 5, 7)},
    "ema": ("SGLang's EMA of accepted drafts", ema(slots=False)),
    "ema_slots": ("SGLang's EMA with its tiers by batch", ema(slots=True)),
    "profiled": ("vLLM's profiled table, interpolated", profiled(floor=False)),
    "profiled_floor": ("vLLM's profiled table, nearest batch below", profiled(floor=True)),
    "constant_cost": ("AL / (1 + 0.10 K)", constant_cost(0.10)),
}
"""The name in the table and the rule, by key."""


# ----------------------------------------------------------------------------------------------------------------- bandits
RELOAD_MINUTES = 5.0
MEASURE_MINUTES = 30.0
DAY_MINUTES = 1440.0
_NOISE = 0.02


def epsilon_greedy(rewards_by_arm: list[list[float]], random: np.random.Generator) -> int:
    """Choose each arm once, then the best mean, and one time in ten a random arm."""
    untried = [arm for arm, rewards in enumerate(rewards_by_arm) if not rewards]
    if untried:
        return untried[0]
    if random.random() < 0.1:
        return int(random.integers(len(rewards_by_arm)))
    return int(np.argmax([np.mean(rewards) for rewards in rewards_by_arm]))


def thompson(rewards_by_arm: list[list[float]], random: np.random.Generator) -> int:
    """Choose untried arms first, then the best draw of normal posteriors."""
    untried = [arm for arm, rewards in enumerate(rewards_by_arm) if not rewards]
    if untried:
        return untried[0]
    scale = float(np.mean([np.mean(rewards) for rewards in rewards_by_arm])) * _NOISE
    return int(
        np.argmax([np.mean(rewards) + scale / math.sqrt(len(rewards)) * random.standard_normal() for rewards in rewards_by_arm])
    )


Bandit = Callable[[list[list[float]], np.random.Generator], int]
BANDITS: dict[str, tuple[str, Bandit]] = {
    "epsilon_greedy": ("epsilon-greedy bandit", epsilon_greedy),
    "thompson": ("Thompson bandit", thompson),
}


def day(grid: Published, column: int, bandit: Bandit, random: np.random.Generator) -> float:
    """Return the throughput lost in 24 hours at one batch, against its best K from the first minute.

    Arms are the K of the grid. A pull is a measurement of 30 minutes, after a reload of 5 minutes if the arm changes.
    """
    arms = grid.usable(column)
    relative_throughput = [1 - grid.regret(k, column) for k in arms]
    rewards_by_arm: list[list[float]] = [[] for _ in arms]
    minutes, output, running = 0.0, 0.0, arms.index(grid.start) if grid.start in arms else 0
    while minutes < DAY_MINUTES:
        arm = bandit(rewards_by_arm, random)
        if arm != running:
            minutes, running = minutes + RELOAD_MINUTES, arm
        length = min(MEASURE_MINUTES, max(DAY_MINUTES - minutes, 0.0))
        minutes, output = minutes + length, output + length * relative_throughput[arm]
        rewards_by_arm[arm].append(relative_throughput[arm] * (1 + _NOISE * random.standard_normal()))
    return 1 - output / DAY_MINUTES
