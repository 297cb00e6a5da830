"""What an analysis knows, kept in the status between two passes, and what it makes of the next blocks.

    Analyzing                                     blocks ─► state ─► judge ─► Promote, Rollback, Inconclusive
    AwaitingApproval, Held, Ramping, Promoting    blocks ─► watched ─► watch ─► Rollback

Guarantees: a block is counted once, however often it is shown: each begins where the one before it ended, and one that began
before that is passed over. The terms are fixed when the analysis begins, but for the hardware of the arms, which is that of the
pods as they are. Not guaranteed: the block that was open when an operator
ended; it is lost, and not counted as dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria import DEFAULT_SHARE_OVER_OBJECTIVE, AnalysisGoal, AnalysisPlan, build_criteria
from aerie.analysis.equivalence import EquivalenceResult
from aerie.analysis.measurement import codec
from aerie.analysis.measurement.blocks import BlockRule, ClosedBlock
from aerie.analysis.measurement.counts import SampleProjection, nearest_bucket_edge
from aerie.analysis.state import AnalysisState, add_block, add_restarts
from aerie.analysis.statistics.calibration import BLOCKS_PER_BATCH
from aerie.analysis.verdict import Verdict, check_guardrails, evaluate_analysis
from aerie.api.rollout import AnalysisSpec
from aerie.api.speculation import LatencyObjective
from aerie.api.status import Arm
from aerie.engine.metrics.names import TIME_TO_FIRST_TOKEN_BUCKETS, Metric

FULL_BLOCK_SECONDS, FULL_BLOCK_DRAFTS, FULL_BLOCK_FINISHED_REQUESTS = 120.0, 2000.0, 20.0
"""Seconds of a full block, and drafts and finished requests that each arm needs in it. Shorter blocks need fewer in proportion,
because how blocks scatter is measured and not taken from the counts; but never fewer than these:"""
MIN_BLOCK_DRAFTS, MIN_BLOCK_FINISHED_REQUESTS = 50.0, 3.0
TRIAL_DEADLINE_FACTOR = 2
"""A trial's deadline by the analysis': times scatter far more than acceptance lengths, and what is given up begins anew."""
GUARDRAIL_HORIZON_HOURS = 1.0
"""Hours over which the tests that watch an accepted canary spend their errors."""


@dataclass(frozen=True)
class AnalysisRun:
    """See the module."""

    plan: AnalysisPlan
    state: AnalysisState
    counted_until: float
    """When the last block ended that was counted, or when counting began."""
    guard_state: AnalysisState | None = None
    """What has been counted since the verdict."""

    def with_blocks(self, blocks: Iterable[ClosedBlock]) -> AnalysisRun:
        """With those blocks that are new."""
        found = self
        for block in sorted(blocks, key=lambda one: one.start_time):
            if block.start_time < found.counted_until:
                continue
            if found.guard_state is None:
                found = replace(found, state=add_block(found.state, block, found.plan), counted_until=block.end_time)
            else:
                found = replace(found, guard_state=add_block(found.guard_state, block, found.plan), counted_until=block.end_time)
        return found

    def skip_blocks(self, blocks: Iterable[ClosedBlock]) -> AnalysisRun:
        """As if these blocks had not been: requests did not go where they should."""
        return replace(self, counted_until=max([self.counted_until, *(block.end_time for block in blocks)]))

    def with_goal(self, goal: AnalysisGoal | None) -> AnalysisRun:
        """With a trial's goal as it is now: one that was to be measured may have come to be proven. All that was counted counts,
        because the tests hold at every moment."""
        return self if goal is None or goal == self.plan.goal else replace(self, plan=replace(self.plan, goal=goal))

    def with_hardware_difference(self, hardware_difference: str | None, now: datetime) -> AnalysisRun:
        """With the hardware of the arms as it is now: on what unlike hardware they run, or empty; None, where that is not known,
        changes nothing. Once it is alike, the block under way is passed over: it began before."""
        if hardware_difference is None or hardware_difference == self.plan.unlike:
            return self
        until = self.counted_until if hardware_difference else max(self.counted_until, now.timestamp())
        return replace(self, plan=replace(self.plan, unlike=hardware_difference), counted_until=until)

    def with_probe_result(self, probe_result: EquivalenceResult | None) -> AnalysisRun:
        """With the engines' greedy answers, if they are there; those that came first stay."""
        if probe_result is None or self.state.answers is not None or self.plan.unasked:
            return self
        return replace(self, state=replace(self.state, answers=probe_result))

    def with_restarts(self, canary_restarts: Mapping[str, int], control_restarts: Mapping[str, int]) -> AnalysisRun:
        """With the restarts of pods, by name, whose process has ended since counting began."""
        if self.guard_state is None:
            return replace(self, state=add_restarts(self.state, canary_restarts, control_restarts))
        return replace(self, guard_state=add_restarts(self.guard_state, canary_restarts, control_restarts))

    def evaluate(self, now: datetime, abort_reasons: Sequence[str]) -> tuple[AnalysisRun, Verdict]:
        """The verdict now."""
        state, judgement = evaluate_analysis(self.state, self.plan, now.timestamp(), abort_reasons)
        return replace(self, state=state), judgement

    def check_guardrails(self, now: datetime, abort_reasons: Sequence[str]) -> tuple[AnalysisRun, Verdict]:
        """Whether something speaks against a canary about which the analysis has ended."""
        watched, judgement = check_guardrails(
            self.guard_state or AnalysisState(now.timestamp()), self._guardrail_plan, now.timestamp(), abort_reasons
        )
        return replace(self, guard_state=watched), judgement

    def reset_guard(self, now: datetime) -> AnalysisRun:
        """Counting begins anew, because what is compared with what has changed; that processes have ended stays known."""
        gathered = self.guard_state or self.state
        return replace(self, guard_state=AnalysisState(now.timestamp(), crashes=gathered.crashes), counted_until=now.timestamp())

    @property
    def calibration_blocks(self) -> int | None:
        """Blocks of stable pods that told how metrics scatter; None where none did."""
        batches = max((scatter.batches for scatter in self.plan.scatters.values()), default=0)
        return BLOCKS_PER_BATCH * batches or None

    @property
    def variance_inflation(self) -> float:
        """That of the first criterion."""
        return self.plan.dispersion_of(build_criteria(self.plan)[0].name).inflation

    @property
    def _guardrail_plan(self) -> AnalysisPlan:
        return replace(self.plan, deadline=max(3600 * GUARDRAIL_HORIZON_HOURS, self.plan.min_blocks * self.plan.block))

    def pack(self) -> str:
        """As text for the status."""
        found = {
            "terms": self.plan.to_dict(),
            "state": self.state.to_dict(),
            "until": self.counted_until,
            "watched": None if self.guard_state is None else self.guard_state.to_dict(),
        }
        return codec.pack(found)

    @classmethod
    def unpack(cls, text: str) -> AnalysisRun | None:
        """What `pack` made; None for what is none of this release's."""
        try:
            found = codec.unpack(text)
            watched = found["watched"]
            return cls(
                AnalysisPlan.from_dict(found["terms"]),
                AnalysisState.from_dict(found["state"]),
                found["until"],
                None if watched is None else AnalysisState.from_dict(watched),
            )
        except (ValueError, KeyError, TypeError):
            return None


def start_analysis(
    analysis: AnalysisSpec,
    arms: tuple[Arm, Arm],
    pod_counts: tuple[int, int],
    objective: LatencyObjective | None,
    failed_attempts: int,
    calibration: BaselineCalibration | None,
    now: datetime,
    probe_skip_reason: str = "",
    goal: AnalysisGoal | None = None,
) -> AnalysisRun:
    """An analysis that begins now; `memory` is of the stable pods before it, `unasked` why greedy answers are not asked for, and
    `goal` a trial's."""
    terms = replace(build_analysis_plan(analysis, arms, pod_counts, objective, failed_attempts, goal), unasked=probe_skip_reason)
    terms = calibration.calibrate_plan(terms) if calibration is not None else terms
    return AnalysisRun(terms, AnalysisState(now.timestamp()), now.timestamp())


def build_analysis_plan(
    analysis: AnalysisSpec,
    arms: tuple[Arm, Arm],
    pod_counts: tuple[int, int],
    objective: LatencyObjective | None,
    failed_attempts: int = 0,
    goal: AnalysisGoal | None = None,
) -> AnalysisPlan:
    """By what the arms canary and control, with so many pods, would be judged.

    `objective`: of latencies, if there is any. `attempt`: how many analyses of this revision have ended without a promotion.
    `goal`: that of a trial, instead of the analysis' own.
    """
    canary, control = arms
    tokens = [arm.setting.tokens if arm.setting else 0 for arm in arms]
    modes = {arm.setting.mode if arm.setting else "Off" for arm in arms}
    deadline = analysis.deadline if goal is None else TRIAL_DEADLINE_FACTOR * analysis.deadline
    return AnalysisPlan(
        goal=goal or analysis.goal,
        margin=analysis.margin,
        failure_margin=analysis.failure_margin,
        min_blocks=analysis.min_blocks,
        soak=analysis.soak.total_seconds(),
        deadline=(deadline - analysis.warmup).total_seconds(),
        block=analysis.block.total_seconds(),
        pods=pod_counts,
        kept=SampleProjection(max(1, min(tokens)), *find_latency_bucket_edges(objective)),
        incomparable=_TRIAL_MESSAGE if goal else explain_incomparable_acceptance(canary, control),
        beyond=1 - objective.percentile / 100 if objective else DEFAULT_SHARE_OVER_OBJECTIVE,
        steady=canary.setting is not None and canary.setting.mode == "Static",
        adaptive=goal is None and canary.target == control.target and modes == {"Adaptive"} and tokens[0] == tokens[1],
        attempt=failed_attempts,
    )


def find_latency_bucket_edges(objective: LatencyObjective | None) -> tuple[float | None, float | None]:
    """The bucket edges at which the objectives of time per output token and time to first token are counted."""
    per_token = objective.time_per_output_token if objective else None
    first = objective.time_to_first_token if objective else None
    return (
        nearest_bucket_edge(per_token.total_seconds(), Metric.TIME_PER_OUTPUT_TOKEN.value.buckets) if per_token else None,
        nearest_bucket_edge(first.total_seconds(), TIME_TO_FIRST_TOKEN_BUCKETS) if first else None,
    )


_TRIAL_MESSAGE = "it is a trial of another setting, and what counts is time."


_TRIMMED_DRAFTS_MESSAGE = (
    "both arms verify adaptively, and drafts that the engine trims under load count as rejected. Time per output token decides"
)
_IN_FLIGHT_MESSAGE = "; output per verification step is compared only while as many requests are in flight on both."


def explain_incomparable_acceptance(canary: Arm, control: Arm) -> str:
    """Why what requests get of drafts does not decide between the arms, as a sentence; empty where it does."""
    if canary.target != control.target:
        return f"the canary serves another target ({canary.target} instead of {control.target})."
    if canary.setting and control.setting and canary.setting.mode == control.setting.mode == "Adaptive":
        return _TRIMMED_DRAFTS_MESSAGE + (_IN_FLIGHT_MESSAGE if canary.setting.tokens == control.setting.tokens else ".")
    for arm, named in ((canary, "the canary"), (control, "the stable revision")):
        if arm.setting is None or arm.setting.mode == "Off":
            return f"{named} serves without a drafter."
        if arm.setting.mode != "Static":
            return f"{named} drafts by the rule {arm.setting.mode}, and acceptance then follows the load."
    mine, theirs = (arm.setting.tokens if arm.setting else 0 for arm in (canary, control))
    if mine != theirs:
        return (
            f"the canary drafts {mine} tokens at a time and the stable revision {theirs}; a text fixes its tokens and not its "
            "drafts, so drafts of more tokens begin at harder places. Time per output token decides."
        )
    return ""


def build_block_rule(plan: AnalysisPlan, scrape_interval_seconds: float) -> BlockRule:
    """When a block of this analysis ends, read every `interval` seconds."""
    part = plan.block / FULL_BLOCK_SECONDS
    drafts = 0.0 if plan.incomparable else max(MIN_BLOCK_DRAFTS, FULL_BLOCK_DRAFTS * min(1.0, part))
    return BlockRule(
        plan.block,
        scrape_interval_seconds,
        drafts,
        max(MIN_BLOCK_FINISHED_REQUESTS, FULL_BLOCK_FINISHED_REQUESTS * min(1.0, part)),
    )
