"""`aerie-drafter train`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging

from aerie.terminal import sanitize_text
from aerie_drafter.cli.console import err, out
from aerie_drafter.errors import ConfigError
from aerie_drafter.train import processes
from aerie_drafter.train.progress import Live
from aerie_drafter.train.settings import commented, read
from aerie_drafter.train.setup import prepare
from aerie_drafter.train.trainer import Silent


def command(
    settings: Annotated[Path | None, typer.Argument(help="The YAML file that says what is trained, on what and how.")] = None,
    init: Annotated[bool, typer.Option("--init", help="Print such a file, every field with its meaning, and end.")] = False,
) -> None:
    """Train a drafter, or go on with a training that was stopped; on several devices with torchrun -m aerie_drafter.cli train FILE."""
    if init:
        out.print(commented(), markup=False, end="")
        return
    if settings is None:
        raise ConfigError("no settings are named: `aerie-drafter train --init > train.yaml` writes a file to start from.")
    chosen = read(settings)
    # Norms keep float32 weights under bfloat16, and PyTorch says once that it has no fused form for that.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with processes.join() as mine:
        if not mine.first:
            prepare(chosen, processes=mine, report=Silent()).run()
            return
        with Live(err) as report:
            trainer = prepare(chosen, processes=mine, report=report, say=err.print)
            if trainer.resume():
                err.print(f"going on after step {trainer.place.step} of {trainer.steps}")
            place = trainer.run()
    best = sanitize_text(str(chosen.output.folder / "best"))
    out.print(f"{best}: acceptance length {place.best:.3f} at {chosen.output.tokens} tokens, on held-out text")
    err.print(f"make of it what vLLM serves with: aerie-drafter export {best} FOLDER")
