"""The YAML file of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie_drafter.errors import ConfigError
from aerie_drafter.train.settings import parse_settings, read_settings, render_default_yaml, render_json_schema

MINIMAL: dict[str, Any] = {"target": {"model": "t"}, "data": {"train": ["a.jsonl"]}, "output": {"folder": "o"}}


def with_field(name: str, value: Any) -> dict[str, Any]:
    group, field = name.split(".")
    return {**MINIMAL, group: {**MINIMAL.get(group, {}), field: value}}


def test_the_default_file_has_every_field_and_its_default(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(render_default_yaml())
    settings, minimal_settings = read_settings(path), parse_settings(MINIMAL, "least")
    assert (settings.loss, settings.drafter, settings.optimizer) == (
        minimal_settings.loss,
        minimal_settings.drafter,
        minimal_settings.optimizer,
    )
    raw = yaml.safe_load(render_default_yaml())
    for group, fields in raw.items():
        assert set(fields) == set(getattr(settings, group).model_dump())
    fields = sum(len(group) for group in raw.values())
    assert render_default_yaml().count("  # ") == fields


def test_defaults_are_the_recipe() -> None:
    settings = parse_settings(MINIMAL, "least")
    assert (settings.loss.horizon, settings.loss.step_decay, settings.optimizer.max_grad_norm) == (7, 0.8, 0.5)
    assert settings.drafter.fc_norm
    assert settings.drafter.norm_output
    assert not settings.drafter.norm_before_fc


def test_step_weights_replace_the_decay() -> None:
    assert parse_settings(with_field("loss.horizon", 3), "f").loss.weights_by_step == pytest.approx((1, 0.8, 0.64))
    weights = parse_settings({**MINIMAL, "loss": {"horizon": 3, "step_weights": [1, 0, 2]}}, "f").loss.weights_by_step
    assert weights == (1, 0, 2)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (with_field("loss.horzion", 3), "f: loss.horzion is not a field; fields: horizon, step_decay, step_weights, kl, "),
        (
            {**MINIMAL, "extra": 1},
            "f: extra is not a field; fields: target, drafter, data, template, loss, optimizer, output, tracking.",
        ),
        (with_field("loss.horizon", 0), "f: loss.horizon is 0: input should be greater than or equal to 1."),
        (with_field("optimizer.learning_rate", "fast"), "f: optimizer.learning_rate is 'fast': input should be a valid number"),
        (with_field("drafter.family", "gpt"), "f: drafter.family is 'gpt': input should be 'llama', 'qwen3' or 'deepseek_v2'."),
        (
            {"target": {}, "data": {"train": ["a"]}, "output": {"folder": "o"}},
            "f: target.model is missing; `aerie-drafter train --init`",
        ),
        (with_field("loss.kl", 0), "f: loss.kl, loss.total_variation, loss.lk_alpha and loss.lk_lambda are all 0; set at least"),
        (with_field("loss.kl", -1), "f: loss.kl is -1: input should be greater than or equal to 0."),
        (with_field("loss.lk_alpha", float("inf")), "f: loss.lk_alpha is inf: input should be a finite number."),
        (
            with_field("loss.step_weights", [1, 0.5]),
            "f: loss.step_weights has 2 weights, and loss.horizon is 7; set one per step.",
        ),
        (with_field("loss.step_weights", [0] * 7), "f: loss.step_weights are all 0; set at least one of them."),
        (
            {**MINIMAL, "output": {"folder": "o", "best_by": [{"temprature": 1}]}},
            "f: output.best_by.0.temperature is missing; `aerie-drafter train --init`",
        ),
        (
            {**MINIMAL, "output": {"folder": "o", "best_by": [{"temperature": 1, "drafts": "drawn"}]}},
            "f: output.best_by.0.drafts is not a field; fields: temperature, draft_sampling, weight.",
        ),
        (with_field("output.num_speculative_tokens", 8), "f: output.num_speculative_tokens is 8, and loss.horizon 7"),
        (with_field("drafter.norm_before_fc", True), "f: drafter.fc_norm and drafter.norm_before_fc are both true"),
        ({**MINIMAL, "target": {"model": "t", "hidden_states": "s", "shard": True}}, "f: target.shard is true"),
    ],
)
def test_an_error_is_one_sentence_with_field_and_value(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(raw, "f")
    assert str(caught.value).startswith(message)


def test_the_json_schema_has_each_field_and_accepts_the_default_file() -> None:
    schema = json.loads(render_json_schema())
    raw = yaml.safe_load(render_default_yaml())
    definitions = schema["$defs"]
    for group, fields in raw.items():
        reference = schema["properties"][group]["$ref"].rpartition("/")[2]
        assert set(definitions[reference]["properties"]) == set(fields)
        assert definitions[reference]["additionalProperties"] is False
        assert all(field.get("description") for field in definitions[reference]["properties"].values())
    assert schema["required"] == ["target", "data", "output"]
    assert definitions["LossSettings"]["properties"]["horizon"]["maximum"] == 32


def test_files_that_are_not_settings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none.yaml cannot be read \(No such file or directory\): give a YAML file. `aerie-drafter train"
    ):
        read_settings(tmp_path / "none.yaml")
    path = tmp_path / "f.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        read_settings(path)
    path.write_text("- 1")
    with pytest.raises(ConfigError, match="groups target, drafter, data"):
        read_settings(path)
