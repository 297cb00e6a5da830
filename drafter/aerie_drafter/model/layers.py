"""The parts of a drafter's layers: attention in the forms of Llama, Qwen3 and DeepSeek's MLA, the MLP, rotary positions.

Names of submodules are the tensor names that vLLM loads. The first layer of an EAGLE drafter reads the token's embedding
beside the hidden state, so its projections into attention take 2 x hidden_size; those of later layers take hidden_size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    """RMSNorm, which on CPU has no fused kernel: here in few operations that keep only its input for the backward."""

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
        normed: Tensor = (x * inverse).mul_(weight)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        normed, size = x * inverse, x.shape[-1]
        product = (grad * normed).reshape(-1, size)
        mean = (product @ weight).div_(size).view(inverse.shape)
        return (grad * weight).addcmul_(normed, mean, value=-1).mul_(inverse), product.sum(0), None


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


class ProjectedTokens(NamedTuple):
    """The half of attention's input projections that reads the tokens: the same ones in all unrolled steps, so computed once."""

    parts: tuple[Tensor, ...]
    """[batch, length, size] for each of `input_projections`, without the half of the hidden state."""
    hidden_weights: tuple[Tensor, ...]
    """[size, hidden] for each: the weights of the other half."""

    @classmethod
    def compute(cls, normed_embedding: Tensor, projections: Sequence[nn.Linear]) -> ProjectedTokens:
        """Compute it from [batch, length, hidden]."""
        halves = [projection.weight.chunk(2, dim=1) for projection in projections]
        parts = tuple(nn.functional.linear(normed_embedding, of_tokens) for of_tokens, _ in halves)
        return cls(parts, tuple(of_hidden for _, of_hidden in halves))

    def windows(self, length: int, count: int) -> list[ProjectedTokens]:
        """Return `count` windows of `length` tokens: the first one begins at token 0, each other one a token later."""
        windows_by_part = [_Windows.apply(part, length, count) for part in self.parts]  # type: ignore[no-untyped-call]
        return [ProjectedTokens(parts, self.hidden_weights) for parts in zip(*windows_by_part, strict=True)]

    def add_hidden(self, normed_hidden: Tensor) -> list[Tensor]:
        """Return the projections of tokens and hidden states, [batch, length, hidden]."""
        pairs = zip(self.parts, self.hidden_weights, strict=True)
        return [nn.functional.linear(normed_hidden, weight).add_(part) for part, weight in pairs]


class _Windows(torch.autograd.Function):
    """Overlapping views; the backward pass adds their gradients into one tensor, where autograd's makes a tensor of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int, count: int) -> tuple[Tensor, ...]:
        ctx.shape = x.shape
        return tuple(x[:, begin : begin + length] for begin in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype = grads[0].dtype
        total = grads[0].new_zeros(ctx.shape, dtype=torch.promote_types(dtype, torch.float32))
        for begin, grad in enumerate(grads):
            total[:, begin : begin + grad.shape[1]] += grad
        return total.to(dtype), None, None


class GroupedAttention(nn.Module):
    """Attention of Llama, and with norms on queries and keys that of Qwen3.

    The layer applies `input_projections` (`ProjectedTokens`); `forward` gets their results.
    """

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        self.window = config.sliding_window
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.rotary = RotaryEmbedding(config, self.head_dim, interleaved=False)
        has_norms = config.family is DrafterFamily.QWEN3
        self.q_norm = RmsNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else None
        self.k_norm = RmsNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else None

    @property
    def input_projections(self) -> tuple[nn.Linear, ...]:
        """Return those of [batch, length, input size]."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(self, projected: Sequence[Tensor], kv_cache: KeyValueCache) -> Tensor:
        """Attend with the projected inputs, [batch, length, size] each; returns [batch, length, hidden]."""
        batch, length, _ = projected[0].shape
        query, key, value = (part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in projected)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        positions = kv_cache.positions(length, query.device)
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        if self.num_kv_heads != self.num_heads:
            # In memory the heads stay behind the columns, as in the query: operations on two orders take longer.
            repeats = self.num_heads // self.num_kv_heads
            key, value = (part.transpose(1, 2).repeat_interleave(repeats, dim=2).transpose(1, 2) for part in (key, value))
        output = kv_cache.attend(query, key, value, self.head_dim**-0.5, self.window)
        attended: Tensor = self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))
        return attended


class LatentAttention(nn.Module):
    """Multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434): keys and values from one low-rank state per token."""

    def __init__(self, config: DrafterConfig, dims: MlaDims, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.dims = config.num_attention_heads, dims
        self.head_dim = dims.qk_nope_head_dim + dims.qk_rope_head_dim
        eps = config.rms_norm_eps
        self.q_a_proj = nn.Linear(input_size, dims.q_lora_rank, bias=False)
        self.q_a_layernorm = RmsNorm(dims.q_lora_rank, eps=eps)
        self.q_b_proj = nn.Linear(dims.q_lora_rank, self.num_heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, dims.kv_lora_rank + dims.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(dims.kv_lora_rank, eps=eps)
        self.kv_b_proj = nn.Linear(dims.kv_lora_rank, self.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * dims.v_head_dim, config.hidden_size, bias=False)
        self.rotary = RotaryEmbedding(config, dims.qk_rope_head_dim, interleaved=True)
        self.attention_scale = self.head_dim**-0.5 * yarn_magnitude(config.rope, "mscale_all_dim", 0.0) ** 2

    @property
    def input_projections(self) -> tuple[nn.Linear, ...]:
        """Return those of [batch, length, input size]."""
        return self.q_a_proj, self.kv_a_proj_with_mqa

    def forward(self, projected: Sequence[Tensor], kv_cache: KeyValueCache) -> Tensor:
        """Attend with the projected inputs, [batch, length, size] each; returns [batch, length, hidden]."""
        query_latent, key_latent = projected
        batch, length, _ = query_latent.shape
        dims = self.dims
        query = self.q_b_proj(self.q_a_layernorm(query_latent)).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        latent, shared = torch.split(key_latent, [dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.num_heads, -1).transpose(1, 2)
        key, value = both.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=-1)
        positions = kv_cache.positions(length, query.device)
        plain, turned = query.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
        query = torch.cat([plain, self.rotary(turned, positions)], dim=-1)
        shared = self.rotary(shared.unsqueeze(1), positions).expand(-1, self.num_heads, -1, -1)
        key = torch.cat([key, shared], dim=-1)
        # The fused kernels require one size for all three; zeros in the value change nothing.
        wider = nn.functional.pad(value, (0, self.head_dim - dims.v_head_dim)) if dims.v_head_dim < self.head_dim else value
        output = kv_cache.attend(query, key, wider, self.attention_scale)[..., : dims.v_head_dim]
        attended: Tensor = self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))
        return attended


class Mlp(nn.Module):
    """MLP with SwiGLU (arXiv 2002.05202)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [..., hidden]."""
        output: Tensor = _GatedDown.apply(  # type: ignore[no-untyped-call]
            self.gate_proj(x), self.up_proj(x), self.down_proj.weight
        )
        return output


class _GatedDown(torch.autograd.Function):
    """The projection of silu(gate) * up. The backward pass computes both again, which takes little time and half the memory."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return nn.functional.linear(nn.functional.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weight = ctx.saved_tensors
        to_gated = grad @ weight.to(grad.dtype)
        activated = nn.functional.silu(gate)
        to_gate = torch.ops.aten.silu_backward(to_gated * up, gate)
        to_up = to_gated.mul_(activated)
        to_weight = grad.flatten(0, -2).T @ activated.mul_(up).flatten(0, -2)
        return to_gate, to_up, to_weight.to(weight.dtype)
