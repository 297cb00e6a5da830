"""Configurations for other trainers, read back by their own parsers where those are installed."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie_drafter.cli import run_cli


def write(tmp_path: Path, target: Path, to: str, **groups: Any) -> dict[str, Any]:
    raw = {
        "target": {"model": str(target)},
        "data": {"train": ["answers.jsonl"], "max_length": 200},
        "loss": {"horizon": 5},
        "optimizer": {"learning_rate": 3e-4, "epochs": 3, "gradient_accumulation_steps": 2},
        "output": {"folder": "out"},
    }
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(raw | groups))
    folder = tmp_path / to
    arguments = ["handover", str(tmp_path / "ours.yaml"), str(folder), "--to", to, "--chat-template", "qwen"]
    assert run_cli(arguments) == 0
    other: dict[str, Any] = yaml.safe_load((folder / "train.yaml").read_text())
    assert json.loads(Path(other["model"]["draft_model_config"]).read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
    return other


def test_torchspec_has_the_recipe_and_its_layer_ids(tmp_path: Path, target_folder: Path) -> None:
    other = write(tmp_path, target_folder, "torchspec")
    assert other["training"]["ttt_length"] == 5
    assert other["training"]["draft_accumulation_steps"] == 2
    assert other["inference"]["aux_hidden_states_layers"] == [1, 2]  # ours are 2 and 3


def test_what_cannot_be_handed_over_is_reported(tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, target_folder, "specforge", loss={"lk_lambda": 1.0, "step_decay": 0.5})
    printed = capsys.readouterr().err
    for part in ("optimizer.betas [0.9, 0.95]", "0.8^i", "drafter.norm_output: release 0.2.0", "exact tokens"):
        assert part in printed


def test_specforges_own_parser_reads_it(tmp_path: Path, target_folder: Path) -> None:
    schema = pytest.importorskip("specforge.config.schema")
    other = write(tmp_path, target_folder, "specforge", loss={"horizon": 4, "lk_lambda": 1.0})
    read = schema.load_config(str(tmp_path / "specforge" / "train.yaml"))
    assert read.training.ttt_length == 4
    assert read.training.lk_loss_type == "lambda"
    assert read.model.aux_hidden_state_layer_ids == other["model"]["aux_hidden_state_layer_ids"]
    assert read.data.max_length == 200


def test_torchspecs_own_parser_reads_it(tmp_path: Path, target_folder: Path) -> None:
    omegaconf: Any = pytest.importorskip("omegaconf")
    pytest.importorskip("torchspec")
    train_config: Any = importlib.import_module("torchspec.config.train_config")
    write(tmp_path, target_folder, "torchspec")
    read = train_config.load_config(str(tmp_path / "torchspec" / "train.yaml"))
    assert read.training.learning_rate == 3e-4
    assert list(read.inference.aux_hidden_states_layers) == [1, 2]
    assert {field.name for field in dataclasses.fields(train_config.Config)} >= set(omegaconf.OmegaConf.to_container(read))
