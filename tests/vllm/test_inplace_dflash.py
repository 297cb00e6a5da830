"""DFlash on real vLLM: a drafter with tensors that its loader calculates itself is replaced in a running engine.

The drafters have random weights, of which no draft is accepted; so their tensors are compared. On CPU vLLM drops the weights from
which DFlash's loader calculates others, so a load there fails; without the packing it is as on GPUs.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie_vllm.worker_protocol import DESCRIBE, SWAP
from tests.vllm.inplace_engine import STAGE_TIMEOUT_SECONDS, OfflineEngine, PreloadedVllm

pytestmark = pytest.mark.timeout(2400)  # a start on busy cores
HIDDEN, HEAD, HEADS, KEY_HEADS, LAYERS, VOCABULARY = 256, 32, 4, 2, 2, 2048
TARGET_ROPE_THETA = 10000.0
"""That of the bundle's target: with the same sizes vLLM gives the drafter the target's rotary embedding."""


def write_dflash(folder: Path, seed: int, rope_theta: float) -> Path:
    """Write a DFlash drafter of the bundle's target, with random weights."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 2]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    tensors = {"fc.weight": draw(HIDDEN, 2 * HIDDEN), "hidden_norm.weight": 1 + draw(HIDDEN), "norm.weight": 1 + draw(HIDDEN)}
    rows = {"q_proj": HEADS * HEAD, "k_proj": KEY_HEADS * HEAD, "v_proj": KEY_HEADS * HEAD}
    for layer in range(LAYERS):
        prefix = f"layers.{layer}"
        tensors |= {f"{prefix}.self_attn.{name}.weight": draw(count, HIDDEN) for name, count in rows.items()}
        tensors |= {f"{prefix}.self_attn.{name}.weight": 1 + draw(HEAD) for name in ("q_norm", "k_norm")}
        tensors |= {f"{prefix}.mlp.{name}.weight": draw(HIDDEN, HIDDEN) for name in ("gate_proj", "up_proj", "down_proj")}
        tensors |= {f"{prefix}.{name}.weight": 1 + draw(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors[f"{prefix}.self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def wait_until_read(engine: OfflineEngine) -> Any:
    """Return the report once the engine's own drafter is read."""
    deadline = time.monotonic() + STAGE_TIMEOUT_SECONDS
    while (report := engine.call(DESCRIBE))["own"] is None:
        assert report["unfit"] is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return report


def hash_derived(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of tensors that DFlash's loader calculates or aliases, from the checkpoint."""
    tensors = load_file(folder / "model.safetensors")

    def list_all(*names: str) -> list[torch.Tensor]:
        return [tensors[f"layers.{layer}.self_attn.{name}.weight"] for layer in range(LAYERS) for name in names]

    derived = {
        "model._fused_kv_weight": torch.cat(list_all("k_proj", "v_proj")),
        "model._k_norm_weights": torch.stack(list_all("k_norm")),
        "model._hidden_norm_weight": tensors["hidden_norm.weight"],
        "model.layers.0.self_attn.qkv_proj.weight": torch.cat(list_all("q_proj", "k_proj", "v_proj")[:3]),
        "model.norm.weight": tensors["norm.weight"],
    }
    return {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in derived.items()}


@pytest.mark.parametrize("rope_theta", [2 * TARGET_ROPE_THETA, TARGET_ROPE_THETA], ids=["rope of its own", "shared rope"])
def test_dflash_is_replaced(preloaded_vllm: PreloadedVllm, tmp_path: Path, rope_theta: float) -> None:
    first, second = (write_dflash(tmp_path / name, seed, rope_theta) for seed, name in enumerate(("first", "second")))
    with preloaded_vllm.start_engine(tmp_path / "engine", first, method="dflash", repacks=False) as engine:
        own = wait_until_read(engine)["own"]["digest"]
        before = engine.call("aerie_drafter_hash_tensors")
        assert hash_derived(first).items() <= before.items()
        assert engine.change(second)["problem"] is None
        after = engine.call("aerie_drafter_hash_tensors")
        assert hash_derived(second).items() <= after.items()
        unchanged = {name for name in before if before[name] == after[name]}
        assert "model._rope_cos_sin_cache" in unchanged
        assert {name for name in unchanged if name.endswith(".weight")} <= {"lm_head.weight", "model.embed_tokens.weight"}
        assert engine.generate()["drafts"] > 0
        assert engine.call(SWAP, own)["problem"] is None
        assert engine.call("aerie_drafter_hash_tensors") == before


def test_packed_weights_are_no_source_of_others(preloaded_vllm: PreloadedVllm, tmp_path: Path) -> None:
    first, second = (write_dflash(tmp_path / name, seed, TARGET_ROPE_THETA) for seed, name in enumerate(("first", "second")))
    with preloaded_vllm.start_engine(tmp_path / "engine", first, method="dflash") as engine:
        own = wait_until_read(engine)["own"]["digest"]
        before = engine.call("aerie_drafter_hash_tensors")
        report = engine.change(second)
        assert "_fused_kv_weight of DFlashQwen3Model has another form" in report["problem"]["message"]
        assert (report["loaded"], report["broken"]) == (own, None)
        assert engine.call("aerie_drafter_hash_tensors") == before
        assert engine.generate()["drafts"] > 0
