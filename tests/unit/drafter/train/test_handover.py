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
from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.train.handover import OtherTrainer, build_specforge_config, build_torchspec_config, find_differences
from aerie_drafter.train.settings import TrainingSettings, parse_settings
from tests.unit.drafter.sizes import SIZES


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


OTHER_VALUES: dict[str, Any] = {
    "model": "other",
    "revision": "abc",
    "dtype": "float16",
    "hidden_states": "states",
    "hidden_states_endpoint": "http://localhost:8000",
    "hidden_states_model": "other",
    "hidden_states_shared_folder": "shared",
    "hidden_state_layer_ids": [1, 2, 3],
    "initial_checkpoint": "drafter",
    "held_out": ["held.jsonl"],
    "train": ["other.jsonl"],
    "chat_template": "template.jinja",
    "cache": "cache",
    "tools": "tools.json",
    "kwargs": {"enable_thinking": False},
    "step_weights": [1.0, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25],
    "betas": [0.8, 0.9],
    "precision": "float32",
    "folder": "elsewhere",
    "save_every": 7,
    "best_by": [{"temperature": 1.0}],
    "tensorboard": "events",
    "wandb": "project",
}
"""A value unlike the default of each field that is no number and no flag."""


def change(value: Any) -> Any:
    """Return another value of a flag or number."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else (value + 0.1 if value < 0.9 else value / 2)


@pytest.mark.parametrize("trainer", OtherTrainer)
def test_each_changed_setting_is_handed_over_or_named(trainer: OtherTrainer) -> None:
    build = build_torchspec_config if trainer is OtherTrainer.TORCHSPEC else build_specforge_config
    plain: dict[str, Any] = {
        "target": {"model": "target"},
        "data": {"train": ["answers.jsonl"]},
        "output": {"folder": "out"},
    }
    config = DrafterConfig(DrafterFamily.LLAMA, **SIZES)

    def describe(raw: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
        settings = parse_settings(raw, "test")
        return build(settings, config, Path("drafter.json"), "qwen"), set(find_differences(settings, trainer))

    before, silent = describe(plain), []
    for group, fields in TrainingSettings.model_fields.items():
        model: Any = fields.annotation
        for name, field in model.model_fields.items():
            if group == "drafter" and name != "initial_checkpoint":
                continue  # in drafter.json
            value = OTHER_VALUES[name] if name in OTHER_VALUES else change(field.default)
            values = {name: value, **({"hidden_states": "states"} if name == "hidden_states_model" else {})}
            if describe(plain | {group: plain.get(group, {}) | values}) == before:
                silent.append(f"{group}.{name}")
    assert silent == []


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
