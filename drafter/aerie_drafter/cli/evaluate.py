"""`aerie-drafter evaluate`."""

from __future__ import annotations

import asyncio
import json
import math
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from transformers.utils import logging

from aerie.terminal import err, out, sanitize_text
from aerie_drafter.chat_template import parse_template_kwargs, read_template_arguments
from aerie_drafter.errors import ConfigError
from aerie_drafter.evaluate.offline import (
    AcceptanceByCategory,
    EvaluationOptions,
    ModelPair,
    acceptance_to_json,
    evaluate_prompts,
    group_by_length,
    sum_acceptance,
)
from aerie_drafter.evaluate.prompts import length_bucket, read_prompts
from aerie_drafter.evaluate.server import evaluate_server


class ResultFormat(Enum):
    """Output format."""

    TABLE = "table"
    JSON = "json"


def command(
    prompts: Annotated[Path, typer.Argument(help="JSON lines: category, and messages, turns, prompt or text.")],
    drafter: Annotated[Path | None, typer.Option(help="Folder of the drafter; with --target.")] = None,
    target: Annotated[Path | None, typer.Option(help="Folder of the target.")] = None,
    url: Annotated[str, typer.Option(help="Address of a running vLLM to measure instead; with --model.")] = "",
    model: Annotated[str, typer.Option(help="Served model name at that address.")] = "",
    tokens: Annotated[
        int, typer.Option("-k", "--tokens", min=1, max=32, help="Draft tokens per step (K); a server uses its own setting.")
    ] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature of the target; 0 is greedy.")] = 0.0,
    sampled_drafts: Annotated[bool, typer.Option(help="Sample draft tokens instead of the most likely ones; slow.")] = False,
    lengths: Annotated[bool, typer.Option("--by-length", help="Group by length of the prompt instead of by category.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests to a server.")] = 8,
    seed: Annotated[int, typer.Option(help="Random seed of sampled answers.")] = 0,
    tools: Annotated[Path | None, typer.Option(help="JSON file with the tools of prompts that have none.")] = None,
    template_kwargs: Annotated[str, typer.Option(help="JSON object: arguments of the chat template.")] = "{}",
    device: Annotated[str, typer.Option(help="Device of target and drafter.")] = "cpu",
    output: Annotated[ResultFormat, typer.Option("-o", "--output", help="Output format.")] = ResultFormat.TABLE,
) -> None:
    """Measure acceptance length by category, with a drafter and its target or with a running vLLM."""
    all_prompts = read_prompts(prompts, read_template_arguments(tools, parse_template_kwargs(template_kwargs)))
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
                temperature=temperature,
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
        if sampled_drafts and temperature == 0:
            raise ConfigError("--sampled-drafts samples at the target's temperature, which is 0: set --temperature too.")
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        pair = ModelPair.load(target, drafter, device=device)
        all_prompts = group_by_length(pair.tokenizer, all_prompts) if lengths else all_prompts
        options = EvaluationOptions(tokens, max_tokens, temperature, sampled_drafts, seed)
        acceptance = evaluate_prompts(pair, all_prompts, options, log_progress=err.print)
    if output is ResultFormat.JSON:
        out.print_json(json.dumps(acceptance_to_json(acceptance)))
    else:
        out.print(build_acceptance_table(acceptance, "PROMPT TOKENS" if lengths else "CATEGORY"))


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
