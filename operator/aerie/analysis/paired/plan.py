"""The criteria of a shadow evaluation, with their alphas and limits: one table, fixed when the evaluation begins.

| criterion             | rolls back when significantly   | alpha | accepts when significantly     | alpha | effective pairs |
|-----------------------|---------------------------------|-------|--------------------------------|-------|-----------------|
| tokens per step       | below the control's             | 0.010 | above * (1 - margin)           | 0.025 | 15 / 40         |
| time per output token | above * (1.02 + pods)           | 0.002 | below * (1.25 + pods)          | 0.025 | 15 / 40         |
| failed requests       | more often (e-value)            | 0.002 | not suspicious                 |       |                 |
| answers               | changed (`answers`)             | 0.002 |                                |       |                 |

The rollback tests' alphas add up to 0.016, because any of them suffices. An acceptance needs both of its tests, so each has the
whole alpha. With goal Superior, the limit of tokens per step is the control's own. "Effective pairs" is the minimum for a
rollback and for an acceptance (`sequence.effective_pair_count`): below it, the sequence is not normal enough.

Tokens per step are a means to an end; users feel the time per output token. So while that is significantly below the control's
(alpha 0.0125, less "pods"), tokens per step neither roll back nor are needed, as in an analysis between pods
(`aerie.analysis.criteria`).

An acceptance starts the ramp, in which the live counters of an analysis may still roll back. So the two share an error budget,
and the times need only exclude what is grossly slower: significantly below 1.25 times the control's and, as measured, below 1.025
times, both with "pods". Where other work disturbs the pods' processors, no short evaluation can show more. Without tokens per
step, 1.025 times has to be significant.

Where canary and control are different pods, "pods" is the largest difference that two pods of one GPU model are expected to have,
because no number of pairs averages that out. It is 0 where both drafters answer by turns in one engine.

A part of the table is left out where it would say nothing of the drafters: tokens per step of unlike settings, times of unlike
pods or loads, and answers of unlike engines. Without times, tokens per step decide alone, and without tokens per step the times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from aerie.analysis.criteria.criterion import TIME_PER_OUTPUT_TOKEN, TOKENS_PER_STEP
from aerie.analysis.criteria.sequence_parameters import (
    PROMOTE_POD_EFFECT_SHARE,
    ROLLBACK_POD_EFFECT_SHARE,
    UNCALIBRATED_POD_EFFECT,
)
from aerie.analysis.criteria.table import MAX_TIME_RATIO_MEASURED_PODS
from aerie.analysis.paired.sequence import Level
from aerie.analysis.statistics.confidence_sequence import pod_effect_quantile

ROLLBACK_LEVEL, SLOWER_LEVEL = Level(0.010, 100.0), Level(0.002, 100.0)
"""Levels of the rollback tests of tokens per step and of times. They detect a canary early that does harm."""
ACCEPT_LEVEL = Level(0.025, 300.0)
"""Level of both acceptance tests, tuned for canaries that are equal."""
FASTER_LEVEL = replace(ROLLBACK_LEVEL, alpha=ACCEPT_LEVEL.alpha / 2)
"""Level of being significantly faster, which replaces tokens per step: half of alpha, as there are two ways to pass. It is as
early as a rollback, which it prevents."""
FAILED_REQUESTS_ALPHA = 0.002
GROSS_TIME_RATIO = 1.25
"""Ratio to the control's time per output token that an acceptance has to exclude."""
ROLLBACK_TIME_RATIO = 1.02
"""Ratio to the control's time per output token beyond which a canary is rolled back, as in `aerie.analysis.criteria`."""
MIN_PAIRS_FOR_ROLLBACK, MIN_PAIRS_FOR_ACCEPTANCE = 15.0, 40.0
"""Least effective pairs."""
MIN_ACCEPTANCE_SECONDS = 60.0
"""Least time of an evaluation that accepts a canary: a request that hangs is known to do so after half a minute."""

Goal = Literal["NonInferior", "Superior"]


@dataclass(frozen=True, slots=True)
class PairedTest:
    """A test whether the canary's amount per token, relative to the control's, is significantly above (1) or below (-1) a limit.

    Amounts are steps and seconds: the fewer, the better.
    """

    metric: str
    sign: Literal[1, -1]
    max_ratio: float
    """The limit."""
    level: Level
    min_pairs: float
    """Least effective pairs."""
    max_estimate: float = math.inf
    """The estimate itself has to be below that, too."""


@dataclass(frozen=True)
class PairedPlan:
    """All parameters of a shadow evaluation; fixed when it begins."""

    goal: Goal = "NonInferior"
    margin: float = 0.02
    max_duration_seconds: float = 14400.0
    """Seconds after which the evaluation is inconclusive."""
    min_acceptance_seconds: float = 0.0
    """Seconds before which nothing is accepted: a request that hangs is known to do so after a while."""
    same_engine: bool = False
    """True if both drafters answer by turns in one engine, and not in two pods."""
    compares_tokens: bool = True
    """False if tokens per step are not comparable."""
    compares_time: bool = True
    """False if times are not comparable."""
    compares_answers: bool = True
    """False if even equal drafters may answer differently."""

    @cached_property
    def fewer_tokens(self) -> PairedTest:
        """Rollback test of tokens per step."""
        return PairedTest(TOKENS_PER_STEP, 1, 1.0, ROLLBACK_LEVEL, MIN_PAIRS_FOR_ROLLBACK)

    @cached_property
    def enough_tokens(self) -> PairedTest:
        """Acceptance test of tokens per step."""
        min_gain = 1 - self.margin if self.goal == "NonInferior" else 1.0
        return PairedTest(TOKENS_PER_STEP, -1, 1 / min_gain, ACCEPT_LEVEL, MIN_PAIRS_FOR_ACCEPTANCE)

    @cached_property
    def slower(self) -> PairedTest:
        """Rollback test of times."""
        limit = ROLLBACK_TIME_RATIO + self._pod_difference(ROLLBACK_POD_EFFECT_SHARE)
        return PairedTest(TIME_PER_OUTPUT_TOKEN, 1, limit, SLOWER_LEVEL, MIN_PAIRS_FOR_ROLLBACK)

    @cached_property
    def fast_enough(self) -> PairedTest:
        """Acceptance test of times."""
        pods = self._pod_difference(PROMOTE_POD_EFFECT_SHARE)
        strict, gross = MAX_TIME_RATIO_MEASURED_PODS + pods, GROSS_TIME_RATIO + pods
        if not self.compares_tokens:
            return PairedTest(TIME_PER_OUTPUT_TOKEN, -1, strict, ACCEPT_LEVEL, MIN_PAIRS_FOR_ACCEPTANCE)
        return PairedTest(TIME_PER_OUTPUT_TOKEN, -1, gross, ACCEPT_LEVEL, MIN_PAIRS_FOR_ACCEPTANCE, max_estimate=strict)

    @cached_property
    def faster(self) -> PairedTest:
        """Test of times that replaces both tests of tokens per step."""
        limit = 1 - self._pod_difference(PROMOTE_POD_EFFECT_SHARE)
        return PairedTest(TIME_PER_OUTPUT_TOKEN, -1, limit, FASTER_LEVEL, MIN_PAIRS_FOR_ROLLBACK)

    def _pod_difference(self, share: float) -> float:
        """Return the difference of two pods that this share of pods stays below, relative to their time."""
        effect = UNCALIBRATED_POD_EFFECT
        return 0.0 if self.same_engine else pod_effect_quantile(effect.degrees_of_freedom, share) * effect.sd

    def to_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PairedPlan:
        return cls(**document)
