"""The sizes of a small drafter, by the names of its config."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
    "draft_vocab_size": 20,
    "target_hidden_size": 16,
    "aux_layer_ids": (2, 4, 5),
}
