"""The ends of simulated rollouts, and their summary.

Guarantee: chances of a summary add up to 1. Not guaranteed: more digits than the standard error of a chance allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Outcomes:
    """The ends of simulated rollouts, or of one of their stages, by run."""

    rolled_back: Bools
    promoted: Bools
    """Whether the stage is passed: promoted, or accepted into the next stage."""
    seconds: Floats
    """Seconds until the verdict, or until the deadline without one."""
    samples: Floats
    """Pairs or blocks until then."""
    user_requests: Floats
    """Users' requests that the new drafter has answered by then."""

    @property
    def runs(self) -> int:
        return len(self.seconds)

    def then(self, following: Outcomes) -> Outcomes:
        """Return the ends of rollouts that continue with another stage unless this one rolls them back.

        Where one of them has fewer runs, so has the result. `samples` are those of the last stage.
        """
        runs = min(self.runs, following.runs)
        first, last = self._first(runs), following._first(runs)
        ends = first.rolled_back
        return Outcomes(
            ends | last.rolled_back,
            ~ends & last.promoted,
            first.seconds + np.where(ends, 0.0, last.seconds),
            np.where(ends, first.samples, last.samples),
            first.user_requests + np.where(ends, 0.0, last.user_requests),
        )

    def unless(self, accepted: Bools, following: Outcomes) -> Outcomes:
        """Return the ends of stages that are others where a stage before has accepted the drafter: `following` there."""
        runs = min(self.runs, following.runs)
        own, other = self._first(runs), following._first(runs)
        return Outcomes(
            *(np.where(accepted[:runs], getattr(other, field.name), getattr(own, field.name)) for field in fields(self))
        )

    def _first(self, runs: int) -> Outcomes:
        return Outcomes(*(getattr(self, field.name)[:runs] for field in fields(self)))


def promote_at_once(runs: int) -> Outcomes:
    """Return a stage that promotes all rollouts, and takes no time."""
    no_run, nothing = np.zeros(runs, dtype=bool), np.zeros(runs)
    return Outcomes(no_run, ~no_run, nothing, nothing, nothing)


@dataclass(frozen=True)
class Summary:
    """What rollouts with one effect end with. Times and samples are those of rollouts with a verdict; None without any."""

    effect: float
    """Relative gain of the new drafter in tokens per step."""
    runs: int
    rollback_chance: float
    promotion_chance: float
    median_seconds: float | None
    p90_seconds: float | None
    median_samples: int | None
    mean_user_requests: float
    """Mean over all runs, with a verdict or without."""

    @property
    def inconclusive_chance(self) -> float:
        return max(0.0, 1 - self.rollback_chance - self.promotion_chance)

    def standard_error(self, chance: float) -> float:
        """Return the standard error of one of the chances. It is not 0 where no run, or every run, has the outcome."""
        smoothed = (chance * self.runs + 1) / (self.runs + 2)
        return math.sqrt(smoothed * (1 - smoothed) / self.runs)


def summarize(effect: float, outcomes: Outcomes) -> Summary:
    """Return the summary of the rollouts with one effect."""
    decided = outcomes.rolled_back | outcomes.promoted
    seconds, samples = outcomes.seconds[decided], outcomes.samples[decided]
    return Summary(
        effect,
        outcomes.runs,
        float(outcomes.rolled_back.mean()),
        float(outcomes.promoted.mean()),
        float(np.quantile(seconds, 0.5, method="higher")) if decided.any() else None,
        float(np.quantile(seconds, 0.9, method="higher")) if decided.any() else None,
        round(float(np.quantile(samples, 0.5, method="higher"))) if decided.any() else None,
        float(outcomes.user_requests.mean()),
    )
