"""Tokens of conversations, with a mask of those that the drafter learns.

A conversation with `sequences` has exact tokens, and they are used as they are. Any other is rendered with the chat template and
encoded. The drafter learns the assistant's parts, each with the token that ends the turn, because the target generates those.

Guarantees: the same conversations, tokenizer, template arguments and length give the same tokens, in the same order, with any
number of processes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, islice
from typing import Any

from aerie_drafter.chat_template import NO_TEMPLATE_ARGUMENTS, ChatMessage, TemplateArguments
from aerie_drafter.errors import DataError
from aerie_drafter.train.conversations import Conversation

EncodedSequence = tuple[list[int], list[bool]]
"""Tokens, and the loss mask."""

CHUNK_SIZE = 256
"""Conversations that a process tokenizes at a time."""

PARALLEL_FROM = 4 * CHUNK_SIZE
"""Fewer conversations are tokenized in this process, because others take seconds to start."""

MAX_PROCESSES = 16


def encode_conversations(
    tokenizer: Any,
    conversations: Iterable[Conversation | DataError],
    max_length: int,
    template: TemplateArguments,
    process_count: int | None = None,
) -> Iterator[EncodedSequence | DataError]:
    """Yield the sequences of all conversations in order, truncated, and an error in place of each invalid one.

    `template` has the arguments that a conversation does not set. By default large sources use the machine's cores.
    """
    iterator = iter(conversations)
    beginning = list(islice(iterator, PARALLEL_FROM))
    if process_count is None:
        cores = len(os.sched_getaffinity(0))
        process_count = min(MAX_PROCESSES, cores) if len(beginning) == PARALLEL_FROM else 1
    chunks = _split(chain(beginning, iterator), CHUNK_SIZE)
    if process_count == 1:
        for chunk in chunks:
            yield from _encode_chunk(tokenizer, chunk, max_length, template)
        return
    # A new interpreter for each process: a fork would copy the locks of threads that tokenizers and PyTorch started here.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(process_count, context, _start_worker, (tokenizer, max_length, template)) as pool:
        pending: deque[Future[list[EncodedSequence | DataError]]] = deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(_encode_in_worker, chunk))
                if len(pending) > 2 * process_count:  # bounds the conversations in memory
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _split(conversations: Iterator[Conversation | DataError], size: int) -> Iterator[list[Conversation | DataError]]:
    while chunk := list(islice(conversations, size)):
        yield chunk


_worker_arguments: tuple[Any, int, TemplateArguments]


def _start_worker(tokenizer: Any, max_length: int, template: TemplateArguments) -> None:
    global _worker_arguments
    _worker_arguments = (tokenizer, max_length, template)


def _encode_in_worker(chunk: Sequence[Conversation | DataError]) -> list[EncodedSequence | DataError]:
    tokenizer, max_length, template = _worker_arguments
    return _encode_chunk(tokenizer, chunk, max_length, template)


def _encode_chunk(
    tokenizer: Any, chunk: Sequence[Conversation | DataError], max_length: int, template: TemplateArguments
) -> list[EncodedSequence | DataError]:
    encoded: list[EncodedSequence | DataError] = []
    for conversation in chunk:
        if isinstance(conversation, DataError):
            encoded.append(conversation)
            continue
        try:
            sequences = _encode_sequences(tokenizer, conversation, template)
        except DataError as error:
            encoded.append(error)
        else:
            encoded += [(token_ids[:max_length], mask[:max_length]) for token_ids, mask in sequences]
    return encoded


def _encode_sequences(tokenizer: Any, conversation: Conversation, template: TemplateArguments) -> list[EncodedSequence]:
    if conversation.sequences:
        return [(list(sequence.token_ids), sequence.answer_mask) for sequence in conversation.sequences]
    if not any(message["role"] == "assistant" for message in conversation.messages):
        raise DataError(f"{conversation.location}: no assistant's message, so there is nothing to learn; remove the line.")
    arguments = conversation.template.with_defaults(template)
    return [encode_conversation(tokenizer, conversation.messages, conversation.location, arguments)]


def encode_conversation(
    tokenizer: Any, messages: Sequence[ChatMessage], location: str, template: TemplateArguments = NO_TEMPLATE_ARGUMENTS
) -> tuple[list[int], list[bool]]:
    """Tokenize the text of a conversation: (tokens, loss mask of the assistant's). Raises DataError."""
    text, spans = render_conversation(tokenizer, messages, location, template)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    loss_mask = []
    span_index = 0
    for first, last in encoded["offset_mapping"]:
        while span_index < len(spans) and spans[span_index][1] <= first:
            span_index += 1
        loss_mask.append(span_index < len(spans) and first >= spans[span_index][0] and last > first)
    return list(encoded["input_ids"]), loss_mask


def render_conversation(
    tokenizer: Any, messages: Sequence[ChatMessage], location: str, template: TemplateArguments = NO_TEMPLATE_ARGUMENTS
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation: (text, spans of the assistant's turns). Raises DataError.

    A turn begins where the rendering of the earlier messages with a generation prompt ends, which is the target's input in
    serving. It ends after its content and the special token that follows. If the template changes the content, it ends with
    the conversation rendered up to it. If that differs too (templates that remove the thinking of earlier turns), it ends
    after the next special token.

    A turn with reasoning or tool calls has text before or after its content, and reasoning may contain the content. So its end
    is that of the conversation rendered up to it, without the white space after the last special token. If the template has
    removed the turn's thinking, the rest of that rendering is searched.
    """

    def rendered(count: int, *, prompt: bool) -> str:
        return template.render(tokenizer, messages[:count], location, generation_prompt=prompt)

    full_text = rendered(len(messages), prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prefix = rendered(index, prompt=True)
        if not full_text.startswith(prefix):
            raise DataError(
                f"{location}: messages[{index}]: the rendering of the earlier messages with a generation prompt is not the "
                "beginning of the whole rendering, so the start of the turn is unknown; split the conversation into one line "
                "per turn, or let `aerie-drafter generate` write its exact tokens."
            )
        content, end = str(message.get("content") or "").strip(), None
        if any(message.get(name) for name in ("reasoning", "reasoning_content", "tool_calls")):
            turn_text = _strip_after_special_token(tokenizer, rendered(index + 1, prompt=False))
            end = _find_end_without_thinking(full_text, turn_text, len(prefix), content)
        if end is None and not message.get("tool_calls"):
            end = _find_turn_end(tokenizer, full_text, len(prefix), content)
        if end is None:
            turn_text = rendered(index + 1, prompt=False)
            end = (
                len(turn_text)
                if full_text.startswith(turn_text)
                else _find_next_special_token_end(tokenizer, full_text, len(prefix))
            )
        if end is None:
            raise DataError(
                f"{location}: messages[{index}]: the chat template changes its content, so the end of the turn is unknown."
            )
        spans.append((len(prefix), end))
    return full_text, spans


def _strip_after_special_token(tokenizer: Any, text: str) -> str:
    """Remove white space at the end that follows a special token: the target generates none after the end of its turn."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(tuple(_special_tokens(tokenizer))) else text


def _find_end_without_thinking(full_text: str, turn_text: str, begin: int, content: str) -> int | None:
    """Return the end in `full_text` of a turn that is rendered in `turn_text` from `begin`.

    Both may be equal up to there, or `full_text` may lack the beginning of the turn; None if it differs in another way.
    """
    if full_text.startswith(turn_text):
        return len(turn_text)
    last = turn_text.rfind(content) if content else len(turn_text) - 1
    first_letter = full_text[begin : begin + 1]
    removed = turn_text.find(first_letter, begin + 1, last + 1)
    while removed >= 0:
        if full_text.startswith(turn_text[removed:], begin):
            return begin + len(turn_text) - removed
        removed = turn_text.find(first_letter, removed + 1, last + 1)
    return None


def _find_turn_end(tokenizer: Any, text: str, begin: int, content: str) -> int | None:
    """Return the index after `content` and the special token that follows it; None if the text does not contain it."""
    content_begin = text.find(content, begin) if content else -1
    if content_begin < 0:
        return None
    end = content_begin + len(content)
    rest = text[end:]
    after = rest.lstrip()
    for token in sorted(_special_tokens(tokenizer), key=len, reverse=True):
        if after.startswith(token):
            return end + len(rest) - len(after) + len(token)
    return end


def _find_next_special_token_end(tokenizer: Any, text: str, begin: int) -> int | None:
    """Return the index after the first special token from `begin`."""
    candidates = [(text.find(token, begin), len(token)) for token in map(str, tokenizer.all_special_tokens)]
    matches = [(index, length) for index, length in candidates if index >= 0]
    return sum(min(matches)) if matches else None


def _special_tokens(tokenizer: Any) -> set[str]:
    added = {str(token) for token in tokenizer.get_added_vocab()}
    return added | {str(token) for token in tokenizer.all_special_tokens}
