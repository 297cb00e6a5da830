"""Parameters of an analysis, fixed when it begins: the criteria are the same from its first block to its verdict.

Guarantees: a plan goes through a dict unchanged. Not guaranteed: that its values are sensible; `aerie.api` validates the spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aerie.analysis.measurement.counts import SampleProjection
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION, Dispersion
from aerie.analysis.statistics.load_adjustment import LoadCurve

DEFAULT_SHARE_OVER_OBJECTIVE = 0.05
"""Share of the requests that the objective's default percentile leaves."""

AnalysisGoal = Literal["NonInferior", "Superior", "Faster", "Explore"]
"""Goal of a canary: the spec's NonInferior or Superior; for a trial of a setting Faster, or Explore, which need show nothing."""


@dataclass(frozen=True, slots=True)
class AnalysisPlan:
    """All parameters of an analysis; fixed before its first block, but for `hardware_mismatch`."""

    goal: AnalysisGoal = "NonInferior"
    margin: float = 0.02
    failure_margin: float = 0.005
    min_blocks: int = 5
    min_duration_seconds: float = 1800.0
    """Seconds under analysis before the canary may be promoted."""
    max_duration_seconds: float = 14400.0
    """Seconds under analysis after which it is inconclusive."""
    block_seconds: float = 120.0
    """Length of a block in seconds."""
    pod_counts: tuple[int, int] = (1, 1)
    """Numbers of pods of canary and control."""
    projection: SampleProjection = field(default_factory=lambda: SampleProjection(draft_positions=1))
    """Numbers of a sample that are kept."""
    drafts_not_comparable_reason: str = ""
    """Reason why tokens per step do not decide; empty where they do."""
    has_fixed_draft_length: bool = True
    """True if the canary drafts the same number of tokens at any load. Then its tokens per step can be shown and followed even
    where they do not decide."""
    allowed_share_over_objective: float = DEFAULT_SHARE_OVER_OBJECTIVE
    """Share of the requests that may be beyond an objective: 1 - its percentile."""
    both_adaptive: bool = False
    """True if both arms verify adaptively up to the same number of tokens."""
    hardware_mismatch: str = ""
    """Difference in the hardware of the arms, as a clause: times are not compared then. Empty where it is the same or unknown.
    Only this parameter changes during an analysis, with the pods."""
    equivalence_skip_reason: str = ""
    """Reason why the output-equivalence probe is skipped, as a clause; empty where it runs."""
    inconclusive_attempts: int = 0
    """Number of recent inconclusive analyses of this revision: each halves the alphas, or retries would pass by chance."""
    dispersions: Mapping[str, Dispersion] = field(default_factory=dict)
    """Dispersion of blocks of equal arms, by criterion."""
    load_curves: Mapping[str, LoadCurve] = field(default_factory=dict)
    """Load curve of a pod, by criterion."""

    def to_dict(self) -> dict[str, Any]:
        document = {name: getattr(self, name) for name in self.__slots__}
        document["projection"] = {name: getattr(self.projection, name) for name in SampleProjection.__slots__}
        document["pod_counts"] = list(self.pod_counts)
        document["dispersions"] = {name: dispersion.to_dict() for name, dispersion in self.dispersions.items()}
        document["load_curves"] = {name: curve.to_list() for name, curve in self.load_curves.items()}
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> AnalysisPlan:
        parsed = {
            "projection": SampleProjection(**document["projection"]),
            "pod_counts": tuple(document["pod_counts"]),
            "dispersions": {name: Dispersion.from_dict(dispersion) for name, dispersion in document["dispersions"].items()},
            "load_curves": {name: LoadCurve(*values) for name, values in document["load_curves"].items()},
        }
        return cls(**{**document, **parsed})

    @property
    def is_trial(self) -> bool:
        """True if it is the trial of a setting, and thus about time."""
        return self.goal in ("Faster", "Explore")

    def dispersion_of(self, criterion: str) -> Dispersion:
        """Return the dispersion of a criterion, by its name; UNCALIBRATED_DISPERSION without calibration."""
        return self.dispersions.get(criterion, UNCALIBRATED_DISPERSION)
