"""The report as Markdown, for pull requests and tickets: the verdict, the decision table, and a picture beside the file.

Guarantee: text of the cluster stays text: it becomes neither markup, nor a link, nor a mention of a user.
"""

from __future__ import annotations

import re

from aerie.cli.report.contents import Contents
from aerie.cli.report.verdict import (
    SAMPLES,
    describe_bounds,
    describe_decision_maker,
    describe_design,
    describe_duration,
    describe_met,
    describe_verdict,
    percent,
    title_of,
)

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~$&])")


def render_markdown(contents: Contents, picture: str = "") -> str:
    """Return the report. `picture`: name of the file with the chart of the decision; empty for none."""
    parts = [f"### {escape(describe_verdict(contents))}"]
    if contents.message:
        parts.append(escape(contents.message))
    parts.append(f"{escape(describe_decision_maker(contents))} {escape(describe_duration(contents))}")
    if contents.comparisons:
        parts.append(_render_table(contents))
    if picture:
        parts.append(f"![Estimate and bounds over time, until the decision]({picture})")
    facts = [f"{escape(name)}: {escape(value)}" for name, value in contents.identity]
    parts.append("\n".join(f"- {fact}" for fact in facts))
    parts += [f"Note: {escape(note)}" for note in contents.notes]
    return "\n\n".join(parts) + "\n"


def _render_table(contents: Contents) -> str:
    samples = SAMPLES.get(contents.design, "samples").capitalize()
    has_requirements = any(item.requirement for item in contents.comparisons)
    required = ("Required", "Met") if has_requirements else ()
    header = ("Criterion", "New against stable", "Bounds", *required, samples)
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for item in sorted(contents.comparisons, key=lambda item: not item.requirement):
        result = item.message or ("-" if item.estimate is None else percent(item.estimate))
        required = (item.requirement, describe_met(contents, item)) if has_requirements else ()
        cells = (title_of(item.metric), result, describe_bounds(item), *required, str(item.samples or ""))
        lines.append(f"| {' | '.join(map(escape, cells))} |")
    design = describe_design(contents)
    return "\n".join(lines) + (f"\n\nCompared by {escape(design)}. Bounds are anytime-valid." if design else "")


def escape(text: str) -> str:
    """Return the text on one line, in which no character has a meaning of Markdown.

    >>> escape("a|b <c> @team")
    'a\\\\|b \\\\<c\\\\> @\\u200bteam'
    """
    line = " ".join("".join(item if item.isprintable() else " " for item in text).split())
    line = _SPECIAL.sub(r"\\\1", line)
    line = re.sub(r"@(?=\w)", "@\u200b", line)  # no mention of a user
    return re.sub(r"(https?):(?=//)", "\\1:\u200b", line)  # no link
