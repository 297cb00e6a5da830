"""Causal attention with a sliding window: each query sees the `window` last keys, its own included.

On CPU a text is split into blocks of queries. Each block reads the keys that any of its queries sees, under a mask of that size,
so memory stays linear in the length. On CUDA the flash kernel has a window of its own.

Guarantee: output, log-sum and gradients are those of one softmax over the visible keys, to rounding.
Not guaranteed: the path for CUDA, which was never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten

MIN_BLOCK = 128
"""Queries of a block, unless the window is larger; smaller blocks read fewer masked keys, in more calls."""


class QueryBlock(NamedTuple):
    """The queries begin..end of some rows; they see keys from `first_key` on."""

    rows: slice
    first_key: int
    begin: int
    end: int

    def queries_of(self, part: Tensor) -> Tensor:
        """Return the view of [batch, heads, length, ...] on the queries."""
        return part[self.rows, :, self.begin : self.end]

    def keys_of(self, part: Tensor) -> Tensor:
        """Return the view of [batch, heads, length, ...] on the keys."""
        return part[self.rows, :, self.first_key : self.end]

    def mask(self, window: int, like: Tensor) -> Tensor:
        """Return what is added to the scores: 0 or -inf, [queries, keys]."""
        query = torch.arange(self.begin, self.end, device=like.device).unsqueeze(1)
        distance = query - torch.arange(self.first_key, self.end, device=like.device)
        visible = (distance >= 0) & (distance < window)
        return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, float("-inf"))


def split_into_blocks(texts: Sequence[tuple[slice, int, int]], window: int, block_size: int) -> list[QueryBlock]:
    """Return the blocks of texts, each of which has rows and the columns begin..end."""
    return [
        QueryBlock(rows, max(text_begin, begin - window + 1), begin, min(begin + block_size, text_end))
        for rows, text_begin, text_end in texts
        for begin in range(text_begin, text_end, block_size)
    ]


def windowed_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, texts: Sequence[tuple[slice, int, int]], window: int
) -> tuple[Tensor, Tensor, list[tuple[Any, ...]]]:
    """Compute attention within the window of each text: (output, log-sum, states for the backward). `texts` cover all columns.

    All of shape [batch, heads, length, size]; the log-sum is [batch, heads, length] in float32 or better.
    """
    output, states = torch.empty_like(query), []
    logsum = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    is_cpu = query.device.type == "cpu"
    for block in split_into_blocks(texts, window, max(window, MIN_BLOCK) if is_cpu else query.shape[2]):
        q, k, v = block.queries_of(query), block.keys_of(key), block.keys_of(value)
        if is_cpu:
            part, part_logsum = _aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, attn_mask=block.mask(window, query), scale=scale
            )
            states.append(())
        else:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            length = block.end - block.begin
            part, part_logsum, *rest = _aten._flash_attention_forward(
                *(q, k, v, None, None, length, length, 0.0, True, False),
                scale=scale,
                window_size_left=window - 1,
                window_size_right=0,
            )
            part = part.transpose(1, 2)
            states.append(tuple(rest[:2]))
        block.queries_of(output).copy_(part)
        block.queries_of(logsum).copy_(part_logsum)
    return output, logsum, states


def windowed_attention_backward(
    output_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsum: Tensor,
    states: Sequence[tuple[Any, ...]],
    scale: float,
    texts: Sequence[tuple[slice, int, int]],
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value for `output` and `logsum`, which may be those of a joint softmax."""
    gradients = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    is_cpu = query.device.type == "cpu"
    blocks = split_into_blocks(texts, window, max(window, MIN_BLOCK) if is_cpu else query.shape[2])
    for block, state in zip(blocks, states, strict=True):
        of = block.queries_of
        arguments = of(output_grad), of(query), block.keys_of(key), block.keys_of(value), of(output)
        if is_cpu:
            parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *arguments, of(logsum).contiguous(), 0.0, False, attn_mask=block.mask(window, query), scale=scale
            )
        else:
            length = block.end - block.begin
            parts = _aten._flash_attention_backward(
                *(each.transpose(1, 2) for each in arguments),
                *(of(logsum).contiguous(), None, None, length, length, 0.0, True, *state),
                scale=scale,
                window_size_left=window - 1,
                window_size_right=0,
            )
            parts = [part.transpose(1, 2) for part in parts]
        of(gradients[0]).copy_(parts[0])
        block.keys_of(gradients[1]).add_(parts[1])
        block.keys_of(gradients[2]).add_(parts[2])
    return gradients
