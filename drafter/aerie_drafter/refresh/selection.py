"""Which prompts a refresh trains on, and which it holds back for the evaluation.

    captured  a a b c c d e          duplicates count once; a prompt is the messages, tools and template arguments
    held back     b     e            by a digest of the conversation's beginning, so no conversation is on both sides
    trained on  a     c   d

Guarantees: pure. The choice depends on the prompts and the settings alone, not on their order or on earlier runs: a prompt that
was held back once is held back in every refresh with the same share. Not guaranteed: that near duplicates are recognised.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aerie_drafter.chat_template import ChatMessage
from aerie_drafter.train.answers import TemperatureMix
from aerie_drafter.train.conversations import Conversation

_SCALE = 2**64


@dataclass(frozen=True)
class Split:
    """Conversations of a domain."""

    trained: tuple[Conversation, ...]
    held_out: tuple[Conversation, ...]


def strip_answer(conversation: Conversation) -> tuple[ChatMessage, ...]:
    """Return the messages before the answers at the end: the prompt."""
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return tuple(messages)


def split_conversations(
    conversations: Sequence[Conversation], held_out_share: float, max_trained: int | None, max_held_out: int
) -> Split:
    """Remove duplicates, and hold a share back. At most `max_...` of each side remain, those with the smallest digests."""
    by_prompt = {_digest_prompt(conversation): conversation for conversation in reversed(conversations)}
    trained: list[Conversation] = []
    held_out: list[Conversation] = []
    for digest in sorted(by_prompt):
        conversation = by_prompt[digest]
        if messages := strip_answer(conversation):
            is_held_out = _digest(_begin_of(messages)) < held_out_share * _SCALE
            (held_out if is_held_out else trained).append(conversation)
    return Split(tuple(trained[:max_trained]), tuple(held_out[:max_held_out]))


def remove_prompts(conversations: Sequence[Conversation], others: Sequence[Conversation]) -> tuple[Conversation, ...]:
    """Return the conversations that do not begin like one of `others`."""
    begins = {_digest(_begin_of(strip_answer(other))) for other in others}
    return tuple(conversation for conversation in conversations if _digest(_begin_of(strip_answer(conversation))) not in begins)


def count_old(new_count: int, old_count: int, old_share: float) -> int:
    """Return how many old conversations are mixed in, so that they are `old_share` of all; no more than there are."""
    return min(old_count, round(new_count * old_share / (1 - old_share)))


def mix_recorded_temperatures(sampling: Sequence[Mapping[str, Any]], default: float) -> TemperatureMix:
    """Return the temperatures of recorded requests with their shares, to a tenth. `default` is that of requests without one."""
    temperatures = [round(float(_number(each.get("temperature"), default)), 1) for each in sampling] or [default]
    counts = Counter(temperatures)
    return TemperatureMix(tuple((value, count / len(temperatures)) for value, count in sorted(counts.items())))


def most_frequent_temperature(mix: TemperatureMix) -> float:
    """Return the temperature with the largest share; of equal ones, the lowest."""
    return max(mix.shares, key=lambda pair: (pair[1], -pair[0]))[0]


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else default


def _begin_of(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages up to the first of the user, which all prompts of a conversation share."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return [{"role": message["role"], "content": message["content"]} for message in messages[: first + 1]]


def _digest_prompt(conversation: Conversation) -> int:
    return _digest([list(strip_answer(conversation)), conversation.template.to_json()])


def _digest(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
