"""The command line: quick help, one sentence and status 2 for an error."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from aerie_drafter.cli import COMMAND_SUMMARIES, run_cli


def test_help_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from aerie_drafter.cli import run_cli; code = run_cli(['--help']); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in COMMAND_SUMMARIES)


@pytest.mark.parametrize("name", COMMAND_SUMMARIES)
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([name, "--help"]) == 0
    assert "Usage: aerie-drafter " + name in capsys.readouterr().out
    assert import_module(f"aerie_drafter.cli.{name}").command.__doc__


def test_an_error_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["export", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none' / 'config.json'}: missing.\n"


def test_wrong_arguments_give_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["export"]) == 2
    assert run_cli(["paint"]) == 2
    assert "paint" in capsys.readouterr().err
