"""What the blocks of an analysis have told so far, and what each further block adds.

    block ─► count ─┬─► pairs (means) and shares (counts) of each criterion, where the arms had like loads
                    ├─► failed requests, blocks in a row that may stop a rollout at once
                    └─► for how long how many pods were followed
    restarts ─► crashed ─► processes that have ended

Guarantees: pure; the state goes through `to_dict` and `from_dict` unchanged. What harms is counted although it takes itself out
of the figures: a process that ends takes its counters along, and an arm that is overloaded gets fewer requests. So processes
that end are counted apart, blocks left out for unlike loads are counted as such, and what may stop a rollout at once looks at
them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal

from aerie.rollout.analysis.blocks import Block, Side
from aerie.rollout.analysis.crashes import Crashes
from aerie.rollout.analysis.criteria import ERRORS, Criterion, Terms, criteria
from aerie.rollout.analysis.demand import TOLERANCE, Demand
from aerie.rollout.analysis.lossless import Answers
from aerie.rollout.analysis.sequential import Events, Pairs
from aerie.rollout.analysis.shares import Shares

Verdict = Literal["Continue", "Promote", "Rollback", "Inconclusive"]

SPOKEN = 50.0
"""Drafts of such a block at least: of a few that a schedule makes in a busy hour chance may accept none."""
HELD = 3.0
"""Requests that the control finishes at least in a block in which the canary finishes next to none of those that it holds."""
SLOW_TIMES = 3.0
"""How many times the control's a time per output token has to exceed to be far slower. Two equal pods under like loads never
differ so much: their blocks scatter by percents. A canary beyond its largest CUDA graph was five times as slow, for the ten
minutes until there were blocks enough for a verdict."""
LATE_TIMES, LATE_REQUESTS = 5.0, 20.0
"""How many times the control's a time to first token has to exceed to be far later, and of how many requests in each arm: prompts
differ in length by more than answers' tokens differ in time."""


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
    stalled: int = 0
    """Blocks in a row, up to the last, in which the canary held requests and finished next to none, while the control did."""
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
    stalled = canary.stalls(control) and control.counts.finished >= HELD
    latest = state.latest + 1 if demand.alike else 0
    return replace(
        _stopped(state, canary, control, demand, terms),
        pairs=pairs,
        shares=shares,
        events=_errors(state, canary, control),
        demand=demand,
        blocks=state.blocks + 1,
        silent=state.silent + 1 if silent else 0,
        stalled=state.stalled + 1 if stalled else 0,
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
