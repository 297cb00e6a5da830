"""The verdict on a canary after each closed block, with the reason in a sentence.

    judge   says Continue, Promote, Rollback or Inconclusive, and why
    watch   says Continue or Rollback: after the verdict, from a state of its own, until the canary is promoted or gone

A canary is rolled back as soon as any criterion certainly fails, or at once when it cannot work at all or is far slower than its
control on like hardware (a hard stop). It is accepted when every criterion certainly holds, after the soak. What is neither by
the deadline is inconclusive, and so is at once the trial of a setting on unlike hardware; missing data never accepts, and
neither does evidence that is none of late: blocks left out for unlike loads stand against an acceptance when they are many or
the latest. Which criteria, and how certain: `criteria`; what is known: `counting`.

Guarantees: a verdict other than Continue stays once it was given, if the state that `judge` returns is kept; a block costs well
under a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aerie.api.status import Comparison
from aerie.rollout.analysis import reasons
from aerie.rollout.analysis.counting import LATE_TIMES, SLOW_TIMES, State, Verdict
from aerie.rollout.analysis.criteria import (
    ERRORS,
    TOKENS_PER_STEP,
    Criterion,
    Terms,
    Test,
    crashes_alpha,
    criteria,
    errors_alpha,
    faster,
    tuning,
)
from aerie.rollout.analysis.lossless import ALPHA
from aerie.rollout.analysis.sequential import Pairs, lower, ratio_bounds, upper
from aerie.rollout.analysis.shares import Shares

MOST_DROPPED = 0.1
"""Share of the blocks that may be dropped before nothing is accepted any more."""
MOST_LEFT_OUT = 0.2
"""Share of the blocks that may be left out for unlike loads before nothing is accepted any more."""
LATEST = 2
"""Blocks, the latest, none of which may be left out."""
SILENT = 2
"""Blocks in a row without one accepted token that stop a rollout at once."""
SLOW = 2
"""Far slower or far later blocks in a row that stop a rollout at once: one may be a pod's hiccup."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is to be made of a state."""

    verdict: Verdict
    reason: str
    comparisons: tuple[Comparison, ...]


def judge(state: State, terms: Terms, now: float, stops: Sequence[str] = ()) -> tuple[State, Judgement]:
    """The verdict at `now`. `stops` are sentences on the canary that end the rollout at once: it crashes, is not ready, ..."""
    table = criteria(terms)
    compared = _comparisons(state, terms, table)
    if state.verdict != "Continue":
        return state, Judgement(state.verdict, state.reason, compared)
    verdict, reason = _verdict(state, terms, now, table, stops)
    reason += reasons.left_out(terms)
    if verdict != "Continue":
        state = replace(state, verdict=verdict, reason=reason)
    return state, Judgement(verdict, reason, compared)


def watch(state: State, terms: Terms, now: float, stops: Sequence[str] = ()) -> tuple[State, Judgement]:
    """`judge` with only the tests armed that roll back; it accepts nothing, and the deadline does not end it.

    Their alphas are spent by `terms.deadline` all the same, so it is to be the time for which this state is watched.
    """
    table = criteria(terms)
    compared = _comparisons(state, terms, table)
    if state.verdict == "Continue" and (against := _against(state, terms, table, stops)):
        state = replace(state, verdict="Rollback", reason=against + reasons.left_out(terms))
    nothing = reasons.nothing_against(state.blocks, now - state.began) + reasons.left_out(terms)
    return state, Judgement(state.verdict, state.reason or nothing, compared)


def _verdict(state: State, terms: Terms, now: float, table: Sequence[Criterion], stops: Sequence[str]) -> tuple[Verdict, str]:
    if against := _against(state, terms, table, stops):
        return "Rollback", against
    if terms.trial and terms.unlike:  # pods do not move: nothing would come of waiting
        return "Inconclusive", reasons.only_time(state.blocks)
    if terms.goal == "Explore":
        told = reasons.measured(table[0], state.pairs.get(table[0].name), state.blocks, terms)
        return "Inconclusive" if now - state.began >= terms.deadline else "Continue", told
    lacking = _lacking(state, terms, now, table)
    if not lacking:
        instead = _faster(state, terms) if _open(table[0], state, terms) else None
        shown = [one for one in table if one.accept and (instead is None or one is not table[0])]
        return "Promote", reasons.accepted(shown, state.pairs, terms, state.answers, table[0] if instead else None)
    if now - state.began >= terms.deadline:
        return "Inconclusive", reasons.inconclusive(lacking, terms.deadline)
    if not state.blocks and not state.dropped:
        return "Continue", reasons.none_yet(terms)
    return "Continue", reasons.open_still(lacking, state.blocks, terms)


def _against(state: State, terms: Terms, table: Sequence[Criterion], stops: Sequence[str]) -> str:
    """Why to roll back; empty when nothing is known against the canary."""
    if stops:
        return " ".join(stops)
    if state.crashes.more(crashes_alpha(terms)):
        return reasons.crashes(state.crashes)
    if state.silent >= SILENT:
        return reasons.silent(state.silent)
    if state.stalled >= SLOW:
        return reasons.stalled(state.stalled, state.load)
    if state.slow >= SLOW and not terms.unlike:
        return reasons.slow(state.slow, SLOW_TIMES, "time per output token")
    if state.late >= SLOW and not terms.unlike:
        return reasons.slow(state.late, LATE_TIMES, "time to first token")
    if state.answers is not None and state.answers.lossy(ALPHA / 2**terms.attempt):
        return reasons.lossy(state.answers)
    return _failed(state, terms, table) if state.blocks >= terms.min_blocks else ""


def certain(test: Test, criterion: Criterion, pairs: Pairs, terms: Terms) -> bool:
    """Whether a test of means has rejected its opposite; of one that asks for no certainty, whether the estimate is so."""
    if test.estimated:
        return test.sign * pairs.mean(test.ratio, test.offset) > 0
    tuned = tuning(test, criterion, terms, pairs)
    if test.sign > 0:
        return lower(pairs, test.ratio, test.offset, tuned) > 0
    return upper(pairs, test.ratio, test.offset, tuned) < 0


def certainly_below(test: Test, criterion: Criterion, shares: Shares, terms: Terms) -> bool:
    """Whether a share is certainly as good as the test asks, by counts."""
    scatter = terms.scatter(criterion.name)
    inflation = scatter.inflation if scatter.batches else 1.0
    if shares.below(test.ratio, test.offset, test.alpha, inflation):
        return True
    return test.or_ratio > 0 and shares.below(test.or_ratio, 0.0, test.alpha, inflation)


def _holds(test: Test, criterion: Criterion, state: State, terms: Terms) -> bool:
    """Whether what has to hold to be accepted certainly does."""
    if criterion.relative:
        pairs = state.pairs.get(criterion.name)
        return pairs is not None and certain(test, criterion, pairs, terms)
    shares = state.shares.get(criterion.name)
    return shares is not None and certainly_below(test, criterion, shares, terms)


def _open(criterion: Criterion, state: State, terms: Terms) -> list[Test]:
    """What is still to be shown of a criterion."""
    return [test for test in criterion.accept if not _holds(test, criterion, state, terms)]


def _faster(state: State, terms: Terms) -> Criterion | None:
    """The row of time per output token, where the canary is certainly faster: users get more, whatever it drafts."""
    found = faster(terms)
    if terms.trial or found is None:
        return None
    row, test = found
    pairs = state.pairs.get(row.name)
    return row if pairs is not None and state.latest >= LATEST and certain(test, row, pairs, terms) else None


def _failed(state: State, terms: Terms, table: Sequence[Criterion]) -> str:
    """The sentence on the first criterion that certainly fails; empty when none does."""
    for criterion in table:
        pairs = state.pairs.get(criterion.name)
        for test in criterion.reject if pairs else ():
            assert pairs is not None
            if certain(test, criterion, pairs, terms) and not (criterion.name == TOKENS_PER_STEP and _faster(state, terms)):
                return reasons.failed(criterion, test, pairs, tuning(test, criterion, terms, pairs))
        if criterion.name == ERRORS and state.events.more(errors_alpha(terms)):
            return reasons.more_errors(state.events)
    return ""


def _lacking(state: State, terms: Terms, now: float, table: Sequence[Criterion]) -> list[str]:
    """What is missing for an acceptance, as clauses, the weightiest first; empty when nothing is."""
    lacking: list[str] = []
    also: list[reasons.Missing] = []
    per_block, by_load = (now - state.began) / state.blocks if state.blocks else terms.block, False
    for criterion in table:
        tests, pairs = _open(criterion, state, terms), state.pairs.get(criterion.name)
        if not tests or (criterion.name == TOKENS_PER_STEP and _faster(state, terms)):
            continue
        by_load |= criterion.by_load
        if pairs is None:
            lacking.append(reasons.nothing_counted(criterion))
        elif criterion is table[0] and criterion.reject:
            against = criterion.reject[0]
            otherwise = reasons.or_rolled_back(criterion, against, pairs, tuning(against, criterion, terms, pairs))
            tuned = tuning(tests[0], criterion, terms, pairs)
            lacking.append(reasons.not_shown(criterion, tests[0], pairs, tuned, per_block, otherwise))
        elif criterion.relative:
            also.append(reasons.Missing(criterion, tests[0], pairs, tuning(tests[0], criterion, terms, pairs)))
        else:
            more = _more(tests[0], criterion, state.shares[criterion.name], terms)
            also.append(reasons.Missing(criterion, tests[0], pairs, None, state.shares[criterion.name], more))
    if state.crashes.suspicious:
        lacking.append(reasons.suspicious(state.crashes))
    if terms.unlike and terms.incomparable:
        lacking.append(reasons.nothing_compared(terms))
    if also:
        lacking.append(reasons.not_shown_either(also, per_block))
    if state.blocks and (unlike := _left_out(state, table, by_load=by_load)):
        lacking.append(unlike)
    if state.blocks < terms.min_blocks:
        lacking.append(reasons.few_blocks(state.blocks, terms.min_blocks))
    if state.dropped > MOST_DROPPED * (state.blocks + state.dropped):
        lacking.append(reasons.dropped(state.dropped, state.blocks, state.pods_dropped))
    if not lacking and now - state.began < terms.soak:
        lacking.append(reasons.soaking(terms.soak - (now - state.began)))
    return lacking


def _left_out(state: State, table: Sequence[Criterion], *, by_load: bool) -> str:
    """That too many blocks, or the latest, count for no latency: what was certain of it need not be so any more."""
    if not any(one.by_load and one.accept for one in table):
        return ""
    if not state.demand.alike and (by_load or state.latest < LATEST):
        return reasons.unlike(state.demand)
    if state.left_out > MOST_LEFT_OUT * state.blocks:
        return reasons.left_out_blocks(state.left_out, state.blocks)
    if state.latest < min(LATEST, state.blocks):
        return reasons.latest_left_out()
    return ""


def _more(test: Test, criterion: Criterion, shares: Shares, terms: Terms, most: float = 1024.0) -> float | None:
    """How many times as many requests it takes if nothing changes; None: no number of them would do."""
    if not certainly_below(test, criterion, shares.times(most), terms):
        return None
    low, high = 1.0, most
    while high > 1.05 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if certainly_below(test, criterion, shares.times(middle), terms) else (middle, high)
    return high


def _comparisons(state: State, terms: Terms, table: Sequence[Criterion]) -> tuple[Comparison, ...]:
    figures = tuple(_comparison(one, state, terms) for one in table if one.name in state.pairs)
    return figures if state.answers is None else (*figures, state.answers.comparison)


def _comparison(criterion: Criterion, state: State, terms: Terms) -> Comparison:
    """The criterion as the status shows it: relative to the control, with the bounds of the tests that decide, if any do."""
    pairs = state.pairs[criterion.name]
    if pairs.control <= 0:
        return Comparison(metric=criterion.name, blocks=pairs.count)
    if not (criterion.reject or criterion.accept):
        estimate = round(pairs.canary / pairs.control - 1, 4)
        return Comparison(metric=criterion.name, blocks=pairs.count, estimate=estimate)
    low, high = bounds(criterion, pairs, terms)
    return Comparison(
        metric=criterion.name,
        blocks=pairs.count,
        estimate=round(pairs.canary / pairs.control - 1, 4),
        lower=round(low - 1, 4) if abs(low) < reasons.LARGEST else None,
        upper=round(high - 1, 4) if abs(high) < reasons.LARGEST else None,
    )


def bounds(criterion: Criterion, pairs: Pairs, terms: Terms) -> tuple[float, float]:
    """Bounds of canary / control, each from the test that looks that way; where only one does, both from it."""
    tests = [*criterion.reject, *reversed(criterion.accept)]
    rising = next((test for test in tests if test.sign > 0), tests[0])
    falling = next((test for test in tests if test.sign < 0), tests[0])
    return ratio_bounds(pairs, tuning(rising, criterion, terms, pairs), tuning(falling, criterion, terms, pairs))
