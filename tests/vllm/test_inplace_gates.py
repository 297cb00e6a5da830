"""The gates of the plugin's classes: each flag, and Qwen 3's class, against vLLM's own classes with the same flags.

Not run: DeepSeek's class, whose attention needs a target of its kind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie_drafter.bundle import find_bundle_path
from tests.vllm.inplace_engine import PreloadedVllm

pytestmark = pytest.mark.timeout(2400)  # four starts on busy cores
Tensors = dict[str, torch.Tensor]


def write_variant(folder: Path, name: str, config: dict[str, Any], edit: Callable[[Tensors], object]) -> Path:
    """Write a copy of one of the bundle's drafters with other keys in its config, and edited tensors."""
    shutil.copytree(find_bundle_path(name), folder)
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, **config}))
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def add_input_norm(tensors: Tensors) -> None:
    tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, 768)


def add_head_norms(tensors: Tensors) -> None:
    """Add what Qwen 3's attention has and Llama's has not."""
    for projection in ("q", "k"):
        tensors[f"midlayer.self_attn.{projection}_norm.weight"] = torch.linspace(1.0, 2.0, 32)


QWEN3 = {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]}
VARIANTS: dict[str, tuple[tuple[str, dict[str, Any], Callable[[Tensors], object]], ...]] = {
    "the flags that the bundle's drafters lack": (
        ("eagle31", {}, lambda tensors: tensors),
        ("eagle3", {"norm_before_fc": True, "norm_before_residual": True, "eagle_config": None}, add_input_norm),
    ),
    "qwen3": (("eagle3", QWEN3, add_head_norms), ("eagle31", QWEN3, add_head_norms)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gate_is_what_the_flag_is_in_vllms_class(variant: str, preloaded_vllm: PreloadedVllm, tmp_path: Path) -> None:
    drafters = [write_variant(tmp_path / f"drafter-{index}", *row) for index, row in enumerate(VARIANTS[variant])]
    fresh = []
    for index, drafter in enumerate(drafters):
        with preloaded_vllm.start_engine(tmp_path / f"fresh-{index}", drafter, plugin=False) as stock:
            fresh.append(stock.generate())
    assert fresh[0]["accepted"] != fresh[1]["accepted"] > 0
    with preloaded_vllm.start_engine(tmp_path / "gated", drafters[0]) as gated:
        assert gated.generate() == fresh[0]
        for index in (1, 0, 1):
            assert gated.change(drafters[index])["problem"] is None
            assert gated.generate() == fresh[index]
