"""The verdict on a canary after each closed block, with the reason in a sentence.

    count   adds a closed block to what is known
    judge   says Continue, Promote, Rollback or Inconclusive, and why
    watch   says Continue or Rollback: after the verdict, from a state of its own, until the canary is promoted or gone

A canary is rolled back as soon as any criterion certainly fails, or at once when it cannot work at all or is far slower than its
control on like hardware (a hard stop). It is accepted when every criterion certainly holds, after the soak. What is neither by
the deadline is inconclusive, and so is at once the trial of a setting on unlike hardware; missing data never accepts. Which
criteria, and how certain: `criteria`.

Guarantees: the state goes through `to_dict` and `from_dict` unchanged; a verdict other than Continue stays once it was given,
if the state that `judge` returns is kept; a block costs well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal

from aerie.api.status import Comparison
from aerie.rollout.analysis import reasons
from aerie.rollout.analysis.blocks import Block, Side
from aerie.rollout.analysis.criteria import ERRORS, Criterion, Terms, Test, criteria, errors_alpha, tuning
from aerie.rollout.analysis.demand import Demand
from aerie.rollout.analysis.lossless import ALPHA, Answers
from aerie.rollout.analysis.sequential import Events, Pairs, Tuning, lower, ratio_bounds, upper

Verdict = Literal["Continue", "Promote", "Rollback", "Inconclusive"]

MOST_DROPPED = 0.1
"""Share of the blocks that may be dropped before nothing is accepted any more."""
SILENT = 2
"""Blocks in a row without one accepted token that stop a rollout at once."""
SPOKEN = 50.0
"""Drafts of such a block at least: of a few that a schedule makes in a busy hour chance may accept none."""
SLOW_TIMES = 3.0
"""How many times the control's a time per output token has to exceed to be far slower. Two equal pods under like loads never
differ so much: their blocks scatter by percents. A canary beyond its largest CUDA graph was five times as slow, for the ten
minutes until there were blocks enough for a verdict."""
SLOW = 2
"""Far slower blocks in a row that stop a rollout at once: one may be a pod's hiccup."""


@dataclass(frozen=True, slots=True)
class State:
    """All that the blocks so far have told."""

    began: float
    """When the first block began."""
    pairs: Mapping[str, Pairs] = field(default_factory=dict)
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
    """Blocks in a row, up to the last, in which the canary was far slower than the control; those with unlike loads left out."""
    answers: Answers | None = None
    """The greedy answers of the engines, once they are there; judged as they first were."""
    verdict: Verdict = "Continue"
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__}
        found["pairs"] = {name: list(astuple(pairs)) for name, pairs in self.pairs.items()}
        found["events"] = list(astuple(self.events))
        found["demand"] = list(astuple(self.demand))
        found["pods_dropped"] = dict(self.pods_dropped)
        found["answers"] = None if self.answers is None else self.answers.to_dict()
        return found

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> State:
        pairs = {name: Pairs(*values) for name, values in found["pairs"].items()}
        answers = Answers.from_dict(found["answers"]) if found.get("answers") else None
        demand = Demand(*found.get("demand", ()))
        return cls(**{**found, "pairs": pairs, "events": Events(*found["events"]), "demand": demand, "answers": answers})


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
    state = replace(state, pods_dropped=pods_dropped)
    canary, control = block.canary, block.control
    if canary is None or control is None:
        return replace(state, dropped=state.dropped + 1)
    table, pairs, demand = criteria(terms), dict(state.pairs), state.demand.add(canary, control)
    alike = demand.alike
    unlike = {one.name for one in table if not _counts(one, demand)}
    if not state.demand.known:  # then it shows in all blocks so far, taken together
        pairs = {name: pair for name, pair in pairs.items() if name not in unlike}
    if terms.unlike:  # whatever was counted of time may be of the same pods
        pairs = {name: pair for name, pair in pairs.items() if name in {one.name for one in table}}
    for criterion in table:
        pair = _pair(criterion, canary, control, block.ended - block.began, terms)
        if pair is not None and criterion.name not in unlike:
            pairs[criterion.name] = pairs.get(criterion.name, Pairs()).add(*pair)
    events = state.events
    exposure = canary.counts.finished + control.counts.finished
    if canary.counts.finished > 0 and control.counts.finished > 0:
        events = events.add(canary.counts.errors, control.counts.errors, canary.counts.finished / exposure)
    silent = canary.counts.drafts >= SPOKEN and canary.counts.accepted == 0 and control.counts.accepted > 0
    silence = state.silent + 1 if silent else 0
    slow = 0 if terms.unlike else state.slow
    if alike and not terms.unlike:
        slow = slow + 1 if _far_slower(canary, control) else 0
    return replace(state, pairs=pairs, events=events, demand=demand, blocks=state.blocks + 1, silent=silence, slow=slow)


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
        return "Promote", reasons.accepted([one for one in table if one.accept], state.pairs, terms, state.answers)
    if now - state.began >= terms.deadline:
        return "Inconclusive", reasons.inconclusive(lacking, terms.deadline)
    if not state.blocks and not state.dropped:
        return "Continue", reasons.none_yet(terms)
    return "Continue", reasons.open_still(lacking, state.blocks, terms)


def _against(state: State, terms: Terms, table: Sequence[Criterion], stops: Sequence[str]) -> str:
    """Why to roll back; empty when nothing is known against the canary."""
    if stops:
        return " ".join(stops)
    if state.silent >= SILENT:
        return reasons.silent(state.silent)
    if state.slow >= SLOW and not terms.unlike:
        return reasons.slow(state.slow, SLOW_TIMES)
    if state.answers is not None and state.answers.lossy(ALPHA / 2**terms.attempt):
        return reasons.lossy(state.answers)
    return _failed(state, terms, table) if state.blocks >= terms.min_blocks else ""


def certain(test: Test, criterion: Criterion, pairs: Pairs, terms: Terms) -> bool:
    """Whether a test has rejected its opposite."""
    tuned = tuning(test, criterion, terms, pairs)
    if test.sign > 0:
        return lower(pairs, test.ratio, test.offset, tuned) > 0
    return upper(pairs, test.ratio, test.offset, tuned) < 0


def _failed(state: State, terms: Terms, table: Sequence[Criterion]) -> str:
    """The sentence on the first criterion that certainly fails; empty when none does."""
    for criterion in table:
        pairs = state.pairs.get(criterion.name)
        for test in criterion.reject if pairs else ():
            assert pairs is not None
            if certain(test, criterion, pairs, terms):
                return reasons.failed(criterion, test, pairs, tuning(test, criterion, terms, pairs))
        if criterion.name == ERRORS and state.events.more(errors_alpha(terms)):
            return reasons.more_errors(state.events)
    return ""


def _lacking(state: State, terms: Terms, now: float, table: Sequence[Criterion]) -> list[str]:
    """What is missing for an acceptance, as clauses, the weightiest first; empty when nothing is."""
    lacking: list[str] = []
    also: list[tuple[Criterion, Test, Pairs, Tuning]] = []
    per_block, by_load = (now - state.began) / state.blocks if state.blocks else terms.block, False
    for criterion in table:
        test, pairs = criterion.accept, state.pairs.get(criterion.name)
        if test is None or (pairs is not None and certain(test, criterion, pairs, terms)):
            continue
        by_load |= criterion.by_load
        if pairs is None:
            lacking.append(reasons.nothing_counted(criterion))
        else:
            tuned = tuning(test, criterion, terms, pairs)
            if criterion is table[0] and criterion.reject:
                against = criterion.reject[0]
                otherwise = reasons.or_rolled_back(criterion, against, pairs, tuning(against, criterion, terms, pairs))
                lacking.append(reasons.not_shown(criterion, test, pairs, tuned, per_block, otherwise))
            else:
                also.append((criterion, test, pairs, tuned))
    if terms.unlike and terms.incomparable:
        lacking.append(reasons.nothing_compared(terms))
    if also:
        lacking.append(reasons.not_shown_either(also, per_block))
    if by_load and state.blocks and not state.demand.alike:
        lacking.append(reasons.unlike(state.demand))
    if state.blocks < terms.min_blocks:
        lacking.append(reasons.few_blocks(state.blocks, terms.min_blocks))
    if state.dropped > MOST_DROPPED * (state.blocks + state.dropped):
        lacking.append(reasons.dropped(state.dropped, state.blocks, state.pods_dropped))
    if not lacking and now - state.began < terms.soak:
        lacking.append(reasons.soaking(terms.soak - (now - state.began)))
    return lacking


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
    tests = [*criterion.reject, *([criterion.accept] if criterion.accept else [])]
    rising = next((test for test in tests if test.sign > 0), tests[0])
    falling = next((test for test in tests if test.sign < 0), tests[0])
    return ratio_bounds(pairs, tuning(rising, criterion, terms, pairs), tuning(falling, criterion, terms, pairs))
