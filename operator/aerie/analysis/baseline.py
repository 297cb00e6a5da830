"""Calibration of the stable pods while nothing is rolled out, so that the next analysis knows the dispersion of its criteria.

    blocks of stable pods ─► BaselineCalibration ─┬─► LoadCurveFit of each load-adjusted metric ─────────┬─► plan of the next
                             .add_block           └─► DeviationHistory of each criterion, at like output ┘   analysis

`blocks.add_scrapes` follows the stable pods as a control without a canary. Dispersion depends mostly on the traffic: how lengths
and topics of requests differ, how long they stay alike, how they are distributed over pods. So a promotion keeps the calibration.
A change that makes other numbers of the same traffic does not (`compatible_with`):

* another length of blocks;
* another latency objective, for the share of requests beyond it;
* more draft positions, for acceptance length and tokens per step: their dispersion increases with their largest length;
* another origin, for everything. From 0.33 on, vLLM drafts nothing in steps where no request can use a draft
  (v1/core/sched/scheduler.py, `_drafts_unused`). So times and their dependence on the load are other numbers. And another routing
  or other nodes make pods differ by other amounts.

Guarantees: pure; text that `pack` made comes back as it was. A calibration holds blocks of one origin alone. Text that does not
name its origin is discarded. Not guaranteed: that the pods are under equal loads, as those
of an analysis are where latencies count. The part of that which the load adjustment leaves counts as dispersion here, and not
there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from aerie.analysis.criteria.criterion import (
    ACCEPTANCE_LENGTH,
    SLOW_TIME_PER_OUTPUT_TOKEN,
    SLOW_TIME_TO_FIRST_TOKEN,
    TOKENS_PER_STEP,
    Criterion,
)
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.table import build_calibration_criteria, build_criteria
from aerie.analysis.measurement import codec
from aerie.analysis.measurement.blocks import BlockRule, ClosedBlock
from aerie.analysis.statistics.calibration import DeviationHistory
from aerie.analysis.statistics.load_adjustment import MIN_CURVE_BLOCKS, LoadCurveFit

MIN_POD_SHARE_OF_BLOCK = 0.5
"""Least share of the drafts and requests that a block needs of a pod; a pod with fewer is excluded. A few requests would show
chance alone, and no block of an analysis consists of so few."""


@dataclass(frozen=True, slots=True)
class BaselineCalibration:
    """Calibration of the stable pods of one origin; see the module."""

    plan: AnalysisPlan
    """Plan with which the blocks were counted."""
    deviations: Mapping[str, DeviationHistory] = field(default_factory=dict)
    """Deviations by criterion, by the names of `build_calibration_criteria`."""
    load_curve_fits: Mapping[str, LoadCurveFit] = field(default_factory=dict)
    """Load curves by the same names, of the criteria that are load-adjusted."""
    block_count: int = 0
    """Blocks counted."""
    last_block_end_time: float = 0.0
    """Time at which the last of them ended."""
    origin: str = ""
    """Origin of the blocks: engine, traffic mode and choice of nodes, as text (canary/analysis_run/calibration_record.py)."""

    def add_block(self, block: ClosedBlock, rule: BlockRule) -> BaselineCalibration:
        """Return the calibration with one more block. A block with fewer than two counted pods changes nothing."""
        min_share = MIN_POD_SHARE_OF_BLOCK / max(1, rule.pods_per_minimum)
        counts_by_pod = {
            name: counts
            for name, counts in (block.control.counts_by_pod if block.control is not None else {}).items()
            if counts.drafts >= min_share * rule.min_drafts and counts.finished_requests >= min_share * rule.min_finished_requests
        }
        if len(counts_by_pod) < 2:
            return self
        seconds = block.end_time - block.start_time
        outputs = {name: counts.output_tokens / seconds for name, counts in counts_by_pod.items()}
        mean_output = math.fsum(outputs.values()) / len(outputs)
        deviations, load_curve_fits = dict(self.deviations), dict(self.load_curve_fits)
        for criterion in build_calibration_criteria(self.plan):
            fractions = {name: criterion.fraction(counts) for name, counts in counts_by_pod.items()}
            values = {name: numerator / denominator for name, (numerator, denominator) in fractions.items() if denominator > 0}
            if criterion.is_load_adjusted:
                curve_fit = load_curve_fits.get(criterion.name, LoadCurveFit())
                load_curve_fits[criterion.name] = curve_fit.add_block(values, outputs)
                if curve_fit.block_count < MIN_CURVE_BLOCKS:
                    continue  # blocks at different outputs would show a dispersion that no analysis has
                if (curve := curve_fit.curve) is not None:
                    values = {name: curve.adjust(value, outputs[name], mean_output) for name, value in values.items()}
            deviations[criterion.name] = deviations.get(criterion.name, DeviationHistory()).add_block(values, criterion.relative)
        return replace(
            self,
            deviations=deviations,
            load_curve_fits=load_curve_fits,
            block_count=self.block_count + 1,
            last_block_end_time=block.end_time,
        )

    def compatible_with(self, plan: AnalysisPlan, origin: str) -> BaselineCalibration:
        """Return the part that holds for blocks of this origin counted with this plan: nothing of another origin's."""
        if origin != self.origin:
            return BaselineCalibration(plan, origin=origin)
        if plan == self.plan:
            return self
        calibrated_names = self._calibrated_names(build_calibration_criteria(plan), plan)
        if not calibrated_names:
            return BaselineCalibration(plan, origin=origin)
        deviations = {name: self.deviations[calibrated_name] for name, calibrated_name in calibrated_names.items()}
        load_curve_fits = {
            name: self.load_curve_fits[calibrated_name]
            for name, calibrated_name in calibrated_names.items()
            if calibrated_name in self.load_curve_fits
        }
        return replace(self, plan=plan, deviations=deviations, load_curve_fits=load_curve_fits)

    def _calibrated_names(self, criteria: Iterable[Criterion], plan: AnalysisPlan) -> dict[str, str]:
        """Return the name under which each criterion is calibrated here, by the criterion's name; without those that are not."""
        return {
            criterion.name: calibrated_name
            for criterion in criteria
            if (calibrated_name := self._calibrated_name(criterion, plan)) is not None
        }

    def _calibrated_name(self, criterion: Criterion, plan: AnalysisPlan) -> str | None:
        """Return the name under which the criterion is calibrated; None where it is not, or from numbers of another kind."""
        calibrated_criteria = build_calibration_criteria(self.plan)
        name = next((calibrated.name for calibrated in calibrated_criteria if calibrated.fraction is criterion.fraction), None)
        if name is None or name not in self.deviations or plan.block_seconds != self.plan.block_seconds:
            return None
        projection, own_projection = plan.projection, self.plan.projection
        is_compatible = {
            TOKENS_PER_STEP: projection.draft_positions <= own_projection.draft_positions,
            ACCEPTANCE_LENGTH: projection.draft_positions <= own_projection.draft_positions,
            SLOW_TIME_PER_OUTPUT_TOKEN: projection.time_per_output_token_edge == own_projection.time_per_output_token_edge,
            SLOW_TIME_TO_FIRST_TOKEN: projection.time_to_first_token_edge == own_projection.time_to_first_token_edge,
        }
        return name if is_compatible.get(name, True) else None

    def calibrate_plan(self, plan: AnalysisPlan) -> AnalysisPlan:
        """Return the plan of an analysis that begins, with the calibration; without criteria that have too little of it."""
        calibrated_names = self._calibrated_names(build_criteria(plan), plan)
        dispersions = {
            name: self.deviations[calibrated_name].estimate_dispersion() for name, calibrated_name in calibrated_names.items()
        }
        curves = {
            name: self.load_curve_fits[calibrated_name].curve
            for name, calibrated_name in calibrated_names.items()
            if calibrated_name in self.load_curve_fits
        }
        return replace(
            plan,
            dispersions={name: dispersion for name, dispersion in dispersions.items() if dispersion.batch_count},
            load_curves={name: curve for name, curve in curves.items() if curve is not None},
        )

    def pack(self) -> str:
        """Return the calibration as text."""
        return codec.pack(
            {
                "plan": self.plan.to_dict(),
                "origin": self.origin,
                "deviations": {name: history.to_dict() for name, history in self.deviations.items()},
                "load_curve_fits": {name: curve_fit.to_list() for name, curve_fit in self.load_curve_fits.items()},
                "block_count": self.block_count,
                "last_block_end_time": self.last_block_end_time,
            }
        )

    @classmethod
    def unpack(cls, text: str) -> BaselineCalibration | None:
        """Return the calibration that `pack` made this text of; None for text of another release."""
        try:
            document = codec.unpack(text)
            deviations = {name: DeviationHistory.from_dict(history) for name, history in document["deviations"].items()}
            load_curve_fits = {name: LoadCurveFit(*values) for name, values in document["load_curve_fits"].items()}
            plan, origin = AnalysisPlan.from_dict(document["plan"]), str(document["origin"])
            return cls(plan, deviations, load_curve_fits, document["block_count"], document["last_block_end_time"], origin)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
