"""Generation of training data: the target's answers to a file of conversations.

Every assistant's turn is regenerated after the new answers before it. A conversation that ends with a question gets an answer.
The output has the same lines in the same order.

Guarantees: an interrupted run is resumed, and on the same machine the file is then the same as without the interruption. A line
is complete or missing. Not guaranteed: equal answers on other hardware or with other batch sizes, because rounding differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aerie_drafter.errors import DataError
from aerie_drafter.train.data import ChatMessage, parse_conversation, read_conversations


@dataclass(frozen=True)
class GenerationParameters:
    """Sampling parameters of the target. Temperature 0 is greedy."""

    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def generate_answers(
    model: Any,
    tokenizer: Any,
    source: Path,
    output: Path,
    *,
    parameters: GenerationParameters,
    batch_size: int = 8,
    on_progress: Callable[[int], None] | None = None,
) -> int:
    """Write the answers of `model` to `output`, and return the number of new ones. Raises DataError.

    `on_progress` gets the number of lines after each batch.
    """
    conversations = [(number, _with_answer_turn(messages)) for number, messages in read_conversations(source)]
    done = _keep_complete_batches(output, batch_size, conversations, source)
    written = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as stream:
        for at in range(done, len(conversations), batch_size):
            batch = conversations[at : at + batch_size]
            torch.manual_seed(parameters.seed + at)  # the same samples wherever the run resumed
            answered = _answer_batch(model, tokenizer, batch, parameters, source)
            stream.write("".join(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in answered))
            stream.flush()
            os.fsync(stream.fileno())
            written += len(answered)
            if on_progress is not None:
                on_progress(at + len(batch))
    return written


def _with_answer_turn(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation with a last turn of the assistant."""
    return messages if messages[-1]["role"] == "assistant" else [*messages, {"role": "assistant", "content": ""}]


def _keep_complete_batches(output: Path, rows: int, conversations: Sequence[tuple[int, list[ChatMessage]]], source: Path) -> int:
    """Truncate the output of an earlier run to complete batches, and return its number of lines. Raises DataError."""
    if not output.exists():
        return 0
    with output.open("rb+") as stream:
        lines = stream.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if len(lines) > len(conversations):
            raise DataError(
                f"{output}: has {len(lines)} lines, but the input has {len(conversations)}: it belongs to "
                "another run; set a new file."
            )
        for index, (line, (number, messages)) in enumerate(zip(lines, conversations, strict=False), start=1):
            answered = parse_conversation(line.decode("utf-8", "replace"), f"{output}:{index}")
            if _prompt_messages(answered) != _prompt_messages(messages):
                raise DataError(f"{output}:{index}: answers another conversation than {source}:{number}; set a new file.")
        kept_lines = len(lines) if len(lines) == len(conversations) else len(lines) - len(lines) % rows
        stream.truncate(sum(map(len, lines[:kept_lines])))
    return kept_lines


def _prompt_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    return [message for message in messages if message["role"] != "assistant"]


def _answer_batch(
    model: Any, tokenizer: Any, batch: Sequence[tuple[int, list[ChatMessage]]], parameters: GenerationParameters, source: Path
) -> list[list[ChatMessage]]:
    """Generate the target's turns of the conversations of one batch, turn by turn."""
    conversations = [messages for _, messages in batch]
    answered: list[list[ChatMessage]] = [[] for _ in conversations]
    while True:
        pending = []
        for index, messages in enumerate(conversations):
            while len(answered[index]) < len(messages) and messages[len(answered[index])]["role"] != "assistant":
                answered[index].append(messages[len(answered[index])])
            if len(answered[index]) < len(messages):
                pending.append(index)
        if not pending:
            return answered
        try:
            prompts = [
                tokenizer.apply_chat_template(answered[index], tokenize=False, add_generation_prompt=True) for index in pending
            ]
        except Exception as error:
            raise DataError(f"{source}:{batch[pending[0]][0]}: the chat template rejects a conversation: {error}") from error
        for index, text in zip(pending, complete_prompts(model, tokenizer, prompts, parameters), strict=True):
            answered[index].append({"role": "assistant", "content": text})


def complete_prompts(model: Any, tokenizer: Any, prompts: Sequence[str], parameters: GenerationParameters) -> list[str]:
    """Generate the target's continuation of each prompt, up to the end of its turn."""
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    longest = max(map(len, encoded))
    end_ids = _end_token_ids(model, tokenizer)
    pad_id = next(iter(sorted(end_ids)), 0)
    tokens = torch.tensor([[pad_id] * (longest - len(prompt_ids)) + prompt_ids for prompt_ids in encoded], device=model.device)
    attention_mask = torch.tensor(
        [[0] * (longest - len(prompt_ids)) + [1] * len(prompt_ids) for prompt_ids in encoded], device=model.device
    )
    sampled = parameters.temperature > 0
    sampling: dict[str, Any] = {"temperature": parameters.temperature, "top_p": parameters.top_p, "top_k": 0} if sampled else {}
    with torch.no_grad():
        output = model.generate(
            input_ids=tokens,
            attention_mask=attention_mask,
            max_new_tokens=parameters.max_tokens,
            do_sample=sampled,
            eos_token_id=sorted(end_ids) or None,
            pad_token_id=pad_id,
            **sampling,
        )
    texts = []
    for row in output[:, longest:].tolist():
        end = next((index for index, token in enumerate(row) if token in end_ids), len(row))
        texts.append(str(tokenizer.decode(row[:end], skip_special_tokens=True)))
    return texts


def _end_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a turn: the tokenizer's and the generation configuration's."""
    configured_ids = getattr(model.generation_config, "eos_token_id", None)
    token_ids = configured_ids if isinstance(configured_ids, list) else [configured_ids]
    return {int(token) for token in (*token_ids, tokenizer.eos_token_id) if token is not None}
