"""How many drafted tokens would be accepted at every K, with the uncertainty, from what the engines counted.

With S_i = q_1 * ... * q_i, each conditional q_i is estimated from the blocks in which position i was offered:

    q_i = sum(accepted_i) / sum(accepted_{i-1} * offered_i / offered_{i-1}),    accepted_0 = offered_0 = offered_1

* What another K would give is not just fewer of these positions. A text fixes how many tokens are written, not how many drafts
  it takes: the larger K is, the fewer drafts pass what is easy, so the drafts begin at harder places and every S_i is lower. Let
  a text's effect move the logit of all q_i alike, with variance v. A place counts with 1 / tau_K, the acceptance length there, so
  to first order

      logit q_i(K) = logit q_i(K') - v * (g_K - g_K'),    g_K = d log tau_K / d logit q = sum(S_k * sum(1 - q_j, j <= k)) / tau_K

  For 0.4 and 0.8 as the standard deviation of requests, acceptance lengths by that are within 0.05 and 0.25 % of the true ones,
  from any of K = 1..7 to any smaller; uncorrected they are up to 1.0 and 3.4 % too low. Texts of easy and hard runs look like a
  v of 1 to 2. Where two K ran at the same time, S_1 at both tells v; else it has the prior alone (`VARIANCE`).
* Dummy and cut drafts (`windows`) only bound `offered`; every draw takes one place between the bounds.
* Blocks are clustered: requests are alike within minutes. The spread is a dependent multiplier bootstrap over blocks (Buehlmann
  1993; Kuensch 1989), whose weights correlate over m^(1/3) neighbours: m blocks, Bartlett weights, as in Newey and West 1987.
* Schedules with three or more numbers of draft tokens bound `offered` too, widely beyond the first position: they count only
  where other blocks tell too little. Adaptive verification never counts.
* A position that was never offered carries the last conditional on, logit q_{K+h} = logit q_K + a random walk of sd 0.5 a step.
  On 32 published acceptance vectors that rule misses the next S by 0.016 on average; a constant acceptance rate by 0.029. What
  gets that far is easier by the same v, so each step goes up by v * (1 - q_K): most of what the places of a larger K take.

Not modelled: acceptance that differs by batch or context length; the blocks of a schedule mix both. They count under their mean
number of draft tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from aerie.engine.speculation import Adaptive, Schedule, Setting
from aerie.engine.windows import Unknown, drafts_by_position
from aerie.tuning.numeric import Array, Whole, logistic, logit
from aerie.tuning.telemetry import Block

LEAST_BLOCKS = 6
"""Half an hour of five minutes each; fewer do not tell how much acceptance moves."""
LEAST_DRAFTS = 2000.0
STEP_BEYOND = 0.5
"""Standard deviation of logit q from one position to the next where none was offered."""
VARIANCE = 0.15
"""Mean of the prior of v, exponential: 0.3 % of acceptance length by each position that is drafted more, and as uncertain.

Requests that differ by 0.4 on the logit are like that; nobody publishes how much they do. A larger mean makes more drafts than
now look worse than they are on the published grids, and too few are chosen (with 0.28, 1.1 % of throughput is lost, not 0.7)."""
_VARIANCES = np.linspace(0.0, 3.0, 301)
_ALIKE = 0.005
"""By how much the logit of S_1 may differ between pods for good; what two settings differ by is known no better."""
_SAME = 1e-3
"""Difference of g up to which two settings are none."""


@dataclass(frozen=True)
class Acceptance:
    """Draws of the acceptance by position."""

    survival: Array
    """Draws by positions: S_1, S_2, ... of each draw, for drafts that begin where those that were counted did."""
    lengths: Array
    """Draws by K = 0, 1, 2, ...: the acceptance length at each, bonus token included. Each K has drafts that begin elsewhere."""
    variance: Array
    """Draws of v: how much texts differ."""
    observed: int
    """Positions that drafts reached; beyond them the last conditional is carried on."""
    blocks: int
    drafts: float

    def length(self, tokens: int) -> Array:
        """Draws of the acceptance length at K = `tokens`."""
        found: Array = self.lengths[:, tokens]
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
    lengths = _mean_tokens(usable)
    deepest = max(most, math.ceil(lengths.max()))
    accepted, high, low = _sums(usable, deepest)
    observed = int(np.count_nonzero(high.sum(axis=0) > 0))
    weights = _multipliers([block.start for block, _ in usable], draws, random)
    place = random.random((draws, 1))  # between the bounds of what was offered
    accepted, high, low = accepted[:, :observed], high[:, :observed], low[:, :observed]
    totals, most_offered, least_offered = (np.maximum(each.sum(axis=0), 1e-9) for each in (accepted, high, low))
    centre = np.clip(totals / (most_offered + place * (least_offered - most_offered)), 1e-4, 1 - 1e-4)
    middle = np.clip(totals / most_offered, 1e-4, 1 - 1e-4)
    influence = (accepted - middle * high) / most_offered
    seen = logit(centre) + weights @ influence / (middle * (1 - middle))
    steps = STEP_BEYOND * random.standard_normal((draws, deepest - observed))
    ran = _between(lengths, deepest)
    usual = np.concatenate([middle, np.repeat(middle[-1:], deepest - observed)])
    offered = (high[:, 0] + low[:, 0]) / 2
    times = np.unique([block.start for block, _ in usable], return_inverse=True)[1]
    variance = _variance(times, accepted[:, 0], offered, ran @ _pull(usual), weights, random.random(draws))
    steps += (variance * (1 - middle[-1]))[:, None]  # what gets so far is easier
    seen = np.concatenate([seen, seen[:, -1:] + np.cumsum(steps, axis=1)], axis=1)
    # Each position as it would be at K = 0, where every token counts the same; then at every K.
    shares = (high / most_offered).T @ ran
    shares = np.concatenate([shares, np.repeat(shares[-1:], deepest - observed, axis=0)])
    pull = variance[:, None] * _pull(logistic(seen))
    even = seen + pull @ shares.T
    each = np.ones((draws, most + 1))
    for tokens in range(1, most + 1):
        each[:, tokens] += np.cumprod(logistic(even[:, :tokens] - pull[:, tokens, None]), axis=1).sum(axis=1)
    survival = np.cumprod(logistic(seen[:, :most]), axis=1)
    return Acceptance(survival, each, variance, min(observed, most), len(usable), drafts)


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


def _mean_tokens(usable: Sequence[tuple[Block, _Offered]]) -> Array:
    """By block, how many tokens a draft had."""
    spoken = [block.counters.speculation for block, _ in usable]
    found = [min(len(one.accepted_per_position), one.draft_tokens / one.drafts) for one in spoken if one is not None]
    return np.maximum(1.0, found)


def _between(lengths: Array, deepest: int) -> Array:
    """By block and K = 0, 1, 2, ...: weights that interpolate what is known at whole K."""
    found: Array = np.maximum(0.0, 1.0 - np.abs(lengths[:, None] - np.arange(deepest + 1)))
    return found


def _pull(conditionals: Array) -> Array:
    """g by K = 0, 1, 2, ...: how much longer drafts get, relative, where the logit of every conditional is higher by 1."""
    survival = np.cumprod(conditionals, axis=-1)
    longer = np.cumsum(survival * np.cumsum(1 - conditionals, axis=-1), axis=-1)
    found = longer / (1 + np.cumsum(survival, axis=-1))
    return np.concatenate([np.zeros((*found.shape[:-1], 1)), found], axis=-1)


def _variance(times: Whole, accepted: Array, offered: Array, pull: Array, weights: Array, places: Array) -> Array:
    """Draws of v, from what the first position accepts in blocks of different K at the same time, and from the prior.

    Between two times traffic moves by more than what is sought, so only what differs within one counts: a regression of the
    logit on g with a level for each time.
    """
    total = np.bincount(times, offered)
    apart = pull - (np.bincount(times, offered * pull) / total)[times]
    paired = np.abs(apart) > _SAME
    count = len(np.unique(times[paired]))
    chances = -_VARIANCES / VARIANCE
    if count >= LEAST_BLOCKS:
        share = float(np.clip(accepted.sum() / offered.sum(), 1e-4, 1 - 1e-4))
        steep = share * (1 - share) * offered
        information = float((steep * apart**2).sum())
        residuals = accepted - offered * (np.bincount(times, accepted) / total)[times]
        found = -float(apart @ residuals) / information
        errors = weights @ (apart * (residuals + found * apart * steep)) / information
        # An error told from so few times is uncertain itself, as Student's t is.
        # All blocks of those times: of two settings the one with nearly all drafts lies so near their mean that it is not paired.
        spread = float(np.ptp(pull[np.isin(times, times[paired])]))
        square = float(errors.var()) * (count - 1) / (count - 3) + (_ALIKE / spread) ** 2
        chances = chances - (_VARIANCES - found) ** 2 / (2 * square)
    mass = np.cumsum(np.exp(chances - chances.max()))
    return np.interp(places, mass / mass[-1], _VARIANCES)


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
