"""The verdict on a canary after each closed block, with the reason in a sentence.

    count   adds a closed block to what is known
    judge   says Continue, Promote, Rollback or Inconclusive, and why
    watch   says Continue or Rollback: after the verdict, from a state of its own, until the canary is promoted or gone

A canary is rolled back as soon as any criterion certainly fails, or at once when it cannot work at all or is far slower than its
control on like hardware (a hard stop). It is accepted when every criterion certainly holds, after the soak. What is neither by
the deadline is inconclusive, and so is at once the trial of a setting on unlike hardware; missing data never accepts. Which
criteria, and how certain: `criteria`.

What harms takes itself out of the figures: a process that ends takes its counters along, and an arm that is overloaded gets
fewer requests and is left out for that. So both are evidence. Processes that end are counted (`crashes`); blocks left out for
unlike loads stand against an acceptance when they are many or the latest; and the hard stops look at blocks of unlike loads too.

Guarantees: the state goes through `to_dict` and `from_dict` unchanged; a verdict other than Continue stays once it was given,
if the state that `judge` returns is kept; a block costs well under a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal

from aerie.api.status import Comparison
from aerie.rollout.analysis import reasons
from aerie.rollout.analysis.blocks import Block, Side
from aerie.rollout.analysis.crashes import Crashes
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
from aerie.rollout.analysis.demand import TOLERANCE, Demand
from aerie.rollout.analysis.lossless import ALPHA, Answers
from aerie.rollout.analysis.sequential import Events, Pairs, lower, ratio_bounds, upper
from aerie.rollout.analysis.shares import Shares

Verdict = Literal["Continue", "Promote", "Rollback", "Inconclusive"]

MOST_DROPPED = 0.1
"""Share of the blocks that may be dropped before nothing is accepted any more."""
MOST_LEFT_OUT = 0.2
"""Share of the blocks that may be left out for unlike loads before nothing is accepted any more."""
LATEST = 2
"""Blocks, the latest, none of which may be left out."""
SILENT = 2
"""Blocks in a row without one accepted token that stop a rollout at once."""
SPOKEN = 50.0
"""Drafts of such a block at least: of a few that a schedule makes in a busy hour chance may accept none."""
SLOW_TIMES = 3.0
"""How many times the control's a time per output token has to exceed to be far slower. Two equal pods under like loads never
differ so much: their blocks scatter by percents. A canary beyond its largest CUDA graph was five times as slow, for the ten
minutes until there were blocks enough for a verdict."""
LATE_TIMES, LATE_REQUESTS = 5.0, 20.0
"""How many times the control's a time to first token has to exceed to be far later, and of how many requests in each arm: prompts
differ in length by more than answers' tokens differ in time."""
SLOW = 2
"""Far slower or far later blocks in a row that stop a rollout at once: one may be a pod's hiccup."""


@dataclass(frozen=True, slots=True)
class State:
    """All that the blocks so far have told."""

    began: float
    """When the first block began."""
    pairs: Mapping[str, Pairs] = field(default_factory=dict)
    shares: Mapping[str, Shares] = field(default_factory=dict)
    """Of the same blocks, the counts of the criteria that are shares."""
    crashes: Crashes = field(default_factory=Crashes)
    events: Events = field(default_factory=Events)
    demand: Demand = field(default_factory=Demand)
    blocks: int = 0
    """Blocks counted."""
    dropped: int = 0
    """Blocks dropped because an arm had no pod with a whole window."""
    pods_dropped: Mapping[str, int] = field(default_factory=dict)
    """Windows of pods left out, by reason."""
    silent: int = 0
    """Blocks in a row, up to the last, in which the canary had drafts enough and none was accepted, while the control's were."""
    slow: int = 0
    """Blocks in a row, up to the last, in which the canary was far slower than the control; those in which it had more requests
    left out."""
    late: int = 0
    """The same of its time to first token."""
    left_out: int = 0
    """Blocks that counted for no latency, because the loads of the arms differed."""
    latest: int = 0
    """Blocks in a row, up to the last, that counted for it."""
    load: float = 0.0
    """Requests on a pod of the canary, running and waiting, in the last block."""
    answers: Answers | None = None
    """The greedy answers of the engines, once they are there; judged as they first were."""
    verdict: Verdict = "Continue"
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__}
        found["pairs"] = {name: list(astuple(pairs)) for name, pairs in self.pairs.items()}
        found["shares"] = {name: list(astuple(shares)) for name, shares in self.shares.items()}
        found["crashes"] = self.crashes.to_dict()
        found["events"] = list(astuple(self.events))
        found["demand"] = list(astuple(self.demand))
        found["pods_dropped"] = dict(self.pods_dropped)
        found["answers"] = None if self.answers is None else self.answers.to_dict()
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> State:
        pairs = {name: Pairs(*values) for name, values in found["pairs"].items()}
        answers = Answers.from_dict(found["answers"]) if found.get("answers") else None
        read = {
            "pairs": pairs,
            "shares": {name: Shares(*values) for name, values in found["shares"].items()},
            "crashes": Crashes(**found["crashes"]),
            "events": Events(*found["events"]),
            "demand": Demand(*found.get("demand", ())),
            "answers": answers,
        }
        return cls(**{**found, **read})


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is to be made of a state."""

    verdict: Verdict
    reason: str
    comparisons: tuple[Comparison, ...]


def count(state: State, block: Block, terms: Terms) -> State:
    """The state with one more closed block."""
    pods_dropped = dict(state.pods_dropped)
    for reason, pods in block.dropped.items():
        pods_dropped[reason] = pods_dropped.get(reason, 0) + pods
    canary, control, seconds = block.canary, block.control, block.ended - block.began
    mine, theirs = (side.pods if side is not None else most for side, most in zip((canary, control), terms.pods, strict=True))
    state = replace(state, pods_dropped=pods_dropped, crashes=state.crashes.followed(mine, theirs, seconds))
    if canary is None or control is None:
        return replace(state, dropped=state.dropped + 1)
    table, demand = criteria(terms), state.demand.add(canary, control)
    pairs, shares = dict(state.pairs), dict(state.shares)
    unlike = {one.name for one in table if not _counts(one, demand)}
    gone: set[str] = set()
    if not state.demand.known:  # then it shows in all blocks so far, taken together
        gone |= unlike
    if terms.unlike:  # whatever was counted of time may be of the same pods
        gone |= pairs.keys() - {one.name for one in table}
    for name in gone:
        pairs.pop(name, None)
        shares.pop(name, None)
    for criterion in table:
        pair = _pair(criterion, canary, control, seconds, terms)
        if pair is not None and criterion.name not in unlike:
            pairs[criterion.name] = pairs.get(criterion.name, Pairs()).add(*pair)
            if not criterion.relative:
                counted = criterion.value(canary.counts), criterion.value(control.counts)
                shares[criterion.name] = shares.get(criterion.name, Shares()).add(*counted)
    silent = canary.counts.drafts >= SPOKEN and canary.counts.accepted == 0 and control.counts.accepted > 0
    latest = state.latest + 1 if demand.alike else 0
    return replace(
        _stopped(state, canary, control, demand, terms),
        pairs=pairs,
        shares=shares,
        events=_errors(state, canary, control),
        demand=demand,
        blocks=state.blocks + 1,
        silent=state.silent + 1 if silent else 0,
        left_out=state.left_out + (not demand.alike),
        latest=latest,
        load=canary.load or 0.0,
    )


def _errors(state: State, canary: Side, control: Side) -> Events:
    mine, theirs = canary.counts, control.counts
    if mine.finished <= 0 or theirs.finished <= 0:
        return state.events
    return state.events.add(mine.errors, theirs.errors, mine.finished / (mine.finished + theirs.finished))


def _stopped(state: State, canary: Side, control: Side, demand: Demand, terms: Terms) -> State:
    """With what may stop it at once. Where the canary has more requests than its control, that is why it may be slower."""
    if terms.unlike:
        return replace(state, slow=0, late=0)
    if not demand.alike and demand.apart > TOLERANCE:
        return state
    slow, late = _far_slower(canary, control), _far_later(canary, control)
    return replace(state, slow=state.slow + 1 if slow else 0, late=state.late + 1 if late else 0)


def crashed(state: State, canary: Mapping[str, int], control: Mapping[str, int]) -> State:
    """With the restarts of all pods, by name, whose process has ended since counting began.

    What was running there has failed: as many requests as the canary's pods had of late, each. They stand against an acceptance;
    that they roll back is left to the crash itself, because they are one event.
    """
    crashes = state.crashes.seen(dict(canary), dict(control))
    if crashes is state.crashes:
        return state
    mine, theirs = crashes.canary - state.crashes.canary, crashes.control - state.crashes.control
    lost, others = mine * state.load, theirs * state.load
    failed = state.shares.get(ERRORS, Shares()).add((lost, lost), (others, others))
    return replace(state, crashes=crashes, shares={**state.shares, ERRORS: failed})


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
    if state.slow >= SLOW and not terms.unlike:
        return reasons.slow(state.slow, SLOW_TIMES, "time per output token")
    if state.late >= SLOW and not terms.unlike:
        return reasons.slow(state.late, LATE_TIMES, "time to first token")
    if state.answers is not None and state.answers.lossy(ALPHA / 2**terms.attempt):
        return reasons.lossy(state.answers)
    return _failed(state, terms, table) if state.blocks >= terms.min_blocks else ""


def certain(test: Test, criterion: Criterion, pairs: Pairs, terms: Terms) -> bool:
    """Whether a test of means has rejected its opposite."""
    tuned = tuning(test, criterion, terms, pairs)
    if test.sign > 0:
        return lower(pairs, test.ratio, test.offset, tuned) > 0
    return upper(pairs, test.ratio, test.offset, tuned) < 0


def certainly_below(test: Test, criterion: Criterion, shares: Shares, terms: Terms) -> bool:
    """Whether a share is certainly as good as the test asks, by counts."""
    inflation = terms.scatter(criterion.name).inflation
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


def _counts(criterion: Criterion, demand: Demand) -> bool:
    """Whether the criterion counts in a block with such loads."""
    return not criterion.by_load or (demand.alike and (demand.alike_in_flight or not criterion.by_flight))


def _pair(criterion: Criterion, canary: Side, control: Side, seconds: float, terms: Terms) -> tuple[float, float] | None:
    """The criterion's value in both arms, the canary's as at the control's output; None where one has nothing to divide by."""
    (mine, my_base), (theirs, their_base) = criterion.value(canary.counts), criterion.value(control.counts)
    if my_base <= 0 or their_base <= 0:
        return None
    value, curve = mine / my_base, terms.curves.get(criterion.name)
    if curve is not None:
        value = curve.at(value, *(side.counts.output_tokens / side.pods / seconds for side in (canary, control)))
    return value, theirs / their_base


def _far_slower(canary: Side, control: Side) -> bool:
    """Whether the canary's mean time per output token is beyond SLOW_TIMES the control's; not where an arm tells no such time."""
    if canary.counts.decode_tokens <= 0 or control.counts.decode_tokens <= 0:
        return False
    mine, theirs = (side.counts.decode_seconds / side.counts.decode_tokens for side in (canary, control))
    return 0 < SLOW_TIMES * theirs < mine


def _far_later(canary: Side, control: Side) -> bool:
    """Whether the canary's mean time to first token is beyond LATE_TIMES the control's."""
    mine, theirs = canary.counts, control.counts
    if min(mine.first_tokens, theirs.first_tokens) < LATE_REQUESTS:
        return False
    return 0 < LATE_TIMES * theirs.first_seconds / theirs.first_tokens < mine.first_seconds / mine.first_tokens


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
