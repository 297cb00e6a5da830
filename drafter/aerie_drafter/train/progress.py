"""Progress of a training on a console: a bar in a terminal, otherwise lines.

Per step of the horizon: `top-1` is the share of columns whose most likely token is the target's, if all earlier steps matched;
`drawn` and `greedy` are the chances that a drawn or the most likely draft token is accepted at loss.acceptance_temperature.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aerie_drafter.train.trainer import EvaluationReport, StepReport


class ConsoleReporter:
    """A TrainingReporter for a console. Without a terminal it prints the first and the last step, and one line in ten seconds."""

    LINE_INTERVAL_SECONDS = 10.0

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress_bar: Progress | None = None
        self.task_id: TaskID | None = None
        self._last_line_time = self._start_time = time.monotonic()
        self._total_tokens = 0
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self.progress_bar = Progress(*columns, TextColumn("{task.description}"), console=console)

    def __enter__(self) -> Self:
        if self.progress_bar is not None:
            self.progress_bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.progress_bar is not None:
            self.progress_bar.stop()

    def on_step(self, step: StepReport) -> None:
        """Update the bar, or print a line."""
        self._total_tokens += step.tokens
        now = time.monotonic()
        speed = self._total_tokens / max(now - self._start_time, 1e-9)
        metrics = step.metrics
        line = f"loss {step.loss:.3f}  top-1 {_format_percents(metrics.conditional_acceptance)}"
        line += f"  drawn {_format_percents(metrics.drawn_acceptance)}  {speed:,.0f} tokens/s"
        if self.progress_bar is not None:
            if self.task_id is None:
                self.task_id = self.progress_bar.add_task("", total=step.total_steps)
            self.progress_bar.update(self.task_id, completed=step.step, description=line)
        elif step.step in (1, step.total_steps) or now - self._last_line_time >= self.LINE_INTERVAL_SECONDS:
            self._last_line_time = now
            self.console.print(f"step {step.step}/{step.total_steps}  {line}")

    def on_evaluation(self, evaluation: EvaluationReport) -> None:
        """Print a line."""
        line = f"step {evaluation.step}: acceptance length {evaluation.acceptance_length:.3f} on held-out text"
        metrics = evaluation.metrics
        line += f", top-1 per position {_format_percents(metrics.conditional_acceptance)}"
        line += f", drawn {_format_percents(metrics.drawn_acceptance)}, greedy {_format_percents(metrics.greedy_acceptance)}"
        self.console.print(line + (", best so far" if evaluation.is_best else ""))


def _format_percents(shares: Sequence[float]) -> str:
    return "/".join(f"{share:.0%}".removesuffix("%") for share in shares) + " %"
