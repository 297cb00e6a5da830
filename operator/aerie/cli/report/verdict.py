"""The decision of a rollout in words, and numbers as reports write them.

Guarantee: pure; text for plain output, which its user escapes.
"""

from __future__ import annotations

from aerie.cli.fleet.resource_view import format_age
from aerie.cli.fleet.screens import METRIC_TITLES
from aerie.cli.report.contents import DESIGNS, TIME_PER_OUTPUT_TOKEN, TOKENS_PER_STEP, Comparison, Contents

_OUTCOMES = {
    "Promoted": "Promoted",
    "RolledBack": "Rolled back",
    "Superseded": "Superseded by another spec",
    "Failed": "Failed",
    "Explored": "Explored",
}
SAMPLES = {"BetweenPods": "blocks", "ByTurns": "pairs of windows", "EqualRequests": "pairs of answers"}
"""What a design counts."""


def describe_verdict(contents: Contents) -> str:
    """Return the decision in one sentence."""
    subject = contents.drafter or contents.change or f"revision {contents.revision}"
    replaced = f" against {contents.replaced_drafter}" if contents.replaced_drafter else ""
    decision = _OUTCOMES.get(contents.result, contents.result) or f"No verdict yet (phase {contents.phase})"
    return f"{decision}: {subject}{replaced}{_describe_main_result(contents)}."


def describe_duration(contents: Contents) -> str:
    """Return when the rollout was, and how long it took."""
    start = f"{contents.started_at:%Y-%m-%d %H:%M} UTC"
    if contents.ended_at is None:
        return f"Started {start}, in progress."
    return f"Started {start}, ended {contents.ended_at:%Y-%m-%d %H:%M} UTC, after {duration(contents)}."


def duration(contents: Contents) -> str:
    """Return the duration of a rollout that has ended; empty for others."""
    return format_age(contents.started_at, contents.ended_at) if contents.ended_at is not None else ""


def describe_decision_maker(contents: Contents) -> str:
    """Return who decided, and why, as sentences."""
    requested_by = contents.requested_by
    if not requested_by:
        return "Decided by the operator, by the rules below." if contents.result else "Not decided yet."
    user = requested_by.get("user") or "a user whom the API server does not name"
    action = f" ({requested_by['action']})" if requested_by.get("action") else ""
    reason = f"Reason: {requested_by['reason'].rstrip('.')}." if requested_by.get("reason") else "No reason is given."
    return f"Decided by {user}{action}. {reason}"


def describe_design(contents: Contents) -> str:
    """Return how the drafters were compared; empty if they were not."""
    designs = dict.fromkeys(item.design for item in contents.observations if item.design)
    return ", then ".join(DESIGNS.get(design, design) for design in designs or ([contents.design] if contents.design else []))


def title_of(metric: str) -> str:
    """Return a metric's title, with a capital."""
    title = METRIC_TITLES.get(metric, metric)
    return title[:1].upper() + title[1:]


def describe_bounds(comparison: Comparison) -> str:
    """Return the bounds, with ? for one that does not exist; empty without bounds."""
    if comparison.lower is None and comparison.upper is None:
        return ""
    return f"{percent(comparison.lower)} to {percent(comparison.upper)}"


def describe_met(contents: Contents, comparison: Comparison) -> str:
    """Return whether what an acceptance needs is met; before the result, it may still be."""
    if comparison.is_met is None:
        return ""
    return "✓ yes" if comparison.is_met else "✗ no" if contents.result else "… not yet"


def percent(change: float | None) -> str:
    """Return a change: +3.0 %; ? for None."""
    return "?" if change is None else f"{100 * change:+z.1f} %"


def find_main_metric(contents: Contents) -> str:
    """Return the metric that the picture of the decision shows: that with bounds; empty if there is none."""
    for metric in (TOKENS_PER_STEP, TIME_PER_OUTPUT_TOKEN):
        values = [item.comparisons[metric] for item in contents.observations if metric in item.comparisons]
        if any(lower is not None or upper is not None for _, lower, upper in values):
            return metric
    return ""


def _describe_main_result(contents: Contents) -> str:
    for metric in (TOKENS_PER_STEP, TIME_PER_OUTPUT_TOKEN):
        for comparison in contents.comparisons:
            if comparison.metric == metric and comparison.estimate is not None:
                bounds = describe_bounds(comparison)
                return f", {title_of(metric).lower()} {percent(comparison.estimate)}{f' ({bounds})' if bounds else ''}"
    return ""
