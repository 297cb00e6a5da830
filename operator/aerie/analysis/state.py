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

from aerie.analysis.criteria import FAILED_REQUESTS, AnalysisPlan, Criterion, build_criteria
from aerie.analysis.equivalence import EquivalenceResult
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.load_match import LOAD_TOLERANCE, LoadMatch
from aerie.analysis.statistics.confidence_sequence import PairedMoments, RareEvents
from aerie.analysis.statistics.crash_rate import CrashCounts
from aerie.analysis.statistics.shares import ShareCounts

VerdictOutcome = Literal["Continue", "Promote", "Rollback", "Inconclusive"]

MIN_DRAFTS_FOR_ZERO_ACCEPTANCE = 50.0
"""Drafts of such a block at least: of a few that a schedule makes in a busy hour chance may accept none."""
MIN_CONTROL_REQUESTS_FOR_STALL = 3.0
"""Requests that the control finishes at least in a block in which the canary finishes next to none of those that it holds."""
ABORT_TIME_PER_OUTPUT_TOKEN_RATIO = 3.0
"""How many times the control's a time per output token has to exceed to be far slower. Two equal pods under like loads never
differ so much: their blocks scatter by percents. A canary beyond its largest CUDA graph was five times as slow, for the ten
minutes until there were blocks enough for a verdict."""
ABORT_TIME_TO_FIRST_TOKEN_RATIO, MIN_REQUESTS_FOR_TIME_TO_FIRST_TOKEN_ABORT = 5.0, 20.0
"""How many times the control's a time to first token has to exceed to be far later, and of how many requests in each arm: prompts
differ in length by more than answers' tokens differ in time."""


@dataclass(frozen=True, slots=True)
class AnalysisState:
    """All that the blocks so far have told."""

    began: float
    """When the first block began."""
    pairs: Mapping[str, PairedMoments] = field(default_factory=dict)
    shares: Mapping[str, ShareCounts] = field(default_factory=dict)
    """Of the same blocks, the counts of the criteria that are shares."""
    crashes: CrashCounts = field(default_factory=CrashCounts)
    events: RareEvents = field(default_factory=RareEvents)
    demand: LoadMatch = field(default_factory=LoadMatch)
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
    answers: EquivalenceResult | None = None
    """The greedy answers of the engines, once they are there; judged as they first were."""
    verdict: VerdictOutcome = "Continue"
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
    def from_dict(cls, document: Mapping[str, Any]) -> AnalysisState:
        pairs = {name: PairedMoments(*values) for name, values in document["pairs"].items()}
        answers = EquivalenceResult.from_dict(document["answers"]) if document.get("answers") else None
        read = {
            "pairs": pairs,
            "shares": {name: ShareCounts(*values) for name, values in document["shares"].items()},
            "crashes": CrashCounts(**document["crashes"]),
            "events": RareEvents(*document["events"]),
            "demand": LoadMatch(*document.get("demand", ())),
            "answers": answers,
        }
        return cls(**{**document, **read})


def add_block(state: AnalysisState, block: ClosedBlock, plan: AnalysisPlan) -> AnalysisState:
    """The state with one more closed block."""
    pods_dropped = dict(state.pods_dropped)
    for reason, pods in block.excluded_pods.items():
        pods_dropped[reason] = pods_dropped.get(reason, 0) + pods
    canary, control, seconds = block.canary, block.control, block.end_time - block.start_time
    mine, theirs = (side.pod_count if side is not None else most for side, most in zip((canary, control), plan.pods, strict=True))
    state = replace(state, pods_dropped=pods_dropped, crashes=state.crashes.add_exposure(mine, theirs, seconds))
    if canary is None or control is None:
        return replace(state, dropped=state.dropped + 1)
    table, demand = build_criteria(plan), state.demand.add_block(canary, control)
    pairs, shares = dict(state.pairs), dict(state.shares)
    unlike = {one.name for one in table if not _is_counted_at_load(one, demand)}
    gone: set[str] = set()
    if not state.demand.has_enough_requests:  # then it shows in all blocks so far, taken together
        gone |= unlike
    if plan.unlike:  # whatever was counted of time may be of the same pods
        gone |= pairs.keys() - {one.name for one in table}
    for name in gone:
        pairs.pop(name, None)
        shares.pop(name, None)
    for criterion in table:
        pair = _criterion_pair(criterion, canary, control, seconds, plan)
        if pair is not None and criterion.name not in unlike:
            pairs[criterion.name] = pairs.get(criterion.name, PairedMoments()).add_pair(*pair)
            if not criterion.relative:
                counted = criterion.fraction(canary.counts), criterion.fraction(control.counts)
                shares[criterion.name] = shares.get(criterion.name, ShareCounts()).add_block(*counted)
    silent = (
        canary.counts.drafts >= MIN_DRAFTS_FOR_ZERO_ACCEPTANCE and canary.counts.accepted == 0 and control.counts.accepted > 0
    )
    stalled = canary.is_stalled_against(control) and control.counts.finished >= MIN_CONTROL_REQUESTS_FOR_STALL
    latest = state.latest + 1 if demand.is_matched else 0
    return replace(
        _update_slow_block_counts(state, canary, control, demand, plan),
        pairs=pairs,
        shares=shares,
        events=_add_failed_requests(state, canary, control),
        demand=demand,
        blocks=state.blocks + 1,
        silent=state.silent + 1 if silent else 0,
        stalled=state.stalled + 1 if stalled else 0,
        left_out=state.left_out + (not demand.is_matched),
        latest=latest,
        load=canary.mean_load or 0.0,
    )


def _add_failed_requests(state: AnalysisState, canary: ArmCounts, control: ArmCounts) -> RareEvents:
    mine, theirs = canary.counts, control.counts
    if mine.finished <= 0 or theirs.finished <= 0:
        return state.events
    return state.events.add_block(mine.errors, theirs.errors, mine.finished / (mine.finished + theirs.finished))


def _update_slow_block_counts(
    state: AnalysisState, canary: ArmCounts, control: ArmCounts, demand: LoadMatch, terms: AnalysisPlan
) -> AnalysisState:
    """With what may stop it at once. Where the canary has more requests than its control, that is why it may be slower."""
    if terms.unlike:
        return replace(state, slow=0, late=0)
    if not demand.is_matched and demand.relative_difference > LOAD_TOLERANCE:
        return state
    slow, late = _is_far_slower(canary, control), _is_first_token_far_later(canary, control)
    return replace(state, slow=state.slow + 1 if slow else 0, late=state.late + 1 if late else 0)


def add_restarts(state: AnalysisState, canary_restarts: Mapping[str, int], control_restarts: Mapping[str, int]) -> AnalysisState:
    """With the restarts of all pods, by name, whose process has ended since counting began.

    What was running there has failed: as many requests as the canary's pods had of late, each. They stand against an acceptance;
    that they roll back is left to the crash itself, because they are one event.
    """
    crashes = state.crashes.add_restarts(dict(canary_restarts), dict(control_restarts))
    if crashes is state.crashes:
        return state
    mine, theirs = crashes.canary - state.crashes.canary, crashes.control - state.crashes.control
    lost, others = mine * state.load, theirs * state.load
    failed = state.shares.get(FAILED_REQUESTS, ShareCounts()).add_block((lost, lost), (others, others))
    return replace(state, crashes=crashes, shares={**state.shares, FAILED_REQUESTS: failed})


def _is_counted_at_load(criterion: Criterion, demand: LoadMatch) -> bool:
    """Whether the criterion counts in a block with such loads."""
    return not criterion.needs_load_match or (
        demand.is_matched and (demand.is_matched_in_flight or not criterion.needs_in_flight_match)
    )


def _criterion_pair(
    criterion: Criterion, canary: ArmCounts, control: ArmCounts, seconds: float, terms: AnalysisPlan
) -> tuple[float, float] | None:
    """The criterion's value in both arms, the canary's as at the control's output; None where one has nothing to divide by."""
    (mine, my_base), (theirs, their_base) = criterion.fraction(canary.counts), criterion.fraction(control.counts)
    if my_base <= 0 or their_base <= 0:
        return None
    value, curve = mine / my_base, terms.curves.get(criterion.name)
    if curve is not None:
        value = curve.adjust(value, *(side.counts.output_tokens / side.pod_count / seconds for side in (canary, control)))
    return value, theirs / their_base


def _is_far_slower(canary: ArmCounts, control: ArmCounts) -> bool:
    """Whether the canary's mean time per output token is beyond SLOW_TIMES the control's; not where an arm tells no such time."""
    if canary.counts.decode_tokens <= 0 or control.counts.decode_tokens <= 0:
        return False
    mine, theirs = (side.counts.decode_seconds / side.counts.decode_tokens for side in (canary, control))
    return 0 < ABORT_TIME_PER_OUTPUT_TOKEN_RATIO * theirs < mine


def _is_first_token_far_later(canary: ArmCounts, control: ArmCounts) -> bool:
    """Whether the canary's mean time to first token is beyond LATE_TIMES the control's."""
    mine, theirs = canary.counts, control.counts
    if min(mine.first_tokens, theirs.first_tokens) < MIN_REQUESTS_FOR_TIME_TO_FIRST_TOKEN_ABORT:
        return False
    return (
        0 < ABORT_TIME_TO_FIRST_TOKEN_RATIO * theirs.first_seconds / theirs.first_tokens < mine.first_seconds / mine.first_tokens
    )
