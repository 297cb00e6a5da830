"""Whether the history of stable pods holds in an analysis, and the dispersion of tokens per step that follows.

    history of the plan + deviations of today's stable pods ─┬─► HistoryFit ─► dispersion of the tests that promote
                                                             └───────────────► dispersion of the tests that roll back

| history    | when                                                         | to promote                                         |
|------------|--------------------------------------------------------------|----------------------------------------------------|
| Absent     | there are too few blocks of stable pods                      | the default, and how far stable pods are apart now |
| Untested   | stable pods were not compared in enough blocks of today      | the history's, with an unknown pod effect          |
| Fits       | it makes likely how far the stable pods are apart now        | the history's                                      |
| DoesNotFit | it does not: by chance, or requests are routed otherwise, or | as without a history                               |
|            | are others. A few blocks may show that                       |                                                    |

A promotion can wait for evidence on the pods; a canary that is much worse serves users meanwhile. So rollbacks have other
constants, and the same statistics:

| history                               | to roll back                                                                       |
|---------------------------------------|------------------------------------------------------------------------------------|
| not refuted, in few blocks of today   | the history's, with `EARLY_POD_EFFECT_FACTOR` times its pod effect: a change of    |
|                                       | routing may not have shown                                                         |
| not refuted in `MIN_SUPPORTED_BLOCKS` | the history's                                                                      |
| refuted, or absent                    | `UNKNOWN_ROLLBACK_DISPERSION`, and how far stable pods are apart now, from the     |
|                                       | first blocks on. With too few for that, an unknown pod effect                      |

The constants of promotions prefer slow verdicts to wrong ones. With them, 3 % of the drafters that are worse by 2 % are promoted
at most, after a change of routing. Those of rollbacks leave 2 % of equal drafters rolled back at most. No test that knows all
kinds of traffic is much faster at promoting (`benchmarks/_canary_oracle.py`).

Where canary and control run on different hardware, the stable pods say nothing of the canary's, so its pod effect is unknown.

After an analysis that promoted (`with_passed_analysis`), a canary is rolled back by the history, and where it is refuted or
absent, by the measured pods alone. The analysis has passed in spite of an unknown pod effect, so pods that are apart by as much
were apart in the canary's favour: a canary that falls behind its control after that has changed. In a fleet with one stable pod,
only a drafter that becomes worse by 15 % would be rolled back otherwise. A canary that a user or equal prompts promoted has no
such evidence.

Guarantees: pure; the plan itself stays as it was, so that a later block may decide otherwise. Not guaranteed: anything for
other criteria than tokens per step. Times have a pod effect in any case (`sequence_parameters`), and shares have bounds of their
own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

from aerie.analysis.criteria.criterion import TOKENS_PER_STEP, Criterion, CriterionTest
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.sequence_parameters import (
    CALIBRATED_TOKENS_PER_STEP_POD_EFFECT,
    TOKENS_PER_STEP_POD_EFFECT_SHARE,
    UNKNOWN_TOKENS_PER_STEP_POD_EFFECT,
)
from aerie.analysis.criteria.table import build_criteria
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION, Dispersion
from aerie.analysis.statistics.confidence_sequence import pod_effect_quantile
from aerie.analysis.statistics.peer_dispersion import MIN_TESTED_BLOCKS, PeerDeviations

HistoryFit = Literal["Absent", "Untested", "Fits", "DoesNotFit"]

MIN_COMPARED_BLOCKS = 28
"""Blocks of a stable pod from which on a history may count for a promotion, and the pod shows how far pods are apart. 28
two-minute blocks are 56 minutes: in 30 minutes, pods whose tenants stay for an hour are alike too often."""
MISFIT_QUANTILE, ROLLBACK_MISFIT_QUANTILE = 0.1, 1.2
"""Standard normal quantiles of the limit by which a history is refuted, for promotions and for rollbacks. By either statistic, a
history that fits is refuted in 46 % and 12 % of the cases, and by one or the other in 60 % and 20 %."""
MIN_SUPPORTED_BLOCKS, EARLY_POD_EFFECT_FACTOR = 70, 6.0
"""Blocks of a stable pod from which on a history counts fully for a rollback, and the factor on its pod effect until then. The
product is that of an unknown pod effect at most."""
UNKNOWN_ROLLBACK_DISPERSION = Dispersion(variance=0.05**2, degrees_of_freedom=12.0)
"""Dispersion for rollbacks without a history that fits. Without an assumed variance, no loss could be significant in the first 40
minutes. Blocks of 120 requests have one of 5 % in `benchmarks/_canary_model.py`."""


class AnalysisPlans(NamedTuple):
    """The plan with the dispersions of tokens per step that hold for today's stable pods."""

    promote: AnalysisPlan
    rollback: AnalysisPlan

    def of(self, test: CriterionTest) -> AnalysisPlan:
        """Return the plan of a test."""
        return self.rollback if test.rolls_back else self.promote


def assess_history(plan: AnalysisPlan, peers: PeerDeviations) -> HistoryFit:
    """Return whether the plan's history holds for a promotion, by these deviations of today's stable pods in tokens per step."""
    history = plan.dispersion_of(TOKENS_PER_STEP)
    if not history.batch_count:
        return "Absent"
    if not peers.is_explained_by(history, CALIBRATED_TOKENS_PER_STEP_POD_EFFECT, MISFIT_QUANTILE):
        return "DoesNotFit"
    return "Untested" if peers.pod_effect(MIN_COMPARED_BLOCKS) is None else "Fits"


def with_tested_history(plan: AnalysisPlan, peers: PeerDeviations) -> AnalysisPlans:
    """Return the plans with the dispersions of tokens per step that hold for these deviations of today's stable pods."""
    dispersions = _promote_dispersion(plan, peers), _rollback_dispersion(plan, peers)
    if plan.hardware_mismatch:
        dispersions = _with_pod_effect(dispersions[0], 0.0, 0.0), _with_pod_effect(dispersions[1], 0.0, 0.0)
    return AnalysisPlans(
        *(replace(plan, dispersions={**plan.dispersions, TOKENS_PER_STEP: dispersion}) for dispersion in dispersions)
    )


def with_passed_analysis(plan: AnalysisPlan, peers: PeerDeviations) -> tuple[AnalysisPlan, tuple[Criterion, ...]]:
    """Return the plan and the criteria by which a canary is rolled back after its analysis has promoted it."""
    criteria = build_criteria(plan)
    if _holds_for_rollbacks(plan.dispersion_of(TOKENS_PER_STEP), peers):
        return plan, criteria
    plan = replace(plan, dispersions={**plan.dispersions, TOKENS_PER_STEP: UNKNOWN_ROLLBACK_DISPERSION})
    return plan, tuple(
        _about_measured_pods(criterion) if criterion.name == TOKENS_PER_STEP else criterion for criterion in criteria
    )


def _about_measured_pods(criterion: Criterion) -> Criterion:
    rollback_tests = tuple(replace(test, measured_pods_only=True) for test in criterion.rollback_tests)
    return replace(criterion, rollback_tests=rollback_tests)


def _promote_dispersion(plan: AnalysisPlan, peers: PeerDeviations) -> Dispersion:
    fit = assess_history(plan, peers)
    if fit in ("Absent", "DoesNotFit"):
        return _with_observed_pod_effect(UNCALIBRATED_DISPERSION, peers, MIN_COMPARED_BLOCKS)
    history = plan.dispersion_of(TOKENS_PER_STEP)
    return _with_pod_effect(history, 0.0, 0.0) if fit == "Untested" else history


def _rollback_dispersion(plan: AnalysisPlan, peers: PeerDeviations) -> Dispersion:
    history = plan.dispersion_of(TOKENS_PER_STEP)
    prior = CALIBRATED_TOKENS_PER_STEP_POD_EFFECT
    if not _holds_for_rollbacks(history, peers):
        return _with_observed_pod_effect(UNKNOWN_ROLLBACK_DISPERSION, peers, MIN_TESTED_BLOCKS)
    freedom = history.pod_effect_degrees_of_freedom
    if not freedom or peers.pod_effect(MIN_SUPPORTED_BLOCKS) is not None:
        return history  # without degrees of freedom its pod effect is an unknown one
    effect, unknown = history.pooled_pod_effect(prior), UNKNOWN_TOKENS_PER_STEP_POD_EFFECT
    quantiles = [pod_effect_quantile(each.degrees_of_freedom, TOKENS_PER_STEP_POD_EFFECT_SHARE) for each in (effect, unknown)]
    early_sd = min(EARLY_POD_EFFECT_FACTOR * effect.sd, max(effect.sd, unknown.sd * quantiles[1] / quantiles[0]))
    # The effect is pooled with the prior later, so the history's own is such that the result is the early one.
    squares = effect.degrees_of_freedom * early_sd**2 - prior.degrees_of_freedom * prior.sd**2
    return _with_pod_effect(history, math.sqrt(squares / freedom), freedom)


def _holds_for_rollbacks(history: Dispersion, peers: PeerDeviations) -> bool:
    prior = CALIBRATED_TOKENS_PER_STEP_POD_EFFECT
    return bool(history.batch_count) and peers.is_explained_by(history, prior, ROLLBACK_MISFIT_QUANTILE)


def _with_observed_pod_effect(dispersion: Dispersion, peers: PeerDeviations, min_blocks: int) -> Dispersion:
    """Return the dispersion with how far stable pods are apart, where so many blocks of them were compared."""
    effect = peers.pod_effect(min_blocks)
    return dispersion if effect is None else _with_pod_effect(dispersion, effect.sd, effect.degrees_of_freedom)


def _with_pod_effect(dispersion: Dispersion, sd: float, degrees_of_freedom: float) -> Dispersion:
    return replace(dispersion, pod_effect_sd=sd, pod_effect_degrees_of_freedom=degrees_of_freedom)
