"""Other projects' checkpoints: the converted drafter computes the same, and ambiguous values need an option."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie_drafter.checkpoint import build_checkpoint, load_drafter, save_checkpoint
from aerie_drafter.cli import run_cli
from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.convert import CheckpointOrigin, ConversionOverrides, LayerIdConvention, convert_checkpoint, import_checkpoint
from aerie_drafter.errors import CheckpointError, ConfigError, DrafterError
from aerie_drafter.export import ExportFormat, export_checkpoint
from aerie_drafter.model import DecodingCache, Drafter
from aerie_drafter.weights import read_header, read_tensors, write_tensors

from .sizes import SIZES

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 40,
    "draft_vocab_size": 20,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}


def build_drafter(**overrides: Any) -> Drafter:
    torch.manual_seed(3)
    drafter = Drafter(
        DrafterConfig(
            **{"family": DrafterFamily.LLAMA, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, **SIZES, **overrides}
        )
    )
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    if drafter.config.draft_vocab_size < drafter.config.vocab_size:
        drafter.set_draft_vocabulary(torch.randperm(40)[: drafter.config.draft_vocab_size].sort().values)
    return drafter


@torch.no_grad()
def outputs(drafter: Drafter) -> tuple[Tensor, Tensor]:
    """Return the logits of two steps, the second fed back, and the tokens of their columns."""
    generator = torch.Generator().manual_seed(5)
    width = drafter.config.target_hidden_size * len(drafter.config.aux_layer_ids)
    aux, memory = torch.randn(1, 6, width, generator=generator), DecodingCache(num_layers=drafter.config.num_hidden_layers)
    tokens = torch.randint(0, 40, (1, 6), generator=generator)
    first = drafter(tokens, drafter.fuse_aux_hidden_states(aux), memory)
    second = drafter(tokens[:, -1:], first.next_hidden[:, -1:], memory)
    return torch.cat([drafter.logits(first.normed_hidden), drafter.logits(second.normed_hidden)], dim=1), drafter.draft_token_ids


def are_equal(first: Drafter, second: Drafter) -> bool:
    """Return whether weights are equal, and outputs up to rounding, which depends on the memory layout of the weights."""
    weights = second.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in first.state_dict().items())
    (first_logits, first_tokens), (second_logits, second_tokens) = outputs(first), outputs(second)
    return torch.allclose(first_logits, second_logits, rtol=1e-5, atol=1e-5) and torch.equal(first_tokens, second_tokens)


def write_foreign_checkpoint(
    folder: Path, drafter: Drafter, config: dict[str, Any], rename: Callable[[str], str] = str, *, pickled: bool = False
) -> Path:
    """Write a folder in the format of another project."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {rename(name): tensor for name, tensor in build_checkpoint(drafter, {}).tensors.items()}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder


def write_target(folder: Path, layers: int = 8) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers, "hidden_size": 16, "vocab_size": 40}))
    return folder


@pytest.mark.parametrize("pickled", [True, False])
def test_safeailab(tmp_path: Path, pickled: bool) -> None:
    drafter = build_drafter()
    source = write_foreign_checkpoint(tmp_path / "s", drafter, {**LLAMA, "architectures": ["LlamaForCausalLM"]}, pickled=pickled)
    with pytest.raises(ConfigError, match=r"config.json: eagle_aux_hidden_state_layer_ids is missing: set the target's folder"):
        convert_checkpoint(source, ConversionOverrides())
    conversion = import_checkpoint(source, tmp_path / "d", ConversionOverrides(), target=write_target(tmp_path / "t"))
    assert conversion.origin is CheckpointOrigin.SAFEAILAB
    assert any("the default for 8 layers" in finding for finding in conversion.findings)
    back = load_drafter(tmp_path / "d")
    assert back.config == drafter.config
    assert back.config.eagle_version == "EAGLE 3"
    assert are_equal(back, drafter)


SPECFORGE = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True}
DAY = datetime.date


def test_specforge_needs_the_training_date(tmp_path: Path) -> None:
    source = write_foreign_checkpoint(tmp_path / "s", build_drafter(fc_norm=True), SPECFORGE)
    with pytest.raises(
        ConfigError, match=r"had another meaning in SpecForge from 2026-07-20 to 2026-09-15 .*its date of training is unknown"
    ):
        convert_checkpoint(source, ConversionOverrides(target_layer_count=8))
    with pytest.raises(ConfigError, match="had no such key on 2026-07-01"):
        convert_checkpoint(source, ConversionOverrides(target_layer_count=8, training_date=DAY(2026, 7, 1)))


@pytest.mark.parametrize(
    ("overrides", "norm_output"),
    [
        (ConversionOverrides(training_date=DAY(2026, 8, 8)), False),
        (ConversionOverrides(training_date=DAY(2026, 9, 16)), True),
        (ConversionOverrides(norm_output=True), True),
        (ConversionOverrides(norm_output=False), False),
        (ConversionOverrides(origin=CheckpointOrigin.TORCHSPEC), True),
    ],
)
def test_specforge_feedback(tmp_path: Path, overrides: ConversionOverrides, norm_output: bool) -> None:
    drafter = build_drafter(fc_norm=True, norm_output=norm_output)
    source = write_foreign_checkpoint(tmp_path / "s", drafter, SPECFORGE)
    conversion = import_checkpoint(source, tmp_path / "d", overrides, target=write_target(tmp_path / "t"))
    assert are_equal(load_drafter(tmp_path / "d"), drafter)
    assert any("pull request 879" in finding for finding in conversion.findings) is (overrides.training_date == DAY(2026, 8, 8))


def test_specforge_without_final_norm_is_rejected(tmp_path: Path) -> None:
    source = write_foreign_checkpoint(tmp_path / "s", build_drafter(fc_norm=True), {**SPECFORGE, "norm_output": False})
    with pytest.raises(ConfigError, match="no engine computes that; retrain it"):
        convert_checkpoint(source, ConversionOverrides(target_layer_count=8, training_date=DAY(2026, 8, 8)))
    assert (
        convert_checkpoint(
            source, ConversionOverrides(target_layer_count=8, training_date=DAY(2026, 9, 20))
        ).checkpoint.config.norm_output
        is False
    )


def test_specforge_without_feedback_norm_is_eagle_3(tmp_path: Path) -> None:
    config = {key: value for key, value in SPECFORGE.items() if key not in ("fc_norm", "norm_output")}
    conversion = convert_checkpoint(
        write_foreign_checkpoint(tmp_path / "s", build_drafter(), config), ConversionOverrides(target_layer_count=8)
    )
    assert (conversion.origin, conversion.checkpoint.config.eagle_version) == (CheckpointOrigin.SPECFORGE, "EAGLE 3")


OUTPUTS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}


@pytest.mark.parametrize(
    ("config", "overrides", "rename", "expected"),
    [
        (OUTPUTS, ConversionOverrides(), str, (2, 4, 5)),
        (OUTPUTS, ConversionOverrides(layer_id_convention=LayerIdConvention.INPUTS), str, (1, 3, 4)),
        (OUTPUTS, ConversionOverrides(aux_layer_ids=(0, 4, 8)), str, (0, 4, 8)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]}},
            ConversionOverrides(origin=CheckpointOrigin.SPECFORGE),
            str,
            (4, 5, 7),
        ),
        ({**OUTPUTS, "_torchspec_version": "1"}, ConversionOverrides(), str, (2, 4, 5)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "next_layer_regular": True}},
            ConversionOverrides(),
            str,
            (3, 4, 5),
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, ConversionOverrides(target_layer_count=8), str, (2, 4, 5)),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "_torchspec_version": "1", "model_type": "kimi_k2"},
            ConversionOverrides(),
            lambda name: name.replace("midlayer.", "layers.0."),
            (2, 4, 5),
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
            ConversionOverrides(),
            lambda name: name.replace("midlayer.", "layers.0."),
            (2, 4, 5),
        ),
    ],
)
def test_layer_ids_are_those_of_vllm(
    tmp_path: Path,
    config: dict[str, Any],
    overrides: ConversionOverrides,
    rename: Callable[[str], str],
    expected: tuple[int, ...],
) -> None:
    source = write_foreign_checkpoint(
        tmp_path / "s", build_drafter(), {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], **config}, rename
    )
    assert convert_checkpoint(source, overrides).checkpoint.config.aux_layer_ids == expected


def test_ambiguous_layer_ids_need_an_option(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [3, 4, 6]}
    with pytest.raises(ConfigError, match="convert with --layer-ids inputs or --layer-ids outputs"):
        convert_checkpoint(write_foreign_checkpoint(tmp_path / "s", build_drafter(), config), ConversionOverrides())


def test_torchspec(tmp_path: Path) -> None:
    drafter = build_drafter(fc_norm=True, norm_output=True)
    conversion = import_checkpoint(
        write_foreign_checkpoint(tmp_path / "s", drafter, {**SPECFORGE, **OUTPUTS, "_torchspec_version": "0.1"}),
        tmp_path / "d",
        ConversionOverrides(),
    )
    assert conversion.origin is CheckpointOrigin.TORCHSPEC
    assert load_drafter(tmp_path / "d").config == drafter.config
    assert are_equal(load_drafter(tmp_path / "d"), drafter)


def test_sglang_legacy_names(tmp_path: Path) -> None:
    legacy = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.", "fc_norm.2.": "aux_norm_high."}

    def rename(name: str) -> str:
        for new, old in legacy.items():
            name = name.replace(new, old)
        return name

    drafter = build_drafter(fc_norm=True, norm_output=True)
    config = {**LLAMA, **OUTPUTS, "architectures": ["LlamaForCausalLMEagle3"], "use_aux_norm": True, "norm_output": True}
    conversion = import_checkpoint(
        write_foreign_checkpoint(tmp_path / "s", drafter, config, rename), tmp_path / "d", ConversionOverrides()
    )
    assert conversion.origin is CheckpointOrigin.SGLANG
    assert are_equal(load_drafter(tmp_path / "d"), drafter)


def test_nemo(tmp_path: Path) -> None:
    drafter = build_drafter(fc_norm=True, norm_output=True)
    config = {**SPECFORGE, **OUTPUTS, "architectures": ["LlamaEagle3DraftModel"]}

    def rename(name: str) -> str:
        return name if name in ("d2t", "t2d") or name.startswith("lm_head") else f"model.{name.replace('midlayer.', 'layers.0.')}"

    conversion = import_checkpoint(
        write_foreign_checkpoint(tmp_path / "s", drafter, config, rename), tmp_path / "d", ConversionOverrides()
    )
    assert conversion.origin is CheckpointOrigin.NEMO
    assert are_equal(load_drafter(tmp_path / "d"), drafter)


@pytest.mark.parametrize(
    "config_fields",
    [
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True},
        {"family": DrafterFamily.QWEN3, "draft_vocab_size": 40, "aux_layer_ids": (1, 3, 5, 7)},
        {
            "target_hidden_size": 12,
            "rope": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ],
)
def test_speculators_round_trip(tmp_path: Path, config_fields: dict[str, Any]) -> None:
    drafter = build_drafter(**config_fields)
    save_checkpoint(tmp_path / "a", drafter, {"target": "some/target", "training_horizon": 3})
    export_checkpoint(tmp_path / "a", tmp_path / "b", export_format=ExportFormat.SPECULATORS, num_speculative_tokens=4)
    conversion = import_checkpoint(tmp_path / "b", tmp_path / "c", ConversionOverrides())
    assert conversion.origin is CheckpointOrigin.SPECULATORS
    assert load_drafter(tmp_path / "c").config == drafter.config
    assert are_equal(load_drafter(tmp_path / "c"), drafter)
    assert conversion.checkpoint.provenance.training_horizon == 3


def write_speculators_checkpoint(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], drafter: Drafter | None = None
) -> Path:
    save_checkpoint(tmp_path / "a", drafter or build_drafter(), {"target": "t"})
    export_checkpoint(tmp_path / "a", tmp_path / "b", export_format=ExportFormat.SPECULATORS)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    change(config)
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    return tmp_path / "b"


def test_speculators_own_copies_and_defaults(tmp_path: Path) -> None:
    drafter = build_drafter(norm_before_residual=True)
    source = write_speculators_checkpoint(tmp_path, lambda config: config.pop("norm_before_residual"), drafter)
    header = read_header(source / "model.safetensors")
    extra = {"verifier_lm_head.weight": torch.ones(20, 16), "verifier_norm.weight": torch.ones(16)}
    write_tensors(source / "model.safetensors", {**read_tensors(header), **extra}, {})
    conversion = import_checkpoint(source, tmp_path / "c", ConversionOverrides())
    assert are_equal(load_drafter(tmp_path / "c"), drafter)
    assert any("verifier_lm_head.weight, verifier_norm.weight" in finding for finding in conversion.findings)
    assert any("norm_before_residual is true, vLLM's default" in finding for finding in conversion.findings)


def windowed(config: dict[str, Any]) -> None:
    config["transformer_layer_config"] |= {"sliding_window": 2048, "layer_types": ["sliding_attention"]}


def test_a_sliding_window_is_kept(tmp_path: Path) -> None:
    conversion = convert_checkpoint(write_speculators_checkpoint(tmp_path, windowed), ConversionOverrides())
    assert conversion.checkpoint.config.sliding_window == 2048


def test_a_window_that_vllm_drops_is_reported(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(family=DrafterFamily.QWEN3), {})
    file = tmp_path / "d" / "config.json"
    window = {"sliding_window": 2048, "layer_types": ["sliding_attention"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | window))
    conversion = convert_checkpoint(tmp_path / "d", ConversionOverrides(layer_id_convention=LayerIdConvention.INPUTS))
    assert conversion.checkpoint.config.sliding_window is None
    assert any("vLLM serves it with full attention" in finding for finding in conversion.findings)


def test_several_layers_with_norms_that_vllm_does_not_use(tmp_path: Path) -> None:
    drafter = build_drafter(num_hidden_layers=3, sliding_window=64)
    source = write_speculators_checkpoint(tmp_path, lambda _: None, drafter)
    header = read_header(source / "model.safetensors")
    unused = {f"layers.{number}.hidden_norm.weight": torch.ones(16) for number in (1, 2)}
    write_tensors(source / "model.safetensors", {**read_tensors(header), **unused}, {})
    conversion = import_checkpoint(source, tmp_path / "c", ConversionOverrides())
    assert are_equal(load_drafter(tmp_path / "c"), drafter)
    assert (conversion.checkpoint.config.num_hidden_layers, conversion.checkpoint.config.sliding_window) == (3, 64)
    assert any("layers.1.hidden_norm.weight, layers.2.hidden_norm.weight" in finding for finding in conversion.findings)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda config: config.update(speculators_model_type="dflash"),
            "speculators_model_type is 'dflash': supported: eagle3",
        ),
        (lambda config: config.pop("transformer_layer_config"), "transformer_layer_config is missing"),
        (lambda config: config["transformer_layer_config"].update(model_type="gemma"), "vLLM serves llama and qwen3"),
        (lambda config: config["transformer_layer_config"].update(num_hidden_layers=2), "num_hidden_layers is 2"),
        (lambda config: config.update(fc_norm=True), "fc_norm.0.weight is missing, and the configuration has fc_norm true"),
        (lambda config: config.update(draft_vocab_size=19), "has shape 20.*the configuration makes it 19"),
    ],
)
def test_invalid_speculators_checkpoints_are_rejected(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    with pytest.raises(DrafterError, match=sentence) as caught:
        convert_checkpoint(write_speculators_checkpoint(tmp_path, change), ConversionOverrides())
    assert str(tmp_path / "b") in str(caught.value)


OURS = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "_torchspec_version": "1",
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
}


def test_ids_in_d2t_are_converted_to_offsets(tmp_path: Path) -> None:
    drafter = build_drafter()
    ids = drafter.draft_token_ids
    source = write_foreign_checkpoint(tmp_path / "s", drafter, OURS)
    tensors = read_tensors(read_header(source / "model.safetensors"))
    write_tensors(source / "model.safetensors", {**tensors, "d2t": ids}, {})
    conversion = convert_checkpoint(source, ConversionOverrides())
    assert torch.equal(conversion.checkpoint.tensors["d2t"], drafter.d2t)
    assert any("as t2d proves" in finding for finding in conversion.findings)
    write_tensors(
        source / "model.safetensors", {name: tensor for name, tensor in {**tensors, "d2t": ids}.items() if name != "t2d"}, {}
    )
    with pytest.raises(CheckpointError, match="d2t is an offset: token of the target = draft id"):
        convert_checkpoint(source, ConversionOverrides())


def test_a_missing_mapping_is_added_and_a_needless_one_removed(tmp_path: Path) -> None:
    drafter = build_drafter()
    source = write_foreign_checkpoint(tmp_path / "s", drafter, OURS)
    tensors = read_tensors(read_header(source / "model.safetensors"))
    write_tensors(source / "model.safetensors", {name: tensor for name, tensor in tensors.items() if name != "d2t"}, {})
    assert torch.equal(convert_checkpoint(source, ConversionOverrides()).checkpoint.tensors["d2t"], drafter.d2t)
    full = write_foreign_checkpoint(tmp_path / "f", build_drafter(draft_vocab_size=40), {**OURS, "draft_vocab_size": 40})
    assert "d2t" not in convert_checkpoint(full, ConversionOverrides()).checkpoint.tensors
    tensors = read_tensors(read_header(full / "model.safetensors"))
    write_tensors(full / "model.safetensors", {**tensors, "d2t": torch.arange(39, -1, -1) - torch.arange(40)}, {})
    with pytest.raises(CheckpointError, match="d2t moves tokens, and draft_vocab_size and vocab_size are both 40"):
        convert_checkpoint(full, ConversionOverrides())


def test_a_mapping_in_another_order_is_kept(tmp_path: Path) -> None:
    drafter = build_drafter()
    source = write_foreign_checkpoint(tmp_path / "s", drafter, OURS)
    tensors = read_tensors(read_header(source / "model.safetensors"))
    order = torch.arange(20).flip(0)
    falling = drafter.draft_token_ids[order] - torch.arange(20)
    moved = {**tensors, "d2t": falling, "lm_head.weight": tensors["lm_head.weight"][order]}
    write_tensors(source / "model.safetensors", moved, {})
    converted = convert_checkpoint(source, ConversionOverrides()).checkpoint.tensors
    assert torch.equal(converted["d2t"], falling)
    assert torch.equal(converted["t2d"], drafter.t2d)


def test_parallel_drafters_are_rejected(tmp_path: Path) -> None:
    source = write_foreign_checkpoint(
        tmp_path / "s", build_drafter(), OURS, lambda name: "mask_hidden" if name == "t2d" else name
    )
    with pytest.raises(CheckpointError, match=r"model.safetensors: mask_hidden exists: parallel drafting"):
        convert_checkpoint(source, ConversionOverrides())


def test_pickles_are_not_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "exploded").touch, ())

    source = write_foreign_checkpoint(tmp_path / "s", build_drafter(), OURS, pickled=True)
    torch.save({"fc.weight": Bomb()}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: cannot be read as tensors only"):
        convert_checkpoint(source, ConversionOverrides())
    assert not (tmp_path / "exploded").exists()
    (source / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: cannot be read"):
        convert_checkpoint(source, ConversionOverrides())


def test_convert_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = build_drafter(fc_norm=True)
    source = write_foreign_checkpoint(tmp_path / "s", drafter, SPECFORGE)
    arguments = [
        "convert",
        str(source),
        str(tmp_path / "d"),
        "--target",
        str(write_target(tmp_path / "t")),
        "--trained",
        "2026-08-01",
    ]
    assert run_cli(arguments) == 0
    printed = capsys.readouterr()
    assert "norm_output is changed from true to false" in printed.err
    assert "EAGLE 3 with fc_norm, from specforge" in printed.out
    assert are_equal(load_drafter(tmp_path / "d"), drafter)
    assert run_cli(["convert", str(source), str(tmp_path / "e"), "--layers", "low"]) == 2
    assert "integers separated by commas" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()
