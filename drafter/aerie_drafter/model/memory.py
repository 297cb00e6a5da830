"""KV caches of a drafter: two implementations with one interface, `positions` and `attend`.

    UnrolledCache    every column of a text drafts on its own, all at once: training, parallel evaluation, drift
    DecodingCache    one text token by token, as in serving: columns are committed, draft tokens are discarded

Each layer of a drafter has a cache of its own: the keys of a step in layer n come from that step's state below it. A cache is
that of the first layer, and has those of the others in `later_layers`.

Guarantee: for the same text both provide a step with the same keys at the same positions: those of committed columns, computed
from the target's states, and those of the draft tokens since. Positions are vLLM's: column t, with token t + 1 and the target's
state at t, has position t; each draft token has the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from aerie_drafter.model.attention import Segment, joint_attention


class KeyValueCache(Protocol):
    """Interface of a KV cache for a layer's attention."""

    @property
    def later_layers(self) -> Sequence[KeyValueCache]:
        """Return the caches of the layers after the first."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the rotary positions of the columns of this call, [length], or [batch, length] if rows differ."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        """Add key and value, and compute attention of [batch, heads, length, size] over the visible entries."""


class UnrolledCache:
    """KV cache of training-time test: call once per step, in order, with all columns.

    `first_keys` and `later_keys` are those of step 0 and of later steps; `last_query` and `last_logsum` those of the last step.
    They are public for `aerie_drafter.drift`. `text_starts` [batch, columns] is for rows of several texts: the column with which
    the text of a column begins.
    """

    def __init__(self, text_starts: Tensor | None = None, *, num_layers: int = 1) -> None:
        self._segments = None if text_starts is None else find_segments(text_starts)
        self._text_starts = text_starts
        self.first_keys: Tensor | None = None
        self.later_keys: list[Tensor] = []
        self.last_query: Tensor | None = None
        self.last_logsum: Tensor | None = None
        self.attention_scale = 1.0
        self.window: int | None = None
        self._first_values: Tensor | None = None
        self._later_values: list[Tensor] = []
        self.later_layers: list[UnrolledCache] = []
        self.later_layers = [self.with_entries(()) for _ in range(num_layers - 1)]

    @property
    def entries(self) -> tuple[Tensor, ...]:
        """Return the keys of all steps, then their values; layer by layer."""
        if self.first_keys is None or self._first_values is None:
            return ()
        own = self.first_keys, *self.later_keys, self._first_values, *self._later_values
        return own + tuple(entry for layer in self.later_layers for entry in layer.entries)

    def with_entries(self, entries: Sequence[Tensor]) -> UnrolledCache:
        """Return a cache of the same texts with other `entries`; this one is unchanged."""
        other = UnrolledCache()
        other._segments, other._text_starts = self._segments, self._text_starts
        count = len(entries) // (1 + len(self.later_layers))
        if entries:
            half = count // 2
            other.first_keys, *other.later_keys = entries[:half]
            other._first_values, *other._later_values = entries[half:count]
        other.later_layers = [
            layer.with_entries(entries[number * count : (number + 1) * count])
            for number, layer in enumerate(self.later_layers, 1)
        ]
        return other

    def positions(self, length: int, device: torch.device) -> Tensor:
        step = 0 if self.first_keys is None else len(self.later_keys) + 1
        positions = torch.arange(step, step + length, device=device)
        return positions if self._text_starts is None else positions - self._text_starts

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        if self.first_keys is None or self._first_values is None:
            self.first_keys, self._first_values = key, value
        else:
            self.later_keys.append(key)
            self._later_values.append(value)
        output, logsum = joint_attention(
            query, self.first_keys, self._first_values, self.later_keys, self._later_values, scale, self._segments, window
        )
        self.last_query, self.last_logsum, self.attention_scale, self.window = query.detach(), logsum, scale, window
        return output


def find_segments(text_starts: Tensor) -> list[Segment]:
    """Return the segments of [batch, columns], where each column has the first column of its text."""
    length = text_starts.shape[1]
    segments = []
    for row, starts in enumerate(text_starts.tolist()):
        begins = [column for column in range(length) if column == 0 or starts[column] != starts[column - 1]]
        segments += [Segment(row, begin, end) for begin, end in itertools.pairwise([*begins, length])]
    return segments


class DecodingCache:
    """KV cache of serving. Call `discard_uncommitted` before a draft; the next step then adds the new columns."""

    def __init__(self, *, num_layers: int = 1) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._committed_length = 0
        self.later_layers = [DecodingCache() for _ in range(num_layers - 1)]

    def discard_uncommitted(self) -> None:
        """Discard the draft tokens since the last commit."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[:, :, : self._committed_length], self._values[:, :, : self._committed_length]
        for layer in self.later_layers:
            layer.discard_uncommitted()

    def commit(self) -> None:
        """Keep all entries so far."""
        self._committed_length = 0 if self._keys is None else self._keys.shape[2]
        for layer in self.later_layers:
            layer.commit()

    def positions(self, length: int, device: torch.device) -> Tensor:
        cached_length = 0 if self._keys is None else self._keys.shape[2]
        return torch.arange(cached_length, cached_length + length, device=device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        if self._keys is not None and self._values is not None:
            key, value = torch.cat([self._keys, key], dim=2), torch.cat([self._values, value], dim=2)
        self._keys, self._values = key, value
        length, total_length = query.shape[2], key.shape[2]
        visible = torch.ones(length, total_length, dtype=torch.bool, device=query.device).tril(total_length - length)
        if window is not None:
            visible = visible.triu(total_length - length - window + 1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)
