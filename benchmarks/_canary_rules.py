"""The compared rules: ours on arrays, and those of Flagger, Argo Rollouts, Kayenta's judge and a paired z-test.

Each rule gets the tokens per step of both arms and decides per run: rolled back, promoted or neither, and after how many minutes.
The model truncates no answer, so tokens per step, which Aerie evaluates, and acceptance length, which the others query, are the
same here. In vLLM acceptance length flatters the better arm; this is not modelled, in the others' favour.

* ours: the criterion of tokens per step of `aerie.analysis` with its alphas, bounds and minimum of blocks, without the
  soak and with all other criteria taken to hold. The test compares it with the operator's own functions, run by run.
* Flagger 1.36.1 (pkg/controller/scheduler.go): a check a minute against a threshold, canary >= 0.98 * stable. Failed checks add
  up and are never subtracted; `threshold` of them roll back. A passed check moves the weight on by `stepWeight`, so
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

Flagger and Argo compare a number with a number: that the number is a ratio of two arms takes a custom query. These rules are
simulated, not the programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aerie.analysis.criteria.criterion import TOKENS_PER_STEP, CriterionTest
from aerie.analysis.criteria.history_fit import (
    EARLY_POD_EFFECT_FACTOR,
    MIN_COMPARED_BLOCKS,
    MIN_SUPPORTED_BLOCKS,
    MISFIT_QUANTILE,
    ROLLBACK_MISFIT_QUANTILE,
    UNKNOWN_ROLLBACK_DISPERSION,
)
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.sequence_parameters import (
    CALIBRATED_TOKENS_PER_STEP_POD_EFFECT,
    OBSERVED_TOKENS_PER_STEP_POD_EFFECT,
    ROLLBACK_OBSERVED_POD_EFFECT,
    TOKENS_PER_STEP_POD_EFFECT_SHARE,
    UNKNOWN_TOKENS_PER_STEP_POD_EFFECT,
)
from aerie.analysis.criteria.table import build_criteria
from aerie.analysis.measurement.blocks import ArmCounts
from aerie.analysis.measurement.counts import EngineCounts
from aerie.analysis.measurement.load_match import LoadMatch
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION, Dispersion, PodEffect
from aerie.analysis.statistics.confidence_sequence import alpha_with_deadline, mixture_precision, pod_effect_quantile
from aerie.analysis.statistics.peer_dispersion import BATCH_BLOCKS, MIN_TESTED_BLOCKS
from aerie.analysis.verdict import MAX_DROPPED_BLOCK_SHARE
from aerie.rollout.canary.analysis_run.run import GUARDRAIL_HORIZON_HOURS
from benchmarks._canary_blocks import Blocks
from benchmarks._canary_model import Bools, Floats

THRESHOLD = 0.98
NEVER = np.inf


class Decisions(NamedTuple):
    """The minutes of the first reason to roll back and of the first to promote, by run; infinite without one."""

    rollback: Floats
    promote: Floats

    @property
    def rolled_back(self) -> Bools:
        return (self.rollback < NEVER) & (self.rollback <= self.promote)

    @property
    def promoted(self) -> Bools:
        return self.promote < self.rollback

    def figures(self) -> dict[str, float]:
        """Return the percentage of runs, and median minutes; NaN without such a run."""
        figures = {"runs": float(len(self.rollback))}
        for name, which, when in (
            ("rollback", self.rolled_back, self.rollback),
            ("promote", self.promoted, self.promote),
        ):
            figures[f"{name}_pct"] = 100 * float(which.mean())
            figures[f"{name}_min"] = float(np.median(when[which])) if which.any() else math.nan
        return figures


def first(reasons: Bools, minutes: Floats) -> Floats:
    """Return the minute of the first column that is true, by run."""
    return np.where(reasons.any(axis=1), np.take_along_axis(minutes, reasons.argmax(axis=1)[:, None], axis=1)[:, 0], NEVER)


# --------------------------------------------------------------------------------------------------------------------- ours
def ours(blocks: Blocks, better: float, dispersions: list[Dispersion], plan: AnalysisPlan) -> Decisions:
    """Decide with Aerie's rule; the canary's tokens per step are multiplied by 1 + `better`. One dispersion for each run."""
    criterion = next(row for row in build_criteria(plan) if row.name == TOKENS_PER_STEP)
    (accept,) = criterion.promote_tests
    canary = blocks.canary * (1 + better)
    counted = ~np.isnan(canary) & (np.arange(canary.shape[1]) >= plan.min_blocks - 1)
    failed = np.zeros_like(counted)
    promote, rollback = (
        sequence_parameters(blocks.peers, dispersions, plan, rolls_back=rolls_back) for rolls_back in (False, True)
    )
    for test in criterion.rollback_tests:
        failed |= significant_blocks(test, canary, blocks, rollback, plan)
    number = np.arange(1, canary.shape[1] + 1)
    trusted = blocks.dropped <= MAX_DROPPED_BLOCK_SHARE * (number + blocks.dropped)
    promoted = significant_blocks(accept, canary, blocks, promote, plan) & trusted
    minutes = blocks.ended / 60
    return Decisions(first(failed & counted, minutes), first(promoted & counted, minutes))


def ours_after_passing(
    blocks: Blocks, passed: Floats, better: float, dispersions: list[Dispersion], plan: AnalysisPlan
) -> Floats:
    """Return the minutes from passing until Aerie rolls the canary back; infinite where it does not.

    `passed`: minute in which each run's analysis has promoted the canary; infinite where it has not. From the next block on the
    canary's tokens per step are multiplied by 1 + `better`.
    """
    criterion = next(row for row in build_criteria(plan) if row.name == TOKENS_PER_STEP)
    (test,) = criterion.rollback_tests
    minutes = blocks.ended / 60
    shift = 1 + (minutes >= passed[:, None]).argmax(axis=1)
    later = Blocks(*(_shift_blocks(values, shift) for values in blocks))
    misfits = sequence_parameters(blocks.peers, dispersions, plan, rolls_back=True).misfits
    parameters = passed_parameters(np.nan_to_num(_shift_blocks(misfits.astype(float), shift)) > 0, dispersions, plan)
    guard_plan = replace(plan, max_duration_seconds=3600 * GUARDRAIL_HORIZON_HOURS)
    canary = later.canary * (1 + better)
    failed = significant_blocks(test, canary, later, parameters, guard_plan) & ~np.isnan(canary)
    failed &= (np.arange(canary.shape[1]) >= plan.min_blocks - 1) & (passed < NEVER)[:, None]
    return first(failed, later.ended / 60 - np.where(passed < NEVER, passed, 0.0)[:, None])


def _shift_blocks(values: Floats, shift: npt.NDArray[np.int64]) -> Floats:
    """Return the values by run and block from each run's block `shift` on, and NaN after the last."""
    index = np.arange(values.shape[1])[None, :] + shift[:, None]
    is_block = index < values.shape[1]
    index, is_block = (each.reshape(*each.shape, *(1,) * (values.ndim - 2)) for each in (index, is_block))
    moved = np.take_along_axis(values, np.minimum(index, values.shape[1] - 1), axis=1)
    return np.where(is_block, moved, np.nan)


def matched_block_percent(blocks: Blocks, more: float = 1.0) -> float:
    """Return the percentage of blocks with matched loads, given `more` times as many requests on the canary."""
    matches: list[bool] = []
    sides = (blocks.canary_pods, more * blocks.canary_begun, blocks.control_pods, blocks.control_begun)
    for run in zip(*(part.tolist() for part in sides), strict=True):
        load_match = LoadMatch()
        for pods, begun, control_pods, control_begun in zip(*run, strict=True):
            if math.isnan(pods):
                break
            canary, control = (
                ArmCounts(round(pod_count), EngineCounts(first_tokens=begun_requests), None)
                for pod_count, begun_requests in ((pods, begun), (control_pods, control_begun))
            )
            load_match = load_match.add_block(canary, control)
            matches.append(load_match.is_matched)
    return 100 * sum(matches) / max(1, len(matches))


class Parameters(NamedTuple):
    """Parameters of the bounds of tokens per step after every block of every run."""

    inflation: Floats
    variance: Floats
    """Variance of a block, per pod, by the history."""
    degrees_of_freedom: Floats
    """Degrees of freedom of that variance."""
    pod_effect_bound: Floats
    """Bound of the lasting difference of two equal arms, relative to their level."""
    misfits: Bools
    """True where the history does not fit."""


class PeerStatistics(NamedTuple):
    """`PeerDeviations` after every block of every run."""

    block_counts: Floats
    """Blocks of each pod."""
    means: Floats
    """Mean deviation of each pod."""
    batch_counts: Floats
    """Closed batches of all pods."""
    batch_squares: Floats
    """Sum of the squared means of these batches."""


def peer_statistics(peers: Floats) -> PeerStatistics:
    """Return the statistics from the tokens per step of equal pods, by run, block and pod."""
    number = (~np.isnan(peers)).sum(axis=2, keepdims=True)
    compared = ~np.isnan(peers) & (number >= 2)
    others = np.maximum(number - 1, 1)
    values = np.where(compared, peers, 1.0)
    others_means = np.where(compared, (np.nansum(peers, axis=2, keepdims=True) - values) / others, 1.0)
    deviations = np.where(compared, (values / others_means - 1) / np.sqrt(1 + 1 / others), 0.0)
    counts, totals = np.cumsum(compared, axis=1), np.cumsum(deviations, axis=1)
    closes = compared & (counts % BATCH_BLOCKS == 0)
    blocks = np.arange(peers.shape[1])[None, :, None]
    last_close = np.maximum.accumulate(np.where(closes, blocks, -1), axis=1)
    previous_close = np.concatenate([np.full_like(last_close[:, :1], -1), last_close[:, :-1]], axis=1)
    before = np.where(previous_close >= 0, np.take_along_axis(totals, np.maximum(previous_close, 0), axis=1), 0.0)
    squares = np.where(closes, ((totals - before) / BATCH_BLOCKS) ** 2, 0.0)
    return PeerStatistics(
        counts.astype(float),
        totals / np.maximum(counts, 1),
        np.cumsum(closes.sum(axis=2), axis=1).astype(float),
        np.cumsum(squares.sum(axis=2), axis=1),
    )


def sequence_parameters(peers: Floats, dispersions: list[Dispersion], plan: AnalysisPlan, *, rolls_back: bool) -> Parameters:
    """Return the parameters that `with_tested_history` and `build_sequence_parameters` have after every block of every run."""
    quantile = ROLLBACK_MISFIT_QUANTILE if rolls_back else MISFIT_QUANTILE
    default = UNKNOWN_ROLLBACK_DISPERSION if rolls_back else UNCALIBRATED_DISPERSION
    statistics = peer_statistics(peers)
    effects = [dispersion.pooled_pod_effect(CALIBRATED_TOKENS_PER_STEP_POD_EFFECT) for dispersion in dispersions]
    inflation, variance, freedom = (_column(dispersions, name) for name in ("inflation", "variance", "degrees_of_freedom"))
    effect_sd, is_known = _column(effects, "sd"), _column(dispersions, "batch_count") > 0
    squares = statistics.means**2
    least_counts = (MIN_TESTED_BLOCKS, *((MIN_SUPPORTED_BLOCKS, MIN_TESTED_BLOCKS) if rolls_back else 2 * (MIN_COMPARED_BLOCKS,)))
    is_tested, is_supporting, is_compared = (statistics.block_counts >= least for least in least_counts)
    tested_pods, supporting_pods, pods = (pods.sum(axis=2) for pods in (is_tested, is_supporting, is_compared))
    expected = (variance * inflation)[..., None] / np.maximum(statistics.block_counts, 1) + effect_sd[..., None] ** 2
    expected_batch = variance * inflation / BATCH_BLOCKS + effect_sd**2
    batch_freedom = statistics.batch_counts * (1 - 1 / peers.shape[2])
    fits = np.where(is_tested, squares / expected, 0.0).sum(axis=2) <= tested_pods * _ratio_limit(tested_pods - 1, quantile)
    fits &= statistics.batch_squares <= statistics.batch_counts * expected_batch * _ratio_limit(batch_freedom, quantile)
    misfits = is_known & (tested_pods >= 2) & ~fits
    is_used = is_known & ~misfits

    by_history = np.array([_pod_effect_bound(effect) for effect in effects])[:, None]
    unknown = _pod_effect_bound(UNKNOWN_TOKENS_PER_STEP_POD_EFFECT)
    untested = np.minimum(EARLY_POD_EFFECT_FACTOR * by_history, np.maximum(by_history, unknown)) if rolls_back else unknown
    bound = np.where(is_used, np.where(supporting_pods >= 2, by_history, untested), unknown)
    mean_squares = np.where(is_compared, squares, 0.0).sum(axis=2) / np.maximum(pods, 1)
    prior = ROLLBACK_OBSERVED_POD_EFFECT if rolls_back else OBSERVED_TOKENS_PER_STEP_POD_EFFECT
    bound = np.where((pods >= 2) & ~is_used, _observed_bound(mean_squares, pods, prior), bound)
    if plan.hardware_mismatch:
        bound = np.full_like(bound, unknown)
    bound *= math.sqrt(1 / plan.pod_counts[0] + 1 / plan.pod_counts[1])
    return Parameters(
        np.where(is_used, inflation, default.inflation),
        np.where(is_used, variance, default.variance),
        np.where(is_used, freedom, default.degrees_of_freedom),
        bound,
        misfits,
    )


def passed_parameters(misfits: Bools, dispersions: list[Dispersion], plan: AnalysisPlan) -> Parameters:
    """Return the parameters of rollbacks that `with_passed_analysis` has after every block; `misfits`: those of rollbacks."""
    is_used = (_column(dispersions, "batch_count") > 0) & ~misfits
    effects = [dispersion.pooled_pod_effect(CALIBRATED_TOKENS_PER_STEP_POD_EFFECT) for dispersion in dispersions]
    by_history = np.array([_pod_effect_bound(effect) for effect in effects])[:, None]
    by_history *= math.sqrt(1 / plan.pod_counts[0] + 1 / plan.pod_counts[1])
    inflation, variance, freedom = (
        np.where(is_used, _column(dispersions, name), getattr(UNKNOWN_ROLLBACK_DISPERSION, name))
        for name in ("inflation", "variance", "degrees_of_freedom")
    )
    return Parameters(inflation, variance, freedom, np.where(is_used, by_history, 0.0), misfits)


def _pod_effect_bound(effect: PodEffect) -> float:
    return pod_effect_quantile(effect.degrees_of_freedom, TOKENS_PER_STEP_POD_EFFECT_SHARE) * effect.sd


def _observed_bound(mean_squares: Floats, pods: npt.NDArray[np.int64], prior: PodEffect) -> Floats:
    """Return the bound of a pod's lasting difference by today's stable pods, of which so many were compared, and this prior."""
    bounds = np.zeros_like(mean_squares)
    for count in range(2, int(pods.max(initial=0)) + 1):
        freedom = prior.degrees_of_freedom + count - 1
        sd = np.sqrt((prior.degrees_of_freedom * prior.sd**2 + (count - 1) * mean_squares) / freedom)
        bounds = np.where(pods == count, _pod_effect_bound(PodEffect(1.0, freedom)) * sd, bounds)
    return bounds


def _ratio_limit(degrees_of_freedom: Floats, quantile: float) -> Floats:
    spread = 2 / (9 * np.where(degrees_of_freedom > 0, degrees_of_freedom, 1.0))
    return np.asarray((1 - spread + quantile * np.sqrt(spread)) ** 3)


def _column(items: Sequence[Dispersion | PodEffect], name: str) -> Floats:
    return np.array([getattr(item, name) for item in items])[:, None]


def significant_blocks(test: CriterionTest, canary: Floats, blocks: Blocks, parameters: Parameters, plan: AnalysisPlan) -> Bools:
    """Return whether `verdict.is_mean_test_met` after every block of every run; False from a run's last block on.

    `canary`: the canary's tokens per step; the control's are those of the blocks.
    """
    control, inflation, prior = blocks.control, parameters.inflation, parameters.degrees_of_freedom
    n = np.arange(1, canary.shape[1] + 1)[None, :]
    scores = canary - test.ratio * control - test.offset
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean, level = np.cumsum(scores, axis=1) / n, np.cumsum(control, axis=1) / n
        variance = np.maximum(0, np.cumsum(scores**2, axis=1) - n * mean**2) / np.maximum(n - 1, 1)
        split = 1 / plan.pod_counts[0] + 1 / plan.pod_counts[1]
        alphas = {value: _alpha(test, value, plan) for value in np.unique(inflation).tolist()}
        alpha = np.vectorize(alphas.__getitem__, otypes=[float])(inflation)
        precisions = {value: mixture_precision(2 * value, test.tightest_block_count) for value in set(alphas.values())}
        g = np.vectorize(precisions.__getitem__, otypes=[float])(alpha)
        effective = n / inflation
        own = effective - 1
        freedom = own + prior
        k = 1 + effective * g
        c = np.exp(2 / (freedom + 1) * (np.log(k) / 2 - np.log(2 * alpha)))
        t_squared = np.where((c < k) & (own > 0), freedom * (c - 1) / (1 - c / k), np.inf)
        pooled = (prior * parameters.variance * split * level**2 + own * variance) / freedom
        slack = (parameters.pod_effect_bound * level) ** 2
        return np.asarray(test.sign * mean - np.sqrt(pooled / effective * t_squared + slack) > 0)


def _alpha(test: CriterionTest, inflation: float, plan: AnalysisPlan) -> float:
    """Return the level of a test's sequence."""
    if not test.rolls_back:
        return test.alpha
    horizon = plan.max_duration_seconds / plan.block_seconds / inflation
    return alpha_with_deadline(test.alpha, horizon, test.tightest_block_count)


# -------------------------------------------------------------------------------------------------------------------- peers
def by_flagger(canary: Floats, control: Floats, threshold: int, step_weight: int, max_weight: int) -> Decisions:
    """Decide by a check a minute. No value is a failed check: NaN compares false."""
    passed = canary >= THRESHOLD * control
    minutes = _minutes(passed)
    return Decisions(
        first(np.cumsum(~passed, axis=1) >= threshold, minutes),
        first(step_weight * np.cumsum(passed, axis=1) >= max_weight, minutes),
    )


def by_argo(canary: Floats, control: Floats, count: int, failure_limit: int) -> Decisions:
    """Decide by a measurement a minute, `count` of them. No value is a failed one: NaN compares false."""
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


def kayenta(canary: Floats, control: Floats, intervals: tuple[int, ...] = (60, 120, 180)) -> Decisions:
    rollback = np.full(len(canary), NEVER)
    for minutes in intervals:
        pending = np.flatnonzero(rollback == NEVER)
        pending_canary, pending_control = canary[pending, :minutes], control[pending, :minutes]
        low = np.concatenate(
            [_low(pending_canary[i : i + 100], pending_control[i : i + 100]) for i in range(0, len(pending_canary), 100)]
            or [np.zeros(0, bool)]
        )
        rollback[pending[low]] = minutes
    return Decisions(rollback, np.full(len(canary), float(intervals[-1])))


def _low(canary: Floats, control: Floats) -> npt.NDArray[np.bool_]:
    """Classify as Kayenta's Low: order statistics of all differences are the confidence interval of the shift."""
    points = canary.shape[1]
    differences = np.nan_to_num(canary[:, :, None] - control[:, None, :]).reshape(len(canary), -1).astype(np.float32)
    half = points * points / 2
    width = 2.3263 * math.sqrt(points * points * (2 * points + 1) / 12)
    places = (int(half), min(points * points - 1, math.ceil(half + width)))
    ordered = np.partition(differences, places, axis=1)
    estimate, upper = ordered[:, places[0]], ordered[:, places[1]]
    return np.asarray((upper < -0.25 * np.abs(estimate)) & (np.nanmean(canary, axis=1) <= np.nanmean(control, axis=1)))
