"""`aerie-drafter evaluate`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from transformers.utils import logging

from aerie.terminal import err, out, sanitize_text
from aerie_drafter.chat_template import parse_template_kwargs, read_template_arguments
from aerie_drafter.errors import ConfigError
from aerie_drafter.evaluate.exact import DEFAULT_TEMPERATURES, ExactAcceptance, measure_exact_acceptance, to_json
from aerie_drafter.evaluate.offline import (
    AcceptanceByCategory,
    EvaluationOptions,
    ModelPair,
    acceptance_to_json,
    evaluate_prompts,
    group_by_length,
    sum_acceptance,
)
from aerie_drafter.evaluate.plot import plot_acceptance
from aerie_drafter.evaluate.prompts import Prompt, length_bucket, read_prompts
from aerie_drafter.evaluate.server import evaluate_server


class ResultFormat(Enum):
    """Output format."""

    TABLE = "table"
    JSON = "json"


def command(
    prompts: Annotated[Path, typer.Argument(help="JSON lines: category, and messages, turns, prompt or text.")],
    drafter: Annotated[Path | None, typer.Option(help="Folder of the drafter; with --target.")] = None,
    versus: Annotated[Path | None, typer.Option(help="Folder of a second drafter to compare, with --exact.")] = None,
    target: Annotated[Path | None, typer.Option(help="Folder of the target.")] = None,
    url: Annotated[str, typer.Option(help="Address of a running vLLM to measure instead; with --model.")] = "",
    model: Annotated[str, typer.Option(help="Served model name at that address.")] = "",
    tokens: Annotated[
        int, typer.Option("-k", "--tokens", min=1, max=32, help="Draft tokens per step (K); a server uses its own setting.")
    ] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 128,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            help="Sampling temperature of the target; 0 is greedy. Default: 0; with --exact, which takes several, 0, 0.7 and 1.",
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Expected acceptance, without drawing drafts: for greedy and drawn drafts, beside an exact copy of the target.",
        ),
    ] = False,
    draws: Annotated[int, typer.Option(min=1, help="Answers to each prompt above temperature 0, with --exact.")] = 1,
    sampled_drafts: Annotated[
        bool, typer.Option("--sampled-drafts", help="Sample draft tokens instead of the most likely ones; slow.")
    ] = False,
    lengths: Annotated[bool, typer.Option("--by-length", help="Group by length of the prompt instead of by category.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests to a server.")] = 8,
    seed: Annotated[int, typer.Option(help="Random seed of sampled answers.")] = 0,
    tools: Annotated[Path | None, typer.Option(help="JSON file with the tools of prompts that have none.")] = None,
    template_kwargs: Annotated[str, typer.Option(help="JSON object: arguments of the chat template.")] = "{}",
    device: Annotated[str, typer.Option(help="Device of target and drafter.")] = "cpu",
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="With --exact, also write a plot: a file ending in .svg or .png.")
    ] = None,
    output: Annotated[ResultFormat, typer.Option("-o", "--output", help="Output format.")] = ResultFormat.TABLE,
) -> None:
    """Measure acceptance length by category, with a drafter and its target or with a running vLLM."""
    all_prompts = read_prompts(prompts, read_template_arguments(tools, parse_template_kwargs(template_kwargs)))
    heading = "PROMPT TOKENS" if lengths else "CATEGORY"
    check_plot_file(plot_file)
    if exact:
        if url or drafter is None or target is None or sampled_drafts:
            raise ConfigError("--exact goes with --drafter and --target, and without --url and --sampled-drafts.")
        options = EvaluationOptions(tokens, max_tokens, seed=seed)
        folders = [drafter] if versus is None else [drafter, versus]
        expected = _measure_exactly(
            all_prompts, target, folders, options, temperature or DEFAULT_TEMPERATURES, draws, device, by_length=lengths
        )
        if output is ResultFormat.JSON:
            out.print_json(json.dumps(to_json(expected)))
        else:
            _print_exact(expected, heading)
        if plot_file is not None:
            plot_acceptance(expected, plot_file)
            err.print(f"wrote {sanitize_text(str(plot_file))}")
        return
    if versus is not None or draws > 1 or plot_file is not None or (temperature is not None and len(temperature) > 1):
        raise ConfigError("--versus, --draws, --plot and several values of --temperature go with --exact.")
    [single_temperature] = temperature or [0.0]
    if url:
        if drafter or target or not model or sampled_drafts:
            raise ConfigError("--url measures a server: it goes with --model, and without --drafter, --target, --sampled-drafts.")
        evaluation = asyncio.run(
            evaluate_server(
                url,
                model,
                all_prompts,
                length_category=length_bucket if lengths else None,
                max_tokens=max_tokens,
                temperature=single_temperature,
                concurrency=concurrency,
                log_progress=err.print,
            )
        )
        if evaluation.foreign_requests:
            err.print(
                f"[yellow]{evaluation.foreign_requests} requests of other clients finished meanwhile and are "
                "included in the results[/]"
            )
        acceptance = evaluation.acceptance_by_category
    else:
        if drafter is None or target is None:
            raise ConfigError("--drafter and --target are required, or --url and --model of a running server.")
        if sampled_drafts and single_temperature == 0:
            raise ConfigError("--sampled-drafts samples at the target's temperature, which is 0: set --temperature too.")
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        pair = ModelPair.load(target, drafter, device=device)
        all_prompts = group_by_length(pair.tokenizer, all_prompts) if lengths else all_prompts
        options = EvaluationOptions(tokens, max_tokens, single_temperature, sampled_drafts, seed)
        acceptance = evaluate_prompts(pair, all_prompts, options, log_progress=err.print)
    if output is ResultFormat.JSON:
        out.print_json(json.dumps(acceptance_to_json(acceptance)))
    else:
        out.print(build_acceptance_table(acceptance, heading))


def check_plot_file(file: Path | None) -> None:
    """Raise ConfigError if a plot cannot be written to a file of this name."""
    if file is not None and file.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot is {file}: expected: a file ending in .svg or .png.")


def _measure_exactly(
    prompts: Sequence[Prompt],
    target: Path,
    folders: Sequence[Path],
    options: EvaluationOptions,
    temperatures: Sequence[float],
    draws: int,
    device: str,
    *,
    by_length: bool,
) -> ExactAcceptance:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    pairs = ModelPair.load_each(target, folders, device=device)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return measure_exact_acceptance(
        pairs[0],
        {name: pair.drafter for name, pair in zip(names, pairs, strict=True)},
        group_by_length(pairs[0].tokenizer, prompts) if by_length else prompts,
        options,
        temperatures=temperatures,
        draws=draws,
        log_progress=err.print,
    )


def _print_exact(expected: ExactAcceptance, heading: str) -> None:
    out.print(build_exact_table(expected, heading))
    gains = build_gain_table(expected, heading)
    if gains.row_count:
        out.print()
        out.print(gains)


def build_exact_table(expected: ExactAcceptance, heading: str) -> Table:
    """Return a table with a row for each condition, category and drafter."""
    report = to_json(expected)["acceptance"]
    table = Table(box=None, pad_edge=False)
    for name in ("T", "DRAFTS", heading, "DRAFTER"):
        table.add_column(name)
    for name in ("AL", "OF COPY", *(f"ACC@{number + 1}" for number in range(len(report[0]["acceptance_per_position"])))):
        table.add_column(name, justify="right")
    for row in report:
        numbers = [row["acceptance_length"], row["share_of_copy"], *row["acceptance_per_position"]]
        table.add_row(
            f"{row['temperature']:g}",
            row["draft_sampling"],
            sanitize_text(row["category"]),
            sanitize_text(row["drafter"]),
            *("-" if number is None else f"{number:.3f}" for number in numbers),
        )
    return table


def build_gain_table(expected: ExactAcceptance, heading: str) -> Table:
    """Return a table with the second drafter's gain over the first, by condition and category; empty for one drafter."""
    table = Table(box=None, pad_edge=False)
    for name in ("T", "DRAFTS", heading):
        table.add_column(name)
    for name in ("GAIN", "95 % INTERVAL"):
        table.add_column(name, justify="right")
    for row in to_json(expected)["gains"]:
        interval = "-" if row["low"] is None else f"{row['low']:+.2%} to {row['high']:+.2%}"
        gain = "-" if row["gain"] is None else f"{row['gain']:+.2%}"
        table.add_row(f"{row['temperature']:g}", row["draft_sampling"], sanitize_text(row["category"]), gain, interval)
    return table


def build_acceptance_table(acceptance_by_category: AcceptanceByCategory, heading: str) -> Table:
    """Return a table with a row per category and one for the total."""
    k = len(next(iter(acceptance_by_category.values())).accepted_per_position)
    table = Table(box=None, pad_edge=False)
    table.add_column(heading)
    for name in ("AL", *(f"ACC@{position}" for position in range(1, k + 1)), "DRAFTS"):
        table.add_column(name, justify="right")
    for name, counts in {**acceptance_by_category, "total": sum_acceptance(acceptance_by_category)}.items():
        numbers: list[Any] = [counts.acceptance_length, *counts.acceptance_rates]
        table.add_row(sanitize_text(name), *("-" if math.isnan(n) else f"{n:.3f}" for n in numbers), str(counts.drafts))
    return table
