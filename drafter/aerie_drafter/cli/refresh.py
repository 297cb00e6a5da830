"""`aerie-drafter refresh`."""

from __future__ import annotations

import json
import warnings
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers.utils import logging

from aerie.boundary import EXIT_REJECTED
from aerie.terminal import err, out, sanitize_text
from aerie_drafter import files
from aerie_drafter.errors import ConfigError
from aerie_drafter.refresh.run import NEW, OLD, REFRESHED, SERVED, Refresh, RefreshInputs
from aerie_drafter.refresh.settings import RefreshSettings
from aerie_drafter.train.progress import ConsoleReporter
from aerie_drafter.train.settings import read_settings_file, render_groups


class ResultFormat(Enum):
    """Output format."""

    TABLE = "table"
    JSON = "json"


def command(
    drafter: Annotated[Path | None, typer.Argument(help="Folder of the served drafter.")] = None,
    folder: Annotated[Path | None, typer.Argument(help="Output folder of the refreshed drafter.")] = None,
    target: Annotated[Path | None, typer.Option(help="Folder of its target.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Captured prompts: a folder of JSON Lines files, as spec.capture writes them, or one file."),
    ] = None,
    old: Annotated[
        list[Path] | None,
        typer.Option(help="Conversations of the old domain. Default: the drafter's training data, if it lies beside it."),
    ] = None,
    old_held_out: Annotated[
        Path | None, typer.Option(help="Old prompts for the evaluation alone. Default: a share of --old.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="Address of a running vLLM that answers; with --model.")] = "",
    model: Annotated[str, typer.Option(help="Served model name at that address.")] = "",
    settings: Annotated[Path | None, typer.Option(help="YAML file with settings; each has a default.")] = None,
    work: Annotated[Path | None, typer.Option(help="Work folder. Default: beside the output, with the suffix .work.")] = None,
    init: Annotated[bool, typer.Option("--init", help="Print a settings file with all fields and their defaults.")] = False,
    output: Annotated[ResultFormat, typer.Option("-o", "--output", help="Output format.")] = ResultFormat.TABLE,
) -> None:
    """Train a served drafter further on captured prompts, and export it if it is better. Exit status 1: it is not."""
    if init:
        out.print(render_groups(RefreshSettings, "aerie-drafter refresh --settings FILE"), markup=False, end="")
        return
    if drafter is None or folder is None or target is None or prompts is None:
        raise ConfigError("expected: aerie-drafter refresh DRAFTER FOLDER --target TARGET --prompts PROMPTS.")
    if folder.name in ("", ".."):
        raise ConfigError(f"{folder}: expected: a new folder, which the refreshed drafter is written to.")
    if bool(endpoint) != bool(model):
        raise ConfigError("--endpoint and --model go together.")
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    work = work or folder.with_name(f"{folder.name}.work")
    with files.reserve_output(work, is_folder=True), ConsoleReporter(err) as reporter:
        report = Refresh(
            RefreshInputs(drafter, target, prompts, tuple(old or ()), old_held_out, endpoint, model),
            RefreshSettings() if settings is None else read_settings_file(settings, RefreshSettings, "refresh"),
            work,
            folder,
            torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            lambda line: err.print(sanitize_text(line)),
            reporter,
        ).run()
    if output is ResultFormat.JSON:
        out.print_json(json.dumps(report))
    else:
        out.print(build_table(report))
        out.print(sanitize_text(describe_outcome(report, folder)))
    if not report["accepted"]:
        raise typer.Exit(EXIT_REJECTED)


def build_table(report: dict[str, Any]) -> Table:
    """Return the table of both domains."""
    table = Table(box=None, pad_edge=False)
    table.add_column("PROMPTS")
    for name in ("HELD BACK", "AL SERVED", "AL REFRESHED", "GAIN", "95 % INTERVAL"):
        table.add_column(name, justify="right")
    for name in (NEW, OLD):
        if (row := report[name]) is not None:
            interval = "-" if row["low"] is None else f"{row['low']:+.2%} to {row['high']:+.2%}"
            lengths = ["-" if row[each] is None else f"{row[each]:.3f}" for each in (SERVED, REFRESHED)]
            gain = "-" if row["gain"] is None else f"{row['gain']:+.2%}"
            table.add_row(name, str(row["prompts"]), *lengths, gain, interval)
    return table


def describe_outcome(report: dict[str, Any], folder: Path) -> str:
    """Return the lines below the table."""
    lines = [f"{name}: {seconds:.0f} s" for name, seconds in report["seconds"].items()]
    recovered = report["recovered_share"]
    trained = ", ".join(f"{count} {domain}" for domain, count in report["trained"].items())
    omitted, rejected = (sum(report[name].values()) for name in ("omitted", "rejected"))
    return "\n".join(
        [
            "",
            ", ".join(lines),
            f"trained on: {trained} conversations"
            + (f"; {omitted} others have no answer token in data.max_length" if omitted else "")
            + (f"; the server rejected {rejected} others" if rejected else ""),
            f"draft vocabulary: {report['draft_vocabulary_coverage']:.1%} of the answers' tokens",
            *([f"recovered: {recovered:.0%} of the lost acceptance length"] if recovered is not None else []),
            *report["reasons"],
            f"{folder}: exported" if report["accepted"] else "not exported",
        ]
    )
