"""Messages of verdicts: the bound, the value, the expected time, and the condition that would decide.

Guarantee: pure text, from an analysis' plan and counts alone; no function here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aerie.analysis.criteria.criterion import Criterion, CriterionTest
from aerie.analysis.criteria.history_fit import MIN_COMPARED_BLOCKS
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.equivalence import EquivalenceResult
from aerie.analysis.formatting import (
    capitalize,
    format_block_count,
    format_bound,
    format_bound_condition,
    format_consecutive_blocks,
    format_duration,
    format_estimate,
    format_limit,
    format_percent,
    format_requirement,
    join_sentences,
    join_words,
)
from aerie.analysis.measurement.load_match import LOAD_TOLERANCE, LoadMatch
from aerie.analysis.statistics.confidence_sequence import PairedMoments, RareEvents, SequenceParameters, blocks_until_half_width
from aerie.analysis.statistics.crash_rate import CrashCounts
from aerie.analysis.statistics.shares import ShareCounts


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
            return format_estimate(self.criterion, self.pairs)
        canary_share, control_share = (events / total if total > 0 else 0.0 for events, total in _arm_fractions(self.shares))
        return f"{format_percent(canary_share)} vs {format_percent(control_share)} on the control"


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
    requirement = "below the control" if replaced_criterion else format_requirement(first.promote_tests[-1])
    message = (
        f"{capitalize(first.title)} {format_estimate(first, first_pairs)}, significantly {requirement}, "
        f"after {format_block_count(first_pairs.count)}."
    )
    if replaced_criterion is not None:
        replaced_estimate = format_estimate(replaced_criterion, pairs[replaced_criterion.name])
        message += f" This replaces {replaced_criterion.title} ({replaced_estimate}), because users notice time."
    if others:
        titles = capitalize(join_words([criterion.title for criterion in others]))
        message += f" {titles} {'passes' if len(others) == 1 else 'pass'}."
    return f"{message}{_equivalence_not_compared_message(plan, equivalence)}{_drafts_not_compared_message(plan)}"


def failed_criterion_message(
    criterion: Criterion, test: CriterionTest, pairs: PairedMoments, parameters: SequenceParameters
) -> str:
    """Return the message of a rollback for a criterion that significantly fails."""
    direction = "at least" if test.sign > 0 else "at most"
    limit_clause = "" if test.ratio == 1.0 and test.offset == 0.0 else f", beyond the limit of {format_limit(test)}"
    bound = format_bound(criterion, test, pairs, parameters)
    return (
        f"{capitalize(criterion.title)} {format_estimate(criterion, pairs)}, significantly {direction} {bound}"
        f"{limit_clause}, after {format_block_count(pairs.count)}."
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
        f"None of the canary's draft tokens was accepted in {format_consecutive_blocks(blocks)}, while the control's were. "
        "The canary's drafter does not fit the target, or was not loaded correctly."
    )


def far_slower_message(blocks: int, ratio: float, metric_title: str) -> str:
    """Return the message of an abort because the canary's tokens take far longer."""
    return (
        f"The canary's {metric_title} was more than {ratio:g} times the control's in {format_consecutive_blocks(blocks)}, "
        "without more requests. Equal pods never differ that much."
    )


def stalled_message(blocks: int, load: float) -> str:
    """Return the message of an abort because the canary holds requests and does not finish them."""
    return (
        f"The canary finished almost no requests in {format_consecutive_blocks(blocks)}, though each of its pods held "
        f"{load:.1f} at a time. The control finished its own. "
        "Either the canary hangs, or clients abandon their requests before the first token."
    )


def inconclusive_message(unmet_conditions: Sequence[str], max_duration_seconds: float) -> str:
    """Return the message of an analysis that is inconclusive at its deadline."""
    return f"Analysis inconclusive after {format_duration(max_duration_seconds)}. {join_sentences(unmet_conditions)}"


def contrary_evidence_message(rollback_message: str) -> str:
    """Return the message of an extension in which evidence against the canary prevents its promotion."""
    return f"Not promoted automatically, because of evidence that is too late for an automatic rollback: {rollback_message}"


def no_block_yet_message(plan: AnalysisPlan) -> str:
    """Return the message of an analysis before its first block."""
    duration = format_duration(plan.block_seconds)
    return f"No block has closed yet. A block takes {duration}, or longer with few requests.{_drafts_not_compared_message(plan)}"


def unmet_conditions_message(unmet_conditions: Sequence[str], blocks: int, plan: AnalysisPlan) -> str:
    """Return the message of an analysis that continues, with its unmet conditions."""
    return f"After {format_block_count(blocks)}: {join_sentences(unmet_conditions)}{_drafts_not_compared_message(plan)}"


def exploration_message(criterion: Criterion, pairs: PairedMoments | None, blocks: int, plan: AnalysisPlan) -> str:
    """Return the message of an exploration: a canary that is measured and never promoted."""
    if pairs is None or not pairs.count:
        return f"Exploration, which is measured and never promoted. {no_block_yet_message(plan)}"
    estimate = f"{criterion.title} {format_estimate(criterion, pairs)}"
    return f"Exploration, which is measured and never promoted. After {format_block_count(blocks)}: {estimate}."


def no_regression_message(blocks: int, seconds: float) -> str:
    """Return the message of a canary that is monitored and has no regression."""
    return f"No regression after {format_block_count(blocks)} in {format_duration(seconds)}."


def unmet_criterion_message(
    criterion: Criterion,
    pairs: PairedMoments,
    promote: tuple[CriterionTest, SequenceParameters],
    rollback: tuple[CriterionTest, SequenceParameters],
    seconds_per_block: float,
    *,
    may_roll_back: bool = True,
) -> str:
    """Return the clauses on the first criterion while its promote test is not met.

    They are the estimate with its bounds, and which bound promotes or, where it `may_roll_back`, rolls back, and when.
    """
    (promote_test, promote_parameters), (rollback_test, rollback_parameters) = promote, rollback
    promote_bound = format_bound(criterion, promote_test, pairs, promote_parameters)
    rollback_bound = format_bound(criterion, rollback_test, pairs, rollback_parameters)
    lower, upper = (promote_bound, rollback_bound) if promote_test.sign > 0 else (rollback_bound, promote_bound)
    if lower and upper:
        bounds = f"confidence bounds {lower} to {upper}"
    elif lower or upper:
        bounds = f"lower bound {lower}" if lower else f"upper bound {upper}"
    else:
        bounds = "too few blocks for confidence bounds"
    time_clause = _time_to_decision(promote_test, pairs, promote_parameters, seconds_per_block)
    rollback_clause = f"; rolls back when {format_bound_condition(rollback_test)}" if may_roll_back else ""
    return (
        f"{criterion.title} {format_estimate(criterion, pairs)} ({bounds}). "
        f"Promotes when {format_bound_condition(promote_test)} ({time_clause}){rollback_clause}"
    )


def other_unmet_criteria_message(unmet_tests: Sequence[UnmetTest], seconds_per_block: float) -> str:
    """Return the clause on the further criteria with an unmet test, in short, grouped by the expected time."""
    requirements_by_time: dict[str, list[str]] = {}
    for unmet in unmet_tests:
        significance = "" if unmet.test.estimate_suffices else "significantly "
        requirement = f"{unmet.criterion.title} ({unmet.estimate}) {significance}{format_requirement(unmet.test)}"
        if unmet.test.estimate_suffices:
            time_clause = _NEVER_AT_THIS_ESTIMATE
        elif unmet.parameters is not None:
            time_clause = _time_to_decision(unmet.test, unmet.pairs, unmet.parameters, seconds_per_block)
        else:
            time_clause = _time_to_count_requests(unmet.needed_request_factor, unmet.pairs.count * seconds_per_block)
        requirements_by_time.setdefault(time_clause, []).append(requirement)
    return "still required: " + "; ".join(
        f"{join_words(requirements)} ({time_clause})" for time_clause, requirements in requirements_by_time.items()
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
    return f"Analysis inconclusive after {format_block_count(blocks)}: a trial is evaluated by time."


def nothing_compared_message(plan: AnalysisPlan) -> str:
    """Return the clause that no criterion is left by which a canary could be promoted."""
    drafts_reason = plan.drafts_not_comparable_reason.rstrip(".")
    return f"neither tokens per step ({drafts_reason}) nor latency are compared, so only a manual promotion is possible"


HISTORY_DOES_NOT_FIT_MESSAGE = (
    " HistoryDoesNotFit: the stable pods differ more in tokens per step than their history makes likely, so it does not count, "
    "and the bounds are wider. That is chance, or requests are routed otherwise than before, or are others."
)
"""Sentences where the history of the stable pods is not used."""
STABLE_PODS_NOT_COMPARED_MESSAGE = (
    f" Until two stable pods or more are compared in {MIN_COMPARED_BLOCKS} blocks, the bounds of tokens per step are wider."
)
"""Sentence while it is unknown how far the stable pods are apart."""


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


def unmatched_blocks_message(blocks: int, counted_blocks: int, latest_streak: int) -> str:
    """Return the clause that too many blocks do not count for latency, and when that ends."""
    return (
        f"{blocks} of {format_block_count(counted_blocks)} do not count for latency, more than a fifth, "
        f"because the loads of the arms differed: as many in a row have to count first ({latest_streak} do now), "
        "or find the cause and promote manually"
    )


def latest_blocks_unmatched_message() -> str:
    """Return the clause that the latest blocks do not count for latency."""
    return "the latest blocks do not count for latency, because the loads of the arms differed"


def too_few_blocks_message(blocks: int, min_blocks: int) -> str:
    """Return the clause that there are too few blocks for a promotion."""
    return f"{blocks} of at least {format_block_count(min_blocks)} closed"


def dropped_blocks_message(blocks: int, counted_blocks: int, excluded_pods: Mapping[str, int]) -> str:
    """Return the clause that too many blocks were dropped, with the excluded pods by reason."""
    reasons = join_words([f"{count} {reason.lower()}" for reason, count in sorted(excluded_pods.items())])
    return (
        f"{blocks} of {format_block_count(blocks + counted_blocks)} were dropped, more than a tenth, "
        f"because pods could not be counted throughout ({reasons}): find the cause before you promote manually"
    )


def soak_message(seconds: float) -> str:
    """Return the clauses that every criterion passes, and the minimum duration is not over."""
    return f"every criterion passes. The minimum duration ends in {format_duration(seconds)}"


def _equivalence_not_compared_message(plan: AnalysisPlan, equivalence: EquivalenceResult | None) -> str:
    """Return the sentence that no greedy answers were compared; empty where some were."""
    if equivalence is None:
        return f" {EquivalenceResult(skip_reason=plan.equivalence_skip_reason or 'they did not come in time').message}"
    return "" if equivalence.compared_prompts else f" {equivalence.message}"


def _drafts_not_compared_message(plan: AnalysisPlan) -> str:
    """Return the sentence why tokens per step do not decide; empty where they do."""
    return f" Tokens per step are not compared: {plan.drafts_not_comparable_reason}" if plan.drafts_not_comparable_reason else ""
