"""SIGTERM during `aerie-drafter train`, as a pod of a Job gets it: a real process, which saves after the current step."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from aerie_drafter.cli import run_cli
from aerie_drafter.train.settings import read_settings
from aerie_drafter.train.setup import build_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_sigterm_saves_after_the_current_step_and_the_training_resumes_there(
    tmp_path: Path, target_folder: Path, write_conversations: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["train", "--init"]) == 0
    raw = yaml.safe_load(capsys.readouterr().out)
    raw["target"]["model"] = str(target_folder)
    raw["data"]["train"] = [str(write_conversations(12))]
    raw["drafter"]["draft_vocab_size"] = 40
    raw["optimizer"]["epochs"] = 1000  # hours: only the signal ends it
    raw["output"] |= {"folder": str(tmp_path / "drafter"), "evaluate_every": 1_000_000}
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(raw))

    command = [sys.executable, "-m", "aerie_drafter.cli", "train", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step 1/"):
                    process.send_signal(signal.SIGTERM)
            status = process.wait(120)
        finally:
            process.kill()
    output = "".join(lines)
    assert status == 143, output
    stopped = re.search(r"stopped after step (\d+) of (\d+), which is saved: the same command resumes", output)
    assert stopped is not None, output
    step, total = map(int, stopped.groups())
    assert 1 <= step < total
    trainer = build_trainer(read_settings(file))
    assert trainer.resume()
    assert (trainer.progress.step, trainer.total_steps) == (step, total)
