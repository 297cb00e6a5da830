"""How a training goes, for the eye: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aerie_drafter.train.trainer import Measured, Stepped


class Live:
    """A Report on a console. Plain lines come at the first and the last step and at most every ten seconds."""

    INTERVAL_S = 10.0

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self._spoke = self._began = time.monotonic()
        self._tokens = 0
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.description}"), console=console)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def stepped(self, news: Stepped) -> None:
        """Moves the bar, or prints a line."""
        self._tokens += news.tokens
        now = time.monotonic()
        speed = self._tokens / max(now - self._began, 1e-9)
        line = f"loss {news.loss:.3f}  accepted {_percent(news.tally.conditional)}  {speed:,.0f} tokens/s"
        if self.bar is not None:
            if self.task is None:
                self.task = self.bar.add_task("", total=news.of)
            self.bar.update(self.task, completed=news.step, description=line)
        elif news.step in (1, news.of) or now - self._spoke >= self.INTERVAL_S:
            self._spoke = now
            self.console.print(f"step {news.step}/{news.of}  {line}")

    def measured(self, news: Measured) -> None:
        """Prints a line."""
        said = f"step {news.step}: acceptance length {news.acceptance_length:.3f} on held-out text"
        each = _percent(news.tally.conditional)
        self.console.print(f"{said}, accepted per position {each}" + (", the best so far" if news.best else ""))


def _percent(shares: Sequence[float]) -> str:
    return "/".join(f"{share:.0%}".removesuffix("%") for share in shares) + " %"
