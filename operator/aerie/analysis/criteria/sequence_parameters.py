"""Parameters of the confidence sequence of a criterion's test: how wide its bounds are, for a calibration or without one.

The dispersion of tokens per step is that which holds for today's stable pods (`history_fit`).

Guarantees: the alpha of a rollback test is spent by the plan's deadline; that of a promote test has none. Not guaranteed: bounds
of a share, whose promote test is exact (`shares`).
"""

from __future__ import annotations

import math

from aerie.analysis.criteria.criterion import TOKENS_PER_STEP, Criterion, CriterionTest
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.statistics.calibration import Dispersion, PodEffect
from aerie.analysis.statistics.confidence_sequence import PairedMoments, SequenceParameters, alpha_with_deadline

UNCALIBRATED_POD_EFFECT, CALIBRATED_POD_EFFECT = PodEffect(0.0175, 3.0), PodEffect(0.01, 1.0)
"""Permanent difference in the times of two pods of one GPU model (clocks, power caps, cooling): without calibration, and beside
one, so that two or three pods that happen to be alike do not prove that all are. An assumption: 2 to 5 % are reported."""
TOKENS_PER_STEP_POD_EFFECT_SHARE, PROMOTE_POD_EFFECT_SHARE, ROLLBACK_POD_EFFECT_SHARE = 0.99, 0.99, 0.9975
"""Share of the permanent differences of pods that a bound is widened for: of tokens per step, and of times. An analysis of four
hours meets the differences of several hours where tenants move between pods, so that each of them has to be rare."""
OTHER_POD_EFFECT_SHARE = 0.975
"""The same of other criteria, and in trials."""
CALIBRATED_TOKENS_PER_STEP_POD_EFFECT = PodEffect(0.003, 2.0)
"""Permanent difference of pods in tokens per step, beside a calibration."""
UNKNOWN_TOKENS_PER_STEP_POD_EFFECT = PodEffect(0.02, 3.0)
OBSERVED_TOKENS_PER_STEP_POD_EFFECT, ROLLBACK_OBSERVED_POD_EFFECT = PodEffect(0.0225, 1.0), PodEffect(0.0175, 3.0)
"""The same without a history that fits: before the stable pods of today were compared, and beside that comparison
(`peer_dispersion`), for promotions and for rollbacks. Drafter and target determine tokens per step whatever the GPU, but the
tenants of a pod differ from those of the next: sticky ones make pods differ by 3 % for hours (`benchmarks/_canary_model.py`)."""
NO_POD_EFFECT = PodEffect(0.0, math.inf)


def build_sequence_parameters(
    test: CriterionTest, criterion: Criterion, plan: AnalysisPlan, pairs: PairedMoments
) -> SequenceParameters:
    """Return the parameters of a test's confidence sequence, at the level of the control."""
    dispersion = plan.dispersion_of(criterion.name)
    alpha = test.alpha
    if test.rolls_back:
        alpha = alpha_with_deadline(
            alpha, plan.max_duration_seconds / plan.block_seconds / dispersion.inflation, test.tightest_block_count
        )
    if not criterion.relative:
        return SequenceParameters(alpha, test.tightest_block_count, dispersion.inflation)
    level = pairs.control_mean
    pod_effect = (
        NO_POD_EFFECT
        if test.measured_pods_only
        else dispersion.pod_effect(_pod_effect_prior(test, criterion, dispersion, plan), level, plan.pod_counts)
    )
    return SequenceParameters(
        alpha=alpha,
        tightest_block_count=test.tightest_block_count,
        inflation=dispersion.inflation,
        prior=dispersion.variance_prior(level, plan.pod_counts),
        pod_effect_sd=pod_effect.sd,
        pod_effect_degrees_of_freedom=pod_effect.degrees_of_freedom,
        pod_effect_share=_pod_effect_share(test, criterion, plan),
    )


def _pod_effect_share(test: CriterionTest, criterion: Criterion, plan: AnalysisPlan) -> float:
    """Return the share of the permanent differences of pods that the bound of a test is widened for."""
    if criterion.name == TOKENS_PER_STEP:
        return TOKENS_PER_STEP_POD_EFFECT_SHARE
    if criterion.is_load_adjusted and not plan.is_trial:
        return ROLLBACK_POD_EFFECT_SHARE if test.rolls_back else PROMOTE_POD_EFFECT_SHARE
    return OTHER_POD_EFFECT_SHARE


def _pod_effect_prior(test: CriterionTest, criterion: Criterion, dispersion: Dispersion, plan: AnalysisPlan) -> PodEffect:
    """Return the assumed permanent difference of pods in a criterion, beside the calibrated one."""
    if criterion.name == TOKENS_PER_STEP:
        if not dispersion.pod_effect_degrees_of_freedom:
            return UNKNOWN_TOKENS_PER_STEP_POD_EFFECT
        if dispersion.batch_count:
            return CALIBRATED_TOKENS_PER_STEP_POD_EFFECT
        return ROLLBACK_OBSERVED_POD_EFFECT if test.rolls_back else OBSERVED_TOKENS_PER_STEP_POD_EFFECT
    if not criterion.is_load_adjusted:
        return CALIBRATED_TOKENS_PER_STEP_POD_EFFECT if dispersion.batch_count else PodEffect(0.0, 0.0)
    if plan.is_trial:
        return PodEffect(0.0, 0.0)
    return CALIBRATED_POD_EFFECT if dispersion.batch_count else UNCALIBRATED_POD_EFFECT
