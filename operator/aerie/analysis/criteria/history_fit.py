"""Whether the history of stable pods holds in an analysis, and the dispersion of tokens per step that follows.

    history of the plan + deviations of today's stable pods ─► HistoryFit ─► dispersion of tokens per step

| history    | when                                                         | dispersion                                         |
|------------|--------------------------------------------------------------|----------------------------------------------------|
| Absent     | there are too few blocks of stable pods                      | the default, and how far stable pods are apart now |
| Untested   | stable pods were not compared in enough blocks of today      | the history's, with an unknown pod effect          |
| Fits       | it makes likely how far the stable pods are apart now        | the history's                                      |
| DoesNotFit | it does not: by chance, or requests are routed otherwise, or | as without a history                               |
|            | are others. A few blocks may show that                       |                                                    |

Where canary and control run on different hardware, the stable pods say nothing of the canary's, so its pod effect is unknown.

Guarantees: pure; the plan itself stays as it was, so that a later block may decide otherwise. Not guaranteed: anything for
other criteria than tokens per step. Times have a pod effect in any case (`sequence_parameters`), and shares have bounds of their
own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from aerie.analysis.criteria.criterion import TOKENS_PER_STEP
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.sequence_parameters import CALIBRATED_TOKENS_PER_STEP_POD_EFFECT
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION, Dispersion
from aerie.analysis.statistics.peer_dispersion import PeerDeviations

HistoryFit = Literal["Absent", "Untested", "Fits", "DoesNotFit"]


def assess_history(plan: AnalysisPlan, peers: PeerDeviations) -> HistoryFit:
    """Return whether the plan's history holds for these deviations of today's stable pods in tokens per step."""
    history = plan.dispersion_of(TOKENS_PER_STEP)
    if not history.batch_count:
        return "Absent"
    if not peers.is_explained_by(history, CALIBRATED_TOKENS_PER_STEP_POD_EFFECT):
        return "DoesNotFit"
    return "Untested" if peers.pod_effect is None else "Fits"


def with_tested_history(plan: AnalysisPlan, peers: PeerDeviations) -> AnalysisPlan:
    """Return the plan with the dispersion of tokens per step that holds for these deviations of today's stable pods."""
    fit = assess_history(plan, peers)
    dispersion = UNCALIBRATED_DISPERSION if fit == "DoesNotFit" else plan.dispersion_of(TOKENS_PER_STEP)
    if fit in ("Absent", "DoesNotFit") and peers.pod_effect is not None:
        dispersion = _with_pod_effect(dispersion, peers.pod_effect.sd, peers.pod_effect.degrees_of_freedom)
    if fit == "Untested" or plan.hardware_mismatch:
        dispersion = _with_pod_effect(dispersion, 0.0, 0.0)
    return replace(plan, dispersions={**plan.dispersions, TOKENS_PER_STEP: dispersion})


def _with_pod_effect(dispersion: Dispersion, sd: float, degrees_of_freedom: float) -> Dispersion:
    return replace(dispersion, pod_effect_sd=sd, pod_effect_degrees_of_freedom=degrees_of_freedom)
