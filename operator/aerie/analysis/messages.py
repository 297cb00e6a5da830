"""Messages of verdicts: the bound, the value, the expected time, and the condition that would decide.

Guarantee: pure text, from an analysis' plan and counts alone; no function here decides anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aerie.analysis.criteria import AnalysisPlan, Criterion, CriterionTest
from aerie.analysis.equivalence import EquivalenceResult
from aerie.analysis.measurement.load_match import LOAD_TOLERANCE, LoadMatch
from aerie.analysis.statistics.confidence_sequence import (
    PairedMoments,
    RareEvents,
    SequenceParameters,
    blocks_until_half_width,
    half_width,
    ratio_bounds,
)
from aerie.analysis.statistics.crash_rate import CrashCounts
from aerie.analysis.statistics.shares import ShareCounts

MAX_REPORTED_RATIO = 1e6
"""Largest bound of a ratio that is reported: beyond it the control's mean is hardly above 0 yet."""


@dataclass(frozen=True, slots=True)
class UnmetTest:
    """A test of a criterion that is not met yet."""

    criterion: Criterion
    test: CriterionTest
    pairs: PairedMoments
    parameters: SequenceParameters | None
    """Parameters of the test of a mean; None for a share."""
    shares: ShareCounts | None = None
    """Counts of a share, which is tested by counts; None for a mean."""
    needed_request_factor: float | None = None
    """Factor by which a share needs more requests; None: no number of them suffices."""

    @property
    def estimate(self) -> str:
        """The estimate as text."""
        if self.shares is None:
            return _format_estimate(self.criterion, self.pairs)
        canary_share, control_share = (events / total if total > 0 else 0.0 for events, total in _arm_fractions(self.shares))
        return f"{_format_percent(canary_share)} vs {_format_percent(control_share)} on the control"


def _arm_fractions(shares: ShareCounts) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (events, total) of the canary and of the control."""
    return (shares.canary_events, shares.canary_total), (shares.control_events, shares.control_total)


def promotion_message(
    criteria: Sequence[Criterion],
    pairs: Mapping[str, PairedMoments],
    plan: AnalysisPlan,
    equivalence: EquivalenceResult | None = None,
    replaced_criterion: Criterion | None = None,
) -> str:
    """Return the message of a promotion: every criterion passes.

    `replaced_criterion` is one that does not pass, and that the canary's being faster replaces.
    """
    first, *others = criteria
    first_pairs = pairs[first.name]
    requirement = "below the control" if replaced_criterion else _format_requirement(first.promote_tests[-1])
    message = (
        f"{_capitalize(first.title)} {_format_estimate(first, first_pairs)}, significantly {requirement}, "
        f"after {_format_block_count(first_pairs.count)}."
    )
    if replaced_criterion is not None:
        replaced_estimate = _format_estimate(replaced_criterion, pairs[replaced_criterion.name])
        message += f" This replaces {replaced_criterion.title} ({replaced_estimate}), because users notice time."
    if others:
        titles = _capitalize(_join_words([criterion.title for criterion in others]))
        message += f" {titles} {'passes' if len(others) == 1 else 'pass'}."
    return f"{message}{_equivalence_not_compared_message(plan, equivalence)}{_drafts_not_compared_message(plan)}"


def failed_criterion_message(
    criterion: Criterion, test: CriterionTest, pairs: PairedMoments, parameters: SequenceParameters
) -> str:
    """Return the message of a rollback for a criterion that significantly fails."""
    direction = "at least" if test.sign > 0 else "at most"
    limit_clause = "" if test.ratio == 1.0 and test.offset == 0.0 else f", beyond the limit of {_format_limit(test)}"
    bound = _format_bound(criterion, test, pairs, parameters)
    return (
        f"{_capitalize(criterion.title)} {_format_estimate(criterion, pairs)}, significantly {direction} {bound}"
        f"{limit_clause}, after {_format_block_count(pairs.count)}."
    )


def failed_requests_message(events: RareEvents) -> str:
    """Return the message of a rollback because the canary fails more requests."""
    return (
        f"The canary failed {events.canary_events:.0f} requests and the control {events.control_events:.0f}. With equal arms, "
        f"about {events.expected_canary_events:.1f} of them would be the canary's (e-value {events.e_value:.3g})."
    )


def crashes_message(crashes: CrashCounts) -> str:
    """Return the message of a rollback because the canary's processes end more often."""
    return (
        f"{_format_crashes(crashes)} (Bayes factor {crashes.bayes_factor:.3g}). Their running requests were lost. "
        "The pods' last log lines and `kubectl describe pod` show why they ended."
    )


def suspicious_crashes_message(crashes: CrashCounts) -> str:
    """Return the clause that the canary's processes may end more often than the control's."""
    return f"{_format_crashes(crashes)}, so the canary may crash more often than the control"


def _format_crashes(crashes: CrashCounts) -> str:
    canary_clause = (
        f"{crashes.canary_crashes} {'process' if crashes.canary_crashes == 1 else 'processes'} of the canary's engines"
    )
    control_clause = f"{crashes.control_crashes or 'none'} of the control's in {crashes.control_pod_hours:.1f}"
    return f"{canary_clause} ended in {crashes.canary_pod_hours:.1f} pod-hours, and {control_clause}"


def lossy_message(equivalence: EquivalenceResult) -> str:
    """Return the message of a rollback because the canary changes answers."""
    return f"{equivalence.message} The canary changes the target's output, which no drafter may do."


def zero_acceptance_message(blocks: int) -> str:
    """Return the message of an abort because none of the canary's draft tokens is accepted."""
    return (
        f"None of the canary's draft tokens was accepted in {_format_consecutive_blocks(blocks)}, while the control's were. "
        "The canary's drafter does not fit the target, or was not loaded correctly."
    )


def far_slower_message(blocks: int, ratio: float, metric_title: str) -> str:
    """Return the message of an abort because the canary's tokens take far longer."""
    return (
        f"The canary's {metric_title} was more than {ratio:g} times the control's in {_format_consecutive_blocks(blocks)}, "
        "without more requests. Equal pods never differ that much."
    )


def stalled_message(blocks: int, load: float) -> str:
    """Return the message of an abort because the canary holds requests and does not finish them."""
    return (
        f"The canary finished almost no requests in {_format_consecutive_blocks(blocks)}, though each of its pods held "
        f"{load:.1f} at a time. The control finished its own. "
        "Either the canary hangs, or clients abandon their requests before the first token."
    )


def inconclusive_message(unmet_conditions: Sequence[str], max_duration_seconds: float) -> str:
    """Return the message of an analysis that is inconclusive at its deadline."""
    return f"Analysis inconclusive after {format_duration(max_duration_seconds)}. {_join_sentences(unmet_conditions)}"


def no_block_yet_message(plan: AnalysisPlan) -> str:
    """Return the message of an analysis before its first block."""
    duration = format_duration(plan.block_seconds)
    return f"No block has closed yet. A block takes {duration}, or longer with few requests.{_drafts_not_compared_message(plan)}"


def unmet_conditions_message(unmet_conditions: Sequence[str], blocks: int, plan: AnalysisPlan) -> str:
    """Return the message of an analysis that continues, with its unmet conditions."""
    return f"After {_format_block_count(blocks)}: {_join_sentences(unmet_conditions)}{_drafts_not_compared_message(plan)}"


def exploration_message(criterion: Criterion, pairs: PairedMoments | None, blocks: int, plan: AnalysisPlan) -> str:
    """Return the message of an exploration: a canary that is measured and never promoted."""
    if pairs is None or not pairs.count:
        return f"Exploration, which is measured and never promoted. {no_block_yet_message(plan)}"
    estimate = f"{criterion.title} {_format_estimate(criterion, pairs)}"
    return f"Exploration, which is measured and never promoted. After {_format_block_count(blocks)}: {estimate}."


def no_regression_message(blocks: int, seconds: float) -> str:
    """Return the message of a canary that is monitored and has no regression."""
    return f"No regression after {_format_block_count(blocks)} in {format_duration(seconds)}."


def unmet_criterion_message(
    criterion: Criterion,
    pairs: PairedMoments,
    promote: tuple[CriterionTest, SequenceParameters],
    rollback: tuple[CriterionTest, SequenceParameters],
    seconds_per_block: float,
) -> str:
    """Return the clauses on the first criterion while its promote test is not met.

    They are the estimate with its bounds, and which bound promotes or rolls back, and when.
    """
    (promote_test, promote_parameters), (rollback_test, rollback_parameters) = promote, rollback
    promote_bound = _format_bound(criterion, promote_test, pairs, promote_parameters)
    rollback_bound = _format_bound(criterion, rollback_test, pairs, rollback_parameters)
    lower, upper = (promote_bound, rollback_bound) if promote_test.sign > 0 else (rollback_bound, promote_bound)
    if lower and upper:
        bounds = f"confidence bounds {lower} to {upper}"
    elif lower or upper:
        bounds = f"lower bound {lower}" if lower else f"upper bound {upper}"
    else:
        bounds = "too few blocks for confidence bounds"
    time_clause = _time_to_decision(promote_test, pairs, promote_parameters, seconds_per_block)
    return (
        f"{criterion.title} {_format_estimate(criterion, pairs)} ({bounds}). "
        f"Promotes when {_format_bound_condition(promote_test)} ({time_clause}); "
        f"rolls back when {_format_bound_condition(rollback_test)}"
    )


def other_unmet_criteria_message(unmet_tests: Sequence[UnmetTest], seconds_per_block: float) -> str:
    """Return the clause on the further criteria with an unmet test, in short, grouped by the expected time."""
    requirements_by_time: dict[str, list[str]] = {}
    for unmet in unmet_tests:
        significance = "" if unmet.test.estimate_suffices else "significantly "
        requirement = f"{unmet.criterion.title} ({unmet.estimate}) {significance}{_format_requirement(unmet.test)}"
        if unmet.test.estimate_suffices:
            time_clause = _NEVER_AT_THIS_ESTIMATE
        elif unmet.parameters is not None:
            time_clause = _time_to_decision(unmet.test, unmet.pairs, unmet.parameters, seconds_per_block)
        else:
            time_clause = _time_to_count_requests(unmet.needed_request_factor, unmet.pairs.count * seconds_per_block)
        requirements_by_time.setdefault(time_clause, []).append(requirement)
    return "still required: " + "; ".join(
        f"{_join_words(requirements)} ({time_clause})" for time_clause, requirements in requirements_by_time.items()
    )


def _time_to_count_requests(request_factor: float | None, elapsed_seconds: float) -> str:
    """Return the clause on the further time until `request_factor` times as many requests are counted."""
    if request_factor is None:
        return _NEVER_AT_THIS_ESTIMATE
    return f"about {format_duration(max(1.0, (request_factor - 1) * elapsed_seconds))} at this rate"


_NEVER_AT_THIS_ESTIMATE = "never at this estimate"


def _time_to_decision(test: CriterionTest, pairs: PairedMoments, parameters: SequenceParameters, seconds_per_block: float) -> str:
    """Return the clause on the further time until the test is met, if nothing changes."""
    distance = test.sign * pairs.score_mean(test.ratio, test.offset)
    if distance <= 0:
        return _NEVER_AT_THIS_ESTIMATE
    needed_blocks = blocks_until_half_width(distance, pairs.score_variance(test.ratio), parameters)
    if needed_blocks is None:
        return "never with these pods: permanent differences between pods hide it, so compare more pods"
    remaining_seconds = max(1, needed_blocks - pairs.count) * seconds_per_block
    return f"about {format_duration(remaining_seconds)} at this rate"


def trial_inconclusive_message(blocks: int) -> str:
    """Return the message of an inconclusive trial: a trial is evaluated by time alone, and time is not compared."""
    return f"Analysis inconclusive after {_format_block_count(blocks)}: a trial is evaluated by time."


def nothing_compared_message(plan: AnalysisPlan) -> str:
    """Return the clause that no criterion is left by which a canary could be promoted."""
    drafts_reason = plan.drafts_not_comparable_reason.rstrip(".")
    return f"neither tokens per step ({drafts_reason}) nor latency are compared, so only a manual promotion is possible"


def latency_not_compared_message(plan: AnalysisPlan) -> str:
    """Return the sentence that latency is not compared, and the fix; empty where it is compared."""
    if not plan.hardware_mismatch:
        return ""
    fix = "a node selector or an affinity in spec.engine.podTemplate places both arms on the same hardware"
    return f" Latency is not compared: {plan.hardware_mismatch}; {fix}."


def criterion_not_counted_message(criterion: Criterion) -> str:
    """Return the clause that no block counted for a criterion."""
    reason_clause = ", because the loads of the arms differed or are unknown" if criterion.needs_load_match else ""
    return f"{criterion.title}: not counted in any block{reason_clause}"


def load_mismatch_message(load_match: LoadMatch) -> str:
    """Return the clause that blocks do not count for latency now, because the arms get different loads."""
    if load_match.variance <= 0:
        return "no block counts for latency while the number of requests is unknown"
    direction = "more" if load_match.relative_difference > 0 else "fewer"
    message = (
        f"the canary gets {abs(load_match.relative_difference):.0%} {direction} requests per pod than the control. "
        f"Blocks count for latency only within {LOAD_TOLERANCE:.0%}: find out what sends them"
    ).replace("%", " %")
    return message + (", or whether clients abandon requests" if load_match.relative_difference < 0 else "")


def unmatched_blocks_message(blocks: int, counted_blocks: int) -> str:
    """Return the clause that too many blocks do not count for latency."""
    return (
        f"{blocks} of {_format_block_count(counted_blocks)} do not count for latency, more than a fifth, "
        "because the loads of the arms differed: find the cause before you promote manually"
    )


def latest_blocks_unmatched_message() -> str:
    """Return the clause that the latest blocks do not count for latency."""
    return "the latest blocks do not count for latency, because the loads of the arms differed"


def too_few_blocks_message(blocks: int, min_blocks: int) -> str:
    """Return the clause that there are too few blocks for a promotion."""
    return f"{blocks} of at least {_format_block_count(min_blocks)} closed"


def dropped_blocks_message(blocks: int, counted_blocks: int, excluded_pods: Mapping[str, int]) -> str:
    """Return the clause that too many blocks were dropped, with the excluded pods by reason."""
    reasons = _join_words([f"{count} {reason.lower()}" for reason, count in sorted(excluded_pods.items())])
    return (
        f"{blocks} of {_format_block_count(blocks + counted_blocks)} were dropped, more than a tenth, "
        f"because pods could not be counted throughout ({reasons}): find the cause before you promote manually"
    )


def soak_message(seconds: float) -> str:
    """Return the clauses that every criterion passes, and the minimum duration is not over."""
    return f"every criterion passes. The minimum duration ends in {format_duration(seconds)}"


def format_duration(seconds: float) -> str:
    """Return a duration in seconds as text: 4 h, 1 h 20 min, 50 min, 40 s.

    >>> format_duration(4800)
    '1 h 20 min'
    """
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{round(seconds)} s"
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (minutes > 0)
    return " ".join(parts)


# -------------------------------------------------------------------------------------------------------------- formatting
def _format_estimate(criterion: Criterion, pairs: PairedMoments) -> str:
    """Return the estimate: relative to the control, or both values where they are shares or the control's is 0."""
    if not criterion.relative or pairs.control_mean <= 0:
        return f"{_format_percent(pairs.canary_mean)} vs {_format_percent(pairs.control_mean)} on the control"
    return f"{pairs.canary_mean / pairs.control_mean - 1:+.1%} vs control".replace("%", " %")


def _format_bound(criterion: Criterion, test: CriterionTest, pairs: PairedMoments, parameters: SequenceParameters) -> str:
    """Return the bound that the test uses, as the status shows it; empty while there is none.

    It is a bound of canary / control - 1 or, where that has no meaning, of the canary's value.
    """
    if not criterion.relative or pairs.control_mean <= 0:
        width = half_width(pairs.count, pairs.score_variance(test.ratio), parameters)
        return (
            _format_percent(pairs.score_mean(test.ratio) - test.sign * width + test.ratio * pairs.control_mean)
            if math.isfinite(width)
            else ""
        )
    lower, upper = ratio_bounds(pairs, parameters, parameters)
    change = (lower if test.sign > 0 else upper) - 1
    if abs(change) >= MAX_REPORTED_RATIO:
        return ""
    digits = 1 if abs(change) >= 0.0005 else 2  # a bound just below 0 must not read as 0
    return f"{change:+.{digits}%}".replace("%", " %")


def _format_limit(test: CriterionTest) -> str:
    """Return the limit of a test as text."""
    if not test.ratio:
        return _format_percent(test.offset)
    if test.offset and test.ratio == 1.0:
        return f"control {100 * test.offset:+g} points"
    if test.offset:
        return f"{test.ratio:g} times control {100 * test.offset:+g} points"
    return f"{test.ratio - 1:+.1%}".replace("%", " %") if test.ratio != 1.0 else "the control"


def _format_bound_condition(test: CriterionTest) -> str:
    """Return the condition of a bound under which a test of a mean is met."""
    limit = "0 %" if test.ratio == 1.0 and not test.offset else _format_limit(test)
    return f"the lower bound exceeds {limit}" if test.sign > 0 else f"the upper bound falls below {limit}"


def _format_requirement(test: CriterionTest) -> str:
    return f"{'above' if test.sign > 0 else 'below'} {_format_limit(test)}"


def _format_percent(value: float) -> str:
    return f"{value:.2%}".replace("%", " %")


def _format_block_count(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _format_consecutive_blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} consecutive blocks"


def _join_sentences(clauses: Sequence[str]) -> str:
    """Return the clauses as sentences."""
    return " ".join(f"{_capitalize(clause)}." for clause in clauses)


def _join_words(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _equivalence_not_compared_message(plan: AnalysisPlan, equivalence: EquivalenceResult | None) -> str:
    """Return the sentence that no greedy answers were compared; empty where some were."""
    if equivalence is None:
        return f" {EquivalenceResult(skip_reason=plan.equivalence_skip_reason or 'they did not come in time').message}"
    return "" if equivalence.compared_prompts else f" {equivalence.message}"


def _drafts_not_compared_message(plan: AnalysisPlan) -> str:
    """Return the sentence why tokens per step do not decide; empty where they do."""
    return f" Tokens per step are not compared: {plan.drafts_not_comparable_reason}" if plan.drafts_not_comparable_reason else ""
