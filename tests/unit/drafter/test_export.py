"""Exports: unchanged tensors, every key that a vLLM release reads, and a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from aerie_drafter import checkpoint
from aerie_drafter.checkpoint import Provenance, load_drafter, save_checkpoint
from aerie_drafter.cli import run_cli
from aerie_drafter.config import DrafterConfig, DrafterFamily, MlaDims
from aerie_drafter.errors import CheckpointError, ConfigError
from aerie_drafter.export import ExportFormat, export_checkpoint, min_vllm_version
from aerie_drafter.model import Drafter
from aerie_drafter.weights import read_header

from .sizes import SIZES

MLA = MlaDims(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, q_lora_rank=6)


def build_drafter(**overrides: Any) -> Drafter:
    torch.manual_seed(4)
    config: dict[str, Any] = {"family": DrafterFamily.LLAMA, **SIZES, "fc_norm": True, "norm_output": True}
    drafter = Drafter(DrafterConfig(**{**config, **overrides}))
    drafter.set_draft_vocabulary(torch.arange(5, 25))
    return drafter


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    save_checkpoint(
        tmp_path / "trained",
        build_drafter(),
        Provenance(target="some/target", training_data="books", training_horizon=3, notes={"seed": "7"}),
    )
    return tmp_path / "trained"


def test_vllm_form(trained: Path, tmp_path: Path) -> None:
    export_checkpoint(trained, tmp_path / "out", num_speculative_tokens=4, acceptance_length=2.5, measured_on="chat")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_aux_hidden_states"] == 3
    assert config["eagle_aux_hidden_state_layer_ids"] == config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    switches = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
    assert [config[name] for name in switches] == [True, True, False, False]
    state = build_drafter().state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_drafter(tmp_path / "out").state_dict().items())
    assert checkpoint.read_provenance(tmp_path / "out").training_horizon == 3


def test_the_model_card_describes_the_checkpoint(trained: Path, tmp_path: Path) -> None:
    export_checkpoint(trained, tmp_path / "out", num_speculative_tokens=4, acceptance_length=2.5, measured_on="chat")
    _, header, body = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header) == {"base_model": "some/target", "tags": ["eagle3", "speculative-decoding", "vllm"]}
    for part in ("EAGLE 3.1 drafter", "2.50 at K=4, on chat", "| training horizon | 3 |", "| seed | 7 |", "vLLM 0.22.0 or later"):
        assert part in body
    assert checkpoint.compute_model_digest(tmp_path / "out") in body
    (command,) = [line for line in body.splitlines() if line.startswith("vllm serve")]
    speculative = json.loads(command.split("--speculative-config '")[1].rstrip("'"))
    assert speculative == {"method": "eagle3", "model": "<this folder>", "num_speculative_tokens": 4}


def test_the_model_card_has_what_the_training_and_the_evaluation_measured(tmp_path: Path) -> None:
    notes = {"acceptance_length": "2.3456", "tokens": "3", "acceptance_length, temperature 1, drawn drafts": "1.9876"}
    save_checkpoint(tmp_path / "best", build_drafter(), Provenance(target="some/target", notes=notes))
    key = {"temperature": 0.7, "draft_sampling": "drawn", "drafter": "best"}
    rows = [
        key | {"category": "code", "acceptance_length": 2.5, "share_of_copy": 0.625},
        key | {"category": "chat", "acceptance_length": None, "share_of_copy": None},
        key | {"category": "code", "drafter": "copy of the target", "acceptance_length": 4.0, "share_of_copy": 1.0},
    ]
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps({"prompts": 2, "acceptance": rows, "gains": []}))
    export_checkpoint(tmp_path / "best", tmp_path / "out", evaluation=file)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| acceptance length | 2.35 at K=3, on held-out text of the training |" in card
    assert "| acceptance_length, temperature 1, drawn drafts | 1.9876 |" in card
    assert "| 0.7 | drawn | code | 2.50 | 62% |" in card
    assert "| 0.7 | drawn | chat |  |  |" in card
    assert "copy of the target |" not in card
    export_checkpoint(tmp_path / "best", tmp_path / "out", num_speculative_tokens=4)
    assert "| acceptance length | not measured |" in (tmp_path / "out" / "README.md").read_text()
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"evaluation.json: cannot be read .* write it with `aerie-drafter evaluate --exact"):
        export_checkpoint(tmp_path / "best", tmp_path / "out", evaluation=file)


def test_the_same_export_gives_the_same_bytes(trained: Path, tmp_path: Path) -> None:
    for number in ("1", "2"):
        export_checkpoint(trained, tmp_path / number / "out", export_format=ExportFormat.SPECULATORS)
    for name in ("README.md", "config.json", "model.safetensors"):
        assert (tmp_path / "1" / "out" / name).read_bytes() == (tmp_path / "2" / "out" / name).read_bytes()


def test_exports_without_embedding_and_in_half_precision_are_smaller(trained: Path, tmp_path: Path) -> None:
    export_checkpoint(trained, tmp_path / "out", include_embedding=False, dtype=torch.bfloat16)
    header = read_header(tmp_path / "out" / "model.safetensors")
    assert "embed_tokens.weight" not in header.tensors
    assert {entry.dtype for entry in header.tensors.values()} == {"BF16", "I64", "BOOL"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_speculators_form(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    export_checkpoint(
        trained, tmp_path / "out", export_format=ExportFormat.SPECULATORS, target=str(target), num_speculative_tokens=5
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {"name_or_path": str(target), "architectures": ["Qwen3ForCausalLM"]}
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["transformer_layer_config"]["vocab_size"] == 40
    assert config["norm_before_residual"] is False  # written, because vLLM's default is true
    names = set(read_header(tmp_path / "out" / "model.safetensors").tensors)
    assert "layers.0.mlp.up_proj.weight" in names
    assert not any(name.startswith("midlayer.") for name in names)


def test_settings_that_speculators_format_lacks_are_rejected(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(family=DrafterFamily.MLA, mla=MLA), {"target": "t"})
    with pytest.raises(ConfigError, match="the speculators format does not support latent attention"):
        export_checkpoint(tmp_path / "d", tmp_path / "out", export_format=ExportFormat.SPECULATORS)
    assert not (tmp_path / "out").exists()


def test_invalid_settings_are_rejected(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 0: must be at least 1"):
        export_checkpoint(trained, tmp_path / "out", num_speculative_tokens=0)
    with pytest.raises(ConfigError, match=r"acceptance_length is 4\.5: must be between 1 and 4 for num_speculative_tokens 3"):
        export_checkpoint(trained, tmp_path / "out", acceptance_length=4.5)
    save_checkpoint(tmp_path / "unknown", build_drafter(), {})
    with pytest.raises(ConfigError, match=r"model.safetensors: its target is unknown; set it"):
        export_checkpoint(tmp_path / "unknown", tmp_path / "out")
    with pytest.raises(CheckpointError, match="contains files that aerie-drafter did not write"):
        export_checkpoint(trained, tmp_path)


def test_an_export_over_its_own_source(trained: Path) -> None:
    before = load_drafter(trained).state_dict()
    export_checkpoint(trained, trained)
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_drafter(trained).state_dict().items())


@pytest.mark.parametrize(
    ("overrides", "form", "release"),
    [
        ({}, ExportFormat.VLLM, "0.22.0"),
        ({}, ExportFormat.SPECULATORS, "0.25.0"),
        ({"fc_norm": False, "norm_output": False}, ExportFormat.SPECULATORS, "0.22.0"),
        ({"family": DrafterFamily.QWEN3}, ExportFormat.VLLM, "0.24.0"),
        ({"num_hidden_layers": 2}, ExportFormat.VLLM, "0.26.0"),
        ({"sliding_window": 64}, ExportFormat.SPECULATORS, "0.26.0"),
        ({"family": DrafterFamily.MLA, "mla": MLA}, ExportFormat.VLLM, "0.23.0"),
        ({"family": DrafterFamily.MLA, "mla": MLA, "fc_norm": False, "norm_output": False}, ExportFormat.VLLM, "0.22.0"),
    ],
)
def test_min_vllm_version_of_an_export(overrides: dict[str, Any], form: ExportFormat, release: str) -> None:
    assert min_vllm_version(build_drafter(**overrides).config, form) == release


def test_export_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["export", str(trained), str(tmp_path / "out"), "--tokens", "5", "--dtype", "bfloat16"]) == 0
    assert f'"model": "{tmp_path / "out"}", "num_speculative_tokens": 5' in capsys.readouterr().out
