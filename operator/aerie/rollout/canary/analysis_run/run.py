"""The analysis of one canary: its counts, which the status keeps between two reconciles, and its verdict on the next blocks.

    Analyzing                                     blocks ─► state ───────► evaluate ─────────► Promote, Rollback, Inconclusive
    AwaitingApproval, Held, Ramping, Promoting    blocks ─► guard_state ─► check_guardrails ─► Rollback
    Analyzing, extended                           blocks ─┬► guard_state ─► check_guardrails ─► Rollback
                                                          └► state ───────► evaluate_extension ─► Promote, Inconclusive

The guardrails of an extension are those of phase Held, and continue through it with the same counts. Blocks that began while the
canary was Held count for the guardrails alone.

Guarantees: each block is counted once, however often it is passed in. A block begins where the one before it ended; one that
began earlier is skipped. The plan is fixed when the analysis begins, except for two parts: the goal of a trial, and the hardware
of the arms, which is that of their current pods. Not guaranteed: the block that is open when an operator ends. It is lost, and
does not count as dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.comparison import Comparison
from aerie.analysis.criteria.plan import DEFAULT_SHARE_OVER_OBJECTIVE, AnalysisGoal, AnalysisPlan
from aerie.analysis.criteria.table import build_criteria
from aerie.analysis.equivalence import EquivalenceResult
from aerie.analysis.measurement import codec
from aerie.analysis.measurement.blocks import BlockRule, ClosedBlock
from aerie.analysis.measurement.counts import SampleProjection, nearest_bucket_edge
from aerie.analysis.state import AnalysisState, add_block, add_restarts
from aerie.analysis.statistics.calibration import BLOCKS_PER_BATCH
from aerie.analysis.verdict import Verdict, check_guardrails, evaluate_analysis, evaluate_extension
from aerie.api.rollout import AnalysisSpec
from aerie.api.speculation import LatencyObjective
from aerie.api.status import Arm, MetricComparison
from aerie.engine.metrics.names import TIME_TO_FIRST_TOKEN_BUCKETS, Metric

FULL_BLOCK_SECONDS, FULL_BLOCK_DRAFTS, FULL_BLOCK_FINISHED_REQUESTS = 120.0, 2000.0, 20.0
"""Length of a full block in seconds, and the drafts and finished requests that each arm needs in it. A shorter block needs
proportionally fewer, because the dispersion of blocks is measured and not derived from the counts. It never needs fewer than
these:"""
MIN_BLOCK_DRAFTS, MIN_BLOCK_FINISHED_REQUESTS = 50.0, 3.0
TRIAL_DEADLINE_FACTOR = 2
"""Deadline of a trial as a multiple of the analysis' deadline. Times have a far larger dispersion than acceptance lengths, and a
trial that is abandoned starts again from zero."""
GUARDRAIL_HORIZON_HOURS = 1.0
"""Hours over which the guardrail tests of a canary that has passed spend their errors."""


@dataclass(frozen=True)
class AnalysisRun:
    """One analysis: its plan, its counts, and the time up to which blocks are counted."""

    plan: AnalysisPlan
    state: AnalysisState
    counted_until: float
    """End of the last block that was counted, or the time when counting began; a Unix time in seconds."""
    guard_state: AnalysisState | None = None
    """Counts since the verdict; None before it."""
    extended_since: float | None = None
    """Unix time at which the extension in progress began; None outside of one."""

    def with_blocks(self, blocks: Iterable[ClosedBlock]) -> AnalysisRun:
        """Return the run with those of the blocks added that are new."""
        run = self
        for block in sorted(blocks, key=lambda block: block.start_time):
            if block.start_time < run.counted_until:
                continue
            if run.guard_state is None:
                run = replace(run, state=add_block(run.state, block, run.plan), counted_until=block.end_time)
            else:
                is_of_extension = run.extended_since is not None and block.start_time >= run.extended_since
                state = add_block(run.state, block, run.plan) if is_of_extension else run.state
                guard_state = add_block(run.guard_state, block, run.plan)
                run = replace(run, state=state, guard_state=guard_state, counted_until=block.end_time)
        return run

    def skip_blocks(self, blocks: Iterable[ClosedBlock]) -> AnalysisRun:
        """Return the run that leaves these blocks out: requests were not routed as they should be."""
        return replace(self, counted_until=max([self.counted_until, *(block.end_time for block in blocks)]))

    def with_goal(self, goal: AnalysisGoal | None) -> AnalysisRun:
        """Return the run with the current goal of a trial: an exploration may have become a trial to be proven. All counts stay
        valid, because the tests hold at every moment."""
        return self if goal is None or goal == self.plan.goal else replace(self, plan=replace(self.plan, goal=goal))

    def with_hardware_difference(self, hardware_difference: str | None, now: datetime) -> AnalysisRun:
        """Return the run with the current hardware of the arms.

        `hardware_difference`: how the hardware of the arms differs; empty where it does not. None, where that is unknown, changes
        nothing. Once the hardware is alike, the open block is skipped, because it began before that.
        """
        if hardware_difference is None or hardware_difference == self.plan.hardware_mismatch:
            return self
        counted_until = self.counted_until if hardware_difference else max(self.counted_until, now.timestamp())
        return replace(self, plan=replace(self.plan, hardware_mismatch=hardware_difference), counted_until=counted_until)

    def with_probe_result(self, probe_result: EquivalenceResult | None) -> AnalysisRun:
        """Return the run with the result of the output-equivalence probe, where there is one. The first result stays."""
        if probe_result is None or self.state.equivalence is not None or self.plan.equivalence_skip_reason:
            return self
        return replace(self, state=replace(self.state, equivalence=probe_result))

    def with_restarts(self, canary_restarts: Mapping[str, int], control_restarts: Mapping[str, int]) -> AnalysisRun:
        """Return the run with the restarts, by pod name, of pods whose process has ended since counting began."""
        if self.guard_state is None:
            return replace(self, state=add_restarts(self.state, canary_restarts, control_restarts))
        guard_state = add_restarts(self.guard_state, canary_restarts, control_restarts)
        if self.extended_since is None:
            return replace(self, guard_state=guard_state)
        return replace(self, guard_state=guard_state, state=add_restarts(self.state, canary_restarts, control_restarts))

    def evaluate(self, now: datetime, abort_reasons: Sequence[str]) -> tuple[AnalysisRun, Verdict]:
        """Return the updated run and the current verdict."""
        state, verdict = evaluate_analysis(self.state, self.plan, now.timestamp(), abort_reasons)
        return replace(self, state=state), verdict

    def check_guardrails(self, now: datetime, abort_reasons: Sequence[str]) -> tuple[AnalysisRun, Verdict]:
        """Return the updated run and the verdict of the guardrails on a canary whose analysis has ended."""
        guard_state, verdict = check_guardrails(
            self.guard_state or AnalysisState(now.timestamp()),
            self._guardrail_plan,
            now.timestamp(),
            abort_reasons,
            has_passed=self.state.outcome == "Promote",
        )
        return replace(self, guard_state=guard_state), verdict

    def begin_extension(self, held_since: datetime, now: datetime) -> AnalysisRun:
        """Return the run whose inconclusive analysis continues. `held_since`: when the analysis, or its last extension, ended."""
        paused_seconds = self.state.paused_seconds + (now - held_since).total_seconds()
        state = replace(self.state, outcome="Continue", message="", paused_seconds=paused_seconds)
        return replace(self, state=state, extended_since=now.timestamp())

    def evaluate_extension(
        self, now: datetime, extension_end_time: datetime, abort_reasons: Sequence[str]
    ) -> tuple[AnalysisRun, Verdict]:
        """Return the updated run and the current verdict in an extension; the guardrails take precedence."""
        run, guard_verdict = self.check_guardrails(now, abort_reasons)
        if guard_verdict.outcome == "Rollback":
            return run, guard_verdict
        state, verdict = evaluate_extension(run.state, run.plan, now.timestamp(), extension_end_time.timestamp())
        return replace(run, state=state), verdict

    def end_extension(self) -> AnalysisRun:
        """Return the run after an extension; its guardrails continue."""
        return replace(self, extended_since=None)

    def reset_guard(self, now: datetime) -> AnalysisRun:
        """Return the run that restarts the counts of the guardrails, because the reference has changed.

        Crashes are kept, and so is how far the stable pods are apart.
        """
        current_state = self.guard_state or self.state
        guard_state = AnalysisState(now.timestamp(), peers=current_state.peers, crashes=current_state.crashes)
        return replace(self, guard_state=guard_state, counted_until=now.timestamp(), extended_since=None)

    def adopt_guard_counts(self, canary_pods: int) -> AnalysisRun:
        """Return the run of a promoted canary, with the counts of its guardrails where the analysis has none, because the shadow
        evaluation or a user has accepted the canary. Post-promotion monitoring needs a level to compare with.

        `canary_pods`: pods that the canary has grown to. Most of the blocks are of fewer, so the level is the more uncertain one.
        """
        if self.state.block_count or self.guard_state is None:
            return self
        plan = replace(self.plan, pod_counts=(max(canary_pods, self.plan.pod_counts[0]), self.plan.pod_counts[1]))
        return replace(self, plan=plan, state=self.guard_state)

    @property
    def calibration_blocks(self) -> int | None:
        """Number of blocks of stable pods from which the dispersion of the metrics was estimated; None without any."""
        batches = max((dispersion.batch_count for dispersion in self.plan.dispersions.values()), default=0)
        return BLOCKS_PER_BATCH * batches or None

    @property
    def variance_inflation(self) -> float:
        """Variance inflation factor of the first criterion."""
        return self.plan.dispersion_of(build_criteria(self.plan)[0].name).inflation

    @property
    def _guardrail_plan(self) -> AnalysisPlan:
        return replace(
            self.plan, max_duration_seconds=max(3600 * GUARDRAIL_HORIZON_HOURS, self.plan.min_blocks * self.plan.block_seconds)
        )

    def pack(self) -> str:
        """Return the run as text for the status."""
        document = {
            "plan": self.plan.to_dict(),
            "state": self.state.to_dict(),
            "counted_until": self.counted_until,
            "guard_state": None if self.guard_state is None else self.guard_state.to_dict(),
            "extended_since": self.extended_since,
        }
        return codec.pack(document)

    @classmethod
    def unpack(cls, text: str) -> AnalysisRun | None:
        """Return the run from the text of `pack`; None for any text that is not of this release."""
        try:
            document = codec.unpack(text)
            guard_document = document["guard_state"]
            return cls(
                AnalysisPlan.from_dict(document["plan"]),
                AnalysisState.from_dict(document["state"]),
                document["counted_until"],
                None if guard_document is None else AnalysisState.from_dict(guard_document),
                document.get("extended_since"),  # an earlier release has not written it
            )
        except (ValueError, KeyError, TypeError):
            return None


def status_comparisons(comparisons: Iterable[Comparison]) -> list[MetricComparison]:
    """Return the comparisons of a verdict as the status has them: JSON has no infinity, so a bound that is infinite is absent."""
    return [
        MetricComparison(
            **asdict(replace(comparison, lower=_drop_infinite(comparison.lower), upper=_drop_infinite(comparison.upper)))
        )
        for comparison in comparisons
    ]


def _drop_infinite(bound: float | None) -> float | None:
    return None if bound is None or math.isinf(bound) else bound


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
    """Return an analysis that begins now.

    `calibration`: that of the stable pods before it. `probe_skip_reason`: why the output-equivalence probe does not run. `goal`:
    that of a trial.
    """
    plan = replace(
        build_analysis_plan(analysis, arms, pod_counts, objective, failed_attempts, goal),
        equivalence_skip_reason=probe_skip_reason,
    )
    plan = calibration.calibrate_plan(plan) if calibration is not None else plan
    return AnalysisRun(plan, AnalysisState(now.timestamp()), now.timestamp())


def build_analysis_plan(
    analysis: AnalysisSpec,
    arms: tuple[Arm, Arm],
    pod_counts: tuple[int, int],
    objective: LatencyObjective | None,
    failed_attempts: int = 0,
    goal: AnalysisGoal | None = None,
) -> AnalysisPlan:
    """Return the plan by which the arms (canary, control), with `pod_counts` pods, are judged.

    `objective`: objective of latencies, if there is any. `failed_attempts`: how many analyses of this revision have ended without
    a promotion. `goal`: goal of a trial, instead of that of the spec's analysis.
    """
    canary, control = arms
    tokens = [arm.setting.num_speculative_tokens if arm.setting else 0 for arm in arms]
    modes = {arm.setting.mode if arm.setting else "Off" for arm in arms}
    deadline = analysis.max_duration if goal is None else TRIAL_DEADLINE_FACTOR * analysis.max_duration
    return AnalysisPlan(
        goal=goal or analysis.goal,
        margin=analysis.margin,
        failure_margin=analysis.failure_margin,
        min_blocks=analysis.min_blocks,
        min_duration_seconds=analysis.min_duration.total_seconds(),
        max_duration_seconds=(deadline - analysis.warmup_duration).total_seconds(),
        block_seconds=analysis.block_duration.total_seconds(),
        pod_counts=pod_counts,
        projection=SampleProjection(max(1, min(tokens)), *find_latency_bucket_edges(objective)),
        drafts_not_comparable_reason=_TRIAL_MESSAGE if goal else explain_incomparable_acceptance(canary, control),
        allowed_share_over_objective=1 - objective.percentile / 100 if objective else DEFAULT_SHARE_OVER_OBJECTIVE,
        has_fixed_draft_length=canary.setting is not None and canary.setting.mode == "Static",
        both_adaptive=goal is None and canary.target == control.target and modes == {"Adaptive"} and tokens[0] == tokens[1],
        inconclusive_attempts=failed_attempts,
    )


def find_latency_bucket_edges(objective: LatencyObjective | None) -> tuple[float | None, float | None]:
    """Return the bucket edges at which the objectives of time per output token and time to first token are counted."""
    time_per_output_token = objective.time_per_output_token if objective else None
    time_to_first_token = objective.time_to_first_token if objective else None
    return (
        nearest_bucket_edge(time_per_output_token.total_seconds(), Metric.TIME_PER_OUTPUT_TOKEN.value.buckets)
        if time_per_output_token
        else None,
        nearest_bucket_edge(time_to_first_token.total_seconds(), TIME_TO_FIRST_TOKEN_BUCKETS) if time_to_first_token else None,
    )


_TRIAL_MESSAGE = "this is a trial of a setting, which time per output token decides."


_TRIMMED_DRAFTS_MESSAGE = (
    "both arms run in mode Adaptive, where drafts that the engine trims under load count as rejected. "
    "Time per output token decides"
)
_IN_FLIGHT_MESSAGE = "; tokens per step are compared only while both arms have the same number of requests in flight."


def explain_incomparable_acceptance(canary: Arm, control: Arm) -> str:
    """Return why output per draft does not decide between the arms, as a message; empty where it does."""
    if canary.target != control.target:
        return f"the canary serves another target ({canary.target} instead of {control.target})."
    if canary.setting and control.setting and canary.setting.mode == control.setting.mode == "Adaptive":
        return _TRIMMED_DRAFTS_MESSAGE + (
            _IN_FLIGHT_MESSAGE if canary.setting.num_speculative_tokens == control.setting.num_speculative_tokens else "."
        )
    for arm, arm_name in ((canary, "the canary"), (control, "the stable revision")):
        if arm.setting is None or arm.setting.mode == "Off":
            return f"{arm_name} has no drafter."
        if arm.setting.mode != "Static":
            return f"{arm_name} drafts in mode {arm.setting.mode}, where acceptance depends on the load."
    canary_tokens, control_tokens = (arm.setting.num_speculative_tokens if arm.setting else 0 for arm in (canary, control))
    if canary_tokens != control_tokens:
        return (
            f"the canary has K={canary_tokens} and the stable revision K={control_tokens}, so their drafts start at different "
            "positions of the same text. Time per output token decides."
        )
    return ""


def build_block_rule(plan: AnalysisPlan, scrape_interval_seconds: float) -> BlockRule:
    """Return the rule for when a block of this analysis ends; the engines are scraped every `scrape_interval_seconds` seconds."""
    fraction = plan.block_seconds / FULL_BLOCK_SECONDS
    min_drafts = 0.0 if plan.drafts_not_comparable_reason else max(MIN_BLOCK_DRAFTS, FULL_BLOCK_DRAFTS * min(1.0, fraction))
    return BlockRule(
        plan.block_seconds,
        scrape_interval_seconds,
        min_drafts,
        max(MIN_BLOCK_FINISHED_REQUESTS, FULL_BLOCK_FINISHED_REQUESTS * min(1.0, fraction)),
    )
