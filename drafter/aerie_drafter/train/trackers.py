"""Experiment trackers: the metrics of a training in TensorBoard or Weights & Biases, besides the console.

    loss, gradient_norm, learning_rate, tokens      of each step
    top1/2, drawn/2, greedy/2                       acceptance of the second unrolled step, as in `aerie_drafter.train.progress`
    held_out/acceptance_length, held_out/top1/2 ..  of each evaluation

A tracker's package is imported only if the settings name the tracker. W&B takes its account, mode and server from its own
environment variables: WANDB_MODE=offline writes to a folder and needs no network. Guarantee: a resumed training continues the
same TensorBoard folder and the same W&B run. Not guaranteed: that a server has received anything.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from aerie_drafter.errors import ConfigError
from aerie_drafter.files import replace_file
from aerie_drafter.train.settings import TrainingSettings
from aerie_drafter.train.trainer import EvaluationReport, StepReport, TrainingReporter
from aerie_drafter.train.ttt import TrainingMetrics

WANDB_RUN_FILE = "wandb-run-id"
"""File in the output folder with the id of the training's W&B run."""


class ReporterGroup:
    """Several reporters as one."""

    def __init__(self, reporters: Sequence[TrainingReporter]) -> None:
        self.reporters = tuple(reporters)

    def on_step(self, step: StepReport) -> None:
        """Pass the report on."""
        for reporter in self.reporters:
            reporter.on_step(step)

    def on_evaluation(self, evaluation: EvaluationReport) -> None:
        """Pass the report on."""
        for reporter in self.reporters:
            reporter.on_evaluation(evaluation)


class TensorBoardTracker:
    """Writer of TensorBoard's event files."""

    def __init__(self, folder: Path) -> None:
        self._module = _import("torch.utils.tensorboard", "tensorboard", "tracking.tensorboard")
        self.folder = folder
        self._writer: Any = None

    def on_step(self, step: StepReport) -> None:
        """Write the values of a step."""
        self._write(step.step, step_values(step))

    def on_evaluation(self, evaluation: EvaluationReport) -> None:
        """Write the values of an evaluation."""
        self._write(evaluation.step, evaluation_values(evaluation))

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._writer is None:  # steps after the last save are repeated by a resumed training: hide their first values
            self._writer = self._module.SummaryWriter(self.folder, purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class WandbTracker:
    """A run of Weights & Biases."""

    def __init__(self, settings: TrainingSettings) -> None:
        wandb = _import("wandb", "wandb", "tracking.wandb")
        folder = settings.output.folder
        try:
            self._run = wandb.init(
                project=settings.tracking.wandb,
                name=folder.name,
                id=_read_run_id(folder),
                resume="allow",
                config=settings.model_dump(mode="json"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"tracking.wandb {settings.tracking.wandb}: no run can be started ({error}); run `wandb login`, or set "
                "WANDB_MODE=offline."
            ) from error

    def on_step(self, step: StepReport) -> None:
        """Log the values of a step; W&B drops those of a repeated step."""
        self._run.log(step_values(step), step=step.step)

    def on_evaluation(self, evaluation: EvaluationReport) -> None:
        """Log the values of an evaluation."""
        self._run.log(evaluation_values(evaluation), step=evaluation.step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


@contextmanager
def open_trackers(settings: TrainingSettings) -> Iterator[list[TrainingReporter]]:
    """Yield the trackers that the settings name, and close them when the block ends. Raises ConfigError."""
    with ExitStack() as stack:
        trackers: list[TrainingReporter] = []
        if settings.tracking.tensorboard is not None:
            board = TensorBoardTracker(settings.tracking.tensorboard)
            stack.callback(board.close)
            trackers.append(board)
        if settings.tracking.wandb is not None:
            run = WandbTracker(settings)
            stack.callback(run.close)
            trackers.append(run)
        yield trackers


def step_values(step: StepReport) -> dict[str, float]:
    """Return a step's values by name."""
    values = {
        "loss": step.loss,
        "gradient_norm": step.gradient_norm,
        "learning_rate": step.learning_rate,
        "tokens": float(step.tokens),
    }
    return values | acceptance_values(step.metrics)


def evaluation_values(evaluation: EvaluationReport) -> dict[str, float]:
    """Return an evaluation's values by name."""
    values = {"acceptance_length": evaluation.acceptance_length} | acceptance_values(evaluation.metrics)
    return {f"held_out/{name}": value for name, value in values.items()}


def acceptance_values(metrics: TrainingMetrics) -> dict[str, float]:
    """Return the acceptance of each unrolled step, counted from 1."""
    series = {
        "top1": metrics.conditional_acceptance,
        "drawn": metrics.drawn_acceptance,
        "greedy": metrics.greedy_acceptance,
    }
    return {f"{name}/{number}": value for name, values in series.items() for number, value in enumerate(values, 1)}


def _read_run_id(folder: Path) -> str:
    """Return the id of the training's run, which begins with the output folder."""
    path = folder / WANDB_RUN_FILE
    if not path.exists():
        replace_file(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8").strip()


def _import(module: str, package: str, field: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{field} is set, and the package {package} is not installed: pip install aerie-drafter[{package}]."
        ) from None
