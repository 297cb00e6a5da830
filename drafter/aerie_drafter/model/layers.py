"""The parts of a drafter's one layer: attention in the forms of Llama, Qwen3 and DeepSeek's MLA, the MLP, rotary positions.

Names of submodules are the tensor names that vLLM loads. The first layer of an EAGLE drafter reads the token's embedding
beside the hidden state, so every projection into attention takes 2 x hidden_size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aerie_drafter.config import DrafterConfig, Family, MlaDims
from aerie_drafter.model.memory import Memory


class Rotary(nn.Module):
    """Rotary positions (RoFormer, arXiv 2104.09864) on the last axis; halves or, `interleaved`, neighbours turn together."""

    inverse_frequencies: Tensor

    def __init__(self, config: DrafterConfig, size: int, *, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        with torch.device("cpu"):  # real numbers also in a module that is made on the meta device
            inverse_frequencies, self.factor = frequencies(config, size)
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate [batch, heads, length, size] by `positions` [length]."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self.inverse_frequencies.to(torch.float32)
        cos, sin = (angles.cos() * self.factor).to(x.dtype), (angles.sin() * self.factor).to(x.dtype)
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def frequencies(config: DrafterConfig, size: int) -> tuple[Tensor, float]:
    """(inverse frequencies [size / 2], factor of cosine and sine) for the configuration's rope type."""
    rope = dict(config.rope)
    kind = str(rope.get("rope_type", "default"))
    theta = float(rope.get("rope_theta", 10000.0))
    plain = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if kind == "default":
        return plain, 1.0
    if config.mla is not None:
        rope.pop("truncate", None)  # vLLM's form for DeepSeek does not know it
    described = LlamaConfig(
        hidden_size=size,  # one head of that size: all that the frequencies depend on
        num_attention_heads=1,
        head_dim=size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
    described.rope_parameters = rope  # as it is: reading a configuration may move keys
    found, factor = ROPE_INIT_FUNCTIONS[kind](described, torch.device("cpu"))
    if config.mla is not None:
        factor = magnitude(rope, "mscale", 1.0) / magnitude(rope, "mscale_all_dim", 0.0)
    return found.to(torch.float32), float(factor)


def magnitude(rope: Mapping[str, Any], key: str, default: float) -> float:
    """DeepSeek's correction for YaRN (modeling_deepseek.py `yarn_get_mscale`), with that key's weight; else 1."""
    factor = float(rope.get("factor", 1.0))
    if rope.get("rope_type") != "yarn" or factor <= 1.0:
        return 1.0
    return 0.1 * float(rope.get(key, default)) * math.log(factor) + 1.0


class GroupedAttention(nn.Module):
    """Attention of Llama, and with norms on queries and keys that of Qwen3."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        wide = 2 * config.hidden_size
        self.q_proj = nn.Linear(wide, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(wide, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(wide, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)
        self.rotary = Rotary(config, self.size, interleaved=False)
        normed = config.family is Family.QWEN3
        self.q_norm = nn.RMSNorm(self.size, eps=config.rms_norm_eps) if normed else None
        self.k_norm = nn.RMSNorm(self.size, eps=config.rms_norm_eps) if normed else None

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """[batch, length, 2 hidden] to [batch, length, hidden]."""
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        positions = memory.positions(length, x.device)
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        if self.kv_heads != self.heads:
            key, value = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (key, value))
        output = memory.attend(query, key, value, self.size**-0.5)
        projected: Tensor = self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))
        return projected


class LatentAttention(nn.Module):
    """Multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434): keys and values from one low-rank state per token."""

    def __init__(self, config: DrafterConfig, dims: MlaDims) -> None:
        super().__init__()
        self.heads, self.dims = config.num_attention_heads, dims
        self.size = dims.qk_nope_head_dim + dims.qk_rope_head_dim
        wide, eps = 2 * config.hidden_size, config.rms_norm_eps
        self.q_a_proj = nn.Linear(wide, dims.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(dims.q_lora_rank, eps=eps)
        self.q_b_proj = nn.Linear(dims.q_lora_rank, self.heads * self.size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(wide, dims.kv_lora_rank + dims.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(dims.kv_lora_rank, eps=eps)
        self.kv_b_proj = nn.Linear(dims.kv_lora_rank, self.heads * (dims.qk_nope_head_dim + dims.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * dims.v_head_dim, config.hidden_size, bias=False)
        self.rotary = Rotary(config, dims.qk_rope_head_dim, interleaved=True)
        self.scale = self.size**-0.5 * magnitude(config.rope, "mscale_all_dim", 0.0) ** 2

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """[batch, length, 2 hidden] to [batch, length, hidden]."""
        batch, length, _ = x.shape
        dims = self.dims
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, self.heads, self.size).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = both.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=-1)
        positions = memory.positions(length, x.device)
        plain, turned = query.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
        query = torch.cat([plain, self.rotary(turned, positions)], dim=-1)
        shared = self.rotary(shared.unsqueeze(1), positions).expand(-1, self.heads, -1, -1)
        key = torch.cat([key, shared], dim=-1)
        # The fused kernels take one size for all three; zeros in the value change nothing.
        wider = nn.functional.pad(value, (0, self.size - dims.v_head_dim)) if dims.v_head_dim < self.size else value
        output = memory.attend(query, key, wider, self.scale)[..., : dims.v_head_dim]
        projected: Tensor = self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Mlp(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        output: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output
