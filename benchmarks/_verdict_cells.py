"""The cells of the benchmark of verdicts: the true properties of a canary, the conditions, and one simulated rollout of it.

A rollout is evaluated as the operator does it, with `AnalysisRun`: blocks and crashes are counted, and a verdict follows each
block. The calibration on stable pods comes from days of the same traffic (`BaselineCalibration`); the rollouts of a cell share
DAYS such days, in turn.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from aerie.analysis import post_promotion
from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.measurement.counts import SampleProjection
from aerie.analysis.state import AnalysisState
from aerie.analysis.statistics.calibration import BLOCKS_PER_BATCH
from aerie.api.status import Arm, SettingStatus
from aerie.rollout.canary.analysis_run.run import AnalysisRun, build_block_rule, explain_incomparable_acceptance
from aerie.rollout.canary.state_machine import MIN_RETENTION_AFTER_CRASH
from benchmarks._verdict_model import LOADS, Canary, Floats, Life, Traffic, close, drifts, side, simulate

HORIZON = 4 * 3600.0
DAY = 24 * 3600.0
DAYS = 50
STABLE = 3
"""Stable pods of a day of calibration."""
REPLICAS = 16
STEPS, HOLD, MONITORED_SECONDS = (0.25, 0.5), 300.0, 600.0
"""Shares of the ramp, seconds at each of them, and seconds of monitoring after the promotion."""


@dataclass(frozen=True)
class Cell:
    """One condition."""

    key: str
    """The key whose value the cell belongs to."""
    title: str
    canary: Canary
    traffic: Traffic = field(default_factory=Traffic)
    pods: int = 1
    """Pods of each arm."""
    history: bool = True

    @property
    def calibration_key(self) -> tuple[Traffic, int]:
        """Traffic of the days of calibration, and their number of draft tokens."""
        return self.traffic, min(self.canary.tokens)


Outcome = tuple[str, float, str]
"""`Promoted`, `RolledBack` or `Undecided`; minutes until then; the message."""


def run(cell: Cell, indices: Sequence[int], calibrations: Sequence[BaselineCalibration], seed: int) -> list[Outcome]:
    """Run these rollouts, calibrated with some days, and return their outcomes."""
    return [rollout(cell, index, calibrations[index % len(calibrations)] if calibrations else None, seed) for index in indices]


def make_plan(cell: Cell, calibration: BaselineCalibration | None) -> AnalysisPlan:
    """Make the analysis plan of the cell's rollouts."""
    canary_tokens, control_tokens = cell.canary.tokens
    arms = [
        Arm(revision=name, target="t", setting=SettingStatus(mode="Static", num_speculative_tokens=k))
        for name, k in (("c", canary_tokens), ("s", control_tokens))
    ]
    plan = AnalysisPlan(
        max_duration_seconds=HORIZON,
        block_seconds=cell.traffic.block,
        pod_counts=(cell.pods, cell.pods),
        projection=SampleProjection(min(canary_tokens, control_tokens), cell.traffic.edge),
        drafts_not_comparable_reason=explain_incomparable_acceptance(*arms),
    )
    return calibration.calibrate_plan(plan) if calibration is not None else plan


def days(traffic: Traffic, tokens: int, indices: Sequence[int], seed: int) -> list[BaselineCalibration]:
    """Calibrate with these days."""
    return [day(traffic, tokens, index, seed) for index in indices]


def day(traffic: Traffic, tokens: int, index: int, seed: int) -> BaselineCalibration:
    """Calibrate with a day of stable pods, or with its last hours, where more would be forgotten anyway."""
    random = np.random.default_rng([seed, zlib.crc32(repr((traffic, tokens)).encode()), index])
    plan = AnalysisPlan(block_seconds=traffic.block, projection=SampleProjection(tokens, traffic.edge))
    rule, calibration = build_block_rule(plan, 15.0), BaselineCalibration(plan)
    seconds = min(DAY, 50 * BLOCKS_PER_BATCH * max(traffic.block, traffic.grid))
    pods = simulate(traffic, STABLE, drifts(traffic, seconds, random), random)
    for block in close(traffic, None, pods, rule):
        calibration = calibration.add_block(block, rule)
    return calibration


def rollout(cell: Cell, index: int, calibration: BaselineCalibration | None, seed: int) -> Outcome:
    """Run one rollout of a cell."""
    random = np.random.default_rng([seed, zlib.crc32(f"{cell.key} {cell.title}".encode()), index])
    plan = make_plan(cell, calibration)
    shared = drifts(cell.traffic, HORIZON, random)
    canary = simulate(cell.traffic, cell.pods, shared, random, cell.canary)
    control = simulate(cell.traffic, cell.pods, shared, random, arm=1, canary=Canary(tokens=cell.canary.tokens))
    stable = simulate(cell.traffic, STABLE, shared, random, arm=1, canary=Canary(tokens=cell.canary.tokens))
    evidence = AnalysisRun(plan, AnalysisState(0.0), 0.0)
    if cell.canary.crashes_every < math.inf:
        return _run_crashing(cell, evidence, canary, control, stable, random)
    reason = ""
    for block in close(cell.traffic, canary, control, build_block_rule(plan, 15.0), stable):
        evidence, verdict = evidence.with_blocks([block]).evaluate(_at(block.end_time), ())
        reason = verdict.message
        if verdict.outcome != "Continue":
            return _OUTCOMES[verdict.outcome], block.end_time / 60, reason
    return "Undecided", HORIZON / 60, reason


_OUTCOMES = {"Promote": "Promoted", "Rollback": "RolledBack", "Inconclusive": "Undecided"}


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


# ---------------------------------------------------------------------------------------------------------------------- crashes
def _run_crashing(
    cell: Cell, evidence: AnalysisRun, canary: Floats, control: Floats, stable: Floats, random: np.random.Generator
) -> Outcome:
    """Run the rollout of a canary whose engines crash, to the end of its monitoring."""
    every, until = cell.canary.crashes_every, HORIZON + 2 * 3600.0
    lives = [Life.draw(0.0, until, every, random) for _ in range(cell.pods)]
    now, outcome, reason = 0.0, "Continue", ""
    for index, canary_counts in enumerate(canary):
        now = (index + 1) * cell.traffic.grid
        evidence = evidence.with_restarts(_restarts(lives, now), {})
        block = _block(now - cell.traffic.grid, now, canary_counts, lives, control[index])
        peers = side(stable[index], cell.traffic.grid, range(STABLE), "stable")
        evidence = evidence.with_blocks([replace(block, stable=peers)])
        evidence, verdict = evidence.evaluate(_at(now), ())
        outcome, reason = verdict.outcome, verdict.message
        if outcome != "Continue":
            break
    if outcome != "Promote":
        return _OUTCOMES.get(outcome, "Undecided"), now / 60, reason
    decided, evidence = now / 60, evidence.reset_guard(_at(now))
    for phase, began, ended, pods in phases(now, cell.pods):
        lives += [Life.draw(began + LOADS, until, every, random) for _ in range(pods - len(lives))]
        if phase == "Monitoring":
            evidence = evidence.reset_guard(_at(began))
        evidence, rollback_reason, rolled_back_at = _run_phase(cell, evidence, lives, began, ended, phase, random)
        if rollback_reason:
            return "RolledBack", rolled_back_at / 60, rollback_reason
    return "Promoted", decided, reason


def phases(now: float, pods: int) -> Iterator[tuple[str, float, float, int]]:
    """Iterate over the phases after the analysis of a canary of `pods` pods: phase, start, latest end, and pods of the canary."""
    for share in STEPS:
        pods = max(pods, math.ceil(share * REPLICAS))
        yield "Ramping", now, now + HOLD, pods
        now += HOLD
    yield "Promoting", now, now + LOADS, REPLICAS
    now += LOADS
    yield "Monitoring", now, now + MIN_RETENTION_AFTER_CRASH.total_seconds(), REPLICAS


def _run_phase(
    cell: Cell, evidence: AnalysisRun, lives: Sequence[Life], began: float, ended: float, phase: str, random: np.random.Generator
) -> tuple[AnalysisRun, str, float]:
    """Run a phase; return the evidence after it, the reason of a rollback, empty without one, and its time."""
    traffic, level = cell.traffic, post_promotion.compute_reference_level(evidence.state, evidence.plan)
    shared = drifts(traffic, ended - began + traffic.grid, random)
    canary = simulate(traffic, len(lives), shared, random, cell.canary)
    control = simulate(traffic, max(1, REPLICAS - len(lives)), shared, random)
    now = began
    for index, canary_counts in enumerate(canary):
        if now >= ended or (phase == "Monitoring" and now - began >= MONITORED_SECONDS and not _suspicious(evidence)):
            break
        now = min(began + (index + 1) * traffic.grid, ended)
        evidence = evidence.with_restarts(_restarts(lives, now), {})
        since = began + index * traffic.grid
        if now - since == traffic.grid:
            block = _block(since, now, canary_counts, lives, control[index])
            if phase == "Monitoring" and level is not None:
                guard_state = post_promotion.add_promoted_block(
                    evidence.guard_state or AnalysisState(now), replace(block, control=None), level, evidence.plan
                )
                evidence = replace(evidence, guard_state=guard_state, counted_until=now)
            elif phase != "Monitoring":
                evidence = evidence.with_blocks([block])
        if phase == "Monitoring":
            assert evidence.guard_state is not None
            rollback_reason = post_promotion.abort_message(evidence.guard_state, evidence.plan)
        else:
            evidence, verdict = evidence.check_guardrails(_at(now), ())
            rollback_reason = verdict.message if verdict.outcome == "Rollback" else ""
        if rollback_reason:
            return evidence, rollback_reason, now
    return evidence, "", ended


def _suspicious(evidence: AnalysisRun) -> bool:
    return evidence.guard_state is not None and evidence.guard_state.crashes.is_suspicious


def _restarts(lives: Sequence[Life], now: float) -> dict[str, int]:
    return {f"canary-{pod}": count for pod, life in enumerate(lives) if (count := life.restarts(now))}


def _block(began: float, ended: float, canary_counts: Floats, lives: Sequence[Life], control_counts: Floats) -> ClosedBlock:
    complete = [pod for pod, life in enumerate(lives) if life.is_complete(began, ended)]
    control = side(control_counts, ended - began, range(len(control_counts)), "control")
    return ClosedBlock(
        began, ended, side(canary_counts, ended - began, complete, "canary"), control, {"Restarted": len(lives) - len(complete)}
    )


def oracle(cell: Cell, runs: int, seed: int) -> float:
    """Return the share of rollouts without two observable crashes, promoted after 30 minutes: none within ten minutes of
    monitoring, or one and no second within the hour to which monitoring is then extended."""
    few = 0
    for index in range(runs):
        random = np.random.default_rng([seed, zlib.crc32(cell.title.encode()), index])
        every, now, pods = cell.canary.crashes_every, 1800.0, cell.pods
        *_, (_, watched, until, _) = phases(now, pods)
        lives = [Life.draw(0.0, until, every, random) for _ in range(pods)]
        for _, began, _, pod_count in phases(now, pods):
            lives += [Life.draw(began + LOADS, until, every, random) for _ in range(pod_count - len(lives))]
        early, late = (sum(life.restarts(end) for life in lives) for end in (watched + MONITORED_SECONDS, until))
        few += early == 0 or late < 2
    return few / runs


# ------------------------------------------------------------------------------------------------------------------------ cells
STEP_10 = 1 / 1.1
"""Time per output token, as a factor, with 10 % more tokens per step and steps that take as long."""

BETTER = Canary(1.09, 1 / 1.09)


def cells() -> Iterator[Cell]:
    """Iterate over all cells."""
    for pods in (1, 2, 4):
        for minutes in (20, 30, 60):
            bad = Canary(per_step=1.1, time=STEP_10, crashes_every=60.0 * minutes)
            yield Cell("crash_promoted", f"{pods} pod{'s' * (pods > 1)}, each crashes every {minutes} min", bad, pods=pods)
    for onset in (5, 15, 25):
        for given_up in (0.10, 0.25, 0.50):
            bad = Canary(per_step=1.05, time=1 / 1.05, onset=60.0 * onset, given_up=given_up)
            title = f"from minute {onset}, {given_up:.0%} given up".replace("%", " %")
            yield Cell("abort_promoted", title, bad, Traffic(rate=10.0))
    for time in (1.1, 1.3, 2.0, 2.9):
        yield Cell("slow_with_objective_promoted", f"time per output token x {time}", Canary(1.1, time), Traffic(edge=0.05))
    for share in (0.06, 0.07, 0.10):
        bad = Canary(beyond=share)
        title = f"{share:.0%} beyond the objective".replace("%", " %")
        yield Cell("objective_broken_promoted", title, bad, Traffic(edge=0.05, beyond=0.04))
    for tokens in ((5, 3), (3, 5)):
        for bias in (0.026, 0.063):
            per_step = 1.08 if tokens[0] > tokens[1] else 1 / 1.08
            positions = 1 - bias if tokens[0] > tokens[1] else 1 / (1 - bias)
            title = f"K {tokens[0]} against {tokens[1]}, positions off by {100 * bias:.1f} %"
            yield Cell("other_k_equal_rollback", title, Canary(per_step, 1.0, positions=positions, tokens=tokens))
            yield Cell("other_k_worse_promoted", title, Canary(per_step, 1.06, positions=positions, tokens=tokens))
    for rate in (1.0, 5.0):
        yield Cell("lighter_faster_rollback", f"{rate:g} requests/s", Canary(0.96, 0.85), Traffic(rate=rate))
    for rate in (1.0, 5.0, 20.0):
        for per_step in (1.08, 1.0):
            title = f"tokens per step {100 * (per_step - 1):+.0f} %, {rate:g} requests/s"
            yield Cell("heavier_slower_promoted", title, Canary(per_step, 1.03, 1.12), Traffic(rate=rate))
    for finished, block, grid in ((3, 18.0, 6.0), (5, 30.0, 15.0), (20, 120.0, 15.0), (120, 120.0, 120.0)):
        for failing in (0.0075, 0.01, 0.02):
            traffic = Traffic(rate=finished / block, block=block, grid=grid)
            title = f"{finished} requests in a block, {100 * failing:g} % fail"
            yield Cell("rare_failures_promoted", title, Canary(1.1, STEP_10, failing=failing), traffic)
    for history in (True, False):
        for sd in (0.0, 0.02, 0.04):
            calibration_title = "history of 3 pods" if history else "no history"
            title, traffic = f"pods differ by {100 * sd:g} %, {calibration_title}", Traffic(pods_sd=sd)
            yield Cell("unlike_gpu_rollback", title, Canary(), traffic, history=history)
            yield Cell("unlike_gpu_worse_promoted", title, Canary(1.1, 1.06), traffic, history=history)
    for rate in (1.0, 20.0):
        yield Cell("equal_rollback", f"{rate:g} requests/s", Canary(), Traffic(rate=rate))
        yield Cell("better_promoted", f"{rate:g} requests/s", BETTER, Traffic(rate=rate))
    for history, sd in ((True, 0.02), (False, 0.0), (False, 0.02)):
        calibration_title = "history of 3 pods" if history else "no history"
        title, traffic = f"pods differ by {100 * sd:g} %, {calibration_title}", Traffic(pods_sd=sd)
        yield Cell("unlike_gpu_better_promoted", title, BETTER, traffic, history=history)


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the percentage of each outcome of a cell, and the median minutes of the decided ones."""
    shares = {
        f"{name}_pct": 100 * sum(outcome == name for outcome, _, _ in outcomes) / len(outcomes)
        for name in ("Promoted", "RolledBack", "Undecided")
    }
    times = [minutes for outcome, minutes, _ in outcomes if outcome != "Undecided"]
    return {**shares, "minutes": statistics.median(times) if times else math.nan}
