"""`aerie-drafter drift`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from transformers.utils import logging

from aerie.terminal import err, out, sanitize_text
from aerie_drafter.checkpoint import read_drafter_config
from aerie_drafter.cli.evaluate import ResultFormat, check_plot_file
from aerie_drafter.drift import DEFAULT_DRIFT_STEPS, DriftProfile, measure_drift, plot_drift
from aerie_drafter.errors import DataError
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, answer_prompts
from aerie_drafter.evaluate.prompts import read_prompts


def command(
    drafter: Annotated[Path, typer.Argument(help="Folder of a drafter.")],
    other: Annotated[Path | None, typer.Argument(help="Second drafter for the same target, to compare.")] = None,
    *,
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines: messages, turns, prompt or text.")],
    tokens: Annotated[int, typer.Option("-k", "--tokens", min=2, max=32, help="Number of steps.")] = DEFAULT_DRIFT_STEPS,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 128,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Also write a plot: a file ending in .svg or .png.")] = None,
    device: Annotated[str, typer.Option(help="Device of target and drafter.")] = "cpu",
    output: Annotated[ResultFormat, typer.Option("-o", "--output", help="Output format.")] = ResultFormat.TABLE,
) -> None:
    """Measure the drift of a drafter over its steps: state norm, attention to the first and to its own tokens, acceptance."""
    check_plot_file(plot_file)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    all_prompts = read_prompts(prompts)
    folders = [drafter] if other is None else [drafter, other]
    pairs = ModelPair.load_each(target, folders, device=device)
    ids = [prompt.encode(pairs[0].tokenizer) for prompt in all_prompts]
    err.print(f"generating the target's answers to {len(ids)} prompts")
    answered_texts = answer_prompts(pairs[0], ids, EvaluationOptions(tokens, max_tokens))
    profiles: dict[str, DriftProfile] = {}
    for folder, pair in zip(folders, pairs, strict=True):
        try:
            profiles[f"{folder.resolve().name} ({read_drafter_config(folder).eagle_version})"] = measure_drift(
                pair, answered_texts, tokens
            )
        except ValueError as error:
            raise DataError(f"{prompts}: {error}") from error
    if output is ResultFormat.JSON:
        out.print_json(
            json.dumps(
                {
                    name: {**dataclasses.asdict(profile), "state_norm_ratio": profile.state_norm_ratio}
                    for name, profile in profiles.items()
                }
            )
        )
    else:
        for name, profile in profiles.items():
            out.print(f"{sanitize_text(name)}: state norm ratio {profile.state_norm_ratio:.2f}, {profile.columns} columns")
            out.print(build_drift_table(profile))
    if plot_file is not None:
        plot_drift(profiles, plot_file)
        err.print(f"wrote {sanitize_text(str(plot_file))}")


def build_drift_table(drift: DriftProfile) -> Table:
    """Return a table with a row per step."""
    table = Table(box=None, pad_edge=False)
    for name in ("STEP", "STATE NORM", "FIRST TOKEN", "OWN TOKENS", "ACCEPTED"):
        table.add_column(name, justify="right")
    rows = zip(
        drift.state_norm, drift.first_token_attention, drift.draft_token_attention, drift.cumulative_acceptance, strict=True
    )
    for step, (norm, *shares) in enumerate(rows, start=1):
        table.add_row(str(step), f"{norm:.2f}", *(f"{share:.3f}" for share in shares))
    return table
