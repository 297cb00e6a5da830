"""The verdict on a canary after each closed block, with the reason in a sentence.

    judge   says Continue, Promote, Rollback or Inconclusive, and why
    watch   says Continue or Rollback: after the verdict, from a state of its own, until the canary is promoted or gone

A canary is rolled back as soon as any criterion certainly fails, or at once when it cannot work at all or is far slower than its
control on like hardware (a hard stop). It is accepted when every criterion certainly holds, after the soak. What is neither by
the deadline is inconclusive, and so is at once the trial of a setting on unlike hardware; missing data never accepts, and
neither does evidence that is none of late: blocks left out for unlike loads stand against an acceptance when they are many or
the latest. Which criteria, and how certain: `criteria`; what is known: `counting`.

Guarantees: a verdict other than Continue stays once it was given, if the state that `judge` returns is kept; a block costs well
under a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aerie.analysis import messages
from aerie.analysis.criteria import (
    FAILED_REQUESTS,
    TOKENS_PER_STEP,
    AnalysisPlan,
    Criterion,
    CriterionTest,
    build_criteria,
    build_faster_test,
    build_sequence_parameters,
    crashes_alpha,
    failed_requests_alpha,
)
from aerie.analysis.equivalence import EQUIVALENCE_ALPHA
from aerie.analysis.state import ABORT_TIME_PER_OUTPUT_TOKEN_RATIO, ABORT_TIME_TO_FIRST_TOKEN_RATIO, AnalysisState, VerdictOutcome
from aerie.analysis.statistics.confidence_sequence import PairedMoments, mean_lower_bound, mean_upper_bound, ratio_bounds
from aerie.analysis.statistics.shares import ShareCounts
from aerie.api.status import MetricComparison

MAX_DROPPED_BLOCK_SHARE = 0.1
"""Share of the blocks that may be dropped before nothing is accepted any more."""
MAX_UNMATCHED_BLOCK_SHARE = 0.2
"""Share of the blocks that may be left out for unlike loads before nothing is accepted any more."""
MIN_LATEST_MATCHED_BLOCKS = 2
"""Blocks, the latest, none of which may be left out."""
ABORT_ZERO_ACCEPTANCE_BLOCKS = 2
"""Blocks in a row without one accepted token that stop a rollout at once."""
ABORT_SLOW_BLOCKS = 2
"""Far slower or far later blocks in a row that stop a rollout at once: one may be a pod's hiccup."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be made of a state."""

    outcome: VerdictOutcome
    message: str
    comparisons: tuple[MetricComparison, ...]


def evaluate_analysis(
    state: AnalysisState, plan: AnalysisPlan, now: float, abort_messages: Sequence[str] = ()
) -> tuple[AnalysisState, Verdict]:
    """The verdict at `now`. `stops` are sentences on the canary that end the rollout at once: it crashes, is not ready, ..."""
    table = build_criteria(plan)
    compared = _build_comparisons(state, plan, table)
    if state.verdict != "Continue":
        return state, Verdict(state.verdict, state.reason, compared)
    verdict, reason = _next_outcome(state, plan, now, table, abort_messages)
    reason += messages.latency_not_compared_message(plan)
    if verdict != "Continue":
        state = replace(state, verdict=verdict, reason=reason)
    return state, Verdict(verdict, reason, compared)


def check_guardrails(
    state: AnalysisState, plan: AnalysisPlan, now: float, abort_messages: Sequence[str] = ()
) -> tuple[AnalysisState, Verdict]:
    """`judge` with only the tests armed that roll back; it accepts nothing, and the deadline does not end it.

    Their alphas are spent by `terms.deadline` all the same, so it is to be the time for which this state is watched.
    """
    table = build_criteria(plan)
    compared = _build_comparisons(state, plan, table)
    if state.verdict == "Continue" and (against := _rollback_message(state, plan, table, abort_messages)):
        state = replace(state, verdict="Rollback", reason=against + messages.latency_not_compared_message(plan))
    nothing = messages.no_regression_message(state.blocks, now - state.began) + messages.latency_not_compared_message(plan)
    return state, Verdict(state.verdict, state.reason or nothing, compared)


def _next_outcome(
    state: AnalysisState, terms: AnalysisPlan, now: float, table: Sequence[Criterion], stops: Sequence[str]
) -> tuple[VerdictOutcome, str]:
    if against := _rollback_message(state, terms, table, stops):
        return "Rollback", against
    if terms.is_trial and terms.unlike:  # pods do not move: nothing would come of waiting
        return "Inconclusive", messages.trial_inconclusive_message(state.blocks)
    if terms.goal == "Explore":
        told = messages.exploration_message(table[0], state.pairs.get(table[0].name), state.blocks, terms)
        return "Inconclusive" if now - state.began >= terms.deadline else "Continue", told
    lacking = _unmet_conditions(state, terms, now, table)
    if not lacking:
        instead = _faster_criterion(state, terms) if _unmet_tests(table[0], state, terms) else None
        shown = [one for one in table if one.promote_tests and (instead is None or one is not table[0])]
        return "Promote", messages.promotion_message(shown, state.pairs, terms, state.answers, table[0] if instead else None)
    if now - state.began >= terms.deadline:
        return "Inconclusive", messages.inconclusive_message(lacking, terms.deadline)
    if not state.blocks and not state.dropped:
        return "Continue", messages.no_block_yet_message(terms)
    return "Continue", messages.unmet_conditions_message(lacking, state.blocks, terms)


def _rollback_message(state: AnalysisState, terms: AnalysisPlan, table: Sequence[Criterion], stops: Sequence[str]) -> str:
    """Why to roll back; empty when nothing is known against the canary."""
    if stops:
        return " ".join(stops)
    if state.crashes.is_canary_worse(crashes_alpha(terms)):
        return messages.crashes_message(state.crashes)
    if state.silent >= ABORT_ZERO_ACCEPTANCE_BLOCKS:
        return messages.zero_acceptance_message(state.silent)
    if state.stalled >= ABORT_SLOW_BLOCKS:
        return messages.stalled_message(state.stalled, state.load)
    if state.slow >= ABORT_SLOW_BLOCKS and not terms.unlike:
        return messages.far_slower_message(state.slow, ABORT_TIME_PER_OUTPUT_TOKEN_RATIO, "time per output token")
    if state.late >= ABORT_SLOW_BLOCKS and not terms.unlike:
        return messages.far_slower_message(state.late, ABORT_TIME_TO_FIRST_TOKEN_RATIO, "time to first token")
    if state.answers is not None and state.answers.is_lossy(EQUIVALENCE_ALPHA / 2**terms.attempt):
        return messages.lossy_message(state.answers)
    return _failed_criterion_message(state, terms, table) if state.blocks >= terms.min_blocks else ""


def is_mean_test_met(test: CriterionTest, criterion: Criterion, pairs: PairedMoments, plan: AnalysisPlan) -> bool:
    """Whether a test of means has rejected its opposite; of one that asks for no certainty, whether the estimate is so."""
    if test.estimate_suffices:
        return test.sign * pairs.score_mean(test.ratio, test.offset) > 0
    tuned = build_sequence_parameters(test, criterion, plan, pairs)
    if test.sign > 0:
        return mean_lower_bound(pairs, test.ratio, test.offset, tuned) > 0
    return mean_upper_bound(pairs, test.ratio, test.offset, tuned) < 0


def is_share_test_met(test: CriterionTest, criterion: Criterion, shares: ShareCounts, plan: AnalysisPlan) -> bool:
    """Whether a share is certainly as good as the test asks, by counts."""
    scatter = plan.dispersion_of(criterion.name)
    inflation = scatter.inflation if scatter.batches else 1.0
    if shares.is_below(test.ratio, test.offset, test.alpha, inflation):
        return True
    return test.alternative_ratio > 0 and shares.is_below(test.alternative_ratio, 0.0, test.alpha, inflation)


def _is_met(test: CriterionTest, criterion: Criterion, state: AnalysisState, terms: AnalysisPlan) -> bool:
    """Whether what has to hold to be accepted certainly does."""
    if criterion.relative:
        pairs = state.pairs.get(criterion.name)
        return pairs is not None and is_mean_test_met(test, criterion, pairs, terms)
    shares = state.shares.get(criterion.name)
    return shares is not None and is_share_test_met(test, criterion, shares, terms)


def _unmet_tests(criterion: Criterion, state: AnalysisState, terms: AnalysisPlan) -> list[CriterionTest]:
    """What is still to be shown of a criterion."""
    return [test for test in criterion.promote_tests if not _is_met(test, criterion, state, terms)]


def _faster_criterion(state: AnalysisState, terms: AnalysisPlan) -> Criterion | None:
    """The row of time per output token, where the canary is certainly faster: users get more, whatever it drafts."""
    found = build_faster_test(terms)
    if terms.is_trial or found is None:
        return None
    row, test = found
    pairs = state.pairs.get(row.name)
    return (
        row
        if pairs is not None and state.latest >= MIN_LATEST_MATCHED_BLOCKS and is_mean_test_met(test, row, pairs, terms)
        else None
    )


def _failed_criterion_message(state: AnalysisState, terms: AnalysisPlan, table: Sequence[Criterion]) -> str:
    """The sentence on the first criterion that certainly fails; empty when none does."""
    for criterion in table:
        pairs = state.pairs.get(criterion.name)
        for test in criterion.rollback_tests if pairs else ():
            assert pairs is not None
            if is_mean_test_met(test, criterion, pairs, terms) and not (
                criterion.name == TOKENS_PER_STEP and _faster_criterion(state, terms)
            ):
                return messages.failed_criterion_message(
                    criterion, test, pairs, build_sequence_parameters(test, criterion, terms, pairs)
                )
        if criterion.name == FAILED_REQUESTS and state.events.is_canary_worse(failed_requests_alpha(terms)):
            return messages.failed_requests_message(state.events)
    return ""


def _unmet_conditions(state: AnalysisState, terms: AnalysisPlan, now: float, table: Sequence[Criterion]) -> list[str]:
    """What is missing for an acceptance, as clauses, the weightiest first; empty when nothing is."""
    lacking: list[str] = []
    also: list[messages.UnmetTest] = []
    per_block, by_load = (now - state.began) / state.blocks if state.blocks else terms.block, False
    for criterion in table:
        tests, pairs = _unmet_tests(criterion, state, terms), state.pairs.get(criterion.name)
        if not tests or (criterion.name == TOKENS_PER_STEP and _faster_criterion(state, terms)):
            continue
        by_load |= criterion.needs_load_match
        if pairs is None:
            lacking.append(messages.criterion_not_counted_message(criterion))
        elif criterion is table[0] and criterion.rollback_tests:
            against = criterion.rollback_tests[0]
            otherwise = messages.rollback_bound_message(
                criterion, against, pairs, build_sequence_parameters(against, criterion, terms, pairs)
            )
            tuned = build_sequence_parameters(tests[0], criterion, terms, pairs)
            lacking.append(messages.unmet_criterion_message(criterion, tests[0], pairs, tuned, per_block, otherwise))
        elif criterion.relative:
            also.append(
                messages.UnmetTest(criterion, tests[0], pairs, build_sequence_parameters(tests[0], criterion, terms, pairs))
            )
        else:
            more = _needed_request_factor(tests[0], criterion, state.shares[criterion.name], terms)
            also.append(messages.UnmetTest(criterion, tests[0], pairs, None, state.shares[criterion.name], more))
    if state.crashes.is_suspicious:
        lacking.append(messages.suspicious_crashes_message(state.crashes))
    if terms.unlike and terms.incomparable:
        lacking.append(messages.nothing_compared_message(terms))
    if also:
        lacking.append(messages.other_unmet_criteria_message(also, per_block))
    if state.blocks and (unlike := _load_mismatch_message(state, table, by_load=by_load)):
        lacking.append(unlike)
    if state.blocks < terms.min_blocks:
        lacking.append(messages.too_few_blocks_message(state.blocks, terms.min_blocks))
    if state.dropped > MAX_DROPPED_BLOCK_SHARE * (state.blocks + state.dropped):
        lacking.append(messages.dropped_blocks_message(state.dropped, state.blocks, state.pods_dropped))
    if not lacking and now - state.began < terms.soak:
        lacking.append(messages.soak_message(terms.soak - (now - state.began)))
    return lacking


def _load_mismatch_message(state: AnalysisState, table: Sequence[Criterion], *, by_load: bool) -> str:
    """That too many blocks, or the latest, count for no latency: what was certain of it need not be so any more."""
    if not any(one.needs_load_match and one.promote_tests for one in table):
        return ""
    if not state.demand.is_matched and (by_load or state.latest < MIN_LATEST_MATCHED_BLOCKS):
        return messages.load_mismatch_message(state.demand)
    if state.left_out > MAX_UNMATCHED_BLOCK_SHARE * state.blocks:
        return messages.unmatched_blocks_message(state.left_out, state.blocks)
    if state.latest < min(MIN_LATEST_MATCHED_BLOCKS, state.blocks):
        return messages.latest_blocks_unmatched_message()
    return ""


def _needed_request_factor(
    test: CriterionTest, criterion: Criterion, shares: ShareCounts, terms: AnalysisPlan, most: float = 1024.0
) -> float | None:
    """How many times as many requests it takes if nothing changes; None: no number of them would do."""
    if not is_share_test_met(test, criterion, shares.scale_by(most), terms):
        return None
    low, high = 1.0, most
    while high > 1.05 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_share_test_met(test, criterion, shares.scale_by(middle), terms) else (middle, high)
    return high


def _build_comparisons(state: AnalysisState, terms: AnalysisPlan, table: Sequence[Criterion]) -> tuple[MetricComparison, ...]:
    figures = tuple(_build_comparison(one, state, terms) for one in table if one.name in state.pairs)
    return figures if state.answers is None else (*figures, state.answers.comparison)


def _build_comparison(criterion: Criterion, state: AnalysisState, terms: AnalysisPlan) -> MetricComparison:
    """The criterion as the status shows it: relative to the control, with the bounds of the tests that decide, if any do."""
    pairs = state.pairs[criterion.name]
    if pairs.control <= 0:
        return MetricComparison(metric=criterion.name, blocks=pairs.count)
    if not (criterion.rollback_tests or criterion.promote_tests):
        estimate = round(pairs.canary / pairs.control - 1, 4)
        return MetricComparison(metric=criterion.name, blocks=pairs.count, estimate=estimate)
    low, high = comparison_bounds(criterion, pairs, terms)
    return MetricComparison(
        metric=criterion.name,
        blocks=pairs.count,
        estimate=round(pairs.canary / pairs.control - 1, 4),
        lower=round(low - 1, 4) if abs(low) < messages.MAX_REPORTED_RATIO else None,
        upper=round(high - 1, 4) if abs(high) < messages.MAX_REPORTED_RATIO else None,
    )


def comparison_bounds(criterion: Criterion, pairs: PairedMoments, plan: AnalysisPlan) -> tuple[float, float]:
    """Bounds of canary / control, each from the test that looks that way; where only one does, both from it."""
    tests = [*criterion.rollback_tests, *reversed(criterion.promote_tests)]
    rising = next((test for test in tests if test.sign > 0), tests[0])
    falling = next((test for test in tests if test.sign < 0), tests[0])
    return ratio_bounds(
        pairs,
        build_sequence_parameters(rising, criterion, plan, pairs),
        build_sequence_parameters(falling, criterion, plan, pairs),
    )
