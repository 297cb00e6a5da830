"""Checkpoints: a saved drafter is loaded bit for bit, and each error is reported in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie_drafter import checkpoint, files
from aerie_drafter.checkpoint import Provenance, compute_model_digest, load_drafter, save_checkpoint
from aerie_drafter.config import DrafterConfig, DrafterFamily, MlaDims
from aerie_drafter.errors import CheckpointError, ConfigError, DrafterError
from aerie_drafter.model import Drafter
from aerie_drafter.weights import read_header, read_tensors, write_tensors
from tests.unit.drafter.sizes import SIZES

SMALL: dict[str, Any] = {**SIZES, "target_hidden_size": 12, "aux_layer_ids": (1, 3, 5)}
MLA = MlaDims(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, q_lora_rank=6)


def build_drafter(**overrides: Any) -> Drafter:
    """Return a small random drafter, by default with a reduced vocabulary."""
    torch.manual_seed(1)
    drafter = Drafter(
        DrafterConfig(**{"family": DrafterFamily.LLAMA, "fc_norm": True, "norm_output": True, **SMALL, **overrides})
    )
    if drafter.config.draft_vocab_size < drafter.config.vocab_size:
        drafter.set_draft_vocabulary(torch.randperm(drafter.config.vocab_size)[: drafter.config.draft_vocab_size].sort().values)
    return drafter


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, EAGLE 3": {"fc_norm": False, "norm_output": False},
    "llama, one norm": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
    "qwen3, full vocabulary": {"family": DrafterFamily.QWEN3, "draft_vocab_size": 40},
    "mla, five layers": {"family": DrafterFamily.MLA, "mla": MLA, "aux_layer_ids": (0, 2, 4, 6, 8)},
    "yarn": {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}},
    "three layers": {"num_hidden_layers": 3},
    "two layers of qwen3 with a window": {"family": DrafterFamily.QWEN3, "num_hidden_layers": 2, "sliding_window": 64},
    "two layers, mla": {"family": DrafterFamily.MLA, "mla": MLA, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_saved_drafter_is_loaded_equal(tmp_path: Path, kind: str, dtype: torch.dtype | None) -> None:
    drafter = build_drafter(**KINDS[kind])
    save_checkpoint(tmp_path / "d", drafter, Provenance(target="t", training_horizon=3, notes={"seed": "1"}), dtype=dtype)
    loaded = load_drafter(tmp_path / "d")
    assert loaded.config == drafter.config
    expected = drafter.to(dtype or torch.float32).state_dict()
    assert set(loaded.state_dict()) == set(expected)
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    rotary = {name: buffer for name, buffer in build_drafter(**KINDS[kind]).named_buffers() if name.endswith("frequencies")}
    assert rotary
    assert all(torch.equal(dict(loaded.named_buffers())[name], buffer) for name, buffer in rotary.items())
    assert [p.requires_grad for p in loaded.parameters()] == [p.requires_grad for p in drafter.parameters()]


def test_names_are_those_that_vllm_loads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(), {})
    names = set(read_header(tmp_path / "d" / "model.safetensors").tensors)
    assert {"fc.weight", "fc_norm.2.weight", "midlayer.self_attn.q_proj.weight", "d2t", "t2d", "embed_tokens.weight"} <= names
    assert not any(name.startswith("model.") for name in names)
    save_checkpoint(tmp_path / "full", build_drafter(draft_vocab_size=40), {}, include_embedding=False)
    assert not {"d2t", "t2d", "embed_tokens.weight"} & set(read_header(tmp_path / "full" / "model.safetensors").tensors)


def test_the_same_drafter_gives_the_same_bytes_and_digest(tmp_path: Path) -> None:
    provenance = Provenance(target="t", training_data="d", training_horizon=3, notes={str(i): "x" for i in range(8)})
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, build_drafter(), provenance)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    os.utime(tmp_path / "b" / "config.json", (1, 1))
    save_checkpoint(tmp_path / "c", build_drafter(), {"target": "another"})
    assert compute_model_digest(tmp_path / "a") == compute_model_digest(tmp_path / "b") == compute_model_digest(tmp_path / "c")
    other = build_drafter()
    with torch.no_grad():
        other.fc.weight[0, 0] += 1e-3
    save_checkpoint(tmp_path / "d", other, provenance)
    save_checkpoint(tmp_path / "e", build_drafter(norm_output=False), provenance)
    assert len({compute_model_digest(tmp_path / name) for name in "ade"}) == 3


def test_provenance_is_saved(tmp_path: Path) -> None:
    provenance = Provenance(
        target="t", target_digest="sha256:1", training_data="books", training_horizon=3, written_by="v", notes={"seed": "7"}
    )
    save_checkpoint(tmp_path / "d", build_drafter(), provenance)
    assert checkpoint.read_provenance(tmp_path / "d") == provenance
    save_checkpoint(tmp_path / "d", build_drafter(), {"target": "t", "training_horizon": 4, "seed": 8})
    loaded = checkpoint.read_provenance(tmp_path / "d")
    assert (loaded.training_horizon, loaded.notes, loaded.written_by.split()[0]) == (4, {"seed": "8"}, "aerie")


def test_embedding_of_the_target(tmp_path: Path) -> None:
    drafter = build_drafter()
    save_checkpoint(tmp_path / "d", drafter, {}, include_embedding=False)
    with pytest.raises(CheckpointError, match="set the target's folder too"):
        load_drafter(tmp_path / "d")
    target = tmp_path / "target"
    target.mkdir()
    write_tensors(target / "model.safetensors", {"model.embed_tokens.weight": drafter.embed_tokens.weight}, {})
    assert torch.equal(load_drafter(tmp_path / "d", target=target).embed_tokens.weight, drafter.embed_tokens.weight)
    write_tensors(target / "model.safetensors", {"model.embed_tokens.weight": torch.zeros(41, 16)}, {})
    with pytest.raises(
        CheckpointError, match=r"has shape 41 x 16, and the drafter in .* needs 40 x 16: it was trained for another target"
    ):
        load_drafter(tmp_path / "d", target=target)


def test_layers_0_is_read_as_midlayer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(), {})
    edit_tensors(
        tmp_path / "d", lambda tensors: {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    )
    assert torch.equal(load_drafter(tmp_path / "d").midlayer.mlp.up_proj.weight, build_drafter().midlayer.mlp.up_proj.weight)


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    header = read_header(file)
    write_tensors(file, change(read_tensors(header)), header.metadata)


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def replace_tensor(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: {**tensors, name: tensor})


def remove_tensor(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: {k: v for k, v in tensors.items() if k != name})


def change_config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def append_bytes(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")


RISING = torch.arange(20)
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (remove_tensor("norm.weight"), r"model.safetensors: norm.weight is missing; expected: a tensor of shape 16\."),
    "extra": (replace_tensor("other.weight", torch.ones(1)), r"other.weight is not a tensor of this configuration"),
    "bias": (replace_tensor("fc.bias", torch.ones(16)), r"fc.bias is not a tensor of this configuration"),
    "shape": (
        replace_tensor("fc.weight", torch.ones(16, 24)),
        r"fc.weight has shape 16 x 24, and the configuration makes it 16 x 36\.",
    ),
    "prefix": (
        lambda folder: edit_tensors(folder, lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()}),
        r"model\.\S+ has the prefix `model.`.*aerie-drafter convert",
    ),
    "norms without the switch": (
        change_config(fc_norm=False),
        r"fc_norm.0.weight exists, and the configuration has fc_norm false",
    ),
    "the switch without norms": (
        remove_tensor("fc_norm.1.weight"),
        r"fc_norm.1.weight is missing, and the configuration has fc_norm true",
    ),
    "both norms": (change_config(norm_before_fc=True, eagle_config={}), r"config.json: fc_norm and norm_before_fc are both true"),
    "input_norm": (replace_tensor("input_norm.weight", torch.ones(36)), r"input_norm.weight exists, .* norm_before_fc false"),
    "fewer layers": (change_config(eagle_aux_hidden_state_layer_ids=[1, 3]), r"fc_norm.2.weight exists, and .* has 2 auxiliary"),
    "d2t missing": (remove_tensor("d2t"), r"d2t is missing; expected: a tensor of shape 20"),
    "d2t repeats": (
        replace_tensor("d2t", torch.tensor([0, 5, -2] + [5] * 17)),
        r"d2t maps draft ids 0 and 2 both to token 0, and vLLM keeps only one of the logits",
    ),
    "d2t too large": (
        replace_tensor("d2t", RISING + 3),
        r"d2t maps draft id 19 to token 41, and the target's vocabulary is 0 to 39",
    ),
    "d2t negative": (replace_tensor("d2t", torch.full((20,), -1)), r"d2t maps draft id 0 to token -1"),
    "d2t no numbers": (replace_tensor("d2t", torch.ones(20)), r"d2t contains torch.float32; expected: integers"),
    "t2d": (replace_tensor("t2d", torch.zeros(40, dtype=torch.bool)), r"t2d is False for token \d+, but True according to d2t"),
    "NaN": (
        replace_tensor("fc.weight", torch.full((16, 36), float("nan"))),
        r"model.safetensors: fc.weight contains NaN or infinity",
    ),
    "inf": (replace_tensor("norm.weight", torch.full((16,), float("inf"))), r"norm.weight contains NaN or infinity"),
    "fp8": (replace_tensor("fc.weight", torch.ones(16, 36).to(torch.float8_e4m3fn)), r"fc.weight is of type F8_E4M3: quantized"),
    "quantised": (change_config(quantization_config={"quant_method": "fp8"}), r"quantization_config is set"),
    "cut off": (truncate_weights, r"model.safetensors: truncated: \d+ bytes found, \d+ expected"),
    "cut in the header": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{"),
        r"no safetensors header",
    ),
    "empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), r"no safetensors header .*0 bytes in total"),
    "another kind": (lambda f: (f / "model.safetensors").write_bytes(b"PK\3\4" * 99), r"no safetensors header"),
    "longer": (append_bytes, r"longer than its header states"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"model.safetensors: missing"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json: missing"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), r"config.json: invalid JSON"),
    "no object": (
        lambda f: (f / "config.json").write_text("[]"),
        r"config.json: expected: an object, not a list",
    ),
    "architecture": (change_config(architectures=["GPT2"]), r"config.json: architectures is \['GPT2'\]: supported: Llama"),
    "layers out of order": (change_config(eagle_aux_hidden_state_layer_ids=[5, 3, 1]), r"config.json: eagle_aux.*ascending"),
    "size in words": (change_config(hidden_size="16"), r"config.json: hidden_size is '16': expected: an integer"),
    "wrong size": (change_config(intermediate_size=32), r"midlayer.mlp.\S+ has shape .*, and the configuration makes it"),
    "rope": (change_config(rope_parameters={"rope_type": "odd"}), r"rope_type is 'odd'"),
    "rope without its factor": (
        change_config(rope_parameters={"rope_type": "linear", "rope_theta": 1.0}),
        r"config.json: .*factor",
    ),
    "rope in words": (change_config(rope_parameters="yarn"), r"config.json: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_errors_are_one_sentence_that_names_the_place(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "d"
    save_checkpoint(folder, build_drafter(), {})
    damage, sentence = FAULTS[fault]
    damage(folder)
    with pytest.raises(DrafterError, match=sentence) as caught:
        load_drafter(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_draft_tokens_may_have_any_order(tmp_path: Path) -> None:
    """vLLM distributes logits by d2t, so each token must occur exactly once."""
    save_checkpoint(tmp_path / "d", build_drafter(), {})
    tokens = torch.arange(39, 19, -1)
    reachable = torch.zeros(40, dtype=torch.bool)
    reachable[tokens] = True
    edit_tensors(tmp_path / "d", lambda tensors: {**tensors, "d2t": tokens - RISING, "t2d": reachable})
    loaded = load_drafter(tmp_path / "d")
    assert loaded.draft_token_ids.tolist() == tokens.tolist()


def test_a_full_vocabulary_has_no_offsets(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(draft_vocab_size=40), {})
    edit_tensors(tmp_path / "d", lambda tensors: {**tensors, "d2t": torch.arange(39, -1, -1) - torch.arange(40)})
    with pytest.raises(CheckpointError, match="d2t moves tokens, and draft_vocab_size and vocab_size are both 40"):
        load_drafter(tmp_path / "d")


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: missing"):
        load_drafter(tmp_path / "none")


def test_nan_is_not_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(), {})
    before = compute_model_digest(tmp_path / "d")
    broken = build_drafter()
    with torch.no_grad():
        broken.norm.weight[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"norm.weight contains NaN or infinity: the drafter is not saved"):
        save_checkpoint(tmp_path / "d", broken, {})
    assert compute_model_digest(tmp_path / "d") == before


def test_a_foreign_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="contains files that aerie-drafter did not write"):
        save_checkpoint(tmp_path, build_drafter(), {})
    assert (tmp_path / "thesis.txt").exists()


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    """A file size limit of the kernel replaces a full disk."""
    folder = tmp_path / "d"
    save_checkpoint(folder, build_drafter(), {})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    program = (
        "import resource, signal, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_checkpoint import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"save_checkpoint(Path({str(folder)!r}), build_drafter(norm_output=False), {{}})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot be written (File too large); the previous one is unchanged." in done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_checkpoint_is_replaced(tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    for norm_output in (True, False):
        save_checkpoint(tmp_path / "d", build_drafter(norm_output=norm_output), {})
        assert load_drafter(tmp_path / "d").config.norm_output is norm_output
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_symbolic_link_is_kept(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("d")
    for norm_output in (True, False):
        save_checkpoint(tmp_path / "link", build_drafter(norm_output=norm_output), {})
        assert load_drafter(tmp_path / "d").config.norm_output is norm_output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "link"]


def test_a_kill_at_any_time_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """A process that replaces checkpoints in a loop is killed at a different time in every round."""
    folder = tmp_path / "d"
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_checkpoint import *\n"
        "drafters = [build_drafter(norm_output=norm_output, hidden_size=64) for norm_output in (True, False)]\n"
        "while True:\n"
        "    for drafter in drafters:\n"
        f"        save_checkpoint(Path({str(folder)!r}), drafter, {{}})\n"
        "        print('saved', flush=True)\n"
    )
    for saves in (3, 8):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(saves)] == ["saved\n"] * saves
            process.kill()
        assert load_drafter(folder).config.hidden_size == 64
    save_checkpoint(folder, build_drafter(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_remains_of_a_kill_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".d.writing").mkdir()
    (tmp_path / ".d.writing" / "half").write_text("x")
    save_checkpoint(tmp_path / "d", build_drafter(), {})
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_failed_block_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(), {})
    before = compute_model_digest(tmp_path / "d")
    with (
        pytest.raises(CheckpointError, match=r"No space left on device\); the previous one is unchanged"),
        checkpoint.replace_checkpoint(tmp_path / "d"),
    ):
        raise OSError(28, "No space left on device")
    assert compute_model_digest(tmp_path / "d") == before


def test_weights_in_several_files_are_loaded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(), {})
    whole = tmp_path / "d" / "model.safetensors"
    tensors = read_tensors(read_header(whole))
    digested = compute_model_digest(tmp_path / "d")
    names = sorted(tensors)
    parts = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, inside in parts.items():
        write_tensors(tmp_path / "d" / file, {name: tensors[name] for name in inside}, {})
    index = {name: file for file, inside in parts.items() for name in inside}
    (tmp_path / "d" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole.unlink()
    assert compute_model_digest(tmp_path / "d") == digested
    assert torch.equal(load_drafter(tmp_path / "d").fc.weight, build_drafter().fc.weight)
    (tmp_path / "d" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index | {"z": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"one.safetensors: z is missing, although model.safetensors.index.json lists it"):
        load_drafter(tmp_path / "d")


def test_config_errors_name_the_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "d", build_drafter(), {})
    edit_config(tmp_path / "d", num_hidden_layers=0)
    with pytest.raises(ConfigError, match=r"config.json: num_hidden_layers is 0: must be an integer of at least 1"):
        load_drafter(tmp_path / "d")
