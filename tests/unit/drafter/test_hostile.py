"""Arbitrary content of a checkpoint's files: it is read, or rejected in one sentence, without another traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aerie_drafter.checkpoint import compute_model_digest, load_drafter, save_checkpoint
from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.convert import ConversionOverrides, convert_checkpoint
from aerie_drafter.errors import DrafterError
from aerie_drafter.export import ExportFormat, export_checkpoint
from aerie_drafter.inspect import inspect_checkpoint
from aerie_drafter.model import Drafter

CONFIG = DrafterConfig(
    family=DrafterFamily.LLAMA,
    hidden_size=8,
    intermediate_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=12,
    draft_vocab_size=6,
    target_hidden_size=8,
    aux_layer_ids=(1, 2, 3),
    fc_norm=True,
    norm_output=True,
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats()
    | st.sampled_from(
        ["", "llama", "qwen3", "LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM", "yarn"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), inner, max_size=3),
    max_leaves=4,
)
ANY = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Checkpoint(dict[str, dict[str, bytes]]):
    """Files by format and name; a short repr for examples that hypothesis prints."""

    def __repr__(self) -> str:
        return "saved"


@pytest.fixture
def valid_checkpoints(tmp_path: Path) -> Checkpoint:
    """Return valid files, by format and name."""
    drafter = Drafter(CONFIG)
    drafter.set_draft_vocabulary(torch.arange(0, 12, 2))
    save_checkpoint(tmp_path / "vllm", drafter, {"target": "t"})
    export_checkpoint(tmp_path / "vllm", tmp_path / "speculators", export_format=ExportFormat.SPECULATORS)
    return Checkpoint(
        {
            form: {name: (tmp_path / form / name).read_bytes() for name in ("config.json", "model.safetensors")}
            for form in ("vllm", "speculators")
        }
    )


def read_with_all_readers(folder: Path, files: dict[str, bytes]) -> None:
    """Read the files with every function that reads a checkpoint."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for read in (
        load_drafter,
        compute_model_digest,
        inspect_checkpoint,
        lambda source: convert_checkpoint(source, ConversionOverrides(target_layer_count=8)),
    ):
        try:
            read(folder)
        except DrafterError as error:
            assert str(folder) in str(error)  # noqa: PT017 - an error is allowed, not expected
            assert "\n" not in str(error)  # noqa: PT017


@ANY
@given(at=st.integers(0, 2**16), new=st.integers(0, 255), form=st.sampled_from(["vllm", "speculators"]))
def test_changed_weight_bytes_are_read_or_rejected(
    valid_checkpoints: Checkpoint, tmp_path: Path, at: int, new: int, form: str
) -> None:
    files = dict(valid_checkpoints[form])
    content = bytearray(files["model.safetensors"])
    end = 8 + int.from_bytes(content[:8], "little") + 64  # the header, and a little of what follows
    content[at % end] = new
    read_with_all_readers(tmp_path / "d", {**files, "model.safetensors": bytes(content)})


@ANY
@given(length=st.integers(0, 2**16))
def test_truncated_weights_are_read_or_rejected(valid_checkpoints: Checkpoint, tmp_path: Path, length: int) -> None:
    files = dict(valid_checkpoints["vllm"])
    whole = files["model.safetensors"]
    read_with_all_readers(tmp_path / "d", {**files, "model.safetensors": whole[: length % len(whole)]})
    with pytest.raises(DrafterError, match=r"model\.safetensors"):
        load_drafter(tmp_path / "d")


@ANY
@given(data=st.data(), form=st.sampled_from(["vllm", "speculators"]))
def test_changed_config_values_are_read_or_rejected(
    valid_checkpoints: Checkpoint, tmp_path: Path, data: st.DataObject, form: str
) -> None:
    files = dict(valid_checkpoints[form])
    config = json.loads(files["config.json"])
    places = [config, *(inner for inner in config.values() if isinstance(inner, dict))]
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUES)
    read_with_all_readers(tmp_path / "d", {**files, "config.json": json.dumps(config).encode()})


@ANY
@given(content=st.binary(max_size=64))
def test_random_config_bytes_are_read_or_rejected(valid_checkpoints: Checkpoint, tmp_path: Path, content: bytes) -> None:
    read_with_all_readers(tmp_path / "d", {**valid_checkpoints["vllm"], "config.json": content})


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_a_huge_vocabulary_size_allocates_no_memory(valid_checkpoints: Checkpoint, tmp_path: Path, form: str) -> None:
    """Regression: the check of a mapping of six tokens allocated 20 GiB, and the kernel killed the process."""
    files = dict(valid_checkpoints[form])
    config = json.loads(files["config.json"])
    place = config if "vocab_size" in config else config["transformer_layer_config"]
    place["vocab_size"] = 2**40
    read_with_all_readers(tmp_path / "d", {**files, "config.json": json.dumps(config).encode()})
    with pytest.raises(DrafterError, match=r"vocab_size is 1099511627776: must be at most 16777216\."):
        convert_checkpoint(tmp_path / "d", ConversionOverrides(target_layer_count=8))
