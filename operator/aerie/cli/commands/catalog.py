"""`aerie catalog`: the published drafters for a target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from aerie.cli.commands.preflight import OutputFormat
from aerie.cli.console import CommandError, err, out
from aerie.cli.inputs.files import CATALOG_HELP, read_catalog
from aerie.engine.models.checkpoint import parse_config
from aerie.engine.models.drafter_catalog import CatalogEntry, CatalogMatch, DrafterCatalog
from aerie.terminal import sanitize_text

_MATCH_NOTES = {"name": "", "copy": "copy of the target by its name", "sizes": "same sizes, possibly another model"}

_COLUMN_TITLES = ("TARGET", "DRAFTER", "KIND", "K", "AL", "COMMIT", "LICENCE", "SELECTION", "SOURCE", "NOTES")
_MIN_TABLE_WIDTH = 120
"""Minimum width of a terminal, in columns, for a readable table."""


def catalog(
    target: Annotated[str | None, typer.Argument(help="Repository of a target, or a folder with its config.json.")] = None,
    catalog_file: Annotated[str | None, typer.Option("--catalog", help=CATALOG_HELP)] = None,
    output: Annotated[OutputFormat, typer.Option("-o", "--output", help="Output format.")] = OutputFormat.TEXT,
) -> None:
    """List published drafters, all or those for one target, best first. Exit status 1: no drafter for the target."""
    drafter_catalog = read_catalog(catalog_file)
    if target is None:
        _print_matches(
            [
                _build_catalog_match(drafter_catalog, CatalogMatch(entry, "name"), entry.targets[0], None)
                for entry in drafter_catalog.entries
            ],
            output,
        )
        return
    config = _read_target_config(target)
    matches = drafter_catalog.find_matches(target, config)
    if output is OutputFormat.JSON or matches:
        _print_matches([_build_catalog_match(drafter_catalog, match, target, config) for match in matches], output)
    if not matches:
        _print_nearest_targets(drafter_catalog, target)
    elif not any(match.entry.kind.is_supported for match in matches):
        err.print("None of these drafters is supported: Aerie supports EAGLE 3 and 3.1.")
    raise typer.Exit(0 if matches else 1)


def _read_target_config(target: str) -> dict[str, Any] | None:
    file = Path(target) / "config.json"
    if not Path(target).is_dir():
        return None
    try:
        return parse_config(file.read_bytes(), str(file))
    except OSError as error:
        raise CommandError(f"{file} cannot be read ({error.strerror}): set a folder with a model, or a repository.") from error


@dataclass(frozen=True)
class _CatalogMatch:
    """A catalog match, and why it is or is not selected for the target."""

    match: CatalogMatch
    selection_reason: str


def _build_catalog_match(
    drafter_catalog: DrafterCatalog, match: CatalogMatch, target: str, config: dict[str, Any] | None
) -> _CatalogMatch:
    return _CatalogMatch(match, drafter_catalog.explain_selection(match, target, config))


def _print_matches(matches: list[_CatalogMatch], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        typer.echo(json.dumps([_match_to_json(match) for match in matches], indent=2))
        return
    rows = [_format_row(match) for match in matches]
    if out.is_terminal and out.width < _MIN_TABLE_WIDTH:
        out.print(_build_grid(rows))
    else:
        # Output to a program keeps whole rows.
        (out if out.is_terminal else Console(width=400)).print(_build_table(rows))


def _format_row(row: _CatalogMatch) -> tuple[str, ...]:
    entry = row.match.entry
    notes = "; ".join(part for part in (_MATCH_NOTES[row.match.reason], entry.notes) if part)
    cells = (
        entry.targets[0],
        entry.repo or "(in the target)",
        entry.kind.value,
        str(entry.num_speculative_tokens or "-"),
        _format_acceptance(entry),
        (entry.revision or entry.reported_revision or "-")[:8],
        entry.licence or "-",
        row.selection_reason,
        entry.source,
        notes,
    )
    return tuple(map(sanitize_text, cells))


def _build_table(rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMN_TITLES:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _build_grid(rows: list[tuple[str, ...]]) -> Table:
    """Build a grid with a line for each field that has a value, and an empty line between drafters."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for index, row in enumerate(rows):
        if index:
            grid.add_row()
        for column, cell in zip(_COLUMN_TITLES, row, strict=True):
            if cell not in ("", "-"):
                grid.add_row(column, cell)
    return grid


def _format_acceptance(entry: CatalogEntry) -> str:
    values = entry.acceptance.values()
    if not values:
        return "-"
    return f"{min(values):.2f}" if len(values) == 1 else f"{min(values):.2f}-{max(values):.2f}"


def _match_to_json(row: _CatalogMatch) -> dict[str, Any]:
    entry = row.match.entry
    return {
        "targets": list(entry.targets),
        "drafter": entry.repo,
        "kind": entry.kind.value,
        "numSpeculativeTokens": entry.num_speculative_tokens,
        "acceptance": dict(entry.acceptance),
        "source": entry.source,
        "notes": entry.notes,
        "revision": entry.revision,
        "reportedRevision": entry.reported_revision,
        "automatic": entry.automatic.value if entry.automatic else None,
        "checked": entry.checked or None,
        "licence": entry.licence or None,
        "matchedBy": row.match.reason,
        "supported": entry.kind.is_supported,
        "selection": row.selection_reason,
    }


def _print_nearest_targets(drafter_catalog: DrafterCatalog, target: str) -> None:
    err.print(sanitize_text(f"The catalog has no drafter for {target}."))
    near = drafter_catalog.nearest_targets(target)
    if near:
        err.print(
            sanitize_text(f"Similar targets in the catalog: {', '.join(near)}. A drafter for another target does not work.")
        )
    err.print(
        "If you have a drafter, set spec.drafter.source, or add an entry with --catalog (see docs/how-to/find-a-drafter.md)."
    )
    err.print("To train a drafter on this target's own answers, see `aerie-drafter --help`.")
