"""`aerie-drafter generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress
from transformers.utils import logging

from aerie.terminal import err, out
from aerie_drafter.errors import ConfigError
from aerie_drafter.train.data import read_conversations
from aerie_drafter.train.generate import GenerationParameters, generate_answers
from aerie_drafter.train.states import load_model, load_tokenizer


def command(
    target: Annotated[str, typer.Argument(help="Folder or Hugging Face repository of the target.")],
    source: Annotated[Path, typer.Argument(help="Conversations, one JSON object per line; the assistant's turns are replaced.")],
    output: Annotated[Path, typer.Argument(help="Output file; an interrupted run is resumed.")],
    revision: Annotated[str | None, typer.Option(help="Commit of the repository.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Batch size.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 1024,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling: cumulative probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
) -> None:
    """Generate training data: the target's answers to the prompts of a file."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = load_tokenizer(target, revision)
    if not tokenizer.chat_template:
        raise ConfigError(f"{target}: its tokenizer has no chat template; add one to the target's folder.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(target, revision, torch.bfloat16 if device.type == "cuda" else torch.float32, device).eval()
    total = sum(1 for _ in read_conversations(source))
    with Progress(console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("answered", total=total)
        written = generate_answers(
            model,
            tokenizer,
            source,
            output,
            parameters=GenerationParameters(max_tokens, temperature, top_p, seed),
            batch_size=rows,
            on_progress=lambda count: bar.update(task, completed=count),
        )
    out.print(f"{output}: {total} conversations, {written} of them new", markup=False)
