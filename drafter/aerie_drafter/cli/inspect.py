"""`aerie-drafter inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from aerie.terminal import out, sanitize_text
from aerie_drafter.inspect import inspect_checkpoint


def command(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a drafter.")],
    target: Annotated[Path | None, typer.Option(help="Folder of the target to check against.")] = None,
    digests: Annotated[bool, typer.Option("--digests", help="Read the target's weights and compare digests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Output as JSON.")] = False,
) -> None:
    """Describe a checkpoint, and check whether it fits a target; exit status 1 if there is a problem."""
    report = inspect_checkpoint(checkpoint, target, compare_digests=digests)
    if as_json:
        out.print_json(json.dumps(report.to_json()))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        table.add_column(overflow="fold")
        for name, value in report.facts.items():
            for key, inner in value.items() if name == "provenance" else [("", value)]:
                table.add_row(sanitize_text(f"{name} {key}".replace("_", " ").strip()), sanitize_text(_format_value(inner)))
        out.print(table)
        for finding in report.findings:
            out.print(f"[dim]-[/] {sanitize_text(finding)}")
        for problem in report.problems:
            out.print(f"[bold red]problem:[/] {sanitize_text(problem)}")
        out.print(f"[bold]{sanitize_text(report.summary)}[/]")
    if report.problems:
        raise typer.Exit(1)


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return str(value)
