"""`aerie-drafter train` and `aerie-drafter generate` as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from aerie_drafter import checkpoint
from aerie_drafter.cli import run_cli


@contextmanager
def other_process(output: Path, *, is_folder: bool) -> Iterator[None]:
    """Let another process hold an output while the block runs."""
    code = (
        "import pathlib, sys; from aerie_drafter.files import reserve_output\n"
        f"with reserve_output(pathlib.Path({str(output)!r}), is_folder={is_folder}): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.kill()  # the system releases the lock then


def test_train_prints_its_settings_and_results(
    tmp_path: Path, target_folder: Path, write_conversations: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["train", "--init"]) == 0
    raw = yaml.safe_load(capsys.readouterr().out)
    raw["target"]["model"] = str(target_folder)
    raw["data"]["train"] = [str(write_conversations(12))]
    raw["output"]["folder"] = str(tmp_path / "drafter")
    raw["drafter"]["draft_vocab_size"] = 40
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(raw))

    assert run_cli(["train", str(tmp_path / "train.yaml")]) == 0
    printed = capsys.readouterr()
    assert "acceptance length" in printed.out
    assert "step 1/" in printed.err
    assert "resuming" not in printed.err
    assert checkpoint.load_drafter(tmp_path / "drafter" / "best").config.draft_vocab_size == 40

    with other_process(tmp_path / "drafter", is_folder=True):
        assert run_cli(["train", str(tmp_path / "train.yaml")]) == 2
        assert f"{tmp_path / 'drafter'}: another process writes to it" in " ".join(capsys.readouterr().err.split())
    assert run_cli(["train", str(tmp_path / "train.yaml")]) == 0
    assert "resuming after step" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == [".lock", "best", "last"]


def test_an_error_of_train_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["train"]) == 2
    assert "aerie-drafter train --init" in capsys.readouterr().err
    assert run_cli(["train", str(tmp_path / "none.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_generate_writes_answers(
    tmp_path: Path, target_folder: Path, write_conversations: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "own.jsonl"
    assert (
        run_cli(["generate", str(write_conversations(3)), str(output), "--target", str(target_folder), "--max-tokens", "4"]) == 0
    )
    assert "3 conversations, 3 of them new" in capsys.readouterr().out
    assert [json.loads(line)["messages"][0]["role"] for line in output.read_text().splitlines()] == ["user"] * 3


def test_a_second_generate_into_one_file_is_rejected(
    tmp_path: Path, target_folder: Path, write_conversations: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "own.jsonl"
    command = ["generate", str(write_conversations(3)), str(output), "--target", str(target_folder), "--max-tokens", "4"]
    with other_process(output, is_folder=False):
        assert run_cli(command) == 2
        assert f"{output}: another process writes to it" in " ".join(capsys.readouterr().err.split())
        assert not output.exists()
    assert run_cli(command) == 0
    assert len(output.read_text().splitlines()) == 3
