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

from aerie_drafter.config import DrafterConfig, DrafterFamily, MlaDims
from aerie_drafter.model.memory import KeyValueCache


class RotaryEmbedding(nn.Module):
    """Rotary positions (RoFormer, arXiv 2104.09864) on the last axis; pairs are halves or, if `interleaved`, neighbors."""

    inverse_frequencies: Tensor

    def __init__(self, config: DrafterConfig, head_dim: int, *, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        with torch.device("cpu"):  # real values also in a module on the meta device
            inverse_frequencies, self.attention_scaling = compute_rotary_frequencies(config, head_dim)
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate [batch, heads, length, size] by `positions`, [length] or [batch, length]."""
        if positions.dim() == 2:
            positions = positions.unsqueeze(1)  # for all heads
        angles = positions.to(torch.float32).unsqueeze(-1) * self.inverse_frequencies.to(torch.float32)
        cos, sin = (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)
        rotated: Tensor = _Rotation.apply(x, cos, sin, self.interleaved)  # type: ignore[no-untyped-call]
        return rotated


class _Rotation(torch.autograd.Function):
    """The rotation of pairs; its backward pass is the rotation by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved=interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, interleaved=ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    half = x.shape[-1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(None, half), slice(half, None))
    rotated, a, b = torch.empty_like(x), x[..., first], x[..., second]
    torch.mul(a, cos, out=rotated[..., first]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=rotated[..., second]).addcmul_(a, sin)
    return rotated


class RmsNorm(nn.RMSNorm):
    """RMSNorm, which on CPU has no fused kernel: here in few operations, and only its input is kept."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis."""
        if x.device.type != "cpu" or x.dtype != self.weight.dtype or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        normed: Tensor = _CpuRmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _CpuRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        normed, size = x * inverse, x.shape[-1]
        to_weight = (grad * normed).reshape(-1, size).sum(0)
        grad = grad * weight
        mean = torch.linalg.vecdot(grad, normed).div_(size).unsqueeze(-1)
        return grad.sub_(normed.mul_(mean)).mul_(inverse), to_weight, None


def compute_rotary_frequencies(config: DrafterConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return (inverse frequencies [head_dim / 2], factor of cosine and sine) for the configuration's rope type."""
    rope = dict(config.rope)
    rope_type = str(rope.get("rope_type", "default"))
    theta = float(rope.get("rope_theta", 10000.0))
    default_frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope_type == "default":
        return default_frequencies, 1.0
    if config.mla is not None:
        rope.pop("truncate", None)  # vLLM's implementation for DeepSeek does not have it
    rope_config = LlamaConfig(
        hidden_size=head_dim,  # one head of that size: all that the frequencies depend on
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
    rope_config.rope_parameters = rope  # unchanged: the constructor may move keys
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](rope_config, torch.device("cpu"))
    if config.mla is not None:
        factor = yarn_magnitude(rope, "mscale", 1.0) / yarn_magnitude(rope, "mscale_all_dim", 0.0)
    return frequencies.to(torch.float32), float(factor)


def yarn_magnitude(rope: Mapping[str, Any], key: str, default: float) -> float:
    """Return DeepSeek's correction for YaRN (modeling_deepseek.py `yarn_get_mscale`) with the weight `key`; 1 without YaRN."""
    factor = float(rope.get("factor", 1.0))
    if rope.get("rope_type") != "yarn" or factor <= 1.0:
        return 1.0
    return 0.1 * float(rope.get(key, default)) * math.log(factor) + 1.0


class GroupedAttention(nn.Module):
    """Attention of Llama, and with norms on queries and keys that of Qwen3."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        input_size = 2 * config.hidden_size
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.rotary = RotaryEmbedding(config, self.head_dim, interleaved=False)
        has_norms = config.family is DrafterFamily.QWEN3
        self.q_norm = RmsNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else None
        self.k_norm = RmsNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else None

    def forward(self, x: Tensor, kv_cache: KeyValueCache) -> Tensor:
        """Attend with [batch, length, 2 hidden]; returns [batch, length, hidden]."""
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        positions = kv_cache.positions(length, x.device)
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        if self.num_kv_heads != self.num_heads:
            key, value = (part.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for part in (key, value))
        output = kv_cache.attend(query, key, value, self.head_dim**-0.5)
        projected: Tensor = self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))
        return projected


class LatentAttention(nn.Module):
    """Multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434): keys and values from one low-rank state per token."""

    def __init__(self, config: DrafterConfig, dims: MlaDims) -> None:
        super().__init__()
        self.num_heads, self.dims = config.num_attention_heads, dims
        self.head_dim = dims.qk_nope_head_dim + dims.qk_rope_head_dim
        input_size, eps = 2 * config.hidden_size, config.rms_norm_eps
        self.q_a_proj = nn.Linear(input_size, dims.q_lora_rank, bias=False)
        self.q_a_layernorm = RmsNorm(dims.q_lora_rank, eps=eps)
        self.q_b_proj = nn.Linear(dims.q_lora_rank, self.num_heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, dims.kv_lora_rank + dims.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(dims.kv_lora_rank, eps=eps)
        self.kv_b_proj = nn.Linear(dims.kv_lora_rank, self.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * dims.v_head_dim, config.hidden_size, bias=False)
        self.rotary = RotaryEmbedding(config, dims.qk_rope_head_dim, interleaved=True)
        self.attention_scale = self.head_dim**-0.5 * yarn_magnitude(config.rope, "mscale_all_dim", 0.0) ** 2

    def forward(self, x: Tensor, kv_cache: KeyValueCache) -> Tensor:
        """Attend with [batch, length, 2 hidden]; returns [batch, length, hidden]."""
        batch, length, _ = x.shape
        dims = self.dims
        query = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        )
        latent, shared = self.kv_a_proj_with_mqa(x).split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.num_heads, -1).transpose(1, 2)
        key, value = both.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=-1)
        positions = kv_cache.positions(length, x.device)
        plain, turned = query.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
        query = torch.cat([plain, self.rotary(turned, positions)], dim=-1)
        shared = self.rotary(shared.unsqueeze(1), positions).expand(-1, self.num_heads, -1, -1)
        key = torch.cat([key, shared], dim=-1)
        # The fused kernels require one size for all three; zeros in the value change nothing.
        wider = nn.functional.pad(value, (0, self.head_dim - dims.v_head_dim)) if dims.v_head_dim < self.head_dim else value
        output = kv_cache.attend(query, key, wider, self.attention_scale)[..., : dims.v_head_dim]
        projected: Tensor = self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Mlp(nn.Module):
    """MLP with SwiGLU (arXiv 2002.05202)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [..., hidden]."""
        output: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output
