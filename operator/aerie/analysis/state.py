"""State of an analysis: the counts of its blocks so far, and the change by each further block.

    block ─► add_block ─┬─► pairs (means) and shares (counts) of each criterion, where the loads of the arms match
                        ├─► deviations of the stable pods from one another
                        ├─► failed requests, and consecutive blocks that may abort a rollout
                        └─► exposure: how many pods were followed for how long
    restarts ─► add_restarts ─► processes that have ended

Guarantees: pure; the state goes through `to_dict` and `from_dict` unchanged. Harm is counted even where it removes itself from
the metrics: a process that ends takes its counters along, and an overloaded arm gets fewer requests. So ended processes are
counted separately, blocks excluded for unequal loads are counted as such, and the abort rules include these blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aerie.analysis.criteria.criterion import FAILED_REQUESTS, Criterion
from aerie.analysis.criteria.fractions import tokens_per_step
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.table import build_criteria
from aerie.analysis.equivalence import EquivalenceResult
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.load_match import LOAD_TOLERANCE, LoadMatch
from aerie.analysis.statistics.confidence_sequence import PairedMoments, RareEvents
from aerie.analysis.statistics.crash_rate import CrashCounts
from aerie.analysis.statistics.field_values import field_values
from aerie.analysis.statistics.peer_dispersion import PeerDeviations
from aerie.analysis.statistics.shares import ShareCounts

VerdictOutcome = Literal["Continue", "Promote", "Rollback", "Inconclusive"]

MIN_DRAFTS_FOR_ZERO_ACCEPTANCE = 50.0
"""Least drafts of a block that counts for zero acceptance: of the few drafts that a schedule makes in a busy hour, none may be
accepted by chance."""
MIN_PEER_SHARE = 0.5
"""Least steps of a stable pod, relative to the mean of them, with which its tokens per step are compared with the others'."""
MIN_CONTROL_REQUESTS_FOR_STALL = 3.0
"""Least requests that the control finishes in a block that counts as stalled: the canary finishes next to none that it holds."""
ABORT_TIME_PER_OUTPUT_TOKEN_RATIO = 3.0
"""Ratio to the control's time per output token beyond which a canary is far slower. Two equal pods under the same load never
differ so much: their blocks differ by percents. A canary beyond its largest CUDA graph was five times as slow, for the ten
minutes until there were enough blocks for a verdict."""
ABORT_TIME_TO_FIRST_TOKEN_RATIO, MIN_REQUESTS_FOR_TIME_TO_FIRST_TOKEN_ABORT = 5.0, 20.0
"""Ratio to the control's time to first token beyond which a canary's is far later, and the least requests of each arm. The ratio
is larger because prompts differ in length by more than the tokens of answers differ in time."""


@dataclass(frozen=True, slots=True)
class AnalysisState:
    """Counts of all blocks so far, and the verdict once there is one."""

    start_time: float
    """Time at which the first block began."""
    paired_moments: Mapping[str, PairedMoments] = field(default_factory=dict)
    """Paired values of the blocks, by criterion."""
    share_counts: Mapping[str, ShareCounts] = field(default_factory=dict)
    """Counts of the same blocks, for the criteria that are shares."""
    peers: PeerDeviations = field(default_factory=PeerDeviations)
    """Deviations of the stable pods from one another in tokens per step."""
    crashes: CrashCounts = field(default_factory=CrashCounts)
    """Engine processes that have ended, and the exposure."""
    failed_requests: RareEvents = field(default_factory=RareEvents)
    """Failed requests of both arms."""
    load_match: LoadMatch = field(default_factory=LoadMatch)
    """Comparison of the recent loads of the arms."""
    block_count: int = 0
    """Blocks counted."""
    dropped_block_count: int = 0
    """Blocks dropped because an arm had no pod with a whole window."""
    excluded_pods: Mapping[str, int] = field(default_factory=dict)
    """Excluded pod windows, by reason."""
    zero_acceptance_streak: int = 0
    """Consecutive blocks, up to the last, in which the canary had enough drafts and none accepted, while the control had some."""
    slow_output_streak: int = 0
    """Consecutive blocks, up to the last, in which the canary was far slower than the control; without those in which it had more
    requests."""
    slow_first_token_streak: int = 0
    """Consecutive blocks, up to the last, in which the canary's first token was far later; counted like `slow_output_streak`."""
    stalled_streak: int = 0
    """Consecutive blocks, up to the last, in which the canary held requests and finished next to none, while the control did."""
    unmatched_block_count: int = 0
    """Blocks excluded from latency criteria, because the loads of the arms differed."""
    latest_matched_streak: int = 0
    """Consecutive blocks, up to the last, that counted for latency."""
    canary_load: float = 0.0
    """Requests on a pod of the canary, running and waiting, in the last block."""
    equivalence: EquivalenceResult | None = None
    """Result of the output-equivalence probe, once it has come; the first one counts."""
    paused_seconds: float = 0.0
    """Seconds since the start in which no block counted: between an inconclusive verdict and the extension that followed."""
    outcome: VerdictOutcome = "Continue"
    message: str = ""
    """Message of a verdict other than Continue."""

    def elapsed_seconds(self, now: float) -> float:
        """Return the seconds under analysis at `now`, a Unix time."""
        return now - self.start_time - self.paused_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict. The fields of `PairedMoments` and the like are lists, in the order of their definition."""
        document = {name: getattr(self, name) for name in self.__slots__}
        document["paired_moments"] = {name: field_values(pairs) for name, pairs in self.paired_moments.items()}
        document["share_counts"] = {name: field_values(shares) for name, shares in self.share_counts.items()}
        document["peers"] = self.peers.to_dict()
        document["crashes"] = self.crashes.to_dict()
        document["failed_requests"] = field_values(self.failed_requests)
        document["load_match"] = field_values(self.load_match)
        document["excluded_pods"] = dict(self.excluded_pods)
        document["equivalence"] = None if self.equivalence is None else self.equivalence.to_dict()
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> AnalysisState:
        equivalence = EquivalenceResult.from_dict(document["equivalence"]) if document.get("equivalence") else None
        parsed = {
            "paired_moments": {name: PairedMoments(*values) for name, values in document["paired_moments"].items()},
            "share_counts": {name: ShareCounts(*values) for name, values in document["share_counts"].items()},
            "peers": PeerDeviations.from_dict(document["peers"]),
            "crashes": CrashCounts(**document["crashes"]),
            "failed_requests": RareEvents(*document["failed_requests"]),
            "load_match": LoadMatch(*document["load_match"]),
            "equivalence": equivalence,
        }
        return cls(**{**document, **parsed})


def add_block(state: AnalysisState, block: ClosedBlock, plan: AnalysisPlan) -> AnalysisState:
    """Return the state with one more closed block."""
    state = replace(_add_exposure(state, block, plan), peers=_add_peers(state.peers, block))
    canary, control, seconds = block.canary, block.control, block.end_time - block.start_time
    if canary is None or control is None:
        return replace(state, dropped_block_count=state.dropped_block_count + 1)
    criteria, load_match = build_criteria(plan), state.load_match.add_block(canary, control)
    unmatched_names = {criterion.name for criterion in criteria if not _is_counted_at_load(criterion, load_match)}
    discarded_names = _discarded_criterion_names(state, plan, criteria, unmatched_names)
    pairs = {name: moments for name, moments in state.paired_moments.items() if name not in discarded_names}
    shares = {name: counts for name, counts in state.share_counts.items() if name not in discarded_names}
    for criterion in criteria:
        pair = _criterion_pair(criterion, canary, control, seconds, plan)
        if pair is not None and criterion.name not in unmatched_names:
            pairs[criterion.name] = pairs.get(criterion.name, PairedMoments()).add_pair(*pair)
            if not criterion.relative:
                fractions = criterion.fraction(canary.counts), criterion.fraction(control.counts)
                shares[criterion.name] = shares.get(criterion.name, ShareCounts()).add_block(*fractions)
    has_zero_acceptance = (
        canary.counts.drafts >= MIN_DRAFTS_FOR_ZERO_ACCEPTANCE
        and canary.counts.accepted_tokens == 0
        and control.counts.accepted_tokens > 0
    )
    is_stalled = canary.is_stalled_against(control) and control.counts.finished_requests >= MIN_CONTROL_REQUESTS_FOR_STALL
    return replace(
        _update_slow_block_counts(state, canary, control, load_match, plan),
        paired_moments=pairs,
        share_counts=shares,
        failed_requests=_add_failed_requests(state, canary, control),
        load_match=load_match,
        block_count=state.block_count + 1,
        zero_acceptance_streak=state.zero_acceptance_streak + 1 if has_zero_acceptance else 0,
        stalled_streak=state.stalled_streak + 1 if is_stalled else 0,
        unmatched_block_count=state.unmatched_block_count + (not load_match.is_matched),
        latest_matched_streak=state.latest_matched_streak + 1 if load_match.is_matched else 0,
        canary_load=canary.mean_load or 0.0,
    )


def _add_exposure(state: AnalysisState, block: ClosedBlock, plan: AnalysisPlan) -> AnalysisState:
    """Return the state with the block's pod-hours and excluded pods; an arm without a whole window counts all its pods."""
    excluded_pods = dict(state.excluded_pods)
    for reason, pod_count in block.excluded_pods.items():
        excluded_pods[reason] = excluded_pods.get(reason, 0) + pod_count
    canary_pods, control_pods = (
        arm.pod_count if arm is not None else planned_pods
        for arm, planned_pods in zip((block.canary, block.control), plan.pod_counts, strict=True)
    )
    crashes = state.crashes.add_exposure(canary_pods, control_pods, block.end_time - block.start_time)
    return replace(state, excluded_pods=excluded_pods, crashes=crashes)


def _add_peers(peers: PeerDeviations, block: ClosedBlock) -> PeerDeviations:
    """Return the deviations with those of the block's equal pods, without pods of few steps, which would show chance alone."""
    if block.peers is None:
        return peers
    fractions = {name: tokens_per_step(counts) for name, counts in block.peers.counts_by_pod.items()}
    min_steps = MIN_PEER_SHARE * sum(steps for _, steps in fractions.values()) / max(1, len(fractions))
    return peers.add_block(
        {name: tokens / steps for name, (tokens, steps) in fractions.items() if steps > 0 and steps >= min_steps}
    )


def _discarded_criterion_names(
    state: AnalysisState, plan: AnalysisPlan, criteria: Iterable[Criterion], unmatched_names: set[str]
) -> set[str]:
    """Return the names of the criteria whose counts so far are discarded, because they may be of unequal loads or hardware."""
    discarded_names: set[str] = set()
    if not state.load_match.has_enough_requests:  # then the difference shows in all blocks so far, taken together
        discarded_names |= unmatched_names
    if plan.hardware_mismatch:  # the earlier counts of time may be of the same pods
        discarded_names |= state.paired_moments.keys() - {criterion.name for criterion in criteria}
    return discarded_names


def _add_failed_requests(state: AnalysisState, canary: ArmCounts, control: ArmCounts) -> RareEvents:
    """Return the failed requests with those of one more block; unchanged where an arm finished none."""
    canary_counts, control_counts = canary.counts, control.counts
    if canary_counts.finished_requests <= 0 or control_counts.finished_requests <= 0:
        return state.failed_requests
    canary_share = canary_counts.finished_requests / (canary_counts.finished_requests + control_counts.finished_requests)
    return state.failed_requests.add_block(canary_counts.failed_requests, control_counts.failed_requests, canary_share)


def _update_slow_block_counts(
    state: AnalysisState, canary: ArmCounts, control: ArmCounts, load_match: LoadMatch, plan: AnalysisPlan
) -> AnalysisState:
    """Return the state with the counts of far slower blocks, which abort the rollout.

    Where the canary has more requests than its control, these may be the cause, and the counts stay.
    """
    if plan.hardware_mismatch:
        return replace(state, slow_output_streak=0, slow_first_token_streak=0)
    if not load_match.is_matched and load_match.relative_difference > LOAD_TOLERANCE:
        return state
    is_slow, is_late = _is_far_slower(canary, control), _is_first_token_far_later(canary, control)
    return replace(
        state,
        slow_output_streak=state.slow_output_streak + 1 if is_slow else 0,
        slow_first_token_streak=state.slow_first_token_streak + 1 if is_late else 0,
    )


def add_restarts(state: AnalysisState, canary_restarts: Mapping[str, int], control_restarts: Mapping[str, int]) -> AnalysisState:
    """Return the state with the restarts of all pods, by name, whose process has ended since counting began.

    The requests that ran there have failed: for each restart, as many as the canary's pods held in the last block. They count
    against a promotion. The rollback is left to the crash itself, because both are one event.
    """
    crashes = state.crashes.add_restarts(dict(canary_restarts), dict(control_restarts))
    if crashes is state.crashes:
        return state
    canary_crashes, control_crashes = (
        crashes.canary_crashes - state.crashes.canary_crashes,
        crashes.control_crashes - state.crashes.control_crashes,
    )
    canary_lost, control_lost = canary_crashes * state.canary_load, control_crashes * state.canary_load
    failed_requests = state.share_counts.get(FAILED_REQUESTS, ShareCounts()).add_block(
        (canary_lost, canary_lost), (control_lost, control_lost)
    )
    return replace(state, crashes=crashes, share_counts={**state.share_counts, FAILED_REQUESTS: failed_requests})


def _is_counted_at_load(criterion: Criterion, load_match: LoadMatch) -> bool:
    """Return whether the criterion counts in a block with such loads."""
    return not criterion.needs_load_match or (
        load_match.is_matched and (load_match.is_matched_in_flight or not criterion.needs_in_flight_match)
    )


def _criterion_pair(
    criterion: Criterion, canary: ArmCounts, control: ArmCounts, seconds: float, plan: AnalysisPlan
) -> tuple[float, float] | None:
    """Return the criterion's value in both arms, the canary's as at the control's output; None where a denominator is 0."""
    (canary_part, canary_base), (control_part, control_base) = (
        criterion.fraction(canary.counts),
        criterion.fraction(control.counts),
    )
    if canary_base <= 0 or control_base <= 0:
        return None
    canary_value, curve = canary_part / canary_base, plan.load_curves.get(criterion.name)
    if curve is not None:
        outputs = (arm.counts.output_tokens / arm.pod_count / seconds for arm in (canary, control))
        canary_value = curve.adjust(canary_value, *outputs)
    return canary_value, control_part / control_base


def _is_far_slower(canary: ArmCounts, control: ArmCounts) -> bool:
    """Return whether the canary's mean time per output token exceeds ABORT_TIME_PER_OUTPUT_TOKEN_RATIO times the control's.

    False where an arm has no such time.
    """
    if canary.counts.decode_tokens <= 0 or control.counts.decode_tokens <= 0:
        return False
    canary_time, control_time = (arm.counts.decode_seconds / arm.counts.decode_tokens for arm in (canary, control))
    return 0 < ABORT_TIME_PER_OUTPUT_TOKEN_RATIO * control_time < canary_time


def _is_first_token_far_later(canary: ArmCounts, control: ArmCounts) -> bool:
    """Return whether the canary's mean time to first token exceeds ABORT_TIME_TO_FIRST_TOKEN_RATIO times the control's.

    False where an arm has too few requests.
    """
    canary_counts, control_counts = canary.counts, control.counts
    if min(canary_counts.first_tokens, control_counts.first_tokens) < MIN_REQUESTS_FOR_TIME_TO_FIRST_TOKEN_ABORT:
        return False
    canary_time = canary_counts.first_token_seconds / canary_counts.first_tokens
    limit = ABORT_TIME_TO_FIRST_TOKEN_RATIO * control_counts.first_token_seconds / control_counts.first_tokens
    return 0 < limit < canary_time
