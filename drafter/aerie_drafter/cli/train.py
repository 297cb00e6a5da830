"""`aerie-drafter train`."""

from __future__ import annotations

import contextlib
import signal
import warnings
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging

from aerie.terminal import err, out, sanitize_text
from aerie_drafter import files
from aerie_drafter.errors import ConfigError
from aerie_drafter.train import processes
from aerie_drafter.train.progress import ConsoleReporter
from aerie_drafter.train.settings import TrainingSettings, read_settings, render_default_yaml, render_json_schema
from aerie_drafter.train.setup import PreparedData, build_trainer, prepare_data
from aerie_drafter.train.trackers import ReporterGroup, open_trackers
from aerie_drafter.train.trainer import NullReporter, Trainer, TrainingProgress

EXIT_TERMINATED = 143
"""Exit status after SIGTERM, 128 + 15, so that a Job of Kubernetes does not count as complete."""


def command(
    settings: Annotated[Path | None, typer.Argument(help="YAML file with the settings of the training.")] = None,
    init: Annotated[
        bool, typer.Option("--init", help="Print a settings file with all fields, their meanings and defaults.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a settings file.")] = False,
) -> None:
    """Train a drafter, or resume a training; on several devices: torchrun -m aerie_drafter.cli train FILE.

    SIGTERM saves after the current step and ends with status 143.
    """
    if init:
        out.print(render_default_yaml(), markup=False, end="")
        return
    if schema:
        out.print(render_json_schema(), markup=False, end="", soft_wrap=True)
        return
    if settings is None:
        raise ConfigError("no settings file: `aerie-drafter train --init > train.yaml` writes one to start from.")
    training = read_settings(settings)
    # Norms keep float32 weights under bfloat16, and PyTorch says once that it has no fused form for that.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    main = processes.is_main_process()
    with files.reserve_output(training.output.folder, is_folder=True) if main else contextlib.nullcontext():
        prepared = prepare_data(training, err.print if main else None)
        with processes.join_process_group() as group:
            progress, total_steps = _run(training, prepared, group)  # a function of its own, whose names keep the group's tensors
            is_main = group.is_main
    if progress.step < total_steps:
        if is_main:
            err.print(f"stopped after step {progress.step} of {total_steps}, which is saved: the same command resumes")
        raise typer.Exit(EXIT_TERMINATED)
    if not is_main:
        return
    best = sanitize_text(str(training.output.folder / "best"))
    out.print(
        f"{best}: acceptance length {progress.best_acceptance_length:.3f} at "
        f"{training.output.num_speculative_tokens} tokens, on held-out text"
    )
    err.print(f"export it for vLLM: aerie-drafter export {best} FOLDER")


def _run(training: TrainingSettings, prepared: PreparedData, group: processes.Processes) -> tuple[TrainingProgress, int]:
    """Train as this process of the group, from where an interrupted training was saved; only the main process reports.

    Return the progress, and the number of all steps: after SIGTERM the training stops before them.
    """
    if not group.is_main:
        trainer = build_trainer(training, prepared=prepared, processes=group, reporter=NullReporter())
        return _run_until_sigterm(trainer), trainer.total_steps
    with open_trackers(training) as trackers, ConsoleReporter(err) as console:
        reporter = ReporterGroup([console, *trackers])
        trainer = build_trainer(training, prepared=prepared, processes=group, reporter=reporter, log_progress=err.print)
        if trainer.resume():
            err.print(f"resuming after step {trainer.progress.step} of {trainer.total_steps}")
        return _run_until_sigterm(trainer), trainer.total_steps


def _run_until_sigterm(trainer: Trainer) -> TrainingProgress:
    previous = signal.signal(signal.SIGTERM, lambda *_: trainer.request_stop())
    try:
        return trainer.run()
    finally:
        signal.signal(signal.SIGTERM, previous)
