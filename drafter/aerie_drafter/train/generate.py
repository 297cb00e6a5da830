"""Answers by the target itself to a file of conversations: what a drafter is best trained on.

Every assistant turn is written anew, each on top of the answers before it; a conversation that ends with a question gets an
answer. The output has the same lines in the same order.

Guarantees: a run that was stopped goes on where it was, and the file is then the same as if it had not been stopped, on the
same machine; a line is whole or not there. Not guaranteed: equal answers on other hardware or in other batch sizes, because
rounding differs.
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
    """How the target answers. Temperature 0 is greedy."""

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
    """Write the answers of `model` to `output`, `rows` conversations at a time; how many were written. Raises DataError.

    `report` is told how many lines are there after each batch.
    """
    asked = [(number, _with_answer_turn(messages)) for number, messages in read_conversations(source)]
    done = _keep_complete_batches(output, batch_size, asked, source)
    written = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as stream:
        for at in range(done, len(asked), batch_size):
            part = asked[at : at + batch_size]
            torch.manual_seed(parameters.seed + at)  # a batch draws the same wherever the run began
            answered = _answer_batch(model, tokenizer, part, parameters, source)
            stream.write("".join(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in answered))
            stream.flush()
            os.fsync(stream.fileno())
            written += len(answered)
            if on_progress is not None:
                on_progress(at + len(part))
    return written


def _with_answer_turn(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The conversation with a last turn for the target."""
    return messages if messages[-1]["role"] == "assistant" else [*messages, {"role": "assistant", "content": ""}]


def _keep_complete_batches(output: Path, rows: int, asked: Sequence[tuple[int, list[ChatMessage]]], source: Path) -> int:
    """Lines of an earlier run to keep: whole batches; the file is cut to them. Raises DataError."""
    if not output.exists():
        return 0
    with output.open("rb+") as stream:
        lines = stream.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if len(lines) > len(asked):
            raise DataError(
                f"{output}: has {len(lines)} lines, and only {len(asked)} are asked for; it is of another run: name a new file."
            )
        for index, (line, (number, messages)) in enumerate(zip(lines, asked, strict=False), start=1):
            answered = parse_conversation(line.decode("utf-8", "replace"), f"{output}:{index}")
            if _prompt_messages(answered) != _prompt_messages(messages):
                raise DataError(f"{output}:{index}: answers another conversation than {source}:{number}; name a new file.")
        kept = len(lines) if len(lines) == len(asked) else len(lines) - len(lines) % rows
        stream.truncate(sum(map(len, lines[:kept])))
    return kept


def _prompt_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    return [message for message in messages if message["role"] != "assistant"]


def _answer_batch(
    model: Any, tokenizer: Any, asked: Sequence[tuple[int, list[ChatMessage]]], sampling: GenerationParameters, source: Path
) -> list[list[ChatMessage]]:
    """The conversations of one batch with the target's turns, turn after turn."""
    whole = [messages for _, messages in asked]
    done: list[list[ChatMessage]] = [[] for _ in whole]
    while True:
        waiting = []
        for index, messages in enumerate(whole):
            while len(done[index]) < len(messages) and messages[len(done[index])]["role"] != "assistant":
                done[index].append(messages[len(done[index])])
            if len(done[index]) < len(messages):
                waiting.append(index)
        if not waiting:
            return done
        try:
            prompts = [
                tokenizer.apply_chat_template(done[index], tokenize=False, add_generation_prompt=True) for index in waiting
            ]
        except Exception as error:
            raise DataError(f"{source}:{asked[waiting[0]][0]}: the chat template refuses a conversation: {error}") from error
        for index, text in zip(waiting, complete_prompts(model, tokenizer, prompts, sampling), strict=True):
            done[index].append({"role": "assistant", "content": text})


def complete_prompts(model: Any, tokenizer: Any, prompts: Sequence[str], parameters: GenerationParameters) -> list[str]:
    """The target's continuation of each prompt, up to the end of its turn."""
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    longest = max(map(len, encoded))
    stop = _end_token_ids(model, tokenizer)
    filler = next(iter(sorted(stop)), 0)
    tokens = torch.tensor([[filler] * (longest - len(one)) + one for one in encoded], device=model.device)
    seen = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in encoded], device=model.device)
    sampled = parameters.temperature > 0
    how: dict[str, Any] = {"temperature": parameters.temperature, "top_p": parameters.top_p, "top_k": 0} if sampled else {}
    with torch.no_grad():
        found = model.generate(
            input_ids=tokens,
            attention_mask=seen,
            max_new_tokens=parameters.max_tokens,
            do_sample=sampled,
            eos_token_id=sorted(stop) or None,
            pad_token_id=filler,
            **how,
        )
    texts = []
    for row in found[:, longest:].tolist():
        end = next((place for place, token in enumerate(row) if token in stop), len(row))
        texts.append(str(tokenizer.decode(row[:end], skip_special_tokens=True)))
    return texts


def _end_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a turn: the tokenizer's and the generation configuration's."""
    named = getattr(model.generation_config, "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    return {int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None}
