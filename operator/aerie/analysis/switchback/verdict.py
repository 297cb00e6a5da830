"""The verdict on a trial by turns after each closed pair of windows, with its message.

The canary's drafter is rolled back as soon as a rollback test is significant. It is promoted when every promote test is, unless
many pairs are lost, processes are suspected to end because of it, or its advantage fades with the time after a change. A trial
with neither by the deadline is inconclusive. Missing windows never promote. `plan` has the tests.

A drafter that was accepted before its trial (`SwitchbackPlan.is_accepted`) needs no significant promote test, and MIN_QUIET_PAIRS
pairs without a significant rollback test instead. Whoever evaluates decides how long that lasts.

Lost pairs may be lost because of a drafter, so many of them prevent a promotion for the rest of the trial, and roll back at the
deadline in a pod that users do not reach yet. Late pairs (`state`)
do not: whether the operator sends the first call of a pair in time depends on neither drafter. They are no evidence either, so a
canary whose pairs are all late is never promoted, and the message has their number.

Guarantees: a verdict other than Continue is final, if the state that `evaluate_switchback` returns is saved. Equal drafters are
rolled back with a chance of at most the sum of the rollback alphas. A canary at the margin is promoted with a chance of at most
PROMOTE_ALPHA + PROMOTE_DEADLINE_ALPHA, unless it was accepted before (`sign_flip`, `carryover` and `crash_rate` have the
conditions).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from aerie.analysis.comparison import Comparison
from aerie.analysis.state import VerdictOutcome
from aerie.analysis.statistics.confidence_sequence import SequenceParameters, ratio_bounds
from aerie.analysis.switchback.carryover import CarryoverEstimate, estimate_carryover
from aerie.analysis.switchback.plan import (
    COMPARED_CRITERIA,
    CRASHES_ALPHA,
    FAILED_REQUESTS_ALPHA,
    FAILURE_MARGIN,
    FAILURE_RATIO,
    PROMOTE_ALPHA,
    PROMOTE_DEADLINE_ALPHA,
    PROMOTE_TESTS,
    ROLLBACK_TESTS,
    SwitchbackPlan,
    SwitchbackTest,
)
from aerie.analysis.switchback.state import SwitchbackState

MAX_LOST_PAIR_SHARE = 0.25
"""Largest share of lost pairs with which a canary may be promoted."""
MIN_QUIET_PAIRS = 8
"""Counted pairs without which no drafter is promoted that was accepted before."""
INTERVAL_ALPHA = 0.025
"""Alpha of each bound of an estimate's interval."""
_TIGHTEST_UNITS = 30.0


@dataclass(frozen=True, slots=True)
class SwitchbackVerdict:
    """The outcome of a trial at one moment, with its message and the comparisons for the status."""

    outcome: VerdictOutcome
    message: str
    comparisons: tuple[Comparison, ...]
    carryover: CarryoverEstimate | None
    """Measured carry-over in tokens per step; None while there are too few pairs."""


def evaluate_switchback(
    state: SwitchbackState, plan: SwitchbackPlan, elapsed_seconds: float
) -> tuple[SwitchbackState, SwitchbackVerdict]:
    """Return the state with the verdict `elapsed_seconds` after the start of the trial, and that verdict."""
    is_deadline, carryover = elapsed_seconds >= plan.max_duration_seconds, estimate_carryover(state.carryover_moments)
    comparisons = _comparisons(state, plan, is_deadline=is_deadline)
    if state.outcome == "Continue":
        outcome, message = _next_outcome(state, plan, carryover, is_deadline=is_deadline)
        if outcome != "Continue":
            state = replace(state, outcome=outcome, message=message)
    else:
        outcome, message = state.outcome, state.message
    return state, SwitchbackVerdict(outcome, message, comparisons, carryover)


def _next_outcome(
    state: SwitchbackState, plan: SwitchbackPlan, carryover: CarryoverEstimate | None, *, is_deadline: bool
) -> tuple[VerdictOutcome, str]:
    """Return the outcome of a trial that has none yet, and its message."""
    if reason := _rollback_reason(state, plan):
        return "Rollback", reason
    missing = _missing_evidence(state, plan, carryover, is_deadline=is_deadline)
    if not missing and plan.is_accepted:
        return "Promote", (
            "The drafter was accepted by its shadow evaluation. Under the traffic of users, by turns in the same pods, no metric "
            f"is significantly worse in {state.counted_pairs} pairs of windows: tokens per step "
            f"{_estimate_text(state, plan.tests['EnoughTokens'])}."
        )
    if not missing:
        titles = list(dict.fromkeys(plan.tests[name].criterion.title for name in PROMOTE_TESTS))
        titles += ["the share of failed requests"] if not plan.is_isolated else []
        return "Promote", (
            f"In {state.counted_pairs} pairs of windows by turns in the same pods, {', '.join(titles[:-1])} and {titles[-1]} are "
            f"significantly good enough: {_estimate_text(state, plan.tests['EnoughTokens'])}."
        )
    text = "; ".join(missing)
    if is_deadline and plan.is_isolated and _has_lost_many(state):
        return "Rollback", (
            f"{state.lost_pairs} of {state.lost_pairs + state.counted_pairs} pairs of windows are lost: the engine ended, did "
            "not answer, or failed to change the drafter. No user is served with a drafter that could not be compared."
        )
    if is_deadline:
        return "Inconclusive", (
            f"After {plan.max_duration_seconds / 60:.0f} min by turns the drafters cannot be distinguished well enough: {text}."
            f"{_late_text(state)} "
            "The pods serve with the stable drafter. Promote manually, or repeat the trial with more pods or traffic."
        )
    counted = f"{state.counted_pairs} pairs of windows are counted."
    return "Continue", f"{counted} A promotion still needs: {text}.{_late_text(state)}"


def _rollback_reason(state: SwitchbackState, plan: SwitchbackPlan) -> str:
    """Return the reason to roll back; empty while there is none."""
    crashes = state.crashes
    if crashes.is_canary_worse(CRASHES_ALPHA * plan.error_share):
        return (
            f"Engines ended {crashes.canary_crashes} times in {crashes.canary_pod_hours:.1f} pod-hours with the canary's drafter "
            f"and {crashes.control_crashes} times in {crashes.control_pod_hours:.1f} with the stable one. Running requests were "
            "lost. Check the engines' logs before another trial."
        )
    if state.failed_requests.is_canary_worse(FAILED_REQUESTS_ALPHA * plan.error_share):
        failures = state.failed_requests
        return (
            f"{failures.canary_events:.0f} requests failed with the canary's drafter and {failures.control_events:.0f} with the "
            "stable one, of equally many. Check the engines' logs before another trial."
        )
    for name in ROLLBACK_TESTS:
        test = plan.tests[name]
        if name == "FewerTokens" and _is_met(state, plan.tests["FasterOutput"]):
            continue
        if _is_met(state, test):
            limit = f" by more than {100 * abs(test.limit):.0f} %" if test.limit else ""
            direction = "above" if test.sign > 0 else "below"
            return (
                f"The {test.criterion.title} is significantly {direction} the stable drafter's{limit}, by turns in the same "
                f"pods: {_estimate_text(state, test)} in {state.counted_pairs} pairs of windows. Clients would wait longer."
            )
    return ""


def _missing_evidence(
    state: SwitchbackState, plan: SwitchbackPlan, carryover: CarryoverEstimate | None, *, is_deadline: bool
) -> list[str]:
    """Return what a promotion still needs, as clauses; empty if nothing."""
    missing = _missing_tests(state, plan, is_deadline=is_deadline) if not plan.is_accepted else []
    if plan.is_accepted and state.counted_pairs < MIN_QUIET_PAIRS:
        missing.append(f"{MIN_QUIET_PAIRS} pairs of windows")
    if state.crashes.is_suspicious:
        missing.append(
            f"more time without a crash (with the canary's drafter {state.crashes.canary_crashes}, "
            f"with the stable one {state.crashes.control_crashes})"
        )
    if _has_lost_many(state):
        missing.append(f"fewer lost pairs of windows ({state.lost_pairs} of {state.lost_pairs + state.counted_pairs})")
    if carryover is not None and carryover.upper < 0:
        missing.append(f"an advantage that does not fade after a change of the drafter ({100 * carryover.estimate:+.1f} %)")
    return missing


def _missing_tests(state: SwitchbackState, plan: SwitchbackPlan, *, is_deadline: bool) -> list[str]:
    """Return which tests a promotion still needs, as clauses; empty if none."""
    missing = []
    for name in PROMOTE_TESTS:
        test = plan.tests[name]
        if not _is_promote_test_met(state, plan, test, is_deadline=is_deadline) and not _is_replaced(state, plan, test):
            direction = "above" if test.sign > 0 else "below"
            missing.append(
                f"{test.criterion.title} significantly {direction} {1 + test.limit:.4g} times the stable drafter's "
                f"({_estimate_text(state, test)})"
            )
    promote_alpha = PROMOTE_ALPHA * plan.error_share
    if not plan.is_isolated and not state.request_shares.is_below(FAILURE_RATIO, FAILURE_MARGIN, promote_alpha):
        missing.append("enough requests to exclude failures")
    return missing


def _has_lost_many(state: SwitchbackState) -> bool:
    return state.lost_pairs > MAX_LOST_PAIR_SHARE * (state.lost_pairs + state.counted_pairs)


def _late_text(state: SwitchbackState) -> str:
    """Return how many pairs are late, and why, as a sentence after a blank; empty for none."""
    if not state.late_pairs:
        return ""
    return (
        f" {state.late_pairs} more pairs are no evidence, because their drafter was changed too late or not at all: the operator "
        "was busy or away, or the rollout was paused."
    )


def _is_met(state: SwitchbackState, test: SwitchbackTest) -> bool:
    """Return whether a test is significant."""
    evidence = state.tests.get(test.name)
    return evidence is not None and evidence.is_significant(test.alpha)


def _requirement(test: SwitchbackTest) -> str:
    """Return what a promote test shows, in short."""
    limit = f"{100 * test.limit:+.1f} %" if test.limit else "the stable drafter's"
    return f"{'above' if test.sign > 0 else 'below'} {limit}"


def _is_promote_test_met(state: SwitchbackState, plan: SwitchbackPlan, test: SwitchbackTest, *, is_deadline: bool) -> bool:
    """Return whether a promote test is significant: at any time, or by the look at the deadline."""
    return _is_met(state, test) or (is_deadline and _is_met_at_deadline(state, test, plan.error_share))


def _is_replaced(state: SwitchbackState, plan: SwitchbackPlan, test: SwitchbackTest) -> bool:
    """Return whether a promotion needs no such test, because the canary's drafter is significantly faster."""
    return test.name == "EnoughTokens" and _is_met(state, plan.tests["FasterOutput"])


def _is_met_at_deadline(state: SwitchbackState, test: SwitchbackTest, error_share: float) -> bool:
    """Return whether a promote test is significant by the look at the deadline."""
    evidence = state.tests.get(test.name)
    return evidence is not None and evidence.is_significant_at_deadline(PROMOTE_DEADLINE_ALPHA * error_share)


def _comparisons(state: SwitchbackState, plan: SwitchbackPlan, *, is_deadline: bool) -> tuple[Comparison, ...]:
    """Return the estimate of each criterion with its interval, and what a promotion needs of it.

    The intervals are t confidence sequences of the units' scores: for people, as rates for normal scores. The tests decide.
    """
    tests = {} if plan.is_accepted else {plan.tests[name].criterion.name: plan.tests[name] for name in PROMOTE_TESTS}
    parameters = SequenceParameters(INTERVAL_ALPHA, _TIGHTEST_UNITS)
    comparisons = []
    for criterion in COMPARED_CRITERIA:
        pairs = state.moments.get(criterion.name)
        if pairs is not None and pairs.control_mean > 0:
            lower, upper = ratio_bounds(pairs, parameters, parameters)
            ratio = pairs.canary_mean / pairs.control_mean
            comparison = Comparison(criterion.name, pairs.count, estimate=ratio - 1, lower=lower - 1, upper=upper - 1)
            if test := tests.get(criterion.name):
                comparison = comparison.with_requirement(
                    _requirement(test),
                    is_met=_is_promote_test_met(state, plan, test, is_deadline=is_deadline),
                    is_replaced=_is_replaced(state, plan, test),
                )
            comparisons.append(comparison)
    return tuple(comparisons)


def _estimate_text(state: SwitchbackState, test: SwitchbackTest) -> str:
    """Return the estimate of a test's criterion as text."""
    pairs = state.moments.get(test.criterion.name)
    if pairs is None or pairs.control_mean <= 0:
        return "not measured yet"
    return f"{100 * (pairs.canary_mean / pairs.control_mean - 1):+z.1f} %"
