"""The rules that are compared: ours on arrays, and what Flagger, Argo Rollouts, Kayenta's judge and a paired z-test would do.

Each rule gets what a step gave in both arms and says per run: rolled back, promoted or neither, and after how many minutes. The
model cuts no answer at its end, so tokens per step, by which Aerie judges, and acceptance length, which the others ask for, are
the same here; that vLLM's acceptance length flatters the better arm is left out, in the others' favour.

* ours: the criterion of tokens per step of `aerie.analysis` with its alphas, bounds and minimum of blocks, without the
  soak and with all other criteria taken to hold. The test compares it with the operator's own functions, run by run.
* Flagger 1.36.1 (pkg/controller/scheduler.go): a check a minute against a threshold, canary >= 0.98 * stable. Failed checks add
  up and are never taken off; so many as `threshold` roll back. A passed check moves the weight on by `stepWeight`, so
  maxWeight / stepWeight passed checks promote. No value is a failed check.
* Argo Rollouts 1.10.1 (analysis/analysis.go, assessMetricStatus): the same check. More failed measurements than `failureLimit`
  abort; the metric is successful when `count` measurements are made, of whatever outcome: `result.Count >= effectiveCount`, where
  Count goes up for Successful, Failed and Inconclusive alike. No value compares false and is a failed measurement.
* How many checks there are is the user's choice, so each has two rows: ten checks, and an example of its own documentation (the
  numbers of checks and failures that it shows; the threshold and the minute stay).
* Kayenta (NetflixACAJudge, MannWhitneyClassifier): after 60, 120 and 180 minutes of points, one a minute, the Mann-Whitney
  confidence interval (98 %) of the difference in location: Low, when its upper end is below -0.25 * |Hodges-Lehmann estimate|
  and the mean ratio is at most 1. Low rolls back, three passes promote.
* paired z: a one-sided 5 % z-test each minute from the tenth on, of canary - stable and of canary - 0.98 * stable.

Flagger and Argo compare a number with a number: that the number is a ratio of two arms takes a query of one's own. Simulated are
these rules, not the programs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aerie.analysis.criteria import (
    CALIBRATED_TOKENS_PER_STEP_POD_EFFECT,
    TOKENS_PER_STEP,
    AnalysisPlan,
    CriterionTest,
    build_criteria,
)
from aerie.analysis.measurement.blocks import ArmCounts
from aerie.analysis.measurement.counts import EngineCounts
from aerie.analysis.measurement.load_match import LoadMatch
from aerie.analysis.statistics.calibration import Dispersion, PodEffect
from aerie.analysis.statistics.confidence_sequence import alpha_with_deadline, mixture_precision, pod_effect_quantile
from aerie.analysis.verdict import MAX_DROPPED_BLOCK_SHARE
from benchmarks._canary_blocks import Blocks
from benchmarks._canary_model import Bools, Floats

THRESHOLD = 0.98
NEVER = np.inf


class Decisions(NamedTuple):
    """By run, the minute of the first reason to roll back and of the first to promote; infinite without one."""

    rollback: Floats
    promote: Floats

    @property
    def rolled_back(self) -> Bools:
        return (self.rollback < NEVER) & (self.rollback <= self.promote)

    @property
    def promoted(self) -> Bools:
        return self.promote < self.rollback

    def figures(self) -> dict[str, float]:
        """Percent of runs, and median minutes; NaN where there is no such run."""
        found = {"runs": float(len(self.rollback))}
        for name, which, when in (
            ("rollback", self.rolled_back, self.rollback),
            ("promote", self.promoted, self.promote),
        ):
            found[f"{name}_pct"] = 100 * float(which.mean())
            found[f"{name}_min"] = float(np.median(when[which])) if which.any() else math.nan
        return found


def first(reasons: Bools, minutes: Floats) -> Floats:
    """The minute of the first column that is true, by run."""
    return np.where(reasons.any(axis=1), np.take_along_axis(minutes, reasons.argmax(axis=1)[:, None], axis=1)[:, 0], NEVER)


# --------------------------------------------------------------------------------------------------------------------- ours
def ours(blocks: Blocks, better: float, scatters: list[Dispersion], terms: AnalysisPlan) -> Decisions:
    """`better`: the canary's tokens per step are multiplied by 1 + better. One scatter for each run."""
    criterion = next(one for one in build_criteria(terms) if one.name == TOKENS_PER_STEP)
    (accept,) = criterion.promote_tests
    canary = blocks.canary * (1 + better)
    counted = ~np.isnan(canary) & (np.arange(canary.shape[1]) >= terms.min_blocks - 1)
    failed = np.zeros_like(counted)
    for test in criterion.rollback_tests:
        failed |= certain(test, canary, blocks.control, scatters, terms)
    number = np.arange(1, canary.shape[1] + 1)
    trusted = blocks.dropped <= MAX_DROPPED_BLOCK_SHARE * (number + blocks.dropped)
    shown = certain(accept, canary, blocks.control, scatters, terms) & trusted
    minutes = blocks.ended / 60
    return Decisions(first(failed & counted, minutes), first(shown & counted, minutes))


def alike(blocks: Blocks, more: float = 1.0) -> float:
    """Percent of the blocks that count for latency, were there so many times as many requests on the canary."""
    found: list[bool] = []
    sides = (blocks.canary_pods, more * blocks.canary_begun, blocks.control_pods, blocks.control_begun)
    for run in zip(*(part.tolist() for part in sides), strict=True):
        demand = LoadMatch()
        for pods, begun, others, their_begun in zip(*run, strict=True):
            if math.isnan(pods):
                break
            mine, theirs = (
                ArmCounts(round(one), EngineCounts(first_tokens=came), None)
                for one, came in ((pods, begun), (others, their_begun))
            )
            demand = demand.add_block(mine, theirs)
            found.append(demand.is_matched)
    return 100 * sum(found) / max(1, len(found))


def certain(test: CriterionTest, canary: Floats, control: Floats, scatters: list[Dispersion], terms: AnalysisPlan) -> Bools:
    """Return whether `verdict.is_mean_test_met` after every block of every run; False from a run's last block on."""
    n = np.arange(1, canary.shape[1] + 1)[None, :]
    scores = canary - test.ratio * control - test.offset
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean, level = np.cumsum(scores, axis=1) / n, np.cumsum(control, axis=1) / n
        variance = np.maximum(0, np.cumsum(scores**2, axis=1) - n * mean**2) / np.maximum(n - 1, 1)
        inflation, per_pod, prior = (
            np.array([getattr(scatter, name) for scatter in scatters])[:, None]
            for name in ("inflation", "variance", "degrees_of_freedom")
        )
        priors = [CALIBRATED_TOKENS_PER_STEP_POD_EFFECT if scatter.batch_count else PodEffect(0.0, 0.0) for scatter in scatters]
        told = [scatter.pod_effect(known, 1.0, terms.pod_counts) for scatter, known in zip(scatters, priors, strict=True)]
        offset = np.array([pod_effect_quantile(one.degrees_of_freedom) * one.sd for one in told])[:, None]
        split = 1 / terms.pod_counts[0] + 1 / terms.pod_counts[1]
        alpha = np.full_like(inflation, test.alpha)
        if test.rolls_back:
            horizons = terms.max_duration_seconds / terms.block_seconds / inflation[:, 0]
            alpha = np.array(
                [alpha_with_deadline(test.alpha, horizon, test.tightest_block_count) for horizon in horizons.tolist()]
            )[:, None]
        g = np.array([mixture_precision(2 * one, test.tightest_block_count) for one in alpha[:, 0].tolist()])[:, None]
        effective = n / inflation
        own = effective - 1
        freedom = own + prior
        k = 1 + effective * g
        c = np.exp(2 / (freedom + 1) * (np.log(k) / 2 - np.log(2 * alpha)))
        t_squared = np.where((c < k) & (own > 0), freedom * (c - 1) / (1 - c / k), np.inf)
        pooled = (prior * per_pod * split * level**2 + own * variance) / freedom
        slack = (offset * level) ** 2
        return np.asarray(test.sign * mean - np.sqrt(pooled / effective * t_squared + slack) > 0)


# -------------------------------------------------------------------------------------------------------------------- peers
def by_flagger(canary: Floats, control: Floats, threshold: int, step_weight: int, max_weight: int) -> Decisions:
    """A check a minute. No value is a failed check: NaN compares false."""
    passed = canary >= THRESHOLD * control
    minutes = _minutes(passed)
    return Decisions(
        first(np.cumsum(~passed, axis=1) >= threshold, minutes),
        first(step_weight * np.cumsum(passed, axis=1) >= max_weight, minutes),
    )


def by_argo(canary: Floats, control: Floats, count: int, failure_limit: int) -> Decisions:
    """A measurement a minute, `count` of them. No value is a failed one: NaN compares false."""
    passed = canary >= THRESHOLD * control
    minutes = _minutes(passed)
    failed = first(np.cumsum(~passed, axis=1) > failure_limit, minutes)
    return Decisions(np.where(failed <= count, failed, NEVER), np.where(failed <= count, NEVER, float(count)))


def flagger(canary: Floats, control: Floats) -> Decisions:
    return by_flagger(canary, control, threshold=5, step_weight=5, max_weight=50)


def flagger_example(canary: Floats, control: Floats) -> Decisions:
    """docs/gitbook/tutorials/gatewayapi-progressive-delivery.md: threshold 5, maxWeight 50, stepWeight 10."""
    return by_flagger(canary, control, threshold=5, step_weight=10, max_weight=50)


def argo(canary: Floats, control: Floats) -> Decisions:
    return by_argo(canary, control, count=10, failure_limit=3)


def argo_example(canary: Floats, control: Floats) -> Decisions:
    """docs/features/analysis.md: the example of several measurements (interval 60s, count 5) with the failureLimit 3 of that
    page's template; without one it would be 0."""
    return by_argo(canary, control, count=5, failure_limit=3)


def _minutes(checks: Bools) -> Floats:
    return np.broadcast_to(np.arange(1.0, checks.shape[1] + 1), checks.shape)


def paired_z(canary: Floats, control: Floats) -> Decisions:
    n = np.arange(1, canary.shape[1] + 1)[None, :]
    minutes = np.broadcast_to(n.astype(float), canary.shape)

    def statistics(ratio: float) -> Floats:
        scores = np.nan_to_num(canary - ratio * control)
        mean = np.cumsum(scores, axis=1) / n
        variance = (np.cumsum(scores**2, axis=1) / n - mean**2) * n / np.maximum(n - 1, 1)
        return np.asarray(mean / np.sqrt(np.maximum(variance, 1e-12) / n))

    z = 1.6449
    return Decisions(
        first((statistics(1.0) < -z) & (n >= 10), minutes),
        first((statistics(THRESHOLD) > z) & (n >= 10), minutes),
    )


def kayenta(canary: Floats, control: Floats, looks: tuple[int, ...] = (60, 120, 180)) -> Decisions:
    rollback = np.full(len(canary), NEVER)
    for minutes in looks:
        undecided = np.flatnonzero(rollback == NEVER)
        mine, theirs = canary[undecided, :minutes], control[undecided, :minutes]
        low = np.concatenate(
            [_low(mine[i : i + 100], theirs[i : i + 100]) for i in range(0, len(mine), 100)] or [np.zeros(0, bool)]
        )
        rollback[undecided[low]] = minutes
    return Decisions(rollback, np.full(len(canary), float(looks[-1])))


def _low(canary: Floats, control: Floats) -> npt.NDArray[np.bool_]:
    """Kayenta's Low: order statistics of all differences are the confidence interval of the shift."""
    points = canary.shape[1]
    differences = np.nan_to_num(canary[:, :, None] - control[:, None, :]).reshape(len(canary), -1).astype(np.float32)
    half = points * points / 2
    width = 2.3263 * math.sqrt(points * points * (2 * points + 1) / 12)
    places = (int(half), min(points * points - 1, math.ceil(half + width)))
    ordered = np.partition(differences, places, axis=1)
    estimate, upper = ordered[:, places[0]], ordered[:, places[1]]
    return np.asarray((upper < -0.25 * np.abs(estimate)) & (np.nanmean(canary, axis=1) <= np.nanmean(control, axis=1)))
