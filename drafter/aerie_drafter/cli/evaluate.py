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
from aerie_drafter.evaluate.offline import Asking, Pair, Result, as_json, by_length, evaluate, total
from aerie_drafter.evaluate.prompts import bucket, read_prompts
from aerie_drafter.evaluate.server import measure


class Output(Enum):
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
    output: Annotated[Output, typer.Option("-o", "--output", help="Form of the result.")] = Output.TABLE,
) -> None:
    """Measure acceptance length by category: of a drafter and its target, or of a running vLLM."""
    given = read_prompts(prompts)
    if url:
        if drafter or target or not model or sampled_drafts:
            raise ConfigError("--url measures a server: it goes with --model, and without --drafter, --target, --sampled-drafts.")
        asked = asyncio.run(
            measure(
                url,
                model,
                given,
                by_length=bucket if lengths else None,
                max_tokens=max_tokens,
                temperature=temperature,
                concurrency=concurrency,
                report=err.print,
            )
        )
        if asked.others:
            err.print(f"[yellow]{asked.others} requests of others finished meanwhile and are in the figures[/]")
        found = asked.found
    else:
        if drafter is None or target is None:
            raise ConfigError("--drafter and --target are needed, or --url and --model of a running server.")
        if sampled_drafts and temperature == 0:
            raise ConfigError("--sampled-drafts draws at the target's temperature, which is 0: give --temperature too.")
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        pair = Pair.load(target, drafter, device=device)
        given = by_length(pair.tokenizer, given) if lengths else given
        asking = Asking(tokens, max_tokens, temperature, sampled_drafts, seed)
        found = evaluate(pair, given, asking, report=err.print)
    if output is Output.JSON:
        out.print_json(json.dumps(as_json(found)))
    else:
        out.print(table(found, "PROMPT TOKENS" if lengths else "CATEGORY"))


def table(found: Result, heading: str) -> Table:
    """A row for each category and one for all."""
    k = len(next(iter(found.values())).accepted)
    made = Table(box=None, pad_edge=False)
    made.add_column(heading)
    for name in ("AL", *(f"ACC@{position}" for position in range(1, k + 1)), "DRAFTS"):
        made.add_column(name, justify="right")
    for name, each in {**found, "total": total(found)}.items():
        numbers: list[Any] = [each.length, *each.rates]
        made.add_row(sanitize_text(name), *("-" if math.isnan(n) else f"{n:.3f}" for n in numbers), str(each.drafts))
    return made
