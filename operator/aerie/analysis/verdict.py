"""The verdict on a canary after each closed block, with its message.

    evaluate_analysis    returns Continue, Promote, Rollback or Inconclusive, and why
    evaluate_extension   returns Continue, Promote or Inconclusive: after an inconclusive verdict, in the time that a user adds
    check_guardrails     returns Continue or Rollback: after the verdict, from a state of its own, until the canary is promoted
                         or deleted

A canary is rolled back as soon as any criterion significantly fails. It is aborted immediately when it cannot work at all, or is
far slower than its control on equal hardware. It is promoted when every criterion significantly passes, after the soak. A canary
with neither by the deadline is inconclusive; the trial of a setting on different hardware is so at once. Missing data never
promotes. Neither does outdated evidence: blocks excluded for unequal loads stand against a promotion when they are many or the
latest. `criteria` has the criteria and their alphas, `state` the counts.

An extension adds no risk of a wrong verdict. The bounds of promote tests are valid at any time, so further blocks cost nothing.
The alpha of rollback tests is spent by the deadline, so no rollback follows from them later. Evidence that would have rolled
back prevents the promotion.

Guarantees: a verdict other than Continue is final, if the state that `evaluate_analysis` returns is kept; only an extension
continues an inconclusive one. A block costs well under a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aerie.analysis import formatting, messages
from aerie.analysis.comparison import Comparison
from aerie.analysis.criteria.criterion import FAILED_REQUESTS, TOKENS_PER_STEP, Criterion, CriterionTest
from aerie.analysis.criteria.history_fit import (
    MIN_COMPARED_BLOCKS,
    AnalysisPlans,
    assess_history,
    with_passed_analysis,
    with_tested_history,
)
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.sequence_parameters import build_sequence_parameters
from aerie.analysis.criteria.table import build_criteria, build_faster_test, crashes_alpha, failed_requests_alpha
from aerie.analysis.equivalence import EQUIVALENCE_ALPHA
from aerie.analysis.state import ABORT_TIME_PER_OUTPUT_TOKEN_RATIO, ABORT_TIME_TO_FIRST_TOKEN_RATIO, AnalysisState, VerdictOutcome
from aerie.analysis.statistics.confidence_sequence import PairedMoments, mean_lower_bound, mean_upper_bound, ratio_bounds
from aerie.analysis.statistics.shares import ShareCounts

MAX_DROPPED_BLOCK_SHARE = 0.1
"""Largest share of dropped blocks with which a canary may be promoted."""
MAX_UNMATCHED_BLOCK_SHARE = 0.2
"""Largest share of blocks excluded for unequal loads with which a canary may be promoted, unless as many have matched since."""
MIN_LATEST_MATCHED_BLOCKS = 2
"""Number of latest blocks none of which may be excluded for unequal loads."""
ABORT_ZERO_ACCEPTANCE_BLOCKS = 2
"""Consecutive blocks without one accepted token that abort a rollout."""
ABORT_SLOW_BLOCKS = 2
"""Consecutive far slower, far later or stalled blocks that abort a rollout: one alone may be a pod's hiccup."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of an analysis at one moment, with its message and the comparisons for the status."""

    outcome: VerdictOutcome
    message: str
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class _Requirements:
    """What a promotion needs of the criteria, and has not yet: the verdict and the status read the same."""

    unmet_tests: Mapping[str, Sequence[CriterionTest]]
    """Unmet promote tests by criterion; without the criteria that have none."""
    faster: Criterion | None
    """Criterion of time per output token if the canary is significantly faster, which replaces tokens per step."""

    def is_replaced(self, criterion: Criterion) -> bool:
        """Return whether the canary's being faster takes the place of a criterion."""
        return criterion.name == TOKENS_PER_STEP and self.faster is not None

    def list_unmet(self, criteria: Sequence[Criterion]) -> list[tuple[Criterion, Sequence[CriterionTest]]]:
        """Return the criteria that prevent a promotion, with their unmet tests."""
        return [
            (criterion, self.unmet_tests[criterion.name])
            for criterion in criteria
            if criterion.name in self.unmet_tests and not self.is_replaced(criterion)
        ]


def evaluate_analysis(
    state: AnalysisState, plan: AnalysisPlan, now: float, abort_messages: Sequence[str] = ()
) -> tuple[AnalysisState, Verdict]:
    """Return the state with the verdict at `now`, and that verdict.

    `abort_messages` are sentences on the canary that end the rollout immediately: it crashes, is not ready, ...
    """
    criteria = build_criteria(plan)
    plans = with_tested_history(plan, state.peers)
    requirements = _find_requirements(state, plans.promote, criteria)
    comparisons = _build_comparisons(state, plans, criteria, None if plan.goal == "Explore" else requirements)
    if state.outcome != "Continue":
        return state, Verdict(state.outcome, state.message, comparisons)
    outcome, message = _next_outcome(state, plans, now, criteria, requirements, abort_messages)
    message += _limitation_message(state, plan, criteria)
    is_compared = state.peers.pod_effect(MIN_COMPARED_BLOCKS) is not None
    if outcome == "Continue" and state.block_count and _is_compared_by_drafts(criteria) and not is_compared:
        message += messages.STABLE_PODS_NOT_COMPARED_MESSAGE
    if outcome != "Continue":
        state = replace(state, outcome=outcome, message=message)
    return state, Verdict(outcome, message, comparisons)


def evaluate_extension(
    state: AnalysisState, plan: AnalysisPlan, now: float, extension_end_time: float
) -> tuple[AnalysisState, Verdict]:
    """Return state and verdict like `evaluate_analysis`, from the promote tests alone: it never rolls back.

    `state`: that of the analysis, without its outcome. `extension_end_time`: Unix time at which it is inconclusive again.
    """
    criteria = build_criteria(plan)
    plans = with_tested_history(plan, state.peers)
    requirements = _find_requirements(state, plans.promote, criteria)
    comparisons = _build_comparisons(state, plans, criteria, requirements)
    if state.outcome != "Continue":
        return state, Verdict(state.outcome, state.message, comparisons)
    contrary_evidence = _rollback_message(state, plans.rollback, criteria, ())
    unmet_conditions = _unmet_conditions(state, plans, now, criteria, requirements, may_roll_back=False)
    outcome: VerdictOutcome = "Inconclusive" if now >= extension_end_time else "Continue"
    if contrary_evidence:
        message = messages.contrary_evidence_message(contrary_evidence)
    elif not unmet_conditions:
        outcome, message = "Promote", _promotion_message(state, plans.promote, criteria, requirements)
    elif outcome == "Inconclusive":
        message = messages.inconclusive_message(unmet_conditions, state.elapsed_seconds(now))
    else:
        message = messages.unmet_conditions_message(unmet_conditions, state.block_count, plans.promote)
    message += _limitation_message(state, plan, criteria)
    if outcome != "Continue":
        state = replace(state, outcome=outcome, message=message)
    return state, Verdict(outcome, message, comparisons)


def check_guardrails(
    state: AnalysisState, plan: AnalysisPlan, now: float, abort_messages: Sequence[str] = (), *, has_passed: bool = False
) -> tuple[AnalysisState, Verdict]:
    """Return state and verdict like `evaluate_analysis`, from the rollback tests alone: it never promotes and has no deadline.

    The alphas are spent by `plan.max_duration_seconds` all the same, so it has to be the time for which this state is monitored.
    `has_passed`: the analysis of these pods with this plan has promoted the canary (`history_fit`).
    """
    if has_passed:
        passed_plan, criteria = with_passed_analysis(plan, state.peers)
        plans = AnalysisPlans(passed_plan, passed_plan)
        limitation_message = messages.latency_not_compared_message(plan)
    else:
        criteria, plans = build_criteria(plan), with_tested_history(plan, state.peers)
        limitation_message = _limitation_message(state, plan, criteria)
    comparisons = _build_comparisons(state, plans, criteria, None)
    if state.outcome == "Continue" and (rollback_message := _rollback_message(state, plans.rollback, criteria, abort_messages)):
        state = replace(state, outcome="Rollback", message=rollback_message + limitation_message)
    continue_message = messages.no_regression_message(state.block_count, now - state.start_time) + limitation_message
    return state, Verdict(state.outcome, state.message or continue_message, comparisons)


def _limitation_message(state: AnalysisState, plan: AnalysisPlan, criteria: Sequence[Criterion]) -> str:
    """Return the sentences on what limits the comparison; empty where nothing does."""
    message = messages.latency_not_compared_message(plan)
    if _is_compared_by_drafts(criteria) and assess_history(plan, state.peers) == "DoesNotFit":
        message += messages.HISTORY_DOES_NOT_FIT_MESSAGE
    return message


def _is_compared_by_drafts(criteria: Sequence[Criterion]) -> bool:
    """Return whether tokens per step are evaluated."""
    return any(criterion.name == TOKENS_PER_STEP and criterion.rollback_tests for criterion in criteria)


def _next_outcome(
    state: AnalysisState,
    plans: AnalysisPlans,
    now: float,
    criteria: Sequence[Criterion],
    requirements: _Requirements,
    abort_messages: Sequence[str],
) -> tuple[VerdictOutcome, str]:
    """Return the outcome at `now` of an analysis that has none yet, and its message."""
    if rollback_message := _rollback_message(state, plans.rollback, criteria, abort_messages):
        return "Rollback", rollback_message
    plan = plans.promote
    if plan.is_trial and plan.hardware_mismatch:  # pods do not move, so waiting would not help
        return "Inconclusive", messages.trial_inconclusive_message(state.block_count)
    if plan.goal == "Explore":
        message = messages.exploration_message(criteria[0], state.paired_moments.get(criteria[0].name), state.block_count, plan)
        return "Inconclusive" if now - state.start_time >= plan.max_duration_seconds else "Continue", message
    unmet_conditions = _unmet_conditions(state, plans, now, criteria, requirements)
    if not unmet_conditions:
        return "Promote", _promotion_message(state, plan, criteria, requirements)
    if now - state.start_time >= plan.max_duration_seconds:
        return "Inconclusive", messages.inconclusive_message(unmet_conditions, plan.max_duration_seconds)
    if not state.block_count and not state.dropped_block_count:
        return "Continue", messages.no_block_yet_message(plan)
    return "Continue", messages.unmet_conditions_message(unmet_conditions, state.block_count, plan)


def _promotion_message(
    state: AnalysisState, plan: AnalysisPlan, criteria: Sequence[Criterion], requirements: _Requirements
) -> str:
    """Return the message of a promotion, for which nothing is unmet."""
    replaced_criterion = criteria[0] if criteria[0].name in requirements.unmet_tests else None
    met_criteria = [criterion for criterion in criteria if criterion.promote_tests and criterion is not replaced_criterion]
    return messages.promotion_message(met_criteria, state.paired_moments, plan, state.equivalence, replaced_criterion)


def _rollback_message(
    state: AnalysisState, plan: AnalysisPlan, criteria: Sequence[Criterion], abort_messages: Sequence[str]
) -> str:
    """Return the reason to roll back; empty while there is none."""
    if abort_messages:
        return " ".join(abort_messages)
    if state.crashes.is_canary_worse(crashes_alpha(plan)):
        return messages.crashes_message(state.crashes)
    if state.zero_acceptance_streak >= ABORT_ZERO_ACCEPTANCE_BLOCKS:
        return messages.zero_acceptance_message(state.zero_acceptance_streak)
    if state.stalled_streak >= ABORT_SLOW_BLOCKS:
        return messages.stalled_message(state.stalled_streak, state.canary_load)
    if state.slow_output_streak >= ABORT_SLOW_BLOCKS and not plan.hardware_mismatch:
        return messages.far_slower_message(state.slow_output_streak, ABORT_TIME_PER_OUTPUT_TOKEN_RATIO, "time per output token")
    if state.slow_first_token_streak >= ABORT_SLOW_BLOCKS and not plan.hardware_mismatch:
        return messages.far_slower_message(state.slow_first_token_streak, ABORT_TIME_TO_FIRST_TOKEN_RATIO, "time to first token")
    if state.equivalence is not None and state.equivalence.is_lossy(EQUIVALENCE_ALPHA / 2**plan.inconclusive_attempts):
        return messages.lossy_message(state.equivalence)
    return _failed_criterion_message(state, plan, criteria) if state.block_count >= plan.min_blocks else ""


def is_mean_test_met(test: CriterionTest, criterion: Criterion, pairs: PairedMoments, plan: AnalysisPlan) -> bool:
    """Return whether a test of means has rejected its opposite.

    For a test that asks for no significance, return whether the estimate itself meets it.
    """
    if test.estimate_suffices:
        return test.sign * pairs.score_mean(test.ratio, test.offset) > 0
    parameters = build_sequence_parameters(test, criterion, plan, pairs)
    if test.sign > 0:
        return mean_lower_bound(pairs, test.ratio, test.offset, parameters) > 0
    return mean_upper_bound(pairs, test.ratio, test.offset, parameters) < 0


def is_share_test_met(test: CriterionTest, criterion: Criterion, shares: ShareCounts, plan: AnalysisPlan) -> bool:
    """Return whether a share is significantly as good as the test requires, by exact bounds of counts."""
    dispersion = plan.dispersion_of(criterion.name)
    inflation = dispersion.inflation if dispersion.batch_count else 1.0
    if shares.is_below(test.ratio, test.offset, test.alpha, inflation):
        return True
    return test.alternative_ratio > 0 and shares.is_below(test.alternative_ratio, 0.0, test.alpha, inflation)


def _is_met(test: CriterionTest, criterion: Criterion, state: AnalysisState, plan: AnalysisPlan) -> bool:
    """Return whether a test that a promotion needs is met; False where the criterion is not counted."""
    if criterion.relative:
        pairs = state.paired_moments.get(criterion.name)
        return pairs is not None and is_mean_test_met(test, criterion, pairs, plan)
    shares = state.share_counts.get(criterion.name)
    return shares is not None and is_share_test_met(test, criterion, shares, plan)


def _find_requirements(state: AnalysisState, plan: AnalysisPlan, criteria: Sequence[Criterion]) -> _Requirements:
    """Return what a promotion needs of the criteria, and has not yet."""
    unmet_tests = {
        criterion.name: tests
        for criterion in criteria
        if (tests := [test for test in criterion.promote_tests if not _is_met(test, criterion, state, plan)])
    }
    return _Requirements(unmet_tests, _faster_criterion(state, plan))


def _faster_criterion(state: AnalysisState, plan: AnalysisPlan) -> Criterion | None:
    """Return the criterion of time per output token if the canary is significantly faster: users get more, whatever it drafts."""
    faster_test = build_faster_test(plan)
    if plan.is_trial or faster_test is None:
        return None
    criterion, test = faster_test
    pairs = state.paired_moments.get(criterion.name)
    if (
        pairs is None
        or state.latest_matched_streak < MIN_LATEST_MATCHED_BLOCKS
        or not is_mean_test_met(test, criterion, pairs, plan)
    ):
        return None
    return criterion


def _failed_criterion_message(state: AnalysisState, plan: AnalysisPlan, criteria: Sequence[Criterion]) -> str:
    """Return the message on the first criterion that significantly fails; empty when none does."""
    for criterion in criteria:
        pairs = state.paired_moments.get(criterion.name)
        for test in criterion.rollback_tests if pairs else ():
            assert pairs is not None
            if is_mean_test_met(test, criterion, pairs, plan) and not (
                criterion.name == TOKENS_PER_STEP and _faster_criterion(state, plan)
            ):
                parameters = build_sequence_parameters(test, criterion, plan, pairs)
                return messages.failed_criterion_message(criterion, test, pairs, parameters)
        if criterion.name == FAILED_REQUESTS and state.failed_requests.is_canary_worse(failed_requests_alpha(plan)):
            return messages.failed_requests_message(state.failed_requests)
    return ""


def _unmet_conditions(
    state: AnalysisState,
    plans: AnalysisPlans,
    now: float,
    criteria: Sequence[Criterion],
    requirements: _Requirements,
    *,
    may_roll_back: bool = True,
) -> list[str]:
    """Return the conditions that a promotion still needs, as clauses, the most important first; empty when all are met.

    `may_roll_back`: False where the rollback tests decide nothing any more.
    """
    plan = plans.promote
    elapsed_seconds = state.elapsed_seconds(now)
    seconds_per_block = elapsed_seconds / state.block_count if state.block_count else plan.block_seconds
    unmet_criteria = requirements.list_unmet(criteria)
    conditions: list[str] = []
    other_unmet_tests: list[messages.UnmetTest] = []
    for criterion, tests in unmet_criteria:
        pairs = state.paired_moments.get(criterion.name)
        if pairs is None:
            conditions.append(messages.criterion_not_counted_message(criterion))
        elif criterion is criteria[0] and criterion.rollback_tests:
            message = _first_unmet_criterion_message(
                criterion, tests[0], pairs, plans, seconds_per_block, may_roll_back=may_roll_back
            )
            conditions.append(message)
        else:
            other_unmet_tests.append(_unmet_test(criterion, tests[0], pairs, state, plan))
    if state.crashes.is_suspicious:
        conditions.append(messages.suspicious_crashes_message(state.crashes))
    if plan.hardware_mismatch and plan.drafts_not_comparable_reason:
        conditions.append(messages.nothing_compared_message(plan))
    if other_unmet_tests:
        conditions.append(messages.other_unmet_criteria_message(other_unmet_tests, seconds_per_block))
    is_latency_unmet = any(criterion.needs_load_match for criterion, _ in unmet_criteria)
    if state.block_count and (load_message := _load_mismatch_message(state, criteria, is_latency_unmet=is_latency_unmet)):
        conditions.append(load_message)
    if state.block_count < plan.min_blocks:
        conditions.append(messages.too_few_blocks_message(state.block_count, plan.min_blocks))
    if state.dropped_block_count > MAX_DROPPED_BLOCK_SHARE * (state.block_count + state.dropped_block_count):
        conditions.append(messages.dropped_blocks_message(state.dropped_block_count, state.block_count, state.excluded_pods))
    if not conditions and elapsed_seconds < plan.min_duration_seconds:
        conditions.append(messages.soak_message(plan.min_duration_seconds - elapsed_seconds))
    return conditions


def _first_unmet_criterion_message(
    criterion: Criterion,
    test: CriterionTest,
    pairs: PairedMoments,
    plans: AnalysisPlans,
    seconds_per_block: float,
    *,
    may_roll_back: bool,
) -> str:
    """Return the clause on the first criterion of the table: its unmet test, and the bound that would roll back."""
    promote, rollback = (
        (sided_test, build_sequence_parameters(sided_test, criterion, plans.of(sided_test), pairs))
        for sided_test in (test, criterion.rollback_tests[0])
    )
    return messages.unmet_criterion_message(criterion, pairs, promote, rollback, seconds_per_block, may_roll_back=may_roll_back)


def _unmet_test(
    criterion: Criterion, test: CriterionTest, pairs: PairedMoments, state: AnalysisState, plan: AnalysisPlan
) -> messages.UnmetTest:
    """Return a further unmet test with the parameters of its mean, or the counts of its share."""
    if criterion.relative:
        return messages.UnmetTest(criterion, test, pairs, build_sequence_parameters(test, criterion, plan, pairs))
    shares = state.share_counts[criterion.name]
    return messages.UnmetTest(criterion, test, pairs, None, shares, _needed_request_factor(test, criterion, shares, plan))


def _load_mismatch_message(state: AnalysisState, criteria: Sequence[Criterion], *, is_latency_unmet: bool) -> str:
    """Return the clause that too many blocks, or the latest, are excluded from latency; empty where they are not.

    Results from the counted blocks may no longer hold then.
    """
    if not any(criterion.needs_load_match and criterion.promote_tests for criterion in criteria):
        return ""
    if not state.load_match.is_matched and (is_latency_unmet or state.latest_matched_streak < MIN_LATEST_MATCHED_BLOCKS):
        return messages.load_mismatch_message(state.load_match)
    is_share_exceeded = state.unmatched_block_count > MAX_UNMATCHED_BLOCK_SHARE * state.block_count
    if is_share_exceeded and state.latest_matched_streak < state.unmatched_block_count:
        return messages.unmatched_blocks_message(state.unmatched_block_count, state.block_count, state.latest_matched_streak)
    if state.latest_matched_streak < min(MIN_LATEST_MATCHED_BLOCKS, state.block_count):
        return messages.latest_blocks_unmatched_message()
    return ""


def _needed_request_factor(
    test: CriterionTest, criterion: Criterion, shares: ShareCounts, plan: AnalysisPlan, max_factor: float = 1024.0
) -> float | None:
    """Return how many times as many requests the test needs if nothing changes; None where not even `max_factor` suffices."""
    if not is_share_test_met(test, criterion, shares.scale_by(max_factor), plan):
        return None
    low, high = 1.0, max_factor
    while high > 1.05 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_share_test_met(test, criterion, shares.scale_by(middle), plan) else (middle, high)
    return high


def _build_comparisons(
    state: AnalysisState, plans: AnalysisPlans, criteria: Sequence[Criterion], requirements: _Requirements | None
) -> tuple[Comparison, ...]:
    """Return the comparisons of all counted criteria, and that of the greedy answers once they have come.

    `requirements`: what a promotion needs of the criteria; None where nothing can promote.
    """
    comparisons = tuple(
        _with_requirement(_build_comparison(criterion, state, plans), criterion, requirements)
        for criterion in criteria
        if criterion.name in state.paired_moments
    )
    return comparisons if state.equivalence is None else (*comparisons, state.equivalence.comparison)


def _with_requirement(comparison: Comparison, criterion: Criterion, requirements: _Requirements | None) -> Comparison:
    if requirements is None or not criterion.promote_tests:
        return comparison
    return comparison.with_requirement(
        formatting.format_requirements(criterion.promote_tests),
        is_met=criterion.name not in requirements.unmet_tests,
        is_replaced=requirements.is_replaced(criterion),
    )


def _build_comparison(criterion: Criterion, state: AnalysisState, plans: AnalysisPlans) -> Comparison:
    """Return the criterion as the status shows it: relative to the control, with the bounds of the tests that decide, if any."""
    pairs = state.paired_moments[criterion.name]
    if pairs.control_mean <= 0:
        return Comparison(metric=criterion.name, sample_count=pairs.count)
    estimate = round(pairs.canary_mean / pairs.control_mean - 1, 4)
    if not (criterion.rollback_tests or criterion.promote_tests):
        return Comparison(metric=criterion.name, sample_count=pairs.count, estimate=estimate)
    lower, upper = comparison_bounds(criterion, pairs, plans)
    return Comparison(
        metric=criterion.name,
        sample_count=pairs.count,
        estimate=estimate,
        lower=round(lower - 1, 4) if abs(lower) < formatting.MAX_REPORTED_RATIO else None,
        upper=round(upper - 1, 4) if abs(upper) < formatting.MAX_REPORTED_RATIO else None,
    )


def comparison_bounds(criterion: Criterion, pairs: PairedMoments, plans: AnalysisPlans) -> tuple[float, float]:
    """Return the bounds of canary / control, each from the test of that side; where only one side has a test, both from it."""
    tests = [*criterion.rollback_tests, *reversed(criterion.promote_tests)]
    lower_test = next((test for test in tests if test.sign > 0), tests[0])
    upper_test = next((test for test in tests if test.sign < 0), tests[0])
    return ratio_bounds(
        pairs,
        build_sequence_parameters(lower_test, criterion, plans.of(lower_test), pairs),
        build_sequence_parameters(upper_test, criterion, plans.of(upper_test), pairs),
    )
