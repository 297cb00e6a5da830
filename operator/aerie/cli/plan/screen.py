"""A plan as text for a terminal of any width.

Guarantees: pure; text of the cluster is shown without markup or control characters. Only commands and lines of the diff may be
wider than the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from aerie.cli.plan.rollout_plan import ForecastRow, RolloutPlan

_VERDICT_STYLES = {"Apply": "bold green", "Nothing": "bold", "Rejected": "bold red"}
_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def render_plan(plan: RolloutPlan) -> RenderableType:
    """Return the screen: verdict, change, preflight, pods, time and users."""
    head = Text.assemble((_clean(f"{plan.namespace}/{plan.name}"), "bold"), "  ")
    head.append(_clean(plan.headline), _VERDICT_STYLES[plan.verdict])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, lines in _list_sections(plan):
        for index, line in enumerate(lines):
            table.add_row(title if index == 0 else "", Text(_clean(line)))
    return Group(head, Text(), table)


def _list_sections(plan: RolloutPlan) -> Iterator[tuple[str, Sequence[str]]]:
    yield "CHANGE", list(plan.describe_change()) or ["None."]
    yield "PREFLIGHT", [plan.preflight.message, *(finding.message for finding in plan.preflight.findings)]
    yield "PODS", list(plan.describe_pods())
    yield "TIME", [plan.forecast.message, *map(_describe_row, plan.forecast.rows)]
    yield "USERS", [*plan.users, *([plan.reversal] if plan.reversal else [])]


def _describe_row(row: ForecastRow) -> str:
    effect = f"{100 * row.effect:+.0f} %" if row.effect else "0 %"
    median = "no verdict" if row.median_seconds is None else f"{row.median_seconds / 60:.0f} min"
    return (
        f"{effect:>5}  {median:>10}  promoted {100 * row.promotion_chance:3.0f} %  rolled back {100 * row.rollback_chance:3.0f} %"
    )


def render_next(plan: RolloutPlan) -> Text:
    """Return the commands that follow, each on a line that can be copied."""
    commands = [Text(_clean(command)) for command in plan.next_commands or ("Nothing to do.",)]
    return Text("\n").join(
        (Text.assemble((f"{'NEXT':<11}", "bold"), commands[0]), *(Text(" " * 11) + each for each in commands[1:]))
    )


def render_diff(diff: str) -> Text:
    """Return a diff of pod templates, with its lines as they are."""
    if not diff:
        return Text("The pod template stays as it is.")
    return Text("\n").join(Text(_clean(line), _DIFF_STYLES.get(line[:1], "")) for line in diff.splitlines())


def _clean(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
