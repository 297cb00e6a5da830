"""The sizes of small drafters, by the names of their config."""

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

UNEQUAL_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 23,
    "draft_vocab_size": 17,
    "target_hidden_size": 12,
    "aux_layer_ids": (1, 2, 4),
}
"""The target's states differ in size from the drafter's, and so do all heads together."""
