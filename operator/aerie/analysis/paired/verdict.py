"""The verdict of a shadow evaluation after each batch, with its message.

The canary is rolled back as soon as a rollback test is significant: before any user has reached it. It is accepted ("Promote",
to the ramp) when both acceptance tests are, unless it fails requests. With neither by the deadline, the evaluation is
inconclusive. `plan` has the tests.

A canary that answers nothing while the control answers is rolled back after `MIN_OUTAGE_SECONDS`. That is no test between equal
drafters, but a limit: an engine that serves users is not silent for so long. Shorter outages are one event each. At the
deadline, a canary that is silent, or has failed suspiciously often, is rolled back too: it must not meet users because time is
over.

Guarantees: a verdict other than Continue is final, if the state that `evaluate_pairs` returns is saved. The message of a test has
the bound that decided. Error rates are those of `sequence` and `answers`; `benchmarks/shadow.py` simulates them.
Not guaranteed: that a canary serves live traffic as well as it answers pairs. The ramp compares live counters for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from aerie.analysis.comparison import Comparison
from aerie.analysis.criteria.criterion import FAILED_REQUESTS, TIME_PER_OUTPUT_TOKEN, TOKENS_PER_STEP
from aerie.analysis.formatting import capitalize, format_duration, join_words
from aerie.analysis.paired.answers import AnswerCounts
from aerie.analysis.paired.failures import FAILURE_INTERVAL_SECONDS, FailureCounts
from aerie.analysis.paired.plan import ACCEPT_LEVEL, FAILED_REQUESTS_ALPHA, ROLLBACK_LEVEL, SLOWER_LEVEL, PairedPlan, PairedTest
from aerie.analysis.paired.sequence import ScoreMoments, effective_bucket_count, effective_pair_count, ratio_bounds, score_moments
from aerie.analysis.paired.state import BOTH_FAILED, CANARY_FAILED, CONTROL_FAILED, PairedState
from aerie.analysis.paired.sums import BUCKETS, TIME_SLOT_SECONDS, PairSums
from aerie.analysis.state import VerdictOutcome

ANSWERS_METRIC = "Answers"
ANSWERS_DIFFER = "AnswersDiffer"
MAX_SUSPICIOUS_FAILURES = 3
"""Failures of the canary alone, in excess of the control's, that say nothing."""
ACCEPTED_FAILURE_SHARE = 0.01
"""Share of the pairs up to which more failures do not prevent an acceptance."""
ROLLBACK_DEVIATIONS, ROLLBACK_TIME_SHARE = 2.0, 0.1
"""Standard deviations of the excess between equal drafters, and share of the time in intervals with a failure, beyond which a
canary is rolled back at the deadline."""
MIN_OUTAGE_ATTEMPTS, MIN_OUTAGE_SECONDS = 3, 120.0
"""Requests one after the other, and their seconds, after which a canary that has answered none of them is rolled back."""
MIN_OUTAGE_SECONDS_AT_END = 30.0
"""The same at the deadline: more than it takes to notice that a pod has ended."""
_FORECAST_STEP, _FORECAST_STEPS = 1.25, 21
"""Factor between the numbers of pairs of a forecast, and how many of them are tried: up to a hundredfold."""
_AFTER_FAILURES = "No user has reached the canary. Check its engine's log before another rollout."
_FIXES = {
    CONTROL_FAILED: " The control does not answer what the canary answers: check its pod and its engine's log.",
    BOTH_FAILED: " Neither engine answers: let the evaluator through to the engines' port in network policies, check their API "
    "key, and read their logs.",
}
"""What to do about the most frequent reason why requests give no pair, as sentences after a blank."""
_TITLES = {TOKENS_PER_STEP: "tokens per step", TIME_PER_OUTPUT_TOKEN: "time per output token"}


@dataclass(frozen=True, slots=True)
class PairedVerdict:
    """The outcome of a shadow evaluation at one moment, with its message and the comparisons for the status."""

    outcome: VerdictOutcome
    """Promote: the canary is accepted into the ramp."""
    message: str
    rollback_reason: str
    """`ANSWERS_DIFFER`, or the name of the criterion; empty unless the outcome is Rollback."""
    comparisons: tuple[Comparison, ...]


def evaluate_pairs(state: PairedState, plan: PairedPlan, elapsed_seconds: float) -> tuple[PairedState, PairedVerdict]:
    """Return the state with the verdict `elapsed_seconds` after the start of the evaluation, and that verdict."""
    outcome, message = state.outcome, state.message
    if outcome == "Continue":
        outcome, message = _next_outcome(state, plan, elapsed_seconds)
        rollback = _find_rollback(state, plan) or (
            _find_rollback_at_end(state, elapsed_seconds) if outcome == "Inconclusive" else None
        )
        if rollback:
            outcome, message = "Rollback", rollback[1]
        if outcome != "Continue":
            state = replace(state, outcome=outcome, message=message, rollback_reason=rollback[0] if rollback else "")
    return state, PairedVerdict(outcome, message, state.rollback_reason, _comparisons(state, plan))


def _next_outcome(state: PairedState, plan: PairedPlan, elapsed_seconds: float) -> tuple[VerdictOutcome, str]:
    """Return the outcome of an evaluation that has none yet and is not rolled back, and its message."""
    missing = _missing_evidence(state, plan, elapsed_seconds)
    pairs = _format_pairs(state)
    if not missing:
        return "Promote", f"{_format_passed(state, plan, pairs)} {_answers_message(state.answers)}"
    if elapsed_seconds >= plan.max_duration_seconds:
        return "Inconclusive", (
            f"Shadow evaluation inconclusive after {format_duration(plan.max_duration_seconds)} and {pairs}. "
            f"Required: {'; '.join(missing)}.{_few_pairs_message(state)}"
        )
    return "Continue", f"After {pairs}, still required: {'; '.join(missing)}.{_few_pairs_message(state)}"


def _format_passed(state: PairedState, plan: PairedPlan, pairs: str) -> str:
    """Return by what a canary is accepted, as sentences."""
    tokens, time = (_format_estimate(state, metric) for metric in (TOKENS_PER_STEP, TIME_PER_OUTPUT_TOKEN))
    if not plan.compares_tokens:
        requirement = _requirement(plan.fast_enough)
        return f"Time per output token {time}, significantly {requirement}, after {pairs}. Tokens per step are not comparable."
    if plan.compares_time and not is_met(plan.enough_tokens, state):
        return (
            f"Time per output token {time}, significantly below the control's, after {pairs}. This replaces tokens per step "
            f"({tokens}), because users notice time."
        )
    other = f"The time per output token passes ({time})." if plan.compares_time else "Times are not comparable."
    return f"Tokens per step {tokens}, significantly {_requirement(plan.enough_tokens)}, after {pairs}. {other}"


def is_met(test: PairedTest, state: PairedState) -> bool:
    """Return whether a test is significant, with enough pairs."""
    sums, _ = _sums_of(state, test.metric)
    if effective_pair_count(sums) < test.min_pairs or not sums.canary_total < test.max_estimate * sums.control_total:
        return False
    return _moments(test, state).is_significant(test.sign, test.level)


def _moments(test: PairedTest, state: PairedState) -> ScoreMoments:
    sums, slots = _sums_of(state, test.metric)
    return score_moments(sums, test.max_ratio, slots)


def _sums_of(state: PairedState, metric: str) -> tuple[PairSums, PairSums | None]:
    """Return the sums of a metric, and those by time slots for times."""
    return (state.steps, None) if metric == TOKENS_PER_STEP else (state.seconds, state.slots)


def _compared_tests(plan: PairedPlan, tokens: PairedTest, time: PairedTest) -> tuple[PairedTest, ...]:
    """Return those of the two tests whose metric is compared."""
    return (*((tokens,) if plan.compares_tokens else ()), *((time,) if plan.compares_time else ()))


def _is_faster(state: PairedState, plan: PairedPlan) -> bool:
    """Return whether the canary is significantly faster, which replaces tokens per step."""
    return plan.compares_time and is_met(plan.faster, state)


def _is_replaced(test: PairedTest, state: PairedState, plan: PairedPlan) -> bool:
    """Return whether an acceptance needs no such test, because the canary is significantly faster."""
    return test is plan.enough_tokens and _is_faster(state, plan)


def _find_rollback(state: PairedState, plan: PairedPlan) -> tuple[str, str] | None:
    """Return the reason to roll back, and its message; None while there is none."""
    if plan.compares_answers and (message := state.answers.difference_message):
        return ANSWERS_DIFFER, f"{message} The canary changes the target's output, which no drafter may do."
    if state.failures.rare_events.is_canary_worse(FAILED_REQUESTS_ALPHA):
        return FAILED_REQUESTS, f"{capitalize(_format_failures(state))}. {_AFTER_FAILURES}"
    if state.failures.outage_attempts >= MIN_OUTAGE_ATTEMPTS and state.failures.outage_seconds >= MIN_OUTAGE_SECONDS:
        return FAILED_REQUESTS, f"{capitalize(_format_outage(state))}. {_AFTER_FAILURES}"
    for test in _compared_tests(plan, plan.fewer_tokens, plan.slower):
        if is_met(test, state) and not (test is plan.fewer_tokens and _is_faster(state, plan)):
            limit = "" if test.max_ratio == 1 else f", beyond the limit of {_format_change(test.max_ratio - 1)}"
            return test.metric, (
                f"{capitalize(_TITLES[test.metric])} {_format_estimate(state, test.metric)}, significantly "
                f"{'above' if test.metric == TIME_PER_OUTPUT_TOKEN else 'below'} the control's{limit}, after "
                f"{_format_pairs(state)}. No user has reached the canary."
            )
    return None


def _find_rollback_at_end(state: PairedState, elapsed_seconds: float) -> tuple[str, str] | None:
    """Return the reason to roll back a canary without a verdict at the deadline, and its message; None while there is none."""
    if state.failures.outage_attempts and state.failures.outage_seconds >= MIN_OUTAGE_SECONDS_AT_END:
        return FAILED_REQUESTS, f"{capitalize(_format_outage(state))}. {_AFTER_FAILURES}"
    if fails_often(state.failures, elapsed_seconds):
        return FAILED_REQUESTS, f"Not accepted in time, and suspicious: {_format_failures(state)}. {_AFTER_FAILURES}"
    return None


def _has_suspicious_failures(state: PairedState) -> bool:
    """Return whether the canary fails more often than the control and than chance explains, or than it may."""
    excess, failures = state.failures.canary - state.failures.control, state.failures.canary + state.failures.control
    return excess > max(MAX_SUSPICIOUS_FAILURES, math.sqrt(failures), ACCEPTED_FAILURE_SHARE * state.steps.pairs)


def fails_often(failures: FailureCounts, elapsed_seconds: float) -> bool:
    """Return whether the canary has failed so often that it must not meet users: more than chance and one stall explain."""
    excess = failures.canary_events - failures.control_events
    deviation = math.sqrt(failures.canary_events + failures.control_events)
    stall = ROLLBACK_TIME_SHARE * elapsed_seconds / FAILURE_INTERVAL_SECONDS
    return excess > max(MAX_SUSPICIOUS_FAILURES, ROLLBACK_DEVIATIONS * deviation, stall)


def _missing_evidence(state: PairedState, plan: PairedPlan, elapsed_seconds: float) -> list[str]:
    """Return what an acceptance still needs, as clauses; empty if nothing."""
    missing = [
        f"{_TITLES[test.metric]} ({_format_estimate(state, test.metric)}) significantly {_requirement(test)}, "
        f"{_time_to_decision(test, state, elapsed_seconds)}"
        for test in _compared_tests(plan, plan.enough_tokens, plan.fast_enough)
        if not is_met(test, state) and not _is_replaced(test, state, plan)
    ]
    if elapsed_seconds < plan.min_acceptance_seconds:
        missing.append(f"{format_duration(plan.min_acceptance_seconds)} of requests, so that those that hang are known")
    if _has_suspicious_failures(state):
        missing.append(f"more pairs without a failure ({_format_failures(state)})")
    if state.failures.outage_attempts:
        missing.append(f"an answer of the canary ({_format_outage(state)})")
    if not (plan.compares_tokens or plan.compares_time):
        missing.append("a metric that is comparable between canary and control")
    return missing


def _time_to_decision(test: PairedTest, state: PairedState, elapsed_seconds: float) -> str:
    """Return how many pairs the test needs, and the further time, if nothing changes."""
    sums, slots = _sums_of(state, test.metric)
    effective_pairs, moments = effective_pair_count(sums), _moments(test, state)
    if effective_pairs < test.min_pairs:
        return f"with {effective_pairs:.0f} of at least {test.min_pairs:.0f} effective pairs"
    if slots is not None and effective_bucket_count(slots) <= 1:
        return f"with pairs of more than {TIME_SLOT_SECONDS:.0f} s"
    if test.sign * moments.score_sum <= 0 or not sums.canary_total < test.max_estimate * sums.control_total:
        return "never at this estimate"

    def is_met_after(factor: float) -> bool:
        scaled = moments.scale_by(factor)
        if slots is not None:  # time brings further slots
            buckets = min(BUCKETS, effective_bucket_count(sums), factor * effective_bucket_count(slots))
            scaled = replace(scaled, degrees_of_freedom=buckets - 1)
        return scaled.is_significant(test.sign, test.level)

    factor = next(filter(is_met_after, (_FORECAST_STEP**power for power in range(1, _FORECAST_STEPS))), None)
    if factor is None:
        return f"in more than {_FORECAST_STEP**_FORECAST_STEPS:.0f} times as many pairs"
    return f"in about {format_duration((factor - 1) * elapsed_seconds)} at this rate ({factor * sums.pairs:.0f} pairs)"


def _comparisons(state: PairedState, plan: PairedPlan) -> tuple[Comparison, ...]:
    """Return the estimates with the bounds that the tests use and what an acceptance needs, and the result for answers."""
    tests = {test.metric: test for test in _compared_tests(plan, plan.enough_tokens, plan.fast_enough)}
    comparisons = [
        comparison.with_requirement(_requirement(test), is_met=is_met(test, state), is_replaced=_is_replaced(test, state, plan))
        if (test := tests.get(comparison.metric))
        else comparison
        for comparison in _estimates(state)
    ]
    answers = state.answers
    if count := answers.greedy_pairs + answers.sampled_pairs:
        comparisons.append(Comparison(ANSWERS_METRIC, count, message=_answers_message(answers)))
    return tuple(comparisons)


def _estimates(state: PairedState) -> list[Comparison]:
    """Return the estimates with the bounds that the tests use."""
    comparisons = []
    for metric, rollback_level in ((TOKENS_PER_STEP, ROLLBACK_LEVEL), (TIME_PER_OUTPUT_TOKEN, SLOWER_LEVEL)):
        sums, slots = _sums_of(state, metric)
        if sums.canary_total > 0 and sums.control_total > 0:
            low, high = ratio_bounds(sums, rollback_level, ACCEPT_LEVEL, slots)
            changes = [_change_of(metric, ratio) for ratio in (sums.canary_total / sums.control_total, low, high)]
            estimate, lower, upper = changes if metric == TIME_PER_OUTPUT_TOKEN else (changes[0], changes[2], changes[1])
            comparisons.append(Comparison(metric, sums.pairs, estimate=estimate, lower=lower, upper=upper))
    return comparisons


def _change_of(metric: str, ratio: float) -> float | None:
    """Return the change of a metric, as users see it, at a ratio of amounts per token; None at a bound that does not exist."""
    if not 0 < ratio < math.inf:
        return None
    return ratio - 1 if metric == TIME_PER_OUTPUT_TOKEN else 1 / ratio - 1


def _format_change(change: float) -> str:
    return f"{100 * change:+z.1f} %"


def _format_pairs(state: PairedState) -> str:
    count = state.steps.pairs
    return f"{count} {'pair' if count == 1 else 'pairs'} of answers to the same requests"


def _format_estimate(state: PairedState, metric: str) -> str:
    """Return the estimate of a metric with the bounds that exist, as text."""
    result = next((each for each in _estimates(state) if each.metric == metric), None)
    if result is None or result.estimate is None:
        return "not measured yet"
    if result.lower is None or result.upper is None:
        return f"{_format_change(result.estimate)} vs control, too few pairs for confidence bounds"
    bounds = f"confidence bounds {_format_change(result.lower)} to {_format_change(result.upper)}"
    return f"{_format_change(result.estimate)} vs control, {bounds}"


def _requirement(test: PairedTest) -> str:
    """Return what an acceptance test shows, as users see the metric."""
    change = _change_of(test.metric, test.max_ratio)
    limit = _format_change(change) if change else "the control's"
    measured = f" and measured below {_format_change(test.max_estimate - 1)}" if test.max_estimate < math.inf else ""
    return f"{'below' if test.metric == TIME_PER_OUTPUT_TOKEN else 'above'} {limit}{measured}"


def _answers_message(answers: AnswerCounts) -> str:
    """Return the result for answers as sentences."""
    clauses = []
    if answers.greedy_pairs:
        repeats = f", {answers.canary_only} of {answers.repeated_requests} repeated ones beyond rounding on the canary alone"
        clauses.append(
            f"{answers.greedy_different_pairs} of {answers.greedy_pairs} greedy answers differ"
            f"{repeats if answers.repeated_requests else ''}."
        )
    if answers.sampled_pairs:
        clauses.append(f"{answers.sampled_pairs} pairs of sampled answers do not differ significantly.")
    return " ".join(clauses) or "No answers were compared."


def _format_failures(state: PairedState) -> str:
    """Return how often each arm alone failed, as a clause."""
    return (
        f"the canary alone failed to answer {_format_requests(state.skipped.get(CANARY_FAILED, 0))} (separate times: "
        f"{state.failures.canary_events}), and the control alone {state.skipped.get(CONTROL_FAILED, 0)} "
        f"({state.failures.control_events})"
    )


def _format_outage(state: PairedState) -> str:
    """Return since when the canary is silent, as a clause."""
    attempts, duration = state.failures.outage_attempts, format_duration(state.failures.outage_seconds)
    return (
        f"the canary has answered nothing for {duration}, in {attempts} {'attempt' if attempts == 1 else 'attempts'} one after "
        "the other, and the control answered the same requests"
    )


def _format_requests(count: int) -> str:
    return f"{count} {'request' if count == 1 else 'requests'}"


def _few_pairs_message(state: PairedState) -> str:
    """Return why most requests give no pair, and what to do, as sentences after a blank; empty where most do."""
    if 2 * sum(state.skipped.values()) <= state.received - state.dropped:
        return ""
    reasons = join_words([f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(state.skipped.items())])
    fix = _FIXES.get(max(state.skipped, key=lambda reason: state.skipped[reason]), "")
    return f" Most requests give no pair: {reasons}.{fix}"
