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
        return f"{_format_percent(canary_share)} against the control's {_format_percent(control_share)}"


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
    requirement = "below the control's" if replaced_criterion else _format_requirement(first.promote_tests[-1])
    message = (
        f"{_capitalize(first.title)} is {_format_estimate(first, first_pairs)}, certainly {requirement}, "
        f"after {_format_block_count(first_pairs.count)}"
    )
    if replaced_criterion is not None:
        replaced_estimate = _format_estimate(replaced_criterion, pairs[replaced_criterion.name])
        message += f"; that stands in for {replaced_criterion.title}, which is {replaced_estimate}: what users feel is time"
    if others:
        titles = _join_words([criterion.title for criterion in others])
        message += f"; {titles} {'is' if len(others) == 1 else 'are'} certainly good enough"
    return f"{message}.{_equivalence_not_compared_message(plan, equivalence)}{_drafts_not_compared_message(plan)}"


def failed_criterion_message(
    criterion: Criterion, test: CriterionTest, pairs: PairedMoments, parameters: SequenceParameters
) -> str:
    """Return the message of a rollback for a criterion that significantly fails."""
    direction = "at least" if test.sign > 0 else "at most"
    limit_clause = "" if test.ratio == 1.0 and test.offset == 0.0 else f", beyond {_format_limit(test)}"
    bound = _format_bound(criterion, test, pairs, parameters)
    return (
        f"{_capitalize(criterion.title)} is {_format_estimate(criterion, pairs)}, certainly {direction} {bound}"
        f"{limit_clause}, after {_format_block_count(pairs.count)}."
    )


def failed_requests_message(events: RareEvents) -> str:
    """Return the message of a rollback because the canary fails more requests."""
    return (
        f"The canary failed {events.canary_events:.0f} requests and the control {events.control_events:.0f}; with equal arms about "
        f"{events.expected_canary_events:.1f} of them would have been the canary's (e-value {events.e_value:.3g})."
    )


def crashes_message(crashes: CrashCounts) -> str:
    """Return the message of a rollback because the canary's processes end more often."""
    return (
        f"{_format_crashes(crashes)} (weight of evidence {crashes.bayes_factor:.3g}). What they were answering is lost; "
        "the pods' last lines and `kubectl describe pod` say why they ended."
    )


def suspicious_crashes_message(crashes: CrashCounts) -> str:
    """Return the clause that the canary's processes may end more often than the control's."""
    return f"{_format_crashes(crashes)}: more speaks for the canary's crashing more often than against it"


def _format_crashes(crashes: CrashCounts) -> str:
    canary_clause = (
        f"{crashes.canary_crashes} of the canary's engine processes {'has' if crashes.canary_crashes == 1 else 'have'} ended"
    )
    control_clause = f"{crashes.control_crashes or 'none'} of the control's in {crashes.control_pod_hours:.1f}"
    return f"{canary_clause} in {crashes.canary_pod_hours:.1f} pod-hours, and {control_clause}"


def lossy_message(equivalence: EquivalenceResult) -> str:
    """Return the message of a rollback because the canary changes answers."""
    return f"{equivalence.message} So the canary changes what the target says, which no drafter may."


def zero_acceptance_message(blocks: int) -> str:
    """Return the message of an abort because none of the canary's drafted tokens is accepted."""
    return (
        f"Not one drafted token of the canary was accepted in {_format_block_count(blocks)} in a row, while the control's were: "
        "its drafter does not fit the target, or does not load as it should."
    )


def far_slower_message(blocks: int, ratio: float, metric_title: str) -> str:
    """Return the message of an abort because the canary's tokens take far longer."""
    return (
        f"The canary's {metric_title} was more than {ratio:g} times the control's in {_format_block_count(blocks)} in a row, "
        "and it had no more requests: no two equal pods differ so much."
    )


def stalled_message(blocks: int, load: float) -> str:
    """Return the message of an abort because the canary holds requests and does not finish them."""
    return (
        f"The canary finished next to no request in {_format_block_count(blocks)} in a row, "
        f"though a pod of it held {load:.1f} at a time, while the control finished its own: "
        "either it hangs, or requests are given up by their clients before the first token."
    )


def inconclusive_message(unmet_conditions: Sequence[str], deadline: float) -> str:
    """Return the message of an analysis that is inconclusive at its deadline."""
    return f"No decision within {format_duration(deadline)}: {'; '.join(unmet_conditions)}."


def no_block_yet_message(plan: AnalysisPlan) -> str:
    """Return the message of an analysis before its first block."""
    duration_clause = f"it takes {format_duration(plan.block_seconds)}, or longer while requests are few"
    return f"The first block has yet to close: {duration_clause}.{_drafts_not_compared_message(plan)}"


def unmet_conditions_message(unmet_conditions: Sequence[str], blocks: int, plan: AnalysisPlan) -> str:
    """Return the message of an analysis that continues, with its unmet conditions."""
    return f"After {_format_block_count(blocks)}: {'; '.join(unmet_conditions)}.{_drafts_not_compared_message(plan)}"


def exploration_message(criterion: Criterion, pairs: PairedMoments | None, blocks: int, plan: AnalysisPlan) -> str:
    """Return the message of an exploration: a canary that is measured and then abandoned."""
    if pairs is None or not pairs.count:
        return f"It is to be measured and given up. {no_block_yet_message(plan)}"
    estimate = _format_estimate(criterion, pairs)
    return f"It is to be measured and given up. After {_format_block_count(blocks)} {criterion.title} is {estimate}."


def no_regression_message(blocks: int, seconds: float) -> str:
    """Return the message of a canary that is monitored and has no regression."""
    return f"Nothing speaks against the canary after {_format_block_count(blocks)} in {format_duration(seconds)}."


def unmet_criterion_message(
    criterion: Criterion,
    test: CriterionTest,
    pairs: PairedMoments,
    parameters: SequenceParameters,
    seconds_per_block: float,
    rollback_clause: str,
) -> str:
    """Return the clause on the first criterion while its test is not met.

    `rollback_clause` is the result of `rollback_bound_message`.
    """
    side, bound = "lower" if test.sign > 0 else "upper", _format_bound(criterion, test, pairs, parameters)
    bound_clause = f", its {side} bound {bound}" if bound else ""
    estimate_clause = f"{criterion.title} is {_format_estimate(criterion, pairs)}{bound_clause}"
    requirement_clause = f"to be accepted it has to be certainly {_format_requirement(test)}"
    time_clause = _time_to_decision(test, pairs, parameters, seconds_per_block)
    return f"{estimate_clause}; {requirement_clause}, {time_clause}{rollback_clause}"


def other_unmet_criteria_message(unmet_tests: Sequence[UnmetTest], seconds_per_block: float) -> str:
    """Return the clause on the further criteria with an unmet test, in short, grouped by the expected time."""
    requirements_by_time: dict[str, list[str]] = {}
    for unmet in unmet_tests:
        certainty = "" if unmet.test.estimate_suffices else "certainly "
        requirement = f"{unmet.criterion.title} ({unmet.estimate}) {certainty}{_format_requirement(unmet.test)}"
        if unmet.test.estimate_suffices:
            time_clause = _NEVER_AT_THIS_ESTIMATE
        elif unmet.parameters is not None:
            time_clause = _time_to_decision(unmet.test, unmet.pairs, unmet.parameters, seconds_per_block)
        else:
            time_clause = _time_to_count_requests(unmet.needed_request_factor, unmet.pairs.count * seconds_per_block)
        requirements_by_time.setdefault(time_clause, []).append(requirement)
    return "still to be shown: " + "; ".join(
        f"{_join_words(requirements)}, {time_clause}" for time_clause, requirements in requirements_by_time.items()
    )


def _time_to_count_requests(request_factor: float | None, elapsed_seconds: float) -> str:
    """Return the clause on the further time until `request_factor` times as many requests are counted."""
    if request_factor is None:
        return _NEVER_AT_THIS_ESTIMATE
    return f"which takes about {format_duration(max(1.0, (request_factor - 1) * elapsed_seconds))} more if nothing changes"


def rollback_bound_message(
    criterion: Criterion, test: CriterionTest, pairs: PairedMoments, parameters: SequenceParameters
) -> str:
    """Return the clause on the bound that would roll back, with its value now; empty while there is none."""
    side, bound = "lower" if test.sign > 0 else "upper", _format_bound(criterion, test, pairs, parameters)
    return f"; it is rolled back when its {side} bound, {bound} now, passes {_format_limit(test)}" if bound else ""


_NEVER_AT_THIS_ESTIMATE = "which time alone will not show: the estimate itself is not"


def _time_to_decision(test: CriterionTest, pairs: PairedMoments, parameters: SequenceParameters, seconds_per_block: float) -> str:
    """Return the clause on the further time until the test is met, if nothing changes."""
    distance = test.sign * pairs.score_mean(test.ratio, test.offset)
    if distance <= 0:
        return _NEVER_AT_THIS_ESTIMATE
    needed_blocks = blocks_until_half_width(distance, pairs.score_variance(test.ratio), parameters)
    if needed_blocks is None:
        return "which these pods cannot show: lasting differences between pods hide it, so compare more of them"
    remaining_seconds = max(1, needed_blocks - pairs.count) * seconds_per_block
    return f"which takes about {format_duration(remaining_seconds)} more if nothing changes"


def trial_inconclusive_message(blocks: int) -> str:
    """Return the message of an inconclusive trial: a trial is evaluated by time alone, and time is not compared."""
    return f"No decision after {_format_block_count(blocks)}: a trial is judged by time."


def nothing_compared_message(plan: AnalysisPlan) -> str:
    """Return the clause that no criterion is left by which a canary could be promoted."""
    drafts_reason = plan.drafts_not_comparable_reason.rstrip(".")
    return f"neither drafts nor latency are compared, so only a person can accept it (of drafts: {drafts_reason})"


def latency_not_compared_message(plan: AnalysisPlan) -> str:
    """Return the sentence that latency is not compared, and the fix; empty where it is compared."""
    if not plan.hardware_mismatch:
        return ""
    fix = "a node selector or an affinity in spec.engine.podTemplate places them alike"
    return f" Latency is not compared: {plan.hardware_mismatch}; {fix}."


def criterion_not_counted_message(criterion: Criterion) -> str:
    """Return the clause that no block counted for a criterion."""
    reason_clause = ", because the load of the arms differed or is unknown" if criterion.needs_load_match else ""
    return f"{criterion.title} was not counted in any block{reason_clause}"


def load_mismatch_message(load_match: LoadMatch) -> str:
    """Return the clause that blocks do not count for latency now, because the arms get different loads."""
    if load_match.variance <= 0:
        return "no block counts for latency while it is not known how many requests came"
    change = f"{abs(load_match.relative_difference):.0%} {'more' if load_match.relative_difference > 0 else 'fewer'}".replace(
        "%", " %"
    )
    return (
        f"the canary gets {change} requests on a pod than the control, and blocks count for latency only while that is within "
        f"{LOAD_TOLERANCE:.0%}: find out what sends them".replace("%:", " %:")
        + (", or whether its clients give up" if load_match.relative_difference < 0 else "")
    )


def unmatched_blocks_message(blocks: int, counted_blocks: int) -> str:
    """Return the clause that too many blocks do not count for latency."""
    return (
        f"{blocks} of {_format_block_count(counted_blocks)} count for no latency, more than a fifth, "
        "because the arms had unlike loads: find out why before trusting the rest"
    )


def latest_blocks_unmatched_message() -> str:
    """Return the clause that the latest blocks do not count for latency."""
    return "the latest blocks count for no latency, because the arms had unlike loads"


def too_few_blocks_message(blocks: int, min_blocks: int) -> str:
    """Return the clause that there are too few blocks for a promotion."""
    return f"{blocks} of at least {_format_block_count(min_blocks)} {'is' if min_blocks == 1 else 'are'} closed"


def dropped_blocks_message(blocks: int, counted_blocks: int, excluded_pods: Mapping[str, int]) -> str:
    """Return the clause that too many blocks were dropped, with the excluded pods by reason."""
    reasons = _join_words([f"{count} {reason.lower()}" for reason, count in sorted(excluded_pods.items())])
    return (
        f"{blocks} of {_format_block_count(blocks + counted_blocks)} had to be dropped, more than a tenth, "
        f"because pods could not be counted throughout ({reasons}): find out why before trusting the rest"
    )


def soak_message(seconds: float) -> str:
    """Return the clause that every criterion passes, and the soak is not over."""
    return f"every criterion holds, and {format_duration(seconds)} of the soak are left"


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
        return f"{_format_percent(pairs.canary_mean)} against the control's {_format_percent(pairs.control_mean)}"
    change = pairs.canary_mean / pairs.control_mean - 1
    return f"{abs(change):.1%} {'above' if change >= 0 else 'below'} the control's".replace("%", " %")


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
        return f"the control's {100 * test.offset:+g} points"
    if test.offset:
        return f"{test.ratio:g} times the control's plus {100 * test.offset:g} points"
    return f"{test.ratio - 1:+.1%}".replace("%", " %") if test.ratio != 1.0 else "the control's"


def _format_requirement(test: CriterionTest) -> str:
    return f"{'above' if test.sign > 0 else 'below'} {_format_limit(test)}"


def _format_percent(value: float) -> str:
    return f"{value:.2%}".replace("%", " %")


def _format_block_count(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


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
    return f" Drafts are not compared: {plan.drafts_not_comparable_reason}" if plan.drafts_not_comparable_reason else ""
