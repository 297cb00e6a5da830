"""A new drafter for a target: its shape, and the weights that it starts from.

The embedding is the target's and stays so; lm_head starts as the target's rows of the draft vocabulary, because the drafter's
last state is to stand in for the target's; norms start at one, the rest as PyTorch draws it from the seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aerie_drafter.config import DrafterConfig, Family, MlaDims, default_aux_layers, rope_parameters
from aerie_drafter.errors import TargetError
from aerie_drafter.model import Drafter
from aerie_drafter.train.settings import DrafterSettings
from aerie_drafter.train.states import Frame


def describe(settings: DrafterSettings, target: Any) -> DrafterConfig:
    """The configuration of a new drafter for a target's Hugging Face configuration. Raises ConfigError, TargetError."""
    family = Family(settings.family) if settings.family else _family(target)
    mla = None
    if family is Family.MLA:
        missing = [name for name in _MLA if not isinstance(getattr(target, name, None), int)]
        if missing:
            raise TargetError(f"drafter.family is deepseek_v2, and the target's configuration has no {missing[0]}; choose llama.")
        sizes: dict[str, Any] = {name: getattr(target, name) for name in _MLA}
        mla = MlaDims(**sizes)
    heads = int(target.num_attention_heads)
    return DrafterConfig(
        family=family,
        hidden_size=int(target.hidden_size),
        intermediate_size=settings.intermediate_size or int(target.intermediate_size),
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(target, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(target, "head_dim", None) or target.hidden_size // heads),
        vocab_size=int(target.vocab_size),
        draft_vocab_size=settings.draft_vocab_size or int(target.vocab_size),
        target_hidden_size=int(target.hidden_size),
        aux_layer_ids=settings.aux_layer_ids or default_aux_layers(int(target.num_hidden_layers)),
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        norm_before_fc=settings.norm_before_fc,
        norm_before_residual=settings.norm_before_residual,
        rms_norm_eps=float(getattr(target, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(target.max_position_embeddings),
        rope=rope_parameters(target.to_dict()),
        mla=mla,
    )


_MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")


def _family(target: Any) -> Family:
    if isinstance(getattr(target, "kv_lora_rank", None), int):
        return Family.MLA
    return Family.QWEN3 if str(target.model_type).startswith("qwen3") else Family.LLAMA


def create(config: DrafterConfig, frame: Frame, draft_tokens: Tensor, seed: int) -> Drafter:
    """A drafter with its first weights, float32 on the CPU, to draft the ids `draft_tokens` [draft_vocab_size], ascending."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
    drafter.set_draft_vocabulary(draft_tokens)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(frame.embedding)
        drafter.lm_head.weight.copy_(frame.head[draft_tokens.to(frame.head.device)])
    return drafter
