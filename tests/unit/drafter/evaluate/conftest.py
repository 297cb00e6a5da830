"""Small random targets and drafters with a vocabulary so small that they often agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.evaluate.target import TargetRunner
from aerie_drafter.model import Drafter

VOCABULARY = 7
Pair = tuple[TargetRunner, Drafter]


def pair(seed: int = 0, *, norm_output: bool = False, draft_vocabulary: int = VOCABULARY) -> Pair:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.6,
    )
    model = LlamaForCausalLM(config).double()
    drafter = Drafter(
        DrafterConfig(
            family=DrafterFamily.LLAMA,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=VOCABULARY,
            draft_vocab_size=draft_vocabulary,
            target_hidden_size=32,
            aux_layer_ids=(1, 3),
            norm_output=norm_output,
        )
    ).double()
    drafter.set_draft_vocabulary(torch.arange(VOCABULARY - draft_vocabulary, VOCABULARY))
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(model.model.embed_tokens.weight)
    return TargetRunner(model, (1, 3)), drafter


@pytest.fixture
def make_pair() -> Callable[..., Pair]:
    return pair
