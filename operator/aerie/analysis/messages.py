"""Verdicts in sentences: which bound, which value, how much longer, and what would decide it."""

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
"""A bound beyond it is none: the control's mean is hardly above 0 yet."""


@dataclass(frozen=True, slots=True)
class UnmetTest:
    """What a criterion has yet to show."""

    criterion: Criterion
    test: CriterionTest
    pairs: PairedMoments
    parameters: SequenceParameters | None
    """Of a mean."""
    shares: ShareCounts | None = None
    """Of a share, which is shown by counts;"""
    needed_request_factor: float | None = None
    """and how many times as many requests it takes; None: no number of them does."""

    @property
    def estimate(self) -> str:
        """The estimate."""
        if self.shares is None:
            return _format_estimate(self.criterion, self.pairs)
        shares = self.shares
        canary, control = (part / of if of > 0 else 0.0 for part, of in _arm_fractions(shares))
        return f"{_format_percent(canary)} against the control's {_format_percent(control)}"


def _arm_fractions(shares: ShareCounts) -> tuple[tuple[float, float], tuple[float, float]]:
    return (shares.canary_events, shares.canary_total), (shares.control_events, shares.control_total)


def promotion_message(
    criteria: Sequence[Criterion],
    pairs: Mapping[str, PairedMoments],
    plan: AnalysisPlan,
    equivalence: EquivalenceResult | None = None,
    replaced_criterion: Criterion | None = None,
) -> str:
    """Every criterion holds. `in_place_of`: one that does not, and for which being faster stands in."""
    first, *others = criteria
    known = pairs[first.name]
    limit = "below the control's" if replaced_criterion else _format_requirement(first.promote_tests[-1])
    said = f"{_capitalize(first.title)} is {_format_estimate(first, known)}, certainly {limit}, after {_format_block_count(known.count)}"
    if replaced_criterion is not None:
        drafts = replaced_criterion.title, _format_estimate(replaced_criterion, pairs[replaced_criterion.name])
        said += f"; that stands in for {drafts[0]}, which is {drafts[1]}: what users feel is time"
    also = (
        f"; {_join_words([one.title for one in others])} {'is' if len(others) == 1 else 'are'} certainly good enough"
        if others
        else ""
    )
    return f"{said}{also}.{_equivalence_not_compared_message(plan, equivalence)}{_drafts_not_compared_message(plan)}"


def failed_criterion_message(
    criterion: Criterion, test: CriterionTest, pairs: PairedMoments, parameters: SequenceParameters
) -> str:
    """A criterion certainly fails."""
    beyond = "at least" if test.sign > 0 else "at most"
    limit = "" if test.ratio == 1.0 and test.offset == 0.0 else f", beyond {_format_limit(test)}"
    return (
        f"{_capitalize(criterion.title)} is {_format_estimate(criterion, pairs)}, certainly {beyond} {_format_bound(criterion, test, pairs, parameters)}"
        f"{limit}, after {_format_block_count(pairs.count)}."
    )


def failed_requests_message(events: RareEvents) -> str:
    """The canary fails more requests."""
    return (
        f"The canary failed {events.canary:.0f} requests and the control {events.control:.0f}; with equal arms about "
        f"{events.expected:.1f} of them would have been the canary's (e-value {events.e_value:.3g})."
    )


def crashes_message(crashes: CrashCounts) -> str:
    """The canary's processes end more often."""
    return (
        f"{_format_crashes(crashes)} (weight of evidence {crashes.bayes_factor:.3g}). What they were answering is lost; the pods' last lines and "
        "`kubectl describe pod` say why they ended."
    )


def suspicious_crashes_message(crashes: CrashCounts) -> str:
    """Some of the canary's processes have ended."""
    return f"{_format_crashes(crashes)}: more speaks for the canary's crashing more often than against it"


def _format_crashes(known: CrashCounts) -> str:
    mine = f"{known.canary} of the canary's engine processes {'has' if known.canary == 1 else 'have'} ended"
    theirs = f"{known.control or 'none'} of the control's in {known.control_hours:.1f}"
    return f"{mine} in {known.canary_hours:.1f} pod-hours, and {theirs}"


def lossy_message(equivalence: EquivalenceResult) -> str:
    """The canary changes answers."""
    return f"{equivalence.message} So the canary changes what the target says, which no drafter may."


def zero_acceptance_message(blocks: int) -> str:
    """No drafted token is accepted."""
    return (
        f"Not one drafted token of the canary was accepted in {_format_block_count(blocks)} in a row, while the control's were: its drafter "
        "does not fit the target, or does not load as it should."
    )


def far_slower_message(blocks: int, ratio: float, metric_title: str) -> str:
    """Tokens take far longer."""
    return (
        f"The canary's {metric_title} was more than {ratio:g} times the control's in {_format_block_count(blocks)} in a row, and it had no more "
        "requests: no two equal pods differ so much."
    )


def stalled_message(blocks: int, load: float) -> str:
    """Requests are held and not finished."""
    return (
        f"The canary finished next to no request in {_format_block_count(blocks)} in a row, though a pod of it held {load:.1f} at a time, "
        "while the control finished its own: either it hangs, or requests are given up by their clients before the first token."
    )


def inconclusive_message(unmet_conditions: Sequence[str], deadline: float) -> str:
    """The deadline has passed."""
    return f"No decision within {format_duration(deadline)}: {'; '.join(unmet_conditions)}."


def no_block_yet_message(plan: AnalysisPlan) -> str:
    """Nothing has been counted."""
    lasts = f"it takes {format_duration(plan.block)}, or longer while requests are few"
    return f"The first block has yet to close: {lasts}.{_drafts_not_compared_message(plan)}"


def unmet_conditions_message(unmet_conditions: Sequence[str], blocks: int, plan: AnalysisPlan) -> str:
    """More is needed."""
    return f"After {_format_block_count(blocks)}: {'; '.join(unmet_conditions)}.{_drafts_not_compared_message(plan)}"


def exploration_message(criterion: Criterion, pairs: PairedMoments | None, blocks: int, plan: AnalysisPlan) -> str:
    """A canary that is to be measured and given up."""
    if pairs is None or not pairs.count:
        return f"It is to be measured and given up. {no_block_yet_message(plan)}"
    return f"It is to be measured and given up. After {_format_block_count(blocks)} {criterion.title} is {_format_estimate(criterion, pairs)}."


def no_regression_message(blocks: int, seconds: float) -> str:
    """Watched, and nothing is wrong."""
    return f"Nothing speaks against the canary after {_format_block_count(blocks)} in {format_duration(seconds)}."


def unmet_criterion_message(
    criterion: Criterion,
    test: CriterionTest,
    pairs: PairedMoments,
    parameters: SequenceParameters,
    seconds_per_block: float,
    rollback_clause: str,
) -> str:
    """A criterion does not hold yet. `rolls_back` says what else may come of it."""
    side, bound = "lower" if test.sign > 0 else "upper", _format_bound(criterion, test, pairs, parameters)
    at = f", its {side} bound {bound}" if bound else ""
    needed = f"{criterion.title} is {_format_estimate(criterion, pairs)}{at}; to be accepted it has to be certainly {_format_requirement(test)}"
    return f"{needed}, {_time_to_decision(test, pairs, parameters, seconds_per_block)}{rollback_clause}"


def other_unmet_criteria_message(unmet_tests: Sequence[UnmetTest], seconds_per_block: float) -> str:
    """Further criteria that do not hold yet, in short."""
    alike: dict[str, list[str]] = {}
    for one in unmet_tests:
        said = f"{one.criterion.title} ({one.estimate}) {'' if one.test.estimate_suffices else 'certainly '}{_format_requirement(one.test)}"
        if one.test.estimate_suffices:
            prospect = _NEVER_AT_THIS_ESTIMATE
        elif one.parameters is not None:
            prospect = _time_to_decision(one.test, one.pairs, one.parameters, seconds_per_block)
        else:
            prospect = _time_to_count_requests(one.needed_request_factor, one.pairs.count * seconds_per_block)
        alike.setdefault(prospect, []).append(said)
    return "still to be shown: " + "; ".join(f"{_join_words(said)}, {prospect}" for prospect, said in alike.items())


def _time_to_count_requests(more: float | None, so_far: float) -> str:
    """How much longer it takes to count so many times as many requests."""
    if more is None:
        return _NEVER_AT_THIS_ESTIMATE
    return f"which takes about {format_duration(max(1.0, (more - 1) * so_far))} more if nothing changes"


def rollback_bound_message(
    criterion: Criterion, test: CriterionTest, pairs: PairedMoments, parameters: SequenceParameters
) -> str:
    """Where the bound stands that would roll back; empty while there is none."""
    side, bound = "lower" if test.sign > 0 else "upper", _format_bound(criterion, test, pairs, parameters)
    return f"; it is rolled back when its {side} bound, {bound} now, passes {_format_limit(test)}" if bound else ""


_NEVER_AT_THIS_ESTIMATE = "which time alone will not show: the estimate itself is not"


def _time_to_decision(test: CriterionTest, pairs: PairedMoments, tuned: SequenceParameters, per_block: float) -> str:
    """How much longer, if nothing changes."""
    mean = test.sign * pairs.score_mean(test.ratio, test.offset)
    if mean <= 0:
        return _NEVER_AT_THIS_ESTIMATE
    total = blocks_until_half_width(mean, pairs.score_variance(test.ratio), tuned)
    if total is None:
        return "which these pods cannot show: lasting differences between pods hide it, so compare more of them"
    return f"which takes about {format_duration(max(1, total - pairs.count) * per_block)} more if nothing changes"


def trial_inconclusive_message(blocks: int) -> str:
    """A trial of a setting, of which nothing but time tells."""
    return f"No decision after {_format_block_count(blocks)}: a trial is judged by time."


def nothing_compared_message(plan: AnalysisPlan) -> str:
    """Nothing is left by which a canary could be accepted."""
    why = plan.incomparable.rstrip(".")
    return f"neither drafts nor latency are compared, so only a person can accept it (of drafts: {why})"


def latency_not_compared_message(plan: AnalysisPlan) -> str:
    """What no verdict is about, and how to have it judged; empty where nothing is left out."""
    if not plan.unlike:
        return ""
    way_out = "a node selector or an affinity in spec.engine.podTemplate places them alike"
    return f" Latency is not compared: {plan.unlike}; {way_out}."


def criterion_not_counted_message(criterion: Criterion) -> str:
    """No block told anything of a criterion."""
    why = ", because the load of the arms differed or is unknown" if criterion.needs_load_match else ""
    return f"{criterion.title} was not counted in any block{why}"


def load_mismatch_message(load_match: LoadMatch) -> str:
    """Blocks are not counted for latency now."""
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
    """Too many blocks count for no latency."""
    return (
        f"{blocks} of {_format_block_count(counted_blocks)} count for no latency, more than a fifth, because the arms had unlike loads: find out "
        "why before trusting the rest"
    )


def latest_blocks_unmatched_message() -> str:
    """The latest blocks count for no latency."""
    return "the latest blocks count for no latency, because the arms had unlike loads"


def too_few_blocks_message(blocks: int, min_blocks: int) -> str:
    """Too few blocks for any verdict."""
    return f"{blocks} of at least {_format_block_count(min_blocks)} {'is' if min_blocks == 1 else 'are'} closed"


def dropped_blocks_message(blocks: int, counted_blocks: int, excluded_pods: Mapping[str, int]) -> str:
    """Too many blocks were dropped."""
    reasons = _join_words([f"{count} {reason.lower()}" for reason, count in sorted(excluded_pods.items())])
    return (
        f"{blocks} of {_format_block_count(blocks + counted_blocks)} had to be dropped, more than a tenth, because pods could not be counted "
        f"throughout ({reasons}): find out why before trusting the rest"
    )


def soak_message(seconds: float) -> str:
    """All holds, and the soak is not over."""
    return f"every criterion holds, and {format_duration(seconds)} of the soak are left"


def format_duration(seconds: float) -> str:
    """Seconds in words: 4 h, 1 h 20 min, 50 min, 40 s.

    >>> duration(4800)
    '1 h 20 min'
    """
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{round(seconds)} s"
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (minutes > 0)
    return " ".join(parts)


# ------------------------------------------------------------------------------------------------------------------- words
def _format_estimate(criterion: Criterion, pairs: PairedMoments) -> str:
    """The estimate: relative to the control, or both values where they are shares or the control's is 0."""
    if not criterion.relative or pairs.control <= 0:
        return f"{_format_percent(pairs.canary)} against the control's {_format_percent(pairs.control)}"
    change = pairs.canary / pairs.control - 1
    return f"{abs(change):.1%} {'above' if change >= 0 else 'below'} the control's".replace("%", " %")


def _format_bound(criterion: Criterion, test: CriterionTest, pairs: PairedMoments, tuned: SequenceParameters) -> str:
    """The bound that the test looks at, as the status shows it: of canary / control - 1, or where that has no meaning of the
    canary's value; empty while there is none."""
    if not criterion.relative or pairs.control <= 0:
        width = half_width(pairs.count, pairs.score_variance(test.ratio), tuned)
        return (
            _format_percent(pairs.score_mean(test.ratio) - test.sign * width + test.ratio * pairs.control)
            if math.isfinite(width)
            else ""
        )
    low, high = ratio_bounds(pairs, tuned, tuned)
    change = (low if test.sign > 0 else high) - 1
    if abs(change) >= MAX_REPORTED_RATIO:
        return ""
    digits = 1 if abs(change) >= 0.0005 else 2  # a bound that is just below 0 must not read as 0
    return f"{change:+.{digits}%}".replace("%", " %")


def _format_limit(test: CriterionTest) -> str:
    """The boundary of a test."""
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


def _equivalence_not_compared_message(terms: AnalysisPlan, answers: EquivalenceResult | None) -> str:
    """That nothing is known of greedy answers; empty where something is."""
    if answers is None:
        return f" {EquivalenceResult(skip_reason=terms.unasked or 'they did not come in time').message}"
    return "" if answers.compared_prompts else f" {answers.message}"


def _drafts_not_compared_message(terms: AnalysisPlan) -> str:
    """Why it is not tokens per step that decide; empty where they do."""
    return f" Drafts are not compared: {terms.incomparable}" if terms.incomparable else ""
