"""`aerie-drafter drift`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from transformers.utils import logging

from aerie.terminal import sanitize_text
from aerie_drafter.checkpoint import read_drafter_config
from aerie_drafter.cli.console import err, out
from aerie_drafter.cli.evaluate import ResultFormat
from aerie_drafter.drift import DEFAULT_DRIFT_STEPS, DriftProfile, measure_drift, plot_drift
from aerie_drafter.errors import ConfigError, DataError
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts
from aerie_drafter.evaluate.prompts import read_prompts


def command(
    drafter: Annotated[Path, typer.Argument(help="A drafter's folder.")],
    other: Annotated[Path | None, typer.Argument(help="Another one for the same target, beside it.")] = None,
    *,
    target: Annotated[Path, typer.Option(help="The target's folder.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines: messages, turns, prompt or text.")],
    tokens: Annotated[int, typer.Option("-k", "--tokens", min=2, max=32, help="Steps.")] = DEFAULT_DRIFT_STEPS,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, tokens.")] = 128,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw it too: a file ending in .svg or .png.")] = None,
    device: Annotated[str, typer.Option(help="Where target and drafter run.")] = "cpu",
    output: Annotated[ResultFormat, typer.Option("-o", "--output", help="Form of the result.")] = ResultFormat.TABLE,
) -> None:
    """Show how a drafter drifts step by step: size of its state, attention on the first and on its own tokens, acceptance."""
    if plot_file is not None and plot_file.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot is {plot_file}: a file ending in .svg or .png is expected.")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    given = read_prompts(prompts)
    found: dict[str, DriftProfile] = {}
    answered = None
    for folder in (drafter, other) if other is not None else (drafter,):
        pair = ModelPair.load(target, folder, device=device)
        if answered is None:
            ids = [prompt.encode(pair.tokenizer) for prompt in given]
            err.print(f"the target answers {len(ids)} prompts")
            answered = answer_prompts(pair, ids, EvaluationOptions(tokens, max_tokens))
        try:
            found[f"{folder.resolve().name} ({read_drafter_config(folder).eagle_version})"] = measure_drift(
                pair, answered, tokens
            )
        except ValueError as error:
            raise DataError(f"{prompts}: {error}") from error
    if output is ResultFormat.JSON:
        out.print_json(
            json.dumps(
                {name: {**dataclasses.asdict(each), "state_norm_ratio": each.state_norm_ratio} for name, each in found.items()}
            )
        )
    else:
        for name, each in found.items():
            out.print(f"{sanitize_text(name)}: state norm ratio {each.state_norm_ratio:.2f}, {each.columns} columns")
            out.print(build_drift_table(each))
    if plot_file is not None:
        plot_drift(found, plot_file)
        err.print(f"{sanitize_text(str(plot_file))} is written")


def build_drift_table(drift: DriftProfile) -> Table:
    """A row for each step."""
    table = Table(box=None, pad_edge=False)
    for name in ("STEP", "STATE NORM", "FIRST TOKEN", "OWN TOKENS", "ACCEPTED"):
        table.add_column(name, justify="right")
    rows = zip(
        drift.state_norm, drift.first_token_attention, drift.draft_token_attention, drift.cumulative_acceptance, strict=True
    )
    for step, (norm, *shares) in enumerate(rows, start=1):
        table.add_row(str(step), f"{norm:.2f}", *(f"{share:.3f}" for share in shares))
    return table
