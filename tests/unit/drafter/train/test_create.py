"""The configuration of a new drafter follows from that of the target."""

from __future__ import annotations

import pytest
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

from aerie_drafter.config import DrafterFamily, MlaDims
from aerie_drafter.errors import ConfigError
from aerie_drafter.model import Drafter
from aerie_drafter.train.create import build_drafter_config
from aerie_drafter.train.settings import DrafterSettings


def test_a_llama_target_gets_a_llama_drafter_with_its_sizes_and_positions() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    target = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        rope_parameters={**rope, "original_max_position_embeddings": 128},
        rms_norm_eps=1e-5,
        max_position_embeddings=1024,
    )
    config = build_drafter_config(DrafterSettings(draft_vocab_size=40, intermediate_size=80), target)
    assert (config.family, config.aux_layer_ids, config.head_dim) == (DrafterFamily.LLAMA, (2, 16, 29), 16)
    assert (config.vocab_size, config.draft_vocab_size, config.intermediate_size) == (100, 40, 80)
    assert (config.rope["rope_type"], config.rms_norm_eps, config.max_position_embeddings) == ("llama3", 1e-5, 1024)
    Drafter(config)


def test_a_qwen3_target_gets_a_qwen3_drafter_by_default() -> None:
    target = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=100)
    assert build_drafter_config(DrafterSettings(), target).family is DrafterFamily.QWEN3
    assert build_drafter_config(DrafterSettings(), target).head_dim == 32
    assert build_drafter_config(DrafterSettings(family="llama"), target).family is DrafterFamily.LLAMA


def deepseek(**rope: float | str) -> DeepseekV3Config:
    return DeepseekV3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=100,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )


def test_a_deepseek_target_gets_latent_attention() -> None:
    config = build_drafter_config(DrafterSettings(), deepseek(rope_type="default"))
    assert config.family is DrafterFamily.MLA
    assert config.mla == MlaDims(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, q_lora_rank=24)
    Drafter(config)


def test_layers_and_window_of_the_settings() -> None:
    target = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=100)
    config = build_drafter_config(DrafterSettings(num_layers=3, sliding_window=64), target)
    assert (config.num_hidden_layers, config.sliding_window) == (3, 64)
    with pytest.raises(ConfigError, match="latent attention ignores it"):
        build_drafter_config(DrafterSettings(sliding_window=64), deepseek(rope_type="default"))


def test_a_draft_vocabulary_larger_than_the_targets_is_rejected() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size 101 is larger than vocab_size 100"):
        build_drafter_config(DrafterSettings(draft_vocab_size=101), deepseek(rope_type="default"))
