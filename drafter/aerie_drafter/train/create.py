"""Creation of a drafter for a target: its configuration and initial weights.

The embedding is the target's and is not trained. lm_head starts as the target's rows of the draft vocabulary, because the
drafter's last state replaces the target's. Norms start at one, other weights with PyTorch's random initialization.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aerie_drafter.config import DrafterConfig, DrafterFamily, MlaDims, default_aux_layer_ids, read_rope_parameters
from aerie_drafter.errors import TargetError
from aerie_drafter.model import Drafter
from aerie_drafter.train.settings import DrafterSettings
from aerie_drafter.train.states import TargetParts


def build_drafter_config(settings: DrafterSettings, target_config: Any) -> DrafterConfig:
    """Return the configuration of a new drafter for a target's Hugging Face configuration. Raises ConfigError, TargetError."""
    family = DrafterFamily(settings.family) if settings.family else _detect_family(target_config)
    mla = None
    if family is DrafterFamily.MLA:
        missing = [name for name in _MLA_DIM_NAMES if not isinstance(getattr(target_config, name, None), int)]
        if missing:
            raise TargetError(f"drafter.family is deepseek_v2, and the target's configuration has no {missing[0]}; choose llama.")
        sizes: dict[str, Any] = {name: getattr(target_config, name) for name in _MLA_DIM_NAMES}
        mla = MlaDims(**sizes)
    heads = int(target_config.num_attention_heads)
    return DrafterConfig(
        family=family,
        hidden_size=int(target_config.hidden_size),
        intermediate_size=settings.intermediate_size or int(target_config.intermediate_size),
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(target_config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(target_config, "head_dim", None) or target_config.hidden_size // heads),
        vocab_size=int(target_config.vocab_size),
        draft_vocab_size=settings.draft_vocab_size or int(target_config.vocab_size),
        target_hidden_size=int(target_config.hidden_size),
        aux_layer_ids=settings.aux_layer_ids or default_aux_layer_ids(int(target_config.num_hidden_layers)),
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        norm_before_fc=settings.norm_before_fc,
        norm_before_residual=settings.norm_before_residual,
        rms_norm_eps=float(getattr(target_config, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(target_config.max_position_embeddings),
        rope=read_rope_parameters(target_config.to_dict()),
        num_hidden_layers=settings.num_layers,
        sliding_window=settings.sliding_window,
        mla=mla,
    )


_MLA_DIM_NAMES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")


def _detect_family(target: Any) -> DrafterFamily:
    if isinstance(getattr(target, "kv_lora_rank", None), int):
        return DrafterFamily.MLA
    return DrafterFamily.QWEN3 if str(target.model_type).startswith("qwen3") else DrafterFamily.LLAMA


def create_drafter(config: DrafterConfig, target_parts: TargetParts, draft_token_ids: Tensor, seed: int) -> Drafter:
    """Create a drafter with initial weights, float32 on CPU, for `draft_token_ids` [draft_vocab_size], ascending."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
    drafter.set_draft_vocabulary(draft_token_ids)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target_parts.embedding)
        drafter.lm_head.weight.copy_(target_parts.lm_head[draft_token_ids.to(target_parts.lm_head.device)])
    return drafter
