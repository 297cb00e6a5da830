"""Generation of training data in this process: the target's answers to a file of conversations.

Every assistant's turn is regenerated after the new answers before it. A conversation that ends with a question gets an answer.
The output has the same lines in the same order, each with the text and the exact tokens. Nothing here parses an answer's tool
calls, so a conversation ends with the answer before the first result of a tool.

Guarantees: the target is sampled from its own distribution, whatever its generation_config.json says. An interrupted run is
resumed, and on the same machine the file is then the same as without the interruption. A line is complete or missing. A run with
another target, template or sampling is rejected. Not guaranteed: equal answers on other hardware or with other batch sizes,
because rounding differs; and later prompts as a server renders them, after an answer with special tokens inside, which its text
lacks. Those are counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aerie_drafter.chat_template import NO_TEMPLATE_ARGUMENTS, ChatMessage, TemplateArguments
from aerie_drafter.errors import DataError
from aerie_drafter.train.answers import (
    GenerationParameters,
    Turn,
    add_answer_turn,
    check_run_file,
    describe_template,
    prompt_messages,
    render_record,
)
from aerie_drafter.train.conversations import Conversation, parse_conversation, parse_json_line, read_texts
from aerie_drafter.train.identity import identify_tokenizer


def generate_answers(
    model: Any,
    tokenizer: Any,
    source: Path,
    output: Path,
    *,
    parameters: GenerationParameters,
    target_id: str,
    template: TemplateArguments = NO_TEMPLATE_ARGUMENTS,
    batch_size: int = 8,
    on_progress: Callable[[int], None] | None = None,
    log: Callable[[str], None] | None = None,
) -> int:
    """Write the answers of `model` to `output`, and return the number of new ones. Raises DataError.

    `on_progress` gets the number of lines after each batch, `log` a warning. All conversations of a batch have the same
    temperature.
    """
    conversations = list(read_texts(source))
    run = {
        "target": target_id,
        "tokenizer": identify_tokenizer(tokenizer),
        **describe_template(tokenizer.chat_template, template),
        **parameters.to_json(),
        "rows": batch_size,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    check_run_file(output, run)
    done = _keep_complete_batches(output, batch_size, conversations, source)
    written, lacking_tokens = 0, 0
    with output.open("a", encoding="utf-8") as stream:
        for at in range(done, len(conversations), batch_size):
            batch = conversations[at : at + batch_size]
            torch.manual_seed(parameters.seed + at)  # the same samples wherever the run resumed
            answered = _answer_batch(model, tokenizer, batch, parameters, template, at // batch_size)
            stream.write("".join(answered.lines))
            stream.flush()
            os.fsync(stream.fileno())
            written += len(batch)
            lacking_tokens += answered.lacking_tokens
            if on_progress is not None:
                on_progress(at + len(batch))
    if lacking_tokens and log is not None:
        log(
            f"warning: conversations with a prompt that lacks special tokens of the answer before it: {lacking_tokens}. A server "
            "may render another prompt; generate conversations of several turns with --endpoint."
        )
    return written


def _keep_complete_batches(output: Path, rows: int, conversations: Sequence[Conversation], source: Path) -> int:
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
                f"another run than {source}; set a new file."
            )
        for index, (line, conversation) in enumerate(zip(lines, conversations, strict=False), start=1):
            answered = parse_conversation(parse_json_line(line, f"{output}:{index}"), f"{output}:{index}")
            prompts = prompt_messages(answered)
            if prompts != prompt_messages(conversation)[: len(prompts)]:
                raise DataError(f"{output}:{index}: answers another conversation than {conversation.location}; set a new file.")
        kept_lines = len(lines) if len(lines) == len(conversations) else len(lines) - len(lines) % rows
        stream.truncate(sum(map(len, lines[:kept_lines])))
    return kept_lines


@dataclass(frozen=True)
class _AnsweredBatch:
    lines: list[str]
    lacking_tokens: int
    """Conversations with a prompt after an answer whose special tokens are not part of it."""


def _answer_batch(
    model: Any,
    tokenizer: Any,
    batch: Sequence[Conversation],
    parameters: GenerationParameters,
    template: TemplateArguments,
    batch_index: int,
) -> _AnsweredBatch:
    """Generate the target's turns of the conversations of one batch, turn by turn."""
    conversations = [_cut_before_tool_result(add_answer_turn(conversation.messages)) for conversation in batch]
    special_ids = set(tokenizer.all_special_ids)
    templates = [conversation.template.with_defaults(template) for conversation in batch]
    temperature = parameters.temperatures.draw(parameters.seed, batch_index)
    answered: list[list[ChatMessage]] = [[] for _ in conversations]
    turns: list[list[Turn]] = [[] for _ in conversations]
    while True:
        pending = []
        for index, messages in enumerate(conversations):
            while len(answered[index]) < len(messages) and messages[len(answered[index])]["role"] != "assistant":
                answered[index].append(messages[len(answered[index])])
            if len(answered[index]) < len(messages):
                pending.append(index)
        if not pending:
            lines = [
                render_record(messages, own_template, temperature, own_turns)
                for messages, own_template, own_turns in zip(answered, templates, turns, strict=True)
            ]
            inside = [{token for turn in own_turns[:-1] for token in turn.answer_token_ids[:-1]} for own_turns in turns]
            return _AnsweredBatch(lines, sum(not special_ids.isdisjoint(tokens) for tokens in inside))
        prompts = []
        for index in pending:
            text = templates[index].render(tokenizer, answered[index], batch[index].location, generation_prompt=True)
            prompts.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
        answers = complete_prompts(model, tokenizer, prompts, parameters, temperature)
        for index, prompt, answer in zip(pending, prompts, answers, strict=True):
            turns[index].append(Turn(tuple(prompt), tuple(answer)))
            answered[index].append({"role": "assistant", "content": _decode_answer(model, tokenizer, answer)})


def _cut_before_tool_result(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return the messages up to the first result of a tool that follows an answer."""
    is_answered = False
    for index, message in enumerate(messages):
        if message["role"] == "tool" and is_answered:
            return messages[:index]
        is_answered = is_answered or message["role"] == "assistant"
    return messages


NEUTRAL_SAMPLING: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": None,
    "exponential_decay_length_penalty": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": None,
    "watermarking_config": None,
    "stop_strings": None,
    "num_beams": 1,
    "min_p": None,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""What changes the target's distribution, and a generation_config.json would otherwise set. transformers takes these first."""


def complete_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], parameters: GenerationParameters, temperature: float
) -> list[list[int]]:
    """Generate the target's continuation of each prompt, with the token that ends its turn."""
    longest = max(map(len, prompts))
    end_ids = _end_token_ids(model, tokenizer)
    pad_id = next(iter(sorted(end_ids)), 0)
    tokens = torch.tensor([[pad_id] * (longest - len(prompt_ids)) + prompt_ids for prompt_ids in prompts], device=model.device)
    attention_mask = torch.tensor(
        [[0] * (longest - len(prompt_ids)) + [1] * len(prompt_ids) for prompt_ids in prompts], device=model.device
    )
    sampled = temperature > 0
    top_p = 1.0 if parameters.top_p is None else parameters.top_p
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": 0} if sampled else {}
    with torch.no_grad():
        output = model.generate(
            input_ids=tokens,
            attention_mask=attention_mask,
            max_new_tokens=parameters.max_tokens,
            do_sample=sampled,
            eos_token_id=sorted(end_ids) or None,
            pad_token_id=pad_id,
            **{**NEUTRAL_SAMPLING, **sampling},
        )
    answers = []
    for row in output[:, longest:].tolist():
        end = next((index + 1 for index, token in enumerate(row) if token in end_ids), len(row))
        answers.append(row[:end])
    return answers


def _decode_answer(model: Any, tokenizer: Any, token_ids: list[int]) -> str:
    """Return the text of an answer, without the token that ends the turn."""
    ended = bool(token_ids) and token_ids[-1] in _end_token_ids(model, tokenizer)
    return str(tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=True))


def _end_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a turn: the tokenizer's and the generation configuration's."""
    configured_ids = getattr(model.generation_config, "eos_token_id", None)
    token_ids = configured_ids if isinstance(configured_ids, list) else [configured_ids]
    return {int(token) for token in (*token_ids, tokenizer.eos_token_id) if token is not None}
