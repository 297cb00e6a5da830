"""`aerie-drafter train`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging

from aerie.terminal import err, out, sanitize_text
from aerie_drafter.errors import ConfigError
from aerie_drafter.train import processes
from aerie_drafter.train.progress import ConsoleReporter
from aerie_drafter.train.settings import TrainingSettings, read_settings, render_default_yaml
from aerie_drafter.train.setup import PreparedData, build_trainer, prepare_data
from aerie_drafter.train.trainer import NullReporter, TrainingProgress


def command(
    settings: Annotated[Path | None, typer.Argument(help="YAML file with the settings of the training.")] = None,
    init: Annotated[
        bool, typer.Option("--init", help="Print a settings file with all fields, their meanings and defaults.")
    ] = False,
) -> None:
    """Train a drafter, or resume a training; on several devices: torchrun -m aerie_drafter.cli train FILE."""
    if init:
        out.print(render_default_yaml(), markup=False, end="")
        return
    if settings is None:
        raise ConfigError("no settings file: `aerie-drafter train --init > train.yaml` writes one to start from.")
    training = read_settings(settings)
    # Norms keep float32 weights under bfloat16, and PyTorch says once that it has no fused form for that.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    prepared = prepare_data(training, err.print if processes.is_main_process() else None)
    with processes.join_process_group() as group:
        progress = _run(training, prepared, group)  # a function of its own: no name here may keep the group's tensors
        if not group.is_main:
            return
    best = sanitize_text(str(training.output.folder / "best"))
    out.print(
        f"{best}: acceptance length {progress.best_acceptance_length:.3f} at "
        f"{training.output.num_speculative_tokens} tokens, on held-out text"
    )
    err.print(f"export it for vLLM: aerie-drafter export {best} FOLDER")


def _run(training: TrainingSettings, prepared: PreparedData, group: processes.Processes) -> TrainingProgress:
    """Train as this process of the group, from where an interrupted training was saved; only the main process reports."""
    if not group.is_main:
        return build_trainer(training, prepared=prepared, processes=group, reporter=NullReporter()).run()
    with ConsoleReporter(err) as reporter:
        trainer = build_trainer(training, prepared=prepared, processes=group, reporter=reporter, log_progress=err.print)
        if trainer.resume():
            err.print(f"resuming after step {trainer.progress.step} of {trainer.total_steps}")
        return trainer.run()
