"""Inspection: every problem is listed with its fix, and a valid checkpoint has none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie_drafter.checkpoint import Provenance, compute_model_digest, save_checkpoint
from aerie_drafter.cli import run_cli
from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.errors import CheckpointError
from aerie_drafter.export import ExportFormat, export_checkpoint
from aerie_drafter.inspect import inspect_checkpoint
from aerie_drafter.model import Drafter
from aerie_drafter.weights import read_header, read_tensors, write_tensors

from .sizes import SIZES


def build_drafter(**overrides: Any) -> Drafter:
    torch.manual_seed(2)
    config: dict[str, Any] = {"family": DrafterFamily.LLAMA, **SIZES, "fc_norm": True, "norm_output": True}
    model = Drafter(DrafterConfig(**{**config, **overrides}))
    if model.config.draft_vocab_size < 40:
        model.set_draft_vocabulary(torch.arange(0, 40, 2))
    return model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    sizes = {"num_hidden_layers": 8, "hidden_size": 16, "vocab_size": 40, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    write_tensors(folder / "model.safetensors", {"model.embed_tokens.weight": build_drafter().embed_tokens.weight}, {})
    return folder


@pytest.fixture
def valid_checkpoint(tmp_path: Path, target: Path) -> Path:
    model = build_drafter()
    save_checkpoint(
        tmp_path / "d",
        model,
        Provenance(target="t", target_digest=compute_model_digest(target), training_horizon=3, notes={"seed": "1"}),
    )
    return tmp_path / "d"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], *, marked: bool = True) -> None:
    header = read_header(folder / "model.safetensors")
    write_tensors(folder / "model.safetensors", change(read_tensors(header)), header.metadata if marked else {})


def test_a_valid_checkpoint_has_no_problem(valid_checkpoint: Path, target: Path) -> None:
    report = inspect_checkpoint(valid_checkpoint, target, compare_digests=True)
    assert report.problems == []
    assert report.summary == f"EAGLE 3.1 for {target}: no problem found."
    facts = report.facts
    assert facts["origin"] == "aerie"
    assert facts["aux_layer_ids"] == [2, 4, 5]
    assert facts["embedding"] == "its own, equal to the target's"
    assert facts["d2t"] == "20 of 40 tokens"
    assert facts["provenance"]["training_horizon"] == 3
    assert facts["provenance"]["seed"] == "1"
    parameters = sum(parameter.numel() for name, parameter in build_drafter().named_parameters() if name != "embed_tokens.weight")
    assert facts["parameters_without_embedding"] == parameters
    assert facts["weight_bytes"] == 4 * (parameters + 40 * 16) + 20 * 8 + 40


def test_inspection_without_a_target(valid_checkpoint: Path) -> None:
    report = inspect_checkpoint(valid_checkpoint)
    assert report.problems == []
    assert report.summary == "EAGLE 3.1: no problem found."


def test_shared_embedding(tmp_path: Path, target: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(), {}, include_embedding=False)
    assert inspect_checkpoint(tmp_path / "d", target).facts["embedding"] == "the target's, shared"
    other = build_drafter()
    with torch.no_grad():
        other.embed_tokens.weight[0] += 1
    save_checkpoint(tmp_path / "d", other, {})
    assert inspect_checkpoint(tmp_path / "d", target).facts["embedding"] == "its own, different from the target's"


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"target_hidden_size": 12}, r"hidden_size is 16, and the drafter's target_hidden_size is 12: .*another target"),
    "vocabulary": (
        {"vocab_size": 41},
        r"vocab_size is 40, and the drafter's vocab_size is 41: it was trained for another target",
    ),
    "depth": ({"aux_layer_ids": (2, 4, 9)}, r"num_hidden_layers is 8, and the drafter reads layer 9"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_target_that_does_not_match_is_reported(tmp_path: Path, target: Path, name: str) -> None:
    overrides, sentence = MISMATCHES[name]
    model = build_drafter(draft_vocab_size=overrides.get("vocab_size", 40), **overrides)
    save_checkpoint(tmp_path / "d", model, {})
    problems = inspect_checkpoint(tmp_path / "d", target).problems
    assert len(problems) == 1
    assert re.search(sentence, problems[0])


def test_weights_of_another_target_are_reported(valid_checkpoint: Path, target: Path) -> None:
    write_tensors(target / "model.safetensors", {"model.embed_tokens.weight": torch.zeros(40, 16)}, {})
    assert inspect_checkpoint(valid_checkpoint, target).problems == []
    (problem,) = inspect_checkpoint(valid_checkpoint, target, compare_digests=True).problems
    assert "other weights, so evaluate acceptance before you serve it" in problem


def test_a_short_context_is_a_finding(tmp_path: Path, target: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(max_position_embeddings=2048), {})
    assert any(
        "trained for 2048 positions and the target supports 4096" in finding
        for finding in inspect_checkpoint(tmp_path / "d", target).findings
    )


def test_all_problems_are_listed(valid_checkpoint: Path) -> None:
    change_tensors(
        valid_checkpoint,
        lambda tensors: {
            **{name: tensor for name, tensor in tensors.items() if name != "norm.weight"},
            "d2t": torch.arange(20) + 30,
        },
    )
    change_tensors(valid_checkpoint, lambda tensors: {**tensors, "fc.weight": torch.full((16, 48), float("nan"))})
    problems = inspect_checkpoint(valid_checkpoint).problems
    assert len(problems) == 3
    assert "norm.weight is missing" in problems[0]
    assert "fc.weight contains NaN or infinity" in problems[1]
    assert "d2t maps draft id 5 to token 40" in problems[2]


def test_switches_against_weights(valid_checkpoint: Path) -> None:
    edit_config(valid_checkpoint, fc_norm=False)
    (problem,) = inspect_checkpoint(valid_checkpoint).problems
    assert "fc_norm.0.weight exists, and the configuration has fc_norm false" in problem


def test_unmarked_keys_that_vllm_misses(valid_checkpoint: Path) -> None:
    change_tensors(
        valid_checkpoint,
        lambda tensors: {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()},
        marked=False,
    )
    edit_config(valid_checkpoint, eagle_aux_hidden_state_layer_ids=None)
    (problem,) = inspect_checkpoint(valid_checkpoint).problems
    assert "is not at the top level, so vLLM's V2 runner uses (2, L // 2, L - 3)" in problem


def test_unmarked_without_layers(valid_checkpoint: Path, target: Path) -> None:
    change_tensors(
        valid_checkpoint,
        lambda tensors: {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()},
        marked=False,
    )
    edit_config(valid_checkpoint, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    (problem,) = inspect_checkpoint(valid_checkpoint).problems
    assert "eagle_aux_hidden_state_layer_ids is missing: set the target's folder" in problem
    assert inspect_checkpoint(valid_checkpoint, target).facts["aux_layer_ids"] == [2, 4, 5]


def test_a_checkpoint_of_another_project_is_reported(valid_checkpoint: Path) -> None:
    change_tensors(valid_checkpoint, lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()}, marked=False)
    (problem,) = inspect_checkpoint(valid_checkpoint).problems
    assert "has the format of nemo" in problem
    assert "aerie-drafter convert" in problem


def test_speculators_form(valid_checkpoint: Path, target: Path, tmp_path: Path) -> None:
    export_checkpoint(valid_checkpoint, tmp_path / "s", export_format=ExportFormat.SPECULATORS, target=str(target))
    report = inspect_checkpoint(tmp_path / "s", target)
    assert report.problems == []
    assert (report.facts["origin"], report.facts["min_vllm_version"]) == ("speculators", "0.25.0")


def test_unreadable_configuration(valid_checkpoint: Path) -> None:
    edit_config(valid_checkpoint, num_hidden_layers=99)
    report = inspect_checkpoint(valid_checkpoint)
    assert report.summary == "Unreadable drafter: 1 problem."
    assert "num_hidden_layers is 99: a drafter has at most 64" in report.problems[0]


def test_missing_layers_are_one_problem(valid_checkpoint: Path) -> None:
    edit_config(valid_checkpoint, num_hidden_layers=3)
    (problem,) = inspect_checkpoint(valid_checkpoint).problems
    assert "it has tensors of 1 layers, and num_hidden_layers is 3" in problem


def test_pickled_weights_are_reported(valid_checkpoint: Path) -> None:
    (valid_checkpoint / "model.safetensors").rename(valid_checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="import it with `aerie-drafter convert`"):
        inspect_checkpoint(valid_checkpoint)


def test_inspect_command(valid_checkpoint: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["inspect", str(valid_checkpoint), "--target", str(target)]) == 0
    assert "no problem found" in capsys.readouterr().out
    edit_config(valid_checkpoint, norm_before_fc=True, eagle_config={})
    assert run_cli(["inspect", str(valid_checkpoint), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert "fc_norm and norm_before_fc are both true" in report["problems"][0]
