"""`aerie catalog`: which drafters have been published for a target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aerie.cli.commands.preflight import Output
from aerie.cli.console import CommandError, err, out
from aerie.cli.inputs.files import CATALOG, read_catalog
from aerie.engine.models.checkpoint import parse_config
from aerie.engine.models.drafter_catalog import Catalog, Entry, Match
from aerie.terminal import plain

_BY = {"name": "", "copy": "by name a copy of it", "sizes": "same sizes, maybe another model"}

_COLUMNS = ("TARGET", "DRAFTER", "KIND", "K", "AL", "COMMIT", "DEFAULT", "SOURCE", "NOTES")
_TABLE = 120
"""Columns of a terminal from which on a table is readable."""


def catalog(
    target: Annotated[str | None, typer.Argument(help="Repository of a target, or a folder with its config.json.")] = None,
    own: Annotated[str | None, typer.Option("--catalog", help=CATALOG)] = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="How to print them.")] = Output.TEXT,
) -> None:
    """List published drafters, all or those for one target, the best first. Exit status 1: there is none for the target."""
    rows = read_catalog(own)
    if target is None:
        _show([_judged(rows, Match(entry, "name"), entry.targets[0], None) for entry in rows.entries], output)
        return
    config = _config(target)
    matches = rows.matches(target, config)
    if output is Output.JSON or matches:
        _show([_judged(rows, match, target, config) for match in matches], output)
    if not matches:
        _tell_nearest(rows, target)
    elif not any(match.entry.kind.runs for match in matches):
        err.print("Aerie runs EAGLE 3 and 3.1 drafters, and there is none among these.")
    raise typer.Exit(0 if matches else 1)


def _config(target: str) -> dict[str, Any] | None:
    file = Path(target) / "config.json"
    if not Path(target).is_dir():
        return None
    try:
        return parse_config(file.read_bytes(), str(file))
    except OSError as error:
        raise CommandError(f"{file} cannot be read ({error.strerror}): give a folder with a model, or a repository.") from error


@dataclass(frozen=True)
class _Judged:
    """A row for a target, and why it is the default there, or not."""

    match: Match
    why: str


def _judged(rows: Catalog, match: Match, target: str, config: dict[str, Any] | None) -> _Judged:
    return _Judged(match, rows.why(match, target, config))


def _show(found: list[_Judged], output: Output) -> None:
    if output is Output.JSON:
        typer.echo(json.dumps([_json(one) for one in found], indent=2))
        return
    rows = [_row(one) for one in found]
    if out.is_terminal and out.width < _TABLE:
        out.print(_blocks(rows))
    else:
        # A program that reads it gets whole rows.
        (out if out.is_terminal else Console(width=400)).print(_table(rows))


def _row(judged: _Judged) -> tuple[str, ...]:
    entry = judged.match.entry
    notes = "; ".join(part for part in (_BY[judged.match.by], entry.notes) if part)
    cells = (
        entry.targets[0],
        entry.repo or "(in the target)",
        entry.kind.value,
        str(entry.tokens or "-"),
        _acceptance(entry),
        (entry.revision or "-")[:8],
        judged.why,
        entry.source,
        notes,
    )
    return tuple(map(plain, cells))


def _table(rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _blocks(rows: list[tuple[str, ...]]) -> Table:
    """A line for each field that has a value, and an empty one between drafters."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for place, row in enumerate(rows):
        if place:
            grid.add_row()
        for column, cell in zip(_COLUMNS, row, strict=True):
            if cell not in ("", "-"):
                grid.add_row(column, cell)
    return grid


def _acceptance(entry: Entry) -> str:
    values = entry.acceptance.values()
    if not values:
        return "-"
    return f"{min(values):.2f}" if len(values) == 1 else f"{min(values):.2f}-{max(values):.2f}"


def _json(judged: _Judged) -> dict[str, Any]:
    entry = judged.match.entry
    return {
        "targets": list(entry.targets),
        "drafter": entry.repo,
        "kind": entry.kind.value,
        "tokens": entry.tokens,
        "acceptance": dict(entry.acceptance),
        "source": entry.source,
        "notes": entry.notes,
        "revision": entry.revision,
        "matchedBy": judged.match.by,
        "runs": entry.kind.runs,
        "default": judged.why,
    }


def _tell_nearest(rows: Catalog, target: str) -> None:
    err.print(plain(f"The catalog has no drafter for {target}."))
    near = rows.nearest(target)
    if near:
        err.print(plain(f"The nearest targets that it has: {', '.join(near)}. A drafter of another target does not work."))
    err.print("If there is one, name it in spec.drafter.source, or add it with --catalog; docs/preflight.md shows an entry.")
    err.print("If there is none, train one on this target's own answers: `aerie-drafter --help`.")
