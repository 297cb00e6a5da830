"""The memory estimate: KV bytes per token of published models, sliding windows, ranks, and the size of the KV cache."""

from __future__ import annotations

from typing import Any

import pytest

from aerie.engine.models.checkpoint import Checkpoint, TensorInfo
from aerie.engine.models.gpu_memory import GIB, RESERVE_BYTES, DraftLogits, MemoryLayout, estimate_memory

LLAMA_8B = {
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
KIMI = {
    "text_config": {
        "dtype": "bfloat16",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
}
GPT_OSS = {
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}


def model(config: dict[str, Any], size: int = 0, names: tuple[str, ...] = ("weight",)) -> Checkpoint:
    return Checkpoint("m", config, {name: TensorInfo("BF16", (size // 2,), "f", 0, size) for name in names}, {})


def estimate_model(config: dict[str, Any], **layout: Any) -> Any:
    return estimate_memory(model(config), None, MemoryLayout(gpu_memory_bytes=80 * GIB, **layout))


@pytest.mark.parametrize(
    ("config", "layout", "expected"),
    [
        (LLAMA_8B, {}, 131072),  # 2 x 32 layers x 8 heads x 128 x 2 bytes: the 128 KiB of the model's documentation
        (LLAMA_8B, {"kv_cache_dtype": "fp8"}, 65536),
        (LLAMA_8B, {"kv_cache_dtype": "fp8", "tensor_parallel": 4}, 16384),
        (LLAMA_8B, {"tensor_parallel": 16}, 2 * 32 * 1 * 128 * 2),  # heads are copied where there are too few
        (LLAMA_8B, {"pipeline_parallel": 2}, 65536),
        (LLAMA_8B, {"dtype": "float32"}, 262144),
        (KIMI, {}, 61 * 576 * 2),
        (KIMI, {"tensor_parallel": 8}, 61 * 576 * 2),  # the latent vector is on every rank
        (GPT_OSS, {}, 2 * 24 * 8 * 64 * 2),
        ({**GPT_OSS, "layer_types": ["full_attention", "linear_attention"] * 12}, {}, 2 * 12 * 8 * 64 * 2),
        ({}, {}, None),
    ],
)
def test_bytes_per_token(config: dict[str, Any], layout: dict[str, Any], expected: int | None) -> None:
    assert estimate_model(config, **layout).target_kv_bytes_per_token == expected


def test_a_sliding_window_bounds_the_kv_bytes_of_a_sequence() -> None:
    per_layer = 2 * 8 * 64 * 2
    assert estimate_model(GPT_OSS, max_model_len=10_000).max_sequence_kv_bytes == 12 * per_layer * (10_000 + 128)
    assert estimate_model(GPT_OSS, max_model_len=100).max_sequence_kv_bytes == 24 * per_layer * 100


def test_the_kv_cache_gets_the_remaining_memory() -> None:
    target = model(LLAMA_8B, 16 * GIB)
    drafter = model({**LLAMA_8B, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}, GIB)
    estimate = estimate_memory(target, drafter, MemoryLayout(gpu_memory_bytes=80 * GIB, max_model_len=8192))
    assert estimate.target_weight_bytes == 16 * GIB
    assert estimate.drafter_weight_bytes == GIB
    assert estimate.drafter_kv_bytes_per_token == 4096
    assert estimate.kv_cache_bytes is not None
    assert estimate.kv_cache_bytes == pytest.approx(80 * GIB * 0.92 - 17 * GIB - RESERVE_BYTES)
    assert estimate.kv_cache_tokens == int(estimate.kv_cache_bytes / (131072 + 4096))
    assert estimate.kv_cache_sequences == pytest.approx(estimate.kv_cache_bytes / ((131072 + 4096) * 8192))


def test_ranks_share_weights_but_not_fc_and_norms() -> None:
    drafter = Checkpoint(
        "d",
        {"architectures": ["LlamaForCausalLMEagle3"], **LLAMA_8B, "num_hidden_layers": 1},
        {
            name: TensorInfo("BF16", (1,), "f", 0, 400)
            for name in (
                "fc.weight",
                "fc_norm.0.weight",
                "norm.weight",
                "midlayer.hidden_norm.weight",
                "d2t",
                "t2d",
                "lm_head.weight",
            )
        },
        {},
    )
    shared = estimate_memory(
        model(LLAMA_8B, 16 * GIB), drafter, MemoryLayout(gpu_memory_bytes=None, tensor_parallel=4, pipeline_parallel=2)
    )
    assert shared.target_weight_bytes == 2 * GIB
    assert shared.drafter_weight_bytes == 5 * 400 + 100  # t2d is never loaded, lm_head is split
    alone = estimate_memory(
        model(LLAMA_8B), drafter, MemoryLayout(gpu_memory_bytes=None, tensor_parallel=4, draft_tensor_parallel=1)
    )
    assert alone.drafter_weight_bytes == 6 * 400
    assert alone.kv_cache_bytes is None
    assert alone.kv_cache_tokens is None


def test_every_assumption_is_listed() -> None:
    assumptions = "; ".join(
        estimate_memory(
            model({**GPT_OSS, "layer_types": ["mamba"] * 24}), None, MemoryLayout(gpu_memory_bytes=80 * GIB)
        ).assumptions
    )
    assert "weights take the bytes that they have on disk" in assumptions
    assert "the KV cache has 2 bytes per element" in assumptions
    assert "the states of 24 layers without a KV cache are not counted" in assumptions
    assert "the engine may use 92% of 80.0 GiB, of which 2 GiB go to activations" in assumptions
    f32 = Checkpoint("m", LLAMA_8B, {"w": TensorInfo("F32", (1,), "f", 0, 4)}, {})
    assert (
        "may store float32 weights as 16 bits" in estimate_memory(f32, None, MemoryLayout(gpu_memory_bytes=None)).assumptions[0]
    )


def test_experts_are_split_over_data_parallel_ranks() -> None:
    """DeepSeek-V3 in FP8 on 8 x H200 with data and expert parallelism."""
    tensors = {
        "model.layers.3.mlp.experts.0.up_proj.weight": TensorInfo("F8_E4M3", (1,), "f", 0, 640 * GIB),
        "model.layers.3.mlp.shared_experts.up_proj.weight": TensorInfo("F8_E4M3", (1,), "f", 0, 3 * GIB),
        "lm_head.weight": TensorInfo("BF16", (1,), "f", 0, 9 * GIB),
    }
    target = Checkpoint("m", KIMI, tensors, {})
    spread = estimate_memory(target, None, MemoryLayout(gpu_memory_bytes=141 * GIB, data_parallel=8))
    assert spread.target_weight_bytes == (640 // 8 + 12) * GIB
    assert spread.min_target_weight_bytes == spread.target_weight_bytes
    assert "split evenly over 1 GPU, experts over 8" in spread.assumptions[0]
    both = estimate_memory(target, None, MemoryLayout(gpu_memory_bytes=None, data_parallel=2, tensor_parallel=4))
    assert both.target_weight_bytes == (640 // 8 + 12 // 4) * GIB


def test_quantized_or_offloaded_weights_have_a_lower_bound() -> None:
    target = model({**LLAMA_8B, "max_position_embeddings": 8192}, 160 * GIB)
    assert not estimate_memory(target, None, MemoryLayout(gpu_memory_bytes=80 * GIB)).may_fit
    assert estimate_memory(target, None, MemoryLayout(gpu_memory_bytes=80 * GIB, quantization="fp8")).may_fit
    assert estimate_memory(target, None, MemoryLayout(gpu_memory_bytes=80 * GIB, offload_flag="--cpu-offload-gb=100")).may_fit
    assert not estimate_memory(target, None, MemoryLayout(gpu_memory_bytes=10 * GIB, quantization="fp8")).may_fit


@pytest.mark.parametrize(
    ("draft_logits", "expected"),
    [
        (None, 0),
        (DraftLogits(3, False, 256), 3 * 128256 * 2 * 256),
        (DraftLogits(3, True, 256), 3 * 128256 * 4 * 256),
        (DraftLogits(3, False), 3 * 128256 * 2 * 1024),
    ],
)
def test_sampled_drafts_reserve_memory_for_their_logits(draft_logits: DraftLogits | None, expected: int) -> None:
    target = model({**LLAMA_8B, "vocab_size": 128256}, 16 * GIB)
    drafter = model({**LLAMA_8B, "vocab_size": 128256, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}, GIB)
    estimate = estimate_memory(
        target, drafter, MemoryLayout(gpu_memory_bytes=80 * GIB, max_model_len=8192, draft_logits=draft_logits)
    )
    assert estimate.draft_logits_bytes == expected
    assert estimate.kv_cache_bytes == pytest.approx(80 * GIB * 0.92 - 17 * GIB - RESERVE_BYTES - expected)
    assert any("drawn keep" in assumption for assumption in estimate.assumptions) == (draft_logits is not None)


def test_the_default_number_of_requests_depends_on_the_gpu() -> None:
    assert DraftLogits(3, True).resolve_max_num_seqs(24 * GIB) == DraftLogits(3, True).resolve_max_num_seqs(None) == 256
    assert DraftLogits(3, True, 8).resolve_max_num_seqs(80 * GIB) == 8
