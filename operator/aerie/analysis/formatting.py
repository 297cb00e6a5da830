"""Numbers of an analysis as text: estimates, bounds, limits and durations, as status and messages show them.

Guarantee: pure text; a bound that has no meaning yet is empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from aerie.analysis.criteria.criterion import Criterion, CriterionTest
from aerie.analysis.statistics.confidence_sequence import PairedMoments, SequenceParameters, half_width, ratio_bounds

MAX_REPORTED_RATIO = 1e6
"""Largest bound of a ratio that is reported: beyond it the control's mean is hardly above 0 yet."""


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


def format_estimate(criterion: Criterion, pairs: PairedMoments) -> str:
    """Return the estimate: relative to the control, or both values where they are shares or the control's is 0."""
    if not criterion.relative or pairs.control_mean <= 0:
        return f"{format_percent(pairs.canary_mean)} vs {format_percent(pairs.control_mean)} on the control"
    return f"{pairs.canary_mean / pairs.control_mean - 1:+z.1%} vs control".replace("%", " %")


def format_bound(criterion: Criterion, test: CriterionTest, pairs: PairedMoments, parameters: SequenceParameters) -> str:
    """Return the bound that the test uses, as the status shows it; empty while there is none.

    It is a bound of canary / control - 1 or, where that has no meaning, of the canary's value.
    """
    if not criterion.relative or pairs.control_mean <= 0:
        width = half_width(pairs.count, pairs.score_variance(test.ratio), parameters)
        return (
            format_percent(pairs.score_mean(test.ratio) - test.sign * width + test.ratio * pairs.control_mean)
            if math.isfinite(width)
            else ""
        )
    lower, upper = ratio_bounds(pairs, parameters, parameters)
    change = (lower if test.sign > 0 else upper) - 1
    if abs(change) >= MAX_REPORTED_RATIO:
        return ""
    digits = 1 if abs(change) >= 0.0005 else 2  # a bound just below 0 must not read as 0
    return f"{change:+.{digits}%}".replace("%", " %")


def format_limit(test: CriterionTest) -> str:
    """Return the limit of a test as text."""
    if not test.ratio:
        return format_percent(test.offset)
    if test.offset and test.ratio == 1.0:
        return f"control {100 * test.offset:+g} points"
    if test.offset:
        return f"{test.ratio:g} times control {100 * test.offset:+g} points"
    return f"{test.ratio - 1:+.1%}".replace("%", " %") if test.ratio != 1.0 else "the control"


def format_bound_condition(test: CriterionTest) -> str:
    """Return the condition of a bound under which a test of a mean is met."""
    limit = "0 %" if test.ratio == 1.0 and not test.offset else format_limit(test)
    return f"the lower bound exceeds {limit}" if test.sign > 0 else f"the upper bound falls below {limit}"


def format_requirement(test: CriterionTest) -> str:
    return f"{'above' if test.sign > 0 else 'below'} {format_limit(test)}"


def format_requirements(tests: Sequence[CriterionTest]) -> str:
    """Return what all tests of a promotion need of a criterion.

    >>> format_requirements([CriterionTest(-1, 1.025, 0.0, 0.05, measured_pods_only=True), CriterionTest(-1, 1.04, 0.0, 0.05)])
    'below +2.5 % on these pods and below +4.0 %'
    """
    return join_words([_format_whole_requirement(test) for test in tests])


def _format_whole_requirement(test: CriterionTest) -> str:
    estimate_clause = "measured " if test.estimate_suffices else ""
    alternative_clause = f" or {test.alternative_ratio:g} times control" if test.alternative_ratio else ""
    pods_clause = " on these pods" if test.measured_pods_only else ""
    return f"{estimate_clause}{format_requirement(test)}{alternative_clause}{pods_clause}"


def format_percent(value: float) -> str:
    return f"{value:.2%}".replace("%", " %")


def format_block_count(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def format_consecutive_blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} consecutive blocks"


def join_sentences(clauses: Sequence[str]) -> str:
    """Return the clauses as sentences."""
    return " ".join(f"{capitalize(clause)}." for clause in clauses)


def join_words(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
