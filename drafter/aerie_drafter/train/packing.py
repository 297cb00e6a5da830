"""Rows of several conversations: none sees another, and each has the positions of a row of its own.

    row       a0 a1 a2 a3 | b0 b1 b2 | c0 c1 ..        starts    0 0 0 0 | 4 4 4 | 7 7 ..

Packing saves the padding behind short conversations in all that the drafter computes by token. Its attention works text by text
(`aerie_drafter.model.attention`). The source of hidden states gets the conversations one by one, in groups of similar lengths.

Guarantee: a packed batch has the loss, gradients and metrics of its conversations in rows of their own, to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aerie_drafter.train.states import HiddenStateSource, TargetHiddenStates


def compute_text_starts(lengths_by_row: Sequence[Sequence[int]], row_length: int) -> Tensor:
    """Return the first index of each token's text, [rows, row_length]; the padding is a text of its own."""
    starts = torch.zeros(len(lengths_by_row), row_length, dtype=torch.long)
    for row, lengths in enumerate(lengths_by_row):
        begin = 0
        for length in lengths:
            starts[row, begin : begin + length] = begin
            begin += length
        starts[row, begin:] = begin
    return starts


def fetch_packed_hidden_states(
    source: HiddenStateSource, tokens: Tensor, conversations_by_row: Sequence[Sequence[Tensor]]
) -> TargetHiddenStates:
    """Return the states of a packed batch [rows, row_length]: those of each conversation alone; 0 in the padding."""
    places = [
        (len(conversation), row, sum(len(earlier) for earlier in conversations[:index]), conversation)
        for row, conversations in enumerate(conversations_by_row)
        for index, conversation in enumerate(conversations)
    ]
    places.sort(key=lambda place: place[:3], reverse=True)
    packed: list[Tensor] = []
    while places:
        longest = places[0][0]
        # As many as fit into the batch's own size with padding, so that a group needs no more memory than the batch.
        group = [places.pop(0) for _ in range(min(len(places), max(1, tokens.numel() // longest)))]
        conversations = [conversation.to(tokens.device, tokens.dtype) for *_, conversation in group]
        padded = torch.nn.utils.rnn.pad_sequence(conversations, batch_first=True)
        states = source.fetch_hidden_states(padded, [[conversation] for *_, conversation in group])
        if not packed:
            packed = [state.new_zeros(*tokens.shape, state.shape[-1]) for state in states]
        for index, (length, row, begin, _) in enumerate(group):
            for target, state in zip(packed, states, strict=True):
                target[row, begin : begin + length] = state[index, :length]
    return TargetHiddenStates(*packed)
