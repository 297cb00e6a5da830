"""Training data from real vLLM: its prompts are those that training renders, and its tokens those that training reads."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import aerie_drafter
from aerie_drafter.chat_template import TemplateArguments
from aerie_drafter.evaluate import Prompt, read_prompts
from aerie_drafter.train.answers import GenerationParameters, TemperatureMix
from aerie_drafter.train.conversations import Conversation, read_conversations
from aerie_drafter.train.data import load_corpus
from aerie_drafter.train.endpoint import EndpointAnswers, EndpointOptions, generate_from_endpoint
from aerie_drafter.train.states import load_model, load_tokenizer

# Most of the timeout is for a first installation of vLLM.
pytestmark = pytest.mark.timeout(2400)

TARGET = Path(aerie_drafter.__file__).parents[1] / "bundle/target"
COUNT, MAX_TOKENS = 48, 48

ROUNDING_DIFFERENCE = 1e-3
"""Difference of logits that is rounding, so that either token is the target's greedy choice."""

TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.arguments.city }}){% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinking is defined and not thinking %}No thoughts. {% endif %}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def url(serve: Callable[..., AbstractContextManager[Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a vLLM with a template that reads tools and an argument."""
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    tools = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    with serve(TARGET, None, f"--chat-template={file}", *tools) as server:
        yield str(server.client.base_url)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = load_tokenizer(str(TARGET), None)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of conversations with one answer, two answers, and a tool's result."""
    path = tmp_path_factory.mktemp("source") / "prompts.jsonl"
    prompts = [prompt.messages[0]["content"] for prompt in read_prompts(TARGET.parent / "prompts.jsonl")]
    records: list[dict[str, Any]] = [{"prompt": text} for text in prompts[: COUNT - 2]]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    user, tool = {"role": "user", "content": prompts[-1]}, {"role": "tool", "content": "rain", "tool_call_id": "1"}
    records.append({"messages": [user, {"role": "assistant", "content": "old"}, user]})
    records.append({"messages": [user, {"role": "assistant", "content": None, "tool_calls": [call]}, tool, user], "tools": TOOLS})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def output(url: str, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the answers, half of them greedy."""
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    parameters = GenerationParameters(MAX_TOKENS, TemperatureMix.parse("0:0.5,1:0.5"))
    options = EndpointOptions(concurrency=16)
    template = TemplateArguments((), {"thinking": False})
    answers = asyncio.run(
        generate_from_endpoint(url, "target", source, path, parameters=parameters, options=options, template=template)
    )
    assert answers == EndpointAnswers(COUNT)
    return path


@pytest.fixture(scope="module")
def conversations(output: Path) -> list[Conversation]:
    return list(read_conversations(output))


def test_prompts_are_those_that_training_and_evaluation_render(conversations: list[Conversation], tokenizer: Any) -> None:
    assert sum(bool(conversation.template.tools) for conversation in conversations) == 1
    for conversation in conversations:
        (first, *_) = conversation.sequences
        request = conversation.messages[: [message["role"] for message in conversation.messages].index("assistant")]
        prompt = Prompt("", tuple(request), template=conversation.template).encode(tokenizer)
        assert list(first.token_ids[: first.answer_spans[0][0]]) == prompt
        assert "No thoughts. " in tokenizer.decode(prompt)


def test_a_message_with_tool_calls_is_rendered_as_by_the_server(url: str, tokenizer: Any, source: Path) -> None:
    """Tokens of the recorded conversation, with the result of its tool."""
    *_, recorded = read_conversations(source)
    expected = Prompt("", recorded.messages, template=recorded.template).encode(tokenizer)
    body = {"model": "target", "messages": list(recorded.messages), "tools": TOOLS}
    response = httpx.post(f"{url}/tokenize", json=body, timeout=60)
    assert response.json()["tokens"] == expected


def test_tokens_are_those_that_the_target_generates(conversations: list[Conversation], output: Path, tokenizer: Any) -> None:
    """A greedy answer's tokens are the target's most likely ones, up to the end of the turn."""
    model = load_model(str(TARGET), None, torch.float32, torch.device("cpu"))
    records = [json.loads(line) for line in output.read_text().splitlines()]
    greedy = [conversation for conversation, record in zip(conversations, records, strict=True) if record["temperature"] == 0]
    assert COUNT / 4 < len(greedy) < COUNT
    ended = 0
    for conversation in greedy:
        for sequence in conversation.sequences:
            tokens = torch.tensor(sequence.token_ids)
            with torch.no_grad():
                logits = model(input_ids=tokens.unsqueeze(0)).logits[0]
            for begin, end in sequence.answer_spans:
                rows = logits[begin - 1 : end - 1]
                chosen = rows.gather(1, tokens[begin:end].unsqueeze(1))[:, 0]
                assert float((rows.max(-1).values - chosen).max()) < ROUNDING_DIFFERENCE
                is_complete = int(tokens[end - 1]) == tokenizer.eos_token_id
                assert is_complete or end - begin == MAX_TOKENS
                ended += is_complete
    assert ended > 0


def test_training_reads_the_tokens_that_differ_from_the_text(
    conversations: list[Conversation], output: Path, tokenizer: Any
) -> None:
    """Some sampled answers have other tokens when their text is encoded; the corpus has those of the server."""
    corpus = load_corpus([output], tokenizer, max_length=4096)
    sequences = [sequence for conversation in conversations for sequence in conversation.sequences]
    assert [corpus[index][0].tolist() for index in range(len(corpus))] == [list(sequence.token_ids) for sequence in sequences]
    assert [corpus[index][1].tolist() for index in range(len(corpus))] == [sequence.answer_mask for sequence in sequences]
    differing = 0
    for conversation in conversations[: COUNT - 2]:  # those with one answer
        (sequence,) = conversation.sequences
        ((begin, end),) = sequence.answer_spans
        text = str(conversation.messages[-1]["content"])
        answer = [token for token in sequence.token_ids[begin:end] if token != tokenizer.eos_token_id]
        assert tokenizer.decode(answer, skip_special_tokens=True) == text
        differing += tokenizer(text, add_special_tokens=False)["input_ids"] != answer
    logging.getLogger(__name__).info("%d of %d answers", differing, COUNT - 2)  # shown by --log-cli-level=info
    assert differing > 0


def test_sampling_is_repeatable_and_differs_between_conversations(url: str, tmp_path: Path) -> None:
    path = tmp_path / "same.jsonl"
    path.write_text('{"prompt": "What is a list?"}\n' * 4)
    parameters = GenerationParameters(16, TemperatureMix.constant(1.0), seed=3)
    texts = []
    for name in ("a", "b"):
        output = tmp_path / name
        asyncio.run(
            generate_from_endpoint(url, "target", path, output, parameters=parameters, options=EndpointOptions(concurrency=1))
        )
        texts.append([conversation.messages[-1]["content"] for conversation in read_conversations(output)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
