"""Criteria that compare canary and control, and the significance a verdict needs: one table, fixed when an analysis begins.

| criterion              | rolls back when significantly       | alpha  | passes when significantly           | load | pods  |
|------------------------|-------------------------------------|--------|-------------------------------------|------|-------|
| tokens per step        | below the control's                 | 0.0125 | above control * (1 - margin)        |      | 0.3 % |
| time per output token  | mean above control * 1.02           | 0.005  | below control * 1.025 as measured,  | yes  | 1.75 %|
|                        |                                     |        | and * 1.04 whatever the pods are    |      |       |
| ... objective, if any  | share beyond it more than control's | 0.0025 | share below 1 - percentile, or      | yes  |       |
|                        | + 0.25 pp (the mean then 0.0025)    |        | below 1.1 * the control's           |      |       |
| time to first token    | mean above control * 1.10           | 0.005  | mean below control * 1.25           | yes  | 1.75 %|
| ... objective, if any  | as above                            | 0.0025 | as above                            | yes  |       |
| failed requests        | more per request (e-value)          | 0.003  | share below 2 * control + 0.5 pp    |      |       |
| ended processes        | more per pod-hour (`crash_rate`)    | 0.002  | not suspicious                      |      |       |
| abandoned requests     | share above control + 5 pp          | 0.001  | share below 2 * control + 5 pp      |      |       |
| output length          | beyond control * 0.9 to 1.1         | 0.001  | -                                   |      |       |
| truncated requests     | share off by more than 5 pp         | 0.001  | -                                   |      |       |
| preemptions            | 2 * control + 0.05 per request      | 0.001  | -                                   | yes  |       |
| greedy answers         | different more often (`equivalence`)| 0.001  | -                                   |      |       |

Alphas. Those of the rollback tests add up to 0.035, because any of them suffices; they are spent by the deadline. A promotion
needs no split, because all of its tests have to pass: each has 0.05.

"Load". The criterion is counted only in blocks in which the loads of the arms match (`load_match`). Its means are adjusted to the
control's output (`load_adjustment`). Nothing is promoted while many blocks, or the latest, are excluded for that (`verdict`),
because the blocks of an overloaded arm are excluded too.

"Pods". The assumed permanent difference of two pods of one GPU model without calibration: a standard deviation, with 3 degrees of
freedom. With calibration it is the calibrated one, and a prior of 1 degree of freedom at 1 %. For tokens per step it exists only
beside a calibration, with 2 degrees: drafter and target determine them, whatever the GPU. For times, bounds are widened for a
share of the differences of such pods: in promote tests for 99 %, in rollback tests for 99.75 %.

Shares pass by exact bounds of counts (`shares`), because a sample variance is 0 where nothing has happened yet. A drafter must
not change outputs at all, so output length, truncated requests and greedy answers are alarms, not goals.

Tokens per step are a means to an end; users feel the time per output token. So the two are evaluated together. While the time is
significantly below the control's (alpha 0.025), a canary is not rolled back for its tokens per step. Nor does it need to pass in
them then: a lighter drafter may get fewer tokens a step and be faster. And no gain in tokens per step promotes a canary whose
time per output token is not significantly good enough. An objective is an additional guard: the mean rolls back as without it. A
promotion then needs significance for the objective. For the mean it needs only an estimate below the limit, so that the mean is
not probably worse. Where requests are few and uneven, the one is significant hours before the other.

The margin covers what cannot be distinguished, and is no allowance. A canary significantly below its control is rolled back
though it is within the margin, unless it is faster.

Tokens per step are the tokens of requests after their first, divided by the steps that generated them. That is (generated - first
tokens) / request steps, as `aerie.engine.metrics.rates.tokens_per_step`. Acceptance length, 1 + accepted / drafts, is shown and
not evaluated. vLLM also counts draft tokens as accepted behind the end of an answer, which no request gets (vllm issue 56101:
v1/core/sched/scheduler.py counts before it trims, in 0.32.0 and 0.33.0). That adds some tenths of a percent to 4 %, the more the
shorter the answers and the better the drafter. So it flatters the better arm. Dummy drafts, which acceptance length counts, are
in no request step, and neither are chunks of a prompt. A step that recomputes a preempted request counts in both, with one token.

| where                          | in place of the first row                                                                |
|--------------------------------|------------------------------------------------------------------------------------------|
| the arms draft different K     | time per output token, with its alpha: a text fixes its tokens, not its drafts, so that  |
|                                | drafts of a larger K begin at harder places, and one drafter shows 2 to 6 % less there   |
| both verify adaptively, same K | time per output token, with its alpha; and tokens per step roll back when significantly  |
|                                | below control * 0.9, alpha 0.005, counted while both have as many requests in flight     |
| neither may be compared        | time per output token, with its alpha                                                    |

Adaptive verification trims drafts, the more the more requests are in flight, and counts them as not accepted. So acceptance
depends on the load there: by some percent, within the 20 % that loads may differ by. Where the arms run on different hardware,
the rows with "load" are left out, because the GPU may decide them. Where tokens per step may not be compared then, nothing is
promoted.

Trials of a speculation setting (goal Faster) are about time, with these rows in place of the first three:

| time per output token  | mean above control * 1.02           | 0.0175 | mean below the control's            | yes  |       |
| ... objective, if any  | as above                            | 0.0025 | as above                            | yes  |       |
| tokens per busy second | below control * 0.9                 | 0.0075 | -                                   | yes  |       |

An exploration (goal Explore) is only measured: it is never promoted, and may be slower. It is rolled back for a mean above
control * 1.5, the share and all other rows. Its tokens per busy second are counted, because its goal may become Faster. A trial
has to show a difference of its own pods, so the prior on pods does not widen its bounds: trials repeat, and a setting is chosen
again every few hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aerie.analysis.measurement.counts import EngineCounts, SampleProjection
from aerie.analysis.statistics.calibration import UNCALIBRATED_DISPERSION, Dispersion, PodEffect
from aerie.analysis.statistics.confidence_sequence import PairedMoments, SequenceParameters, alpha_with_deadline
from aerie.analysis.statistics.load_adjustment import LoadCurve

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

PROMOTE_ALPHA = 0.05
FASTER_ALPHA = 0.025
"""Alpha of being significantly faster, which replaces tokens per step: half of PROMOTE_ALPHA, as there are two ways to pass."""
FAILED_REQUESTS_ALPHA = 0.003
CRASHES_ALPHA = 0.002
MAX_TIME_RATIO_MEASURED_PODS, MAX_TIME_RATIO_ANY_PODS = 1.025, 1.04
"""Largest ratio to the control's time per output token with which a canary passes: on the measured pods, and on any others."""
UNCALIBRATED_POD_EFFECT, CALIBRATED_POD_EFFECT = PodEffect(0.0175, 3.0), PodEffect(0.01, 1.0)
"""Permanent difference in the times of two pods of one GPU model (clocks, power caps, cooling): without calibration, and beside
one, so that two or three pods that happen to be alike do not prove that all are. An assumption: 2 to 5 % are reported."""
TOKENS_PER_STEP_POD_EFFECT_SHARE, PROMOTE_POD_EFFECT_SHARE, ROLLBACK_POD_EFFECT_SHARE = 0.975, 0.99, 0.9975
"""Share of the permanent differences of pods that a bound is widened for: of tokens per step, and of times."""
CALIBRATED_TOKENS_PER_STEP_POD_EFFECT = PodEffect(0.003, 2.0)
"""Permanent difference of pods in tokens per step, beside a calibration."""
PROMOTE_TIGHTEST_BLOCK_COUNT, ROLLBACK_TIGHTEST_BLOCK_COUNT, TRIAL_TIGHTEST_BLOCK_COUNT = 20.0, 30.0, 20.0
"""Effective blocks at which bounds are tightest. Each detects a canary early that is much better or much worse. They are tuned
for canaries that are a little better, or a little worse, and for settings that are slower by a tenth."""
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


def build_criteria(plan: AnalysisPlan) -> tuple[Criterion, ...]:
    """Return the criteria of the table for this plan."""
    return tuple(
        _with_attempt_alphas(criterion, plan.inconclusive_attempts)
        for criterion in _build_all_criteria(plan)
        if not (criterion.needs_load_match and plan.hardware_mismatch)
    )


def _build_all_criteria(plan: AnalysisPlan) -> Iterator[Criterion]:
    """Yield the criteria for this plan, also those of times where the arms run on different hardware."""
    if plan.is_trial:
        yield from _build_trial_criteria(plan)
    else:
        yield from _build_speed_criteria(plan)
    yield from _build_first_token_criteria(plan)
    yield from _build_request_criteria(plan)
    if plan.has_fixed_draft_length and not plan.is_trial:  # shown, not evaluated
        if plan.drafts_not_comparable_reason:
            yield Criterion(TOKENS_PER_STEP, _TOKENS_PER_STEP_TITLE, _tokens_per_step, ())
        yield Criterion(ACCEPTANCE_LENGTH, "acceptance length", _acceptance_length, ())


def build_calibration_criteria(plan: AnalysisPlan) -> tuple[Criterion, ...]:
    """Return the criteria that stable pods calibrate: all that this plan or a trial's measures, each once."""
    criteria_by_fraction: dict[Callable[[EngineCounts], tuple[float, float]], Criterion] = {}
    for criterion in (*build_criteria(replace(plan, goal="Faster")), *build_criteria(plan)):
        criteria_by_fraction.setdefault(criterion.fraction, criterion)
    return tuple(criteria_by_fraction.values())


def build_faster_test(plan: AnalysisPlan) -> tuple[Criterion, CriterionTest] | None:
    """Return the criterion and the test of a canary that is significantly faster; None where times are not compared."""
    criterion = next((criterion for criterion in build_criteria(plan) if criterion.name == TIME_PER_OUTPUT_TOKEN), None)
    if criterion is None:
        return None
    alpha = FASTER_ALPHA / 2**plan.inconclusive_attempts
    test = CriterionTest(-1, 1.0, 0.0, alpha, rolls_back=False, tightest_block_count=PROMOTE_TIGHTEST_BLOCK_COUNT)
    return criterion, test


def failed_requests_alpha(plan: AnalysisPlan) -> float:
    """Return the alpha of rolling back for failed requests."""
    return float(FAILED_REQUESTS_ALPHA / 2**plan.inconclusive_attempts)


def crashes_alpha(plan: AnalysisPlan) -> float:
    """Return the alpha of rolling back for processes that have ended."""
    return float(CRASHES_ALPHA / 2**plan.inconclusive_attempts)


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
        else dispersion.pod_effect(_pod_effect_prior(criterion, dispersion, plan), level, plan.pod_counts)
    )
    pod_effect_share = TOKENS_PER_STEP_POD_EFFECT_SHARE
    if criterion.is_load_adjusted and not plan.is_trial:
        pod_effect_share = ROLLBACK_POD_EFFECT_SHARE if test.rolls_back else PROMOTE_POD_EFFECT_SHARE
    return SequenceParameters(
        alpha=alpha,
        tightest_block_count=test.tightest_block_count,
        inflation=dispersion.inflation,
        prior=dispersion.variance_prior(level, plan.pod_counts),
        pod_effect_sd=pod_effect.sd,
        pod_effect_degrees_of_freedom=pod_effect.degrees_of_freedom,
        pod_effect_share=pod_effect_share,
    )


def _pod_effect_prior(criterion: Criterion, dispersion: Dispersion, plan: AnalysisPlan) -> PodEffect:
    """Return the assumed permanent difference of pods in a criterion, beside the calibrated one."""
    if not criterion.is_load_adjusted:
        return CALIBRATED_TOKENS_PER_STEP_POD_EFFECT if dispersion.batch_count else PodEffect(0.0, 0.0)
    if plan.is_trial:
        return PodEffect(0.0, 0.0)
    return CALIBRATED_POD_EFFECT if dispersion.batch_count else UNCALIBRATED_POD_EFFECT


# ------------------------------------------------------------------------------------------------------- rows of the table
_TOKENS_PER_STEP_TITLE, _TIME_PER_OUTPUT_TOKEN_TITLE = "tokens per step", "time per output token"
OBJECTIVE_ALPHA = 0.0025
"""Alpha of rolling back for an objective; subtracted from that of the mean beside it."""
MAX_RATIO_WHERE_CONTROL_MISSES_OBJECTIVE = 1.1
"""Largest ratio to the control's share beyond an objective that passes where the control itself misses the objective."""
NO_POD_EFFECT = PodEffect(0.0, math.inf)


def _build_speed_criteria(plan: AnalysisPlan) -> Iterator[Criterion]:
    """Yield the criteria of tokens per step and of time per output token, for a canary that is no trial of a setting."""
    drafts_compared, output_edge = not plan.drafts_not_comparable_reason, plan.projection.time_per_output_token_edge
    if drafts_compared:
        yield _build_tokens_per_step_criterion(plan)
    alpha = 0.005 if drafts_compared else 0.0125
    yield _build_output_time_criterion(plan, alpha if output_edge is None else alpha - OBJECTIVE_ALPHA)
    if output_edge is not None:
        yield _build_output_objective_criterion(output_edge, plan)
    if plan.both_adaptive and not drafts_compared:
        yield Criterion(
            TOKENS_PER_STEP,
            _TOKENS_PER_STEP_TITLE,
            _tokens_per_step,
            (_rollback_if_below(0.9, 0.0, 0.005),),
            needs_load_match=True,
            needs_in_flight_match=True,
        )


def _build_tokens_per_step_criterion(plan: AnalysisPlan) -> Criterion:
    """Return the criterion by which drafts are compared."""
    min_ratio = 1.0 if plan.goal == "Superior" else 1.0 - plan.margin
    promote_test = CriterionTest(
        1, min_ratio, 0.0, PROMOTE_ALPHA, rolls_back=False, tightest_block_count=PROMOTE_TIGHTEST_BLOCK_COUNT
    )
    return Criterion(
        TOKENS_PER_STEP, _TOKENS_PER_STEP_TITLE, _tokens_per_step, (_rollback_if_below(1.0, 0.0, 0.0125),), (promote_test,)
    )


def _build_output_time_criterion(plan: AnalysisPlan, alpha: float) -> Criterion:
    """Return the criterion of the mean time per output token, with this alpha of its rollback test."""
    promote_tests: tuple[CriterionTest, ...] = (
        replace(_promote_if_below(MAX_TIME_RATIO_MEASURED_PODS, 0.0), measured_pods_only=True),
        _promote_if_below(MAX_TIME_RATIO_ANY_PODS, 0.0),
    )
    if plan.drafts_not_comparable_reason and plan.goal == "Superior":
        promote_tests = (_promote_if_below(1.0, 0.0),)
    elif plan.projection.time_per_output_token_edge is not None and not plan.drafts_not_comparable_reason:
        promote_tests = (replace(_promote_if_below(MAX_TIME_RATIO_MEASURED_PODS, 0.0), estimate_suffices=True),)
    return Criterion(
        TIME_PER_OUTPUT_TOKEN,
        _TIME_PER_OUTPUT_TOKEN_TITLE,
        _time_per_output_token,
        (_rollback_if_above(1.02, 0.0, alpha),),
        promote_tests,
        needs_load_match=True,
    )


def _build_trial_criteria(plan: AnalysisPlan) -> Iterator[Criterion]:
    """Yield the criteria of time of a trial of a setting."""
    has_to_be_faster = plan.goal == "Faster"
    rollback_test = replace(
        _rollback_if_above(1.02 if has_to_be_faster else 1.5, 0.0, 0.0175), tightest_block_count=TRIAL_TIGHTEST_BLOCK_COUNT
    )
    yield Criterion(
        TIME_PER_OUTPUT_TOKEN,
        _TIME_PER_OUTPUT_TOKEN_TITLE,
        _time_per_output_token,
        (rollback_test,),
        (_promote_if_below(1.0, 0.0),) if has_to_be_faster else (),
        needs_load_match=True,
    )
    if plan.projection.time_per_output_token_edge is not None:
        yield _build_output_objective_criterion(plan.projection.time_per_output_token_edge, plan)
    # Its mean step is weighted by requests: some per cent off where a step grows fast with its batch, so 10 % are tolerated.
    yield Criterion(
        TOKENS_PER_BUSY_SECOND,
        "tokens per busy second",
        _tokens_per_busy_second,
        (_rollback_if_below(0.9, 0.0, 0.0075),) if has_to_be_faster else (),
        needs_load_match=True,
    )


def _build_first_token_criteria(plan: AnalysisPlan) -> Iterator[Criterion]:
    """Yield the criteria of the time to first token: the mean and, with an objective, the share beyond it."""
    first_edge = plan.projection.time_to_first_token_edge
    rollback_test = _rollback_if_above(1.10, 0.0, 0.005 if first_edge is None else 0.005 - OBJECTIVE_ALPHA)
    promote_test = replace(_promote_if_below(1.25, 0.0), estimate_suffices=first_edge is not None)
    yield Criterion(
        TIME_TO_FIRST_TOKEN,
        "time to first token",
        _time_to_first_token,
        (rollback_test,),
        (promote_test,),
        needs_load_match=True,
    )
    if first_edge is not None:
        clause = f"with a first token after {_format_seconds(first_edge)}"
        yield _build_objective_criterion(SLOW_TIME_TO_FIRST_TOKEN, clause, _slow_first_token_share, plan)


def _build_request_criteria(plan: AnalysisPlan) -> Iterator[Criterion]:
    """Yield the criteria of how requests end: failed, abandoned, of another length, truncated, preempted."""
    yield Criterion(
        FAILED_REQUESTS,
        "share of failed requests",
        _failed_requests,
        (),
        (_promote_if_below(2.0, plan.failure_margin),),
        relative=False,
    )
    yield Criterion(
        ABANDONED_REQUESTS,
        "share of abandoned requests",
        _abandoned_requests,
        (_rollback_if_above(1.0, 0.05, 0.001),),
        (_promote_if_below(2.0, 0.05),),
        relative=False,
    )
    yield Criterion(
        OUTPUT_LENGTH,
        "output tokens per request",
        _output_length,
        (_rollback_if_above(1.1, 0.0, 0.0005), _rollback_if_below(0.9, 0.0, 0.0005)),
    )
    yield Criterion(
        TRUNCATED_REQUESTS,
        "share of truncated requests",
        _truncated_requests,
        (_rollback_if_above(1.0, 0.05, 0.0005), _rollback_if_below(1.0, -0.05, 0.0005)),
        relative=False,
    )
    yield Criterion(
        PREEMPTIONS,
        "preemptions per request",
        _preemptions,
        (_rollback_if_above(2.0, 0.05, 0.001),),
        needs_load_match=True,
        relative=False,
    )


def _build_output_objective_criterion(output_edge: float, plan: AnalysisPlan) -> Criterion:
    """Return the criterion of the share of requests beyond the objective for time per output token."""
    clause = f"that take more than {_format_seconds(output_edge)} per output token"
    return _build_objective_criterion(SLOW_TIME_PER_OUTPUT_TOKEN, clause, _slow_output_share, plan)


def _build_objective_criterion(
    name: str, clause: str, fraction: Callable[[EngineCounts], tuple[float, float]], plan: AnalysisPlan
) -> Criterion:
    """Return the criterion of a share of requests beyond an objective; the clause completes its title."""
    promote_test = replace(
        _promote_if_below(0.0, plan.allowed_share_over_objective), alternative_ratio=MAX_RATIO_WHERE_CONTROL_MISSES_OBJECTIVE
    )
    return Criterion(
        name,
        f"share of requests {clause}",
        fraction,
        (_rollback_if_above(1.0, 0.0025, OBJECTIVE_ALPHA),),
        (promote_test,),
        needs_load_match=True,
        relative=False,
    )


def _rollback_if_above(ratio: float, offset: float, alpha: float) -> CriterionTest:
    return CriterionTest(1, ratio, offset, alpha)


def _rollback_if_below(ratio: float, offset: float, alpha: float) -> CriterionTest:
    return CriterionTest(-1, ratio, offset, alpha)


def _promote_if_below(ratio: float, offset: float) -> CriterionTest:
    return CriterionTest(-1, ratio, offset, PROMOTE_ALPHA, rolls_back=False, tightest_block_count=PROMOTE_TIGHTEST_BLOCK_COUNT)


def _with_attempt_alphas(criterion: Criterion, attempt: int) -> Criterion:
    """Return the criterion with the alphas of its tests halved for each earlier attempt."""
    if not attempt:
        return criterion
    rollback_tests = tuple(replace(test, alpha=test.alpha / 2**attempt) for test in criterion.rollback_tests)
    promote_tests = tuple(replace(test, alpha=test.alpha / 2**attempt) for test in criterion.promote_tests)
    return replace(criterion, rollback_tests=rollback_tests, promote_tests=promote_tests)


def _format_seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def _tokens_per_step(counts: EngineCounts) -> tuple[float, float]:
    return counts.decode_tokens, counts.request_steps


def _acceptance_length(counts: EngineCounts) -> tuple[float, float]:
    return counts.drafts + counts.accepted_tokens, counts.drafts


def _time_per_output_token(counts: EngineCounts) -> tuple[float, float]:
    return counts.decode_seconds, counts.decode_tokens


def _tokens_per_busy_second(counts: EngineCounts) -> tuple[float, float]:
    return counts.output_tokens, counts.busy_seconds


def _slow_output_share(counts: EngineCounts) -> tuple[float, float]:
    return counts.slow_output_requests, counts.timed_requests


def _time_to_first_token(counts: EngineCounts) -> tuple[float, float]:
    return counts.first_token_seconds, counts.first_tokens


def _slow_first_token_share(counts: EngineCounts) -> tuple[float, float]:
    return counts.slow_first_token_requests, counts.first_tokens


def _failed_requests(counts: EngineCounts) -> tuple[float, float]:
    return counts.failed_requests, counts.finished_requests


def _output_length(counts: EngineCounts) -> tuple[float, float]:
    return counts.output_tokens, counts.finished_requests


def _abandoned_requests(counts: EngineCounts) -> tuple[float, float]:
    return counts.abandoned_requests, counts.first_tokens


def _truncated_requests(counts: EngineCounts) -> tuple[float, float]:
    return counts.truncated_requests, counts.finished_requests


def _preemptions(counts: EngineCounts) -> tuple[float, float]:
    return counts.preemptions, counts.finished_requests
