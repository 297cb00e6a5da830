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

from aerie.terminal import sanitize_text
from aerie_drafter.cli.console import err, out
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
    """Form of the result."""

    TABLE = "table"
    JSON = "json"


def command(
    prompts: Annotated[Path, typer.Argument(help="JSON lines: category, and messages, turns, prompt or text.")],
    drafter: Annotated[Path | None, typer.Option(help="The drafter's folder; with --target.")] = None,
    target: Annotated[Path | None, typer.Option(help="The target's folder.")] = None,
    url: Annotated[str, typer.Option(help="Address of a running vLLM to measure instead; with --model.")] = "",
    model: Annotated[str, typer.Option(help="The name that it serves the target under.")] = "",
    tokens: Annotated[int, typer.Option("-k", "--tokens", min=1, max=32, help="Drafted tokens (K); a server has its own.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Of the target; 0 is greedy.")] = 0.0,
    sampled_drafts: Annotated[bool, typer.Option(help="Draw drafts too, instead of taking the likeliest tokens; slow.")] = False,
    lengths: Annotated[bool, typer.Option("--by-length", help="By length of the prompt instead of by category.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time, to a server.")] = 8,
    seed: Annotated[int, typer.Option(help="Of drawn answers.")] = 0,
    device: Annotated[str, typer.Option(help="Where target and drafter run.")] = "cpu",
    output: Annotated[ResultFormat, typer.Option("-o", "--output", help="Form of the result.")] = ResultFormat.TABLE,
) -> None:
    """Measure acceptance length by category: of a drafter and its target, or of a running vLLM."""
    given = read_prompts(prompts)
    if url:
        if drafter or target or not model or sampled_drafts:
            raise ConfigError("--url measures a server: it goes with --model, and without --drafter, --target, --sampled-drafts.")
        asked = asyncio.run(
            evaluate_server(
                url,
                model,
                given,
                length_category=length_bucket if lengths else None,
                max_tokens=max_tokens,
                temperature=temperature,
                concurrency=concurrency,
                log_progress=err.print,
            )
        )
        if asked.foreign_requests:
            err.print(f"[yellow]{asked.foreign_requests} requests of others finished meanwhile and are in the figures[/]")
        found = asked.acceptance_by_category
    else:
        if drafter is None or target is None:
            raise ConfigError("--drafter and --target are needed, or --url and --model of a running server.")
        if sampled_drafts and temperature == 0:
            raise ConfigError("--sampled-drafts draws at the target's temperature, which is 0: give --temperature too.")
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        pair = ModelPair.load(target, drafter, device=device)
        given = group_by_length(pair.tokenizer, given) if lengths else given
        asking = EvaluationOptions(tokens, max_tokens, temperature, sampled_drafts, seed)
        found = evaluate_prompts(pair, given, asking, log_progress=err.print)
    if output is ResultFormat.JSON:
        out.print_json(json.dumps(acceptance_to_json(found)))
    else:
        out.print(build_acceptance_table(found, "PROMPT TOKENS" if lengths else "CATEGORY"))


def build_acceptance_table(acceptance_by_category: AcceptanceByCategory, heading: str) -> Table:
    """A row for each category and one for all."""
    k = len(next(iter(acceptance_by_category.values())).accepted_per_position)
    made = Table(box=None, pad_edge=False)
    made.add_column(heading)
    for name in ("AL", *(f"ACC@{position}" for position in range(1, k + 1)), "DRAFTS"):
        made.add_column(name, justify="right")
    for name, each in {**acceptance_by_category, "total": sum_acceptance(acceptance_by_category)}.items():
        numbers: list[Any] = [each.acceptance_length, *each.acceptance_rates]
        made.add_row(sanitize_text(name), *("-" if math.isnan(n) else f"{n:.3f}" for n in numbers), str(each.drafts))
    return made
