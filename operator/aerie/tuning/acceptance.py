"""How many drafted tokens would be accepted at every K, with the uncertainty, from what the engines counted.

For a fixed K the survival S_1..S_k of the positions is what K' = k would give on the same traffic, so looking down costs
nothing. With S_i = q_1 * ... * q_i, each conditional q_i is estimated from the blocks in which position i was offered:

    q_i = sum(accepted_i) / sum(accepted_{i-1} * offered_i / offered_{i-1}),    accepted_0 = offered_0 = offered_1

* Dummy and cut drafts (`windows`) only bound `offered`; every draw takes one place between the bounds.
* Blocks are clustered: requests are alike within minutes. The spread is a dependent multiplier bootstrap over blocks (Buehlmann
  1993; Kuensch 1989), whose weights correlate over m^(1/3) neighbours: m blocks, Bartlett weights, as in Newey and West 1987.
* Schedules with three or more numbers of draft tokens bound `offered` too, widely beyond the first position: they count only
  where other blocks tell too little. Adaptive verification never counts.
* A position that was never offered carries the last conditional on, logit q_{K+h} = logit q_K + a random walk of sd 0.5 a step.
  On 32 published acceptance vectors that rule misses the next S by 0.016 on average; a constant acceptance rate by 0.029.

Not modelled: acceptance that differs by batch or context length; the blocks of a schedule mix both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.engine.speculation import Adaptive, Schedule, Setting
from aerie.engine.windows import Unknown, drafts_by_position
from aerie.tuning.numeric import Array, logistic, logit
from aerie.tuning.telemetry import Block

LEAST_BLOCKS = 6
"""Half an hour of five minutes each; fewer do not tell how much acceptance moves."""
LEAST_DRAFTS = 2000.0
STEP_BEYOND = 0.5
"""Standard deviation of logit q from one position to the next where none was offered."""


@dataclass(frozen=True)
class Acceptance:
    """Draws of the acceptance by position."""

    survival: Array
    """Draws by positions: S_1, S_2, ... of each draw."""
    observed: int
    """Positions that drafts reached; beyond them the last conditional is carried on."""
    blocks: int
    drafts: float

    def length(self, tokens: int) -> Array:
        """Draws of the acceptance length at K = `tokens`, bonus token included."""
        found: Array = 1.0 + self.survival[:, :tokens].sum(axis=1)
        return found

    @property
    def lengths(self) -> Array:
        """Draws by K = 0, 1, 2, ...: the acceptance length at each."""
        draws, positions = self.survival.shape
        found = np.ones((draws, positions + 1))
        found[:, 1:] += np.cumsum(self.survival, axis=1)
        return found


def acceptance(blocks: Iterable[Block], most: int, draws: int, random: np.random.Generator) -> Acceptance | Unknown:
    """Acceptance up to K = `most`, from all blocks in which drafts were verified."""
    known, refused = _usable(blocks)
    usable = [one for one in known if not _bounded(one[0].setting)]
    if not _enough(usable):
        usable = known
    drafts = _drafts(usable)
    if not _enough(usable):
        why = f": {refused}" if refused and not usable else "."
        return Unknown(
            f"acceptance was counted in {len(usable)} blocks of time with {drafts:.0f} drafts, and {LEAST_BLOCKS} with "
            f"{LEAST_DRAFTS:.0f} are needed to tell how much it moves{why}"
        )
    accepted, high, low = _sums(usable, most)
    observed = int(np.count_nonzero(high.sum(axis=0) > 0))
    weights = _multipliers([block.start for block, _ in usable], draws, random)
    place = random.random((draws, 1))  # between the bounds of what was offered
    accepted, high, low = accepted[:, :observed], high[:, :observed], low[:, :observed]
    totals, most_offered, least_offered = (np.maximum(each.sum(axis=0), 1e-9) for each in (accepted, high, low))
    centre = np.clip(totals / (most_offered + place * (least_offered - most_offered)), 1e-4, 1 - 1e-4)
    middle = np.clip(totals / most_offered, 1e-4, 1 - 1e-4)
    influence = (accepted - middle * high) / most_offered
    conditionals = logistic(logit(centre) + weights @ influence / (middle * (1 - middle)))
    if observed < most:
        steps = STEP_BEYOND * random.standard_normal((draws, most - observed))
        beyond = logistic(logit(conditionals[:, -1:]) + np.cumsum(steps, axis=1))
        conditionals = np.concatenate([conditionals, beyond], axis=1)
    return Acceptance(np.cumprod(conditionals, axis=1), observed, len(usable), drafts)


_Offered = Sequence[tuple[float, float]]


def _bounded(setting: Setting) -> bool:
    """Whether the counters only bound how many drafts reached a position: what else was counted tells more."""
    return isinstance(setting, Schedule) and len(setting.drafting) > 2


def _enough(usable: Sequence[tuple[Block, _Offered]]) -> bool:
    return len(usable) >= LEAST_BLOCKS and _drafts(usable) >= LEAST_DRAFTS


def _drafts(usable: Sequence[tuple[Block, _Offered]]) -> float:
    return sum(block.counters.speculation.drafts for block, _ in usable if block.counters.speculation)


def _usable(blocks: Iterable[Block]) -> tuple[list[tuple[Block, _Offered]], str]:
    """Blocks whose drafts by position are known, with the bounds of those; and why one of the others is not."""
    found: list[tuple[Block, _Offered]] = []
    refused = ""
    for block in blocks:
        if isinstance(block.setting, Adaptive):
            refused = "adaptive verification books what it trimmed as not accepted."
            continue
        offered = drafts_by_position(block.counters, block.setting)
        if isinstance(offered, Unknown):
            refused = offered.sentence
            continue
        found.append((block, [(one.low, one.high) for one in offered]))
    return found, refused


def _sums(usable: Sequence[tuple[Block, _Offered]], most: int) -> tuple[Array, Array, Array]:
    """By block and position: accepted, and the upper and lower bound of the drafts that could have been."""
    accepted, high, low = (np.zeros((len(usable), most)) for _ in range(3))
    for row, (block, offered) in enumerate(usable):
        assert block.counters.speculation is not None
        counts = block.counters.speculation.accepted_per_position
        for i in range(min(most, len(counts))):
            before = counts[i - 1] if i else 0.0
            for bound, into in ((1, high), (0, low)):
                reached = offered[i][bound]
                into[row, i] = reached if i == 0 else before * _ratio(reached, offered[i - 1][bound])
            # What is beyond the bounds is rounding, or a request that came back after a preemption.
            low[row, i] = min(max(low[row, i], counts[i]), high[row, i])
            accepted[row, i] = min(counts[i], high[row, i])
    return accepted, high, low


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _multipliers(starts: Sequence[float], draws: int, random: np.random.Generator) -> Array:
    """Weights of the blocks, around 0: correlated between neighbours, those of one time alike whatever their setting."""
    times = sorted(set(starts))
    count = len(times)
    reach = max(1, round(count ** (1 / 3)))
    noise = np.cumsum(random.standard_normal((draws, count + reach)), axis=1)
    correlated = (noise[:, reach:] - noise[:, :-reach]) / math.sqrt(reach)
    correlated *= math.sqrt(count / max(count - 1, 1))
    index = {time: column for column, time in enumerate(times)}
    found: Array = correlated[:, [index[start] for start in starts]]
    return found
