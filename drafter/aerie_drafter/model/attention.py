"""Attention of training-time test (TTT): one softmax over a causal block of keys and the diagonals of later steps.

Column t of step 0 contains what the drafter knows after token t + 1. In step i every column continues on its own: its query sees

    keys of step 0      steps 1..i
    j <= t, causal      only column t of each: the diagonal

    step 2, T = 4:   k0: 1 . . .   k1: 1 . . .   k2: 1 . . .
                         1 1 . .       . 1 . .       . 1 . .
                         1 1 1 .       . . 1 .       . . 1 .
                         1 1 1 1       . . . 1       . . . 1

A mask over the concatenated keys would be T x (i + 1) T, of which all but T numbers per later step are masked. Here the
causal block is PyTorch's fused kernel, a diagonal costs one product per column, and the parts are joined through the log of
the sum of exponentials, as in FlashAttention (arXiv 2205.14135).

A row may contain several texts behind each other, its segments; the causal block is then one of each. The diagonals need nothing.

With a sliding window of W tokens, the query of step i has the position t + i. It sees the keys of step 0 from t + i - W + 1 on,
which is a window of W - i (`aerie_drafter.model.window`), and all diagonals, because W exceeds the number of steps.

Guarantee: value and gradients equal those of one softmax over all visible keys, to rounding; memory is linear in T. The
fused kernel's own backward is handed the joint output and the joint log-sum, which makes its recomputed probabilities those
of the joint softmax. Not guaranteed: second derivatives; the returned log-sum carries no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aerie_drafter.model.window import windowed_attention, windowed_attention_backward

_aten = torch.ops.aten


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, tuple[Any, ...]]:
    """Compute causal attention with the device's fused kernel: (output, state for its backward, first the log-sum).

    All of shape [batch, heads, length, size]; the log-sum is [batch, heads, length] in float32 or better.
    """
    if query.device.type == "cpu":
        output, logsum = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)
        return output, (logsum,)
    # CUDA's flash kernel supports 16-bit numbers only, which trainings on GPU use.
    output, logsum, *rest = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scale)
    return output, (logsum, *rest[:6])


def causal_attention_backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsum: Tensor,
    saved_state: tuple[Any, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value for `output` and `logsum`, which may be those of a joint softmax."""
    if query.device.type == "cpu":
        gradients: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            output_grad, query, key, value, output, logsum, 0.0, True, scale=scale
        )
        return gradients
    cumulative_q, cumulative_k, longest_q, longest_k, seed, offset = saved_state
    gpu_gradients: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward(
        output_grad,
        query,
        key,
        value,
        output,
        logsum,
        cumulative_q,
        cumulative_k,
        longest_q,
        longest_k,
        0.0,
        True,
        seed,
        offset,
        scale=scale,
    )
    return gpu_gradients


class Segment(NamedTuple):
    """The columns begin..end of a row of the batch; they see each other and no others."""

    row: int
    begin: int
    end: int

    def of(self, part: Tensor) -> Tensor:
        """Return the view of [batch, heads, length, ...] on the segment, with a batch of 1."""
        return part[self.row : self.row + 1, :, self.begin : self.end]


def segmented_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, segments: Sequence[Segment]
) -> tuple[Tensor, Tensor, list[tuple[Any, ...]]]:
    """Compute causal attention within each segment: (output, log-sum, state of each segment). The segments cover all columns."""
    output, logsum, states = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=_logsum_dtype(query)), []
    for segment in segments:
        part, (part_logsum, *rest) = causal_attention(segment.of(query), segment.of(key), segment.of(value), scale)
        segment.of(output).copy_(part)
        segment.of(logsum).copy_(part_logsum)
        states.append(tuple(rest))
    return output, logsum, states


def _logsum_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def segmented_attention_backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsum: Tensor,
    states: Sequence[tuple[Any, ...]],
    scale: float,
    segments: Sequence[Segment],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; see `causal_attention_backward`."""
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for segment, state in zip(segments, states, strict=True):
        of = segment.of
        parts = causal_attention_backward(of(output_grad), of(query), of(key), of(value), of(output), of(logsum), state, scale)
        for gradient, part in zip(gradients, parts, strict=True):
            segment.of(gradient).copy_(part)
    return gradients


def _dot(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products of rows, [...], of [..., size]. Sums of 16-bit numbers are of `dtype`."""
    return torch.linalg.vecdot(a, b) if a.dtype == dtype else (a * b).sum(-1, dtype=dtype)


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scale: float,
        segments: Sequence[Segment] | None,
        window: int | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *later: Tensor,
    ) -> tuple[Tensor, Tensor]:
        keys, values = later[: len(later) // 2], later[len(later) // 2 :]
        rest: Any
        if window is not None:
            first, first_logsum, rest = windowed_attention(query, key, value, scale, _texts(segments, query), window)
        elif segments is None:
            first, (first_logsum, *rest) = causal_attention(query, key, value, scale)
        else:
            first, first_logsum, rest = segmented_attention(query, key, value, scale, segments)
        scores = [_dot(query, k, first_logsum.dtype) * scale for k in keys]
        logsum = torch.logsumexp(torch.stack([first_logsum, *scores]), dim=0)
        output = first * (first_logsum - logsum).exp().unsqueeze(-1).to(first.dtype)
        for score, v in zip(scores, values, strict=True):
            output.addcmul_((score - logsum).exp().unsqueeze(-1).to(v.dtype), v)
        ctx.save_for_backward(query, key, value, output, logsum, *scores, *later)
        ctx.scale, ctx.segments, ctx.window, ctx.rest, ctx.count = scale, segments, window, tuple(rest), len(keys)
        ctx.mark_non_differentiable(logsum)
        return output, logsum

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsum, *rest = ctx.saved_tensors
        count: int = ctx.count
        scores, keys, values = rest[:count], rest[count : 2 * count], rest[2 * count :]
        if grad.stride(-1) != 1:
            grad = grad.contiguous()  # the kernels require it of the last axis only
        arguments = (grad, query, key, value, output, logsum, ctx.rest, ctx.scale)
        if ctx.window is not None:
            parts = windowed_attention_backward(*arguments, _texts(ctx.segments, query), ctx.window)
        elif ctx.segments is None:
            parts = causal_attention_backward(*arguments)
        else:
            parts = segmented_attention_backward(*arguments, ctx.segments)
        to_query, to_key, to_value = parts
        mean = _dot(grad, output, grad.dtype)
        to_keys, to_values = [], []
        for score, k, v in zip(scores, keys, values, strict=True):
            probability = (score - logsum).exp().to(grad.dtype)
            to_values.append(probability.unsqueeze(-1) * grad)
            to_score = (probability * (_dot(grad, v, grad.dtype) - mean) * ctx.scale).unsqueeze(-1)
            to_query.addcmul_(to_score, k)
            to_keys.append(to_score * query)
        return None, None, None, to_query, to_key, to_value, *to_keys, *to_values


def _texts(segments: Sequence[Segment] | None, query: Tensor) -> list[tuple[slice, int, int]]:
    """Return rows, begin and end of the texts of a batch."""
    if segments is None:
        return [(slice(None), 0, query.shape[2])]
    return [(slice(row, row + 1), begin, end) for row, begin, end in segments]


def joint_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    later_keys: Sequence[Tensor],
    later_values: Sequence[Tensor],
    scale: float,
    segments: Sequence[Segment] | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of one unrolled step: (output, log-sum of the visible scores, without gradient).

    Every tensor is [batch, heads, length, size] with one size; the log-sum is [batch, heads, length]. `key` and `value` are
    those of step 0, `later_*` those of steps 1 to the query's own. `segments` cover all columns; without them a row is one text.
    `window` is the sliding window of step 0, if the layer has one; it exceeds the number of later steps.
    """
    if window is not None:
        window -= len(later_keys)
        if window < 1:
            raise ValueError(f"the step {len(later_keys)} is past the sliding window.")
        if window >= query.shape[2]:
            window = None  # no text reaches it

    output: tuple[Tensor, Tensor] = _JointAttention.apply(  # type: ignore[no-untyped-call]
        scale, segments, window, query, key, value, *later_keys, *later_values
    )
    return output
