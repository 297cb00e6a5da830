"""A criterion of an analysis and its tests, as data; and the names of the criteria, by which states and calibrations are saved.

Guarantees: plain data; nothing here decides. Not guaranteed: that a plan has every criterion (`table`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from aerie.analysis.measurement.counts import EngineCounts

TOKENS_PER_STEP = "TokensPerStep"
ACCEPTANCE_LENGTH = "AcceptanceLength"
TIME_PER_OUTPUT_TOKEN = "TimePerOutputToken"
SLOW_TIME_PER_OUTPUT_TOKEN = "SlowTimePerOutputToken"
TOKENS_PER_BUSY_SECOND = "TokensPerBusySecond"
TIME_TO_FIRST_TOKEN = "TimeToFirstToken"
SLOW_TIME_TO_FIRST_TOKEN = "SlowTimeToFirstToken"
FAILED_REQUESTS = "FailedRequests"
OUTPUT_LENGTH = "OutputLength"
TRUNCATED_REQUESTS = "TruncatedRequests"
PREEMPTIONS = "Preemptions"
ABANDONED_REQUESTS = "AbandonedRequests"

PROMOTE_TIGHTEST_BLOCK_COUNT, ROLLBACK_TIGHTEST_BLOCK_COUNT, TRIAL_TIGHTEST_BLOCK_COUNT = 20.0, 30.0, 20.0
"""Effective blocks at which bounds are tightest. Each detects a canary early that is much better or much worse. They are tuned
for canaries that are a little better, or a little worse, and for settings that are slower by a tenth."""
DRAFTS_ROLLBACK_TIGHTEST_BLOCK_COUNT = 25.0
"""The same of the rollback by tokens per step: a little earlier, because users are served by a much worse canary meanwhile."""


@dataclass(frozen=True, slots=True)
class CriterionTest:
    """A test whether canary - ratio * control - offset is significantly above 0 (sign 1) or below it (sign -1)."""

    sign: Literal[1, -1]
    ratio: float
    offset: float
    alpha: float
    rolls_back: bool = True
    """True for a rollback test, whose alpha is spent by the deadline; False for a promote test, whose alpha has no deadline."""
    tightest_block_count: float = ROLLBACK_TIGHTEST_BLOCK_COUNT
    """Effective blocks after which the bound is tightest."""
    alternative_ratio: float = 0.0
    """Ratio to the control's share below which the test of a share passes as well; 0: there is none."""
    estimate_suffices: bool = False
    """True if no significance is needed: the estimate itself suffices."""
    measured_pods_only: bool = False
    """True if the test is about the measured pods alone, and not about others of their kind."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """A criterion that compares the arms: its value, and the tests of a rollback and of a promotion."""

    name: str
    title: str
    """Text of the criterion in messages, such as in "the ... is"."""
    fraction: Callable[[EngineCounts], tuple[float, float]]
    """Function that returns numerator and denominator, from the sums over an arm."""
    rollback_tests: tuple[CriterionTest, ...]
    """Tests any of which rolls back."""
    promote_tests: tuple[CriterionTest, ...] = ()
    """Tests all of which a promotion needs; empty: it needs no more than no rollback."""
    needs_load_match: bool = False
    """True if only blocks in which the loads match count."""
    needs_in_flight_match: bool = False
    """True if the loads have to match in requests in flight, too, and not only in arrived requests."""
    relative: bool = True
    """True if the dispersion is in proportion to the level, as that of means is. Other criteria are shares of counts, whose
    promote tests are exact (`shares`)."""

    @property
    def is_load_adjusted(self) -> bool:
        """True if the canary's value is adjusted to the control's output: a mean that depends on the load."""
        return self.needs_load_match and self.relative and not self.needs_in_flight_match
