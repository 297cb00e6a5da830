"""Whether promoted pods give fewer tokens per step than when their revision was accepted: a fall below that level.

What is followed are tokens per step, also where the analysis was not judged by them because its arms drafted unlike numbers of
tokens: the level is the canary's own. A drafter whose numbers of tokens go with the load is not followed.

There is no arm beside them to compare with: blocks are compared with a number. What the traffic itself does to acceptance is not
taken off by pairs then, and no count of blocks averages it out, because it may last for hours. So a fall by less than the margin
is none, and a certain one is a suspicion and no verdict: it says that old pods should get requests, and be compared with in pairs
as ever (`judgement.watch`).

A fall to an acceptance length of 1.00 is no drift and needs no statistics: the drafter proposes noise, as it does once its
weights are lost, and after `SILENT` such blocks in a row that is said (`stop`). Nor do engines that end again and
again (`crashes`).

How blocks scatter is known from those of the analysis: their variance is a prior for the few blocks of a watch, and how uncertain
the level itself is joins as a lasting difference. Not guaranteed: any rate of wrong suspicions where the traffic changes; one
costs no more than that old pods get requests for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from aerie.rollout.analysis import reasons
from aerie.rollout.analysis.blocks import Block
from aerie.rollout.analysis.counting import SPOKEN, State
from aerie.rollout.analysis.criteria import ACCEPTANCE_LENGTH, TOKENS_PER_STEP, Criterion, Terms, crashes_alpha, criteria
from aerie.rollout.analysis.judgement import SILENT
from aerie.rollout.analysis.sequential import Pairs, Prior, Tuning, half_width, upper

ALPHA = 0.05
TIGHTEST = 5.0
"""Effective blocks at which the bound is tightest: a watch has few."""
NOISE = 0.005
"""Accepted tokens per draft up to which an acceptance length reads 1.00: a drafter that proposes noise is right now and then."""
LOST = (
    "Its drafter proposes noise. So it does when its weights are lost: after a sleep of level 2, vLLM's reload_weights loads the "
    "target's weights alone (vLLM issue 52479). Answers stay right and come slower; restart the pods, which loads both."
)
"""What an acceptance length of 1.00 means where it was higher before."""
LEAST = 3
"""Blocks before which nothing is said."""


@dataclass(frozen=True, slots=True)
class Level:
    """The tokens per step that a revision was accepted with."""

    mean: float
    sd: float
    """Standard deviation of the mean."""
    variance: float
    """Of a block of one pod."""
    freedom: float
    """Degrees of freedom of the variance."""


def level_of(state: State, terms: Terms) -> Level | None:
    """The canary's level in an analysis; None where neither decides, or it has too few blocks."""
    criterion = _criterion(terms)
    if criterion is None or (pairs := _pairs(state, criterion, terms)) is None:
        return None
    inflation = terms.scatter(criterion.name).inflation
    variance = max(0.0, pairs.canary_squares) / (pairs.count - 1)
    return Level(
        pairs.canary,
        math.sqrt(variance * inflation / pairs.count),
        variance * terms.pods[0],
        max(0.0, pairs.count / inflation - 1),
    )


def accepted_length(state: State, terms: Terms) -> float | None:
    """The canary's acceptance length in an analysis, by vLLM's counters, as the status shows it of every arm; None as above."""
    row = next((one for one in criteria(terms) if one.name == ACCEPTANCE_LENGTH), None)
    pairs = None if row is None else _pairs(state, row, terms)
    return None if pairs is None else pairs.canary


def count(state: State, block: Block, level: Level, terms: Terms) -> State:
    """The state with one more block of the promoted pods, the block's canary; that it has no control is no fault here."""
    criterion, side = _criterion(terms), block.canary
    followed = side.pods if side is not None else terms.pods[0]
    state = replace(state, crashes=state.crashes.followed(followed, 0, block.ended - block.began))
    if side is None or criterion is None:
        return replace(state, dropped=state.dropped + 1)
    part, whole = criterion.value(side.counts)
    if whole <= 0:
        return state
    pairs = {criterion.name: state.pairs.get(criterion.name, Pairs()).add(part / whole, level.mean)}
    most = min(NOISE, (level.mean - 1) / 10) * side.counts.drafts
    silent = side.counts.drafts >= SPOKEN and level.mean > 1 and side.counts.accepted <= most
    return replace(state, pairs=pairs, blocks=state.blocks + 1, silent=state.silent + 1 if silent else 0)


def stop(state: State, terms: Terms) -> str:
    """Why the promotion is taken back at once: its processes end, or next to none of its drafted tokens is accepted any more.
    Empty where neither."""
    if state.crashes.more(crashes_alpha(terms)):
        return reasons.crashes(state.crashes)
    if state.silent < SILENT:
        return ""
    return f"Acceptance length of the promoted pods has fallen to 1.00, in {state.silent} blocks in a row. {LOST}"


def fallen(state: State, level: Level, terms: Terms, pods: int) -> str:
    """That so many promoted pods are certainly below the level; empty while they are not."""
    criterion = _criterion(terms)
    if criterion is None:
        return ""
    pairs, ratio = state.pairs.get(criterion.name, Pairs()), 1 - terms.margin
    tuned = tuning(level, terms, pods)
    if pairs.count < LEAST or upper(pairs, ratio, 0.0, tuned) >= 0:
        return ""
    most = pairs.canary + half_width(pairs.count, pairs.variance(ratio), tuned)
    said = (
        f"{criterion.title.capitalize()} is {pairs.canary:.2f} since the promotion, {1 - pairs.canary / level.mean:.0%} below "
        f"the {level.mean:.2f} of the acceptance and certainly at most {most:.2f}, after {pairs.count} blocks."
    )
    return said.replace("%", " %")


def tuning(level: Level, terms: Terms, pods: int) -> Tuning:
    """Of the bound on the mean of the pods' blocks."""
    criterion = _criterion(terms)
    inflation = terms.scatter(criterion.name if criterion else "").inflation
    return Tuning(ALPHA, TIGHTEST, inflation, Prior(level.variance / max(1, pods), level.freedom), level.sd)


def _criterion(terms: Terms) -> Criterion | None:
    """That of tokens per step, where the load does not decide them."""
    return next((one for one in criteria(terms) if one.name == TOKENS_PER_STEP and terms.steady), None)


def _pairs(state: State, criterion: Criterion, terms: Terms) -> Pairs | None:
    """What an analysis counted of it; None while that is too little."""
    pairs = state.pairs.get(criterion.name, Pairs())
    return pairs if pairs.count >= max(2, terms.min_blocks) else None
