"""The command line of `kubectl aerie report`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from aerie.cli.console import CommandError, err
from aerie.cli.fleet.kubectl import Document, Kubectl
from aerie.cli.fleet.options import with_kubectl
from aerie.manifests.rollout_history_config_map import rollout_history_config_map_name


class Format(StrEnum):
    """Format of a report."""

    HTML = "html"
    MARKDOWN = "md"
    SVG = "svg"


@with_kubectl
def report(
    kubectl: Kubectl,
    name: Annotated[str, typer.Argument(help="Name of the SpeculativeDeployment.", show_default=False)],
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", help="File: .html, .md (with a .svg beside it) or .svg. -: standard output, see --format."
        ),
    ],
    format_: Annotated[
        Format | None, typer.Option("--format", help="Format, if the file's name does not say it.", show_default=False)
    ] = None,
    revision: Annotated[
        str, typer.Option("--revision", help="Revision whose rollout is reported, or its beginning. Default: the latest rollout.")
    ] = "",
) -> None:
    """Write the record of a rollout's decision: verdict, criteria, curves, traffic and versions, as HTML, Markdown or SVG."""
    from aerie.cli.report import charts, contents, markdown, page  # not needed by other commands

    chosen = _find_format(output, format_)
    document = kubectl.get(name)
    config_map, events, notes = _read_further(kubectl, name)
    rollout = contents.build_contents(document, config_map, events, revision=revision, notes=notes)
    if chosen is Format.HTML:
        _write(output, page.render_page(rollout))
        return
    if chosen is Format.MARKDOWN and output == "-":
        _write(output, markdown.render_markdown(rollout))
        return
    chart = charts.draw_decision(rollout)
    if chosen is Format.SVG:
        if chart is None:
            raise CommandError(
                f"there is no curve of {name}: nothing was compared twice, or the operator has no record of this rollout. Use "
                "--format html, which has what is known."
            )
        _write(output, charts.with_theme(chart.svg))
        return
    picture = Path(output).with_suffix(".svg")
    if chart is not None:
        _write(str(picture), charts.with_theme(chart.svg))
    _write(output, markdown.render_markdown(rollout, picture.name if chart is not None else ""))


def _find_format(output: str, format_: Format | None) -> Format:
    """Return the format; raise `CommandError` if neither option nor name of the file say it."""
    if format_ is not None:
        return format_
    suffix = {".htm": ".html", ".markdown": ".md"}.get(Path(output).suffix.lower(), Path(output).suffix.lower())
    if suffix.removeprefix(".") in tuple(Format):
        return Format(suffix.removeprefix("."))
    if output == "-":
        return Format.HTML
    raise CommandError(f"--output is {output}: end it with .html, .md or .svg, or set --format.")


def _read_further(kubectl: Kubectl, name: str) -> tuple[Document | None, Sequence[Document] | None, list[str]]:
    """Return the records and the events as far as the user may read them, and notes about what is missing."""
    notes: list[str] = []
    config_map: Document | None = None
    events: Sequence[Document] | None = None
    try:
        config_map = kubectl.find("configmap", rollout_history_config_map_name(name))
    except CommandError as error:
        notes.append(f"The operator's records of rollouts cannot be read: {error}")
    try:
        events = kubectl.read_events(name)
    except CommandError as error:
        notes.append(f"Events cannot be read: {error}")
    return config_map, events, notes


def _write(output: str, text: str) -> None:
    """Write a file, or standard output for -."""
    if output == "-":
        typer.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--output is {output}: it cannot be written ({error.strerror}). Use another folder.") from error
    err.print(f"Wrote {output}.", markup=False)
