"""Progress of a training: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from aerie_drafter.train.progress import ConsoleReporter
from aerie_drafter.train.trainer import EvaluationReport, StepReport
from aerie_drafter.train.ttt import TrainingMetrics

TALLY = TrainingMetrics(
    torch.tensor(
        [[10.0, 10.0], [5.0, 8.0], [10.0, 10.0], [10.0, 7.0], [7.0, 2.0], [10.0, 10.0], [6.0, 3.0], [4.0, 1.0]],
        dtype=torch.float64,
    )
)


def read_progress(*, terminal: bool) -> str:
    stream = io.StringIO()
    with ConsoleReporter(Console(file=stream, force_terminal=terminal, color_system=None, width=200)) as live:
        for step in range(1, 4):
            live.on_step(StepReport(step, 3, 0, 1.25, 0.1, 1e-4, 100, TALLY))
        live.on_evaluation(EvaluationReport(3, 1.9, True, TALLY))
    return stream.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_loss_and_acceptance_per_position_are_shown(*, terminal: bool) -> None:
    text = read_progress(terminal=terminal)
    assert "loss 1.250  top-1 70/29 %  drawn 60/30 %" in text
    assert (
        "step 3: acceptance length 1.900 on held-out text, top-1 per position 70/29 %, drawn 60/30 %, greedy 40/10 %, best so far"
        in text
    )


def test_without_a_terminal_quick_steps_print_the_first_and_last_line() -> None:
    lines = [line for line in read_progress(terminal=False).splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["1/3", "3/3", "3:"]
