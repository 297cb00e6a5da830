"""Forecasts an analysis of canary pods under the traffic of users, by the functions of aerie.analysis themselves.

Each request on the pods of both arms is simulated. A block closes at the first scrape at which the operator's rule has enough
counts. Every pod differs permanently in the time of a step, and each arm's time of a step varies from block to block.

With a history, stable pods are calibrated by the operator's own calibration, on a day of blocks of the same traffic, before the
analysis. `CALIBRATIONS` such days are shared by all runs. Without it the rule has its default caution. During the analysis, up
to `MAX_CALIBRATION_PODS` stable pods are compared with one another.

Guarantee: all effects meet the same requests. Not guaranteed: lost scrapes, restarts, unequal loads and answers; here are none.
Each block costs a fraction of a millisecond, so there are fewer runs than of other stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.measurement.blocks import ArmCounts, BlockRule, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts
from aerie.analysis.state import AnalysisState, VerdictOutcome, add_block
from aerie.analysis.verdict import evaluate_analysis
from aerie.forecast.assumptions import Requests
from aerie.forecast.outcomes import Outcomes
from aerie.forecast.requests import Served, draw_factor, serve

CALIBRATIONS, MAX_CALIBRATION_PODS = 2, 3
"""Simulated calibrations, and the most stable pods that are simulated."""
_SEGMENT_SCRAPES, _DAY_SECONDS = 120, 86400.0
FIRST_TOKEN_SECONDS = 0.1
"""Time to first token; it varies like the time of a step."""


@dataclass(frozen=True)
class LiveAnalysis:
    """An analysis that is forecast."""

    plan: AnalysisPlan
    rule: BlockRule
    stable_pods: int
    """Stable pods; with 0 or 1 they are not compared with one another, and there is no history."""
    has_history: bool = True
    """Whether there is a history of more stable pods than one."""


class _Arm:
    """An arm at each scrape. Its requests are drawn as they are needed, and stay."""

    def __init__(self, rule: BlockRule, requests: Requests, pods: int, random: np.random.Generator) -> None:
        self.pods, self.pod_factor = pods, float(draw_factor(requests.pod_deviation, pods, random).mean())
        self._requests, self._random = requests, random
        self._times = rule.scrape_interval_seconds * np.arange(_SEGMENT_SCRAPES + 1)
        self._totals = np.zeros((3, 1))

    def count(self, begin: int, end: int) -> Served:
        """Return the counts between two scrapes."""
        while self._totals.shape[1] <= end:
            served = np.stack(serve(self._requests, self.pods, self._times, self._random))
            further = self._totals[:, -1:] + served[:, 1:] - served[:, :1]
            self._totals = np.concatenate([self._totals, further], axis=1)
        return Served(*(self._totals[:, end] - self._totals[:, begin]))


def forecast_live(analysis: LiveAnalysis, requests: Requests, effects: Sequence[float], runs: int, seed: int) -> list[Outcomes]:
    """Return the ends of analyses, by effect. Samples are blocks."""
    plans = [analysis.plan]
    if analysis.has_history and analysis.stable_pods > 1:
        plans = [_calibrate(analysis, requests, np.random.default_rng((seed, number))) for number in range(CALIBRATIONS)]
    results: list[list[tuple[VerdictOutcome, float, int]]] = [[] for _ in effects]
    for run in range(runs):
        plan = plans[run % len(plans)]
        random = np.random.default_rng((seed, CALIBRATIONS + run))
        canary, control = (_Arm(analysis.rule, requests, pods, random) for pods in plan.pod_counts)
        stable = [_Arm(analysis.rule, requests, 1, random) for _ in range(min(analysis.stable_pods, MAX_CALIBRATION_PODS))]
        for effect, ends in zip(effects, results, strict=True):
            noise = np.random.default_rng((seed, run, 1))
            ends.append(_analyze(plan, analysis.rule, requests, (canary, control), stable, effect, noise))
    outcomes = []
    for ends in results:
        verdicts = np.array([end[0] for end in ends])
        seconds = np.array([end[1] for end in ends])
        outcomes.append(
            Outcomes(
                verdicts == "Rollback",
                verdicts == "Promote",
                seconds,
                np.array([float(end[2]) for end in ends]),
                requests.per_second * analysis.plan.pod_counts[0] * seconds,
            )
        )
    return outcomes


def _analyze(
    plan: AnalysisPlan,
    rule: BlockRule,
    requests: Requests,
    arms: tuple[_Arm, _Arm],
    stable: Sequence[_Arm],
    effect: float,
    random: np.random.Generator,
) -> tuple[VerdictOutcome, float, int]:
    """Return the verdict, its seconds and its blocks; Inconclusive at the deadline."""
    state, begin = AnalysisState(0.0), 0
    interval = rule.scrape_interval_seconds
    for scrape in range(1, math.ceil(plan.max_duration_seconds / interval) + 1):
        if (scrape - begin) * interval < rule.block_seconds:
            continue
        canary, control = (
            _count_arm(requests, arm, begin, scrape, gain, random) for arm, gain in zip(arms, (effect, 0.0), strict=True)
        )
        if not (rule.has_enough(canary) and rule.has_enough(control)):
            continue
        by_pod = _count_by_pod(requests, stable, begin, scrape, random)
        block = ClosedBlock(begin * interval, scrape * interval, canary, replace(control, counts_by_pod=by_pod))
        state, verdict = evaluate_analysis(add_block(state, block, plan), plan, block.end_time)
        if verdict.outcome != "Continue":
            return verdict.outcome, min(block.end_time, plan.max_duration_seconds), state.block_count
        begin = scrape
    return "Inconclusive", plan.max_duration_seconds, state.block_count


def _count_arm(requests: Requests, arm: _Arm, begin: int, end: int, effect: float, random: np.random.Generator) -> ArmCounts:
    """Return the counts of an arm between two scrapes."""
    tokens, steps, finished = map(float, arm.count(begin, end))
    steps /= 1 + effect
    factor = arm.pod_factor * float(draw_factor(requests.step_time_deviation / math.sqrt(arm.pods), 1, random)[0])
    counts = EngineCounts(
        drafts=steps,
        accepted_tokens=max(0.0, tokens - steps),
        draft_tokens=steps,
        decode_tokens=tokens,
        decode_seconds=steps * requests.step_seconds * factor,
        output_tokens=tokens + finished,
        finished_requests=finished,
        first_tokens=finished,
        first_token_seconds=finished * FIRST_TOKEN_SECONDS * factor,
        timed_requests=finished,
        request_steps=steps,
        iterations=steps,
    )
    return ArmCounts(arm.pods, counts, requests.per_second * requests.seconds)


def _count_by_pod(
    requests: Requests, pods: Sequence[_Arm], begin: int, end: int, random: np.random.Generator
) -> dict[str, EngineCounts]:
    """Return the counts of each stable pod between two scrapes, by name."""
    return {f"pod-{index}": _count_arm(requests, pod, begin, end, 0.0, random).counts for index, pod in enumerate(pods)}


def _calibrate(analysis: LiveAnalysis, requests: Requests, random: np.random.Generator) -> AnalysisPlan:
    """Return the plan with the calibration that a day of stable pods has given."""
    plan, interval = analysis.plan, analysis.rule.scrape_interval_seconds
    rule = replace(analysis.rule, pods_per_minimum=plan.pod_counts[0])  # as controller/collection/calibration.py
    pods = [_Arm(rule, requests, 1, random) for _ in range(min(analysis.stable_pods, MAX_CALIBRATION_PODS))]
    calibration, begin = BaselineCalibration(plan), 0
    for scrape in range(1, math.ceil(_DAY_SECONDS / interval) + 1):
        if (scrape - begin) * interval < rule.block_seconds:
            continue
        by_pod = _count_by_pod(requests, pods, begin, scrape, random)
        arm = ArmCounts(len(pods), sum(by_pod.values(), EngineCounts()), None, by_pod)
        if not rule.has_enough(arm):
            continue
        calibration = calibration.add_block(ClosedBlock(begin * interval, scrape * interval, None, arm), rule)
        begin = scrape
    return calibration.calibrate_plan(plan)
