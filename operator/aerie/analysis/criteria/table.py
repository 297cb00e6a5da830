"""Rows of the table of criteria, built for a plan: the table itself, with its reasons, is the docstring of the package.

Guarantees: equal plans have the same criteria, in the same order. Alphas are halved for each inconclusive attempt. Not
guaranteed: a criterion of time, which is left out where the arms run on different hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from aerie.analysis.criteria import fractions
from aerie.analysis.criteria.criterion import (
    ABANDONED_REQUESTS,
    ACCEPTANCE_LENGTH,
    DRAFTS_ROLLBACK_TIGHTEST_BLOCK_COUNT,
    FAILED_REQUESTS,
    OUTPUT_LENGTH,
    PREEMPTIONS,
    PROMOTE_TIGHTEST_BLOCK_COUNT,
    SLOW_TIME_PER_OUTPUT_TOKEN,
    SLOW_TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    TOKENS_PER_BUSY_SECOND,
    TOKENS_PER_STEP,
    TRIAL_TIGHTEST_BLOCK_COUNT,
    TRUNCATED_REQUESTS,
    Criterion,
    CriterionTest,
)
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.measurement.counts import EngineCounts

PROMOTE_ALPHA = 0.05
FASTER_ALPHA = 0.025
"""Alpha of being significantly faster, which replaces tokens per step: half of PROMOTE_ALPHA, as there are two ways to pass."""
FAILED_REQUESTS_ALPHA = 0.003
CRASHES_ALPHA = 0.002
MAX_TIME_RATIO_MEASURED_PODS, MAX_TIME_RATIO_ANY_PODS = 1.025, 1.04
"""Largest ratio to the control's time per output token with which a canary passes: on the measured pods, and on any others."""


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
            yield Criterion(TOKENS_PER_STEP, _TOKENS_PER_STEP_TITLE, fractions.tokens_per_step, ())
        yield Criterion(ACCEPTANCE_LENGTH, "acceptance length", fractions.acceptance_length, ())


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


# ------------------------------------------------------------------------------------------------------- rows of the table
_TOKENS_PER_STEP_TITLE, _TIME_PER_OUTPUT_TOKEN_TITLE = "tokens per step", "time per output token"
OBJECTIVE_ALPHA = 0.0025
"""Alpha of rolling back for an objective; subtracted from that of the mean beside it."""
MAX_RATIO_WHERE_CONTROL_MISSES_OBJECTIVE = 1.1
"""Largest ratio to the control's share beyond an objective that passes where the control itself misses the objective."""


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
            fractions.tokens_per_step,
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
        TOKENS_PER_STEP,
        _TOKENS_PER_STEP_TITLE,
        fractions.tokens_per_step,
        (replace(_rollback_if_below(1.0, 0.0, 0.0125), tightest_block_count=DRAFTS_ROLLBACK_TIGHTEST_BLOCK_COUNT),),
        (promote_test,),
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
        fractions.time_per_output_token,
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
        fractions.time_per_output_token,
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
        fractions.tokens_per_busy_second,
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
        fractions.time_to_first_token,
        (rollback_test,),
        (promote_test,),
        needs_load_match=True,
    )
    if first_edge is not None:
        clause = f"with a first token after {_format_seconds(first_edge)}"
        yield _build_objective_criterion(SLOW_TIME_TO_FIRST_TOKEN, clause, fractions.slow_first_token_share, plan)


def _build_request_criteria(plan: AnalysisPlan) -> Iterator[Criterion]:
    """Yield the criteria of how requests end: failed, abandoned, of another length, truncated, preempted."""
    yield Criterion(
        FAILED_REQUESTS,
        "share of failed requests",
        fractions.failed_requests,
        (),
        (_promote_if_below(2.0, plan.failure_margin),),
        relative=False,
    )
    yield Criterion(
        ABANDONED_REQUESTS,
        "share of abandoned requests",
        fractions.abandoned_requests,
        (_rollback_if_above(1.0, 0.05, 0.001),),
        (_promote_if_below(2.0, 0.05),),
        relative=False,
    )
    yield Criterion(
        OUTPUT_LENGTH,
        "output tokens per request",
        fractions.output_length,
        (_rollback_if_above(1.1, 0.0, 0.0005), _rollback_if_below(0.9, 0.0, 0.0005)),
    )
    yield Criterion(
        TRUNCATED_REQUESTS,
        "share of truncated requests",
        fractions.truncated_requests,
        (_rollback_if_above(1.0, 0.05, 0.0005), _rollback_if_below(1.0, -0.05, 0.0005)),
        relative=False,
    )
    yield Criterion(
        PREEMPTIONS,
        "preemptions per request",
        fractions.preemptions,
        (_rollback_if_above(2.0, 0.05, 0.001),),
        needs_load_match=True,
        relative=False,
    )


def _build_output_objective_criterion(output_edge: float, plan: AnalysisPlan) -> Criterion:
    """Return the criterion of the share of requests beyond the objective for time per output token."""
    clause = f"that take more than {_format_seconds(output_edge)} per output token"
    return _build_objective_criterion(SLOW_TIME_PER_OUTPUT_TOKEN, clause, fractions.slow_output_share, plan)


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
