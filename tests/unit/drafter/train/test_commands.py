"""`aerie-drafter train` and `aerie-drafter generate` as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from aerie_drafter import checkpoint
from aerie_drafter.cli import run_cli


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

    assert run_cli(["train", str(tmp_path / "train.yaml")]) == 0
    assert "resuming after step" in capsys.readouterr().err


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
