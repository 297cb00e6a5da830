"""The criteria of a trial by turns, with their alphas and limits: one table, fixed when the trial begins.

| criterion             | rolls back when significantly | alpha  | passes when significantly | alpha         |
|-----------------------|-------------------------------|--------|---------------------------|---------------|
| tokens per step       | below the stable drafter's    | 0.010  | above * (1 - margin)      | 0.025 + 0.015 |
| time per output token | above * 1.02                  | 0.003  | below * 1.025             | 0.025 + 0.015 |
| time to first token   | above * 1.10                  | 0.003  | below * 1.25              | 0.025 + 0.015 |
| answer tokens         | below * 0.7                   | 0.001  |                           |               |
| failed requests       | more per request (e-value)    | 0.001  | below 2 * + 1.5 pp        | 0.025         |
| ended processes       | more per pod-hour             | 0.002  | not suspicious            |               |

The rollback tests' alphas add up to 0.02, because any of them suffices. A promotion needs all of its tests, so each has the whole
alpha: 0.025 at any time, and 0.015 for the one look at the deadline (`sign_flip`). Users feel the time per output token. So while
it is significantly below the stable drafter's (alpha 0.0125), tokens per step neither roll back nor are needed, as in an
analysis between pods (`aerie.analysis.criteria`).

Where a shadow evaluation comes before a trial, each of the two spends half of every alpha, so that the sums stay. A trial of a
drafter that was accepted there needs no evidence for it: it passes at the end of its time unless a rollback test is significant.

An engine that hangs with a drafter has neither steps nor times of answers, and nothing that the other criteria could compare. The
tokens of answers per window find it: requests come independently of the drafter, so a pair is as likely to have more of them with
either.

Both drafters run in the same pods under the same load, so times need no matching of loads and no allowance for pods. Only the
promote test of tokens per step allows for a carry-over (`carryover`). What a drafter costs per step changes immediately with it.

A criterion is a cost per base: steps per token, seconds per token, seconds per first token. The score of a pair of windows, at
the ratio r of the canary's cost to the stable drafter's, is linear in r:

    Y = w (c_canary - r c_stable)        w = n_canary n_stable / (n_canary + n_stable)

with cost per base c and base n: the Mantel-Haenszel weights of a rate ratio (Greenland and Robins, Biometrics 1985). The base,
tokens of answers or requests, does not depend on the drafter. So the score is antisymmetric in the two windows exactly when the
canary is at r, however few requests a window has. A mean of ratios would be biased there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from aerie.analysis.measurement.counts import EngineCounts
from aerie.analysis.switchback.design import WindowSchedule
from aerie.analysis.switchback.sign_flip import TUNED_DEADLINE_SHARES, TUNED_WINDOWS

TOKENS_PER_STEP = "TokensPerStep"
TIME_PER_OUTPUT_TOKEN = "TimePerOutputToken"
TIME_TO_FIRST_TOKEN = "TimeToFirstToken"
ANSWER_TOKENS = "AnswerTokens"

PROMOTE_ALPHA, PROMOTE_DEADLINE_ALPHA = 0.025, 0.015
"""Alphas of a promote test: at any time, and of the look at the deadline."""
FASTER_ALPHA = PROMOTE_ALPHA / 2
"""Alpha of being significantly faster, which replaces tokens per step: half, as there are two ways to pass."""
FAILED_REQUESTS_ALPHA = 0.001
CRASHES_ALPHA = 0.002
FAILURE_RATIO, FAILURE_MARGIN = 2.0, 0.015
"""Limit of the canary's share of failed requests: ratio to the stable drafter's, and offset. About 370 requests without a failure
exclude the offset."""

SwitchbackGoal = Literal["NonInferior", "Superior"]


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """The counts of one pod in one window after its wash-out. The order of the fields is the saved format."""

    decode_tokens: float = 0.0
    """Output tokens other than first tokens."""
    request_steps: float = 0.0
    """Verification steps, once for each request in them."""
    decode_seconds: float = 0.0
    """Seconds for these tokens, summed over requests."""
    first_tokens: float = 0.0
    first_token_seconds: float = 0.0
    """Seconds to the first token, summed over requests."""
    finished_requests: float = 0.0
    failed_requests: float = 0.0
    drafts: float = 0.0
    accepted_tokens: float = 0.0

    @classmethod
    def from_engine_counts(cls, counts: EngineCounts) -> WindowCounts:
        """Return the counts of a window from those of an engine."""
        return cls(*(getattr(counts, field.name) for field in fields(cls)))


@dataclass(frozen=True, slots=True)
class Criterion:
    """A cost per base that the drafters are compared by."""

    name: str
    title: str
    """Text of the criterion in messages."""
    fraction: Callable[[WindowCounts], tuple[float, float]]
    """Function that returns cost and base of a window."""
    is_inverse: bool = False
    """True if users see base per cost: tokens per step."""


TOKENS_PER_STEP_CRITERION = Criterion(
    TOKENS_PER_STEP,
    "number of tokens per step",
    lambda counts: (counts.request_steps, counts.decode_tokens),
    is_inverse=True,
)
TIME_PER_OUTPUT_TOKEN_CRITERION = Criterion(
    TIME_PER_OUTPUT_TOKEN, "time per output token", lambda counts: (counts.decode_seconds, counts.decode_tokens)
)
TIME_TO_FIRST_TOKEN_CRITERION = Criterion(
    TIME_TO_FIRST_TOKEN, "time to first token", lambda counts: (counts.first_token_seconds, counts.first_tokens)
)
ANSWER_TOKENS_CRITERION = Criterion(ANSWER_TOKENS, "number of answer tokens", lambda counts: (counts.decode_tokens, 1.0))
COMPARED_CRITERIA = (TOKENS_PER_STEP_CRITERION, TIME_PER_OUTPUT_TOKEN_CRITERION, TIME_TO_FIRST_TOKEN_CRITERION)
"""Criteria that the status shows."""
CRITERIA = (*COMPARED_CRITERIA, ANSWER_TOKENS_CRITERION)


@dataclass(frozen=True, slots=True)
class SwitchbackTest:
    """A test whether the canary's ratio to the stable drafter, less 1, is significantly above (sign 1) or below (-1) a limit.

    The ratio is that of the criterion as users see it: of tokens per step, or of times.
    """

    name: str
    criterion: Criterion
    sign: Literal[1, -1]
    limit: float
    alpha: float
    is_attenuated: bool
    """True if pairs are tested against the share of the limit that a carry-over leaves."""


@dataclass(frozen=True)
class SwitchbackPlan:
    """All parameters of a trial by turns; fixed when it begins."""

    seed: str
    """Seed of the orders."""
    schedule: WindowSchedule
    goal: SwitchbackGoal = "NonInferior"
    margin: float = 0.02
    max_duration_seconds: float = 14400.0
    """Seconds after which the trial is inconclusive."""
    is_isolated: bool = False
    """Whether the pod gets no requests of users. A promotion then needs no thousand requests to exclude failures: those of users,
    which follow, are many more. A drafter whose pairs are lost is rolled back at the deadline, because users come next."""
    error_share: float = 1.0
    """Share of every alpha that may be spent."""
    is_accepted: bool = False
    """Whether the canary's drafter was accepted before, so that a promotion needs no significant test."""

    @cached_property
    def tests(self) -> Mapping[str, SwitchbackTest]:
        """The tests of the table that compare means, by name."""
        margin = self.margin if self.goal == "NonInferior" else 0.0
        tokens, output, first, answers = CRITERIA
        share = self.error_share
        tests = (
            SwitchbackTest("FewerTokens", tokens, -1, 0.0, 0.01 * share, is_attenuated=False),
            SwitchbackTest("SlowerOutput", output, 1, 0.02, 0.003 * share, is_attenuated=False),
            SwitchbackTest("LaterFirstToken", first, 1, 0.10, 0.003 * share, is_attenuated=False),
            SwitchbackTest("FewerAnswerTokens", answers, -1, -0.30, 0.001 * share, is_attenuated=False),
            SwitchbackTest("EnoughTokens", tokens, 1, -margin, PROMOTE_ALPHA * share, is_attenuated=True),
            SwitchbackTest("FastEnoughOutput", output, -1, 0.025, PROMOTE_ALPHA * share, is_attenuated=False),
            SwitchbackTest("EarlyEnoughFirstToken", first, -1, 0.25, PROMOTE_ALPHA * share, is_attenuated=False),
            SwitchbackTest("FasterOutput", output, -1, 0.0, FASTER_ALPHA * share, is_attenuated=False),
        )
        return {test.name: test for test in tests}

    @cached_property
    def tuned_times(self) -> tuple[float, ...]:
        """The times that the components of every test are tuned for, in seconds."""
        first_window, deadline = self.schedule.first_window_seconds, self.max_duration_seconds
        return (*(count * first_window for count in TUNED_WINDOWS), *(share * deadline for share in TUNED_DEADLINE_SHARES))

    def to_dict(self) -> dict[str, Any]:
        schedule = [self.schedule.first_window_seconds, self.schedule.carryover_seconds]
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "schedule": schedule}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> SwitchbackPlan:
        return cls(**{**document, "schedule": WindowSchedule(*document["schedule"])})


ROLLBACK_TESTS = ("FewerTokens", "SlowerOutput", "LaterFirstToken", "FewerAnswerTokens")
PROMOTE_TESTS = ("EnoughTokens", "FastEnoughOutput", "EarlyEnoughFirstToken")
