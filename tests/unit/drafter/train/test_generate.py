"""Answers of the target: equal to its own decoding, also in batches, and a run that is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aerie_drafter.chat_template import TemplateArguments
from aerie_drafter.errors import ConfigError, DataError
from aerie_drafter.train.answers import GenerationParameters, TemperatureMix, Turn, join_turns
from aerie_drafter.train.data import load_corpus
from aerie_drafter.train.generate import generate_answers as generate_answers_of

generate_answers = partial(generate_answers_of, target_id="sha256:0")

FORM = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "old"}]},
    {
        "messages": [
            {"role": "system", "content": "long system text"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "old"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "old"},
        ]
    },
    {"prompt": "d", "response": "old"},
    {"prompt": "e", "response": "old"},
    {"prompt": "f", "response": "old"},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in FORM))
    return path


@pytest.fixture(scope="module")
def letter_target(target_of: Callable[..., Any], tokenizer_of: Callable[..., Any]) -> tuple[Any, Any]:
    """A target that writes plain letters only, so that its text can be tokenized again, and its tokenizer."""
    model, tokenizer = target_of(initializer_range=0.3), tokenizer_of()
    letters = torch.tensor([tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefgh"] + [256])
    others = torch.ones(264, dtype=torch.bool)
    others[letters] = False
    model.lm_head.weight.data[others] = 0.0
    return model, tokenizer


def read(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def greedy_answer(model: Any, tokenizer: Any, messages: list[dict[str, str]], length: int) -> str:
    """Decode one conversation, one token at a time, without cache or padding."""
    tokens = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]
    begun = len(tokens)
    while len(tokens) < begun + length:
        with torch.no_grad():
            best = int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
        if best == tokenizer.eos_token_id:
            break
        tokens.append(best)
    return str(tokenizer.decode(tokens[begun:], skip_special_tokens=True))


def test_every_turn_is_generated_after_the_generated_turns(source: Path, letter_target: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = letter_target
    output = tmp_path / "answers.jsonl"
    assert generate_answers(model, tokenizer, source, output, parameters=GenerationParameters(max_tokens=6), batch_size=3) == 5
    answered = read(output)
    assert [[m["role"] for m in messages] for messages in answered][1] == ["system", "user", "assistant", "user", "assistant"]
    answers = set()
    for messages in answered:
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                assert message["content"] == greedy_answer(model, tokenizer, messages[:index], 6)
                answers.add(message["content"])
    assert len(answers) > 1
    assert "old" not in answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_run_gives_the_same_file(
    source: Path, letter_target: tuple[Any, Any], tmp_path: Path, temperature: float
) -> None:
    model, tokenizer = letter_target
    output, parameters = (
        tmp_path / "answers.jsonl",
        GenerationParameters(max_tokens=6, temperatures=TemperatureMix.constant(temperature), seed=3),
    )
    generate_answers(model, tokenizer, source, output, parameters=parameters, batch_size=2)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:3]) + lines[3][:5])  # killed in the middle of the second batch
    progress: list[int] = []
    assert (
        generate_answers(model, tokenizer, source, output, parameters=parameters, batch_size=2, on_progress=progress.append) == 3
    )
    assert output.read_bytes() == whole
    assert progress == [4, 5]
    assert generate_answers(model, tokenizer, source, output, parameters=parameters, batch_size=2) == 0


def test_sampling_depends_on_the_seed(source: Path, letter_target: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = letter_target
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        sampling = GenerationParameters(max_tokens=12, temperatures=TemperatureMix.constant(2.0), seed=seed)
        generate_answers(model, tokenizer, source, tmp_path / name, parameters=sampling, batch_size=2)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1] != texts[2]


def test_a_question_without_answer_gets_one(source: Path, letter_target: tuple[Any, Any], tmp_path: Path) -> None:
    """A conversation that ends with a question is answered like one whose answer is replaced."""
    questions = tmp_path / "questions.jsonl"
    alone = [{"prompt": "d"}, {"messages": FORM[1]["messages"][:-1]}]  # type: ignore[index]
    questions.write_text("".join(json.dumps(line) + "\n" for line in alone))
    for name, file in (("one", questions), ("other", source)):
        generate_answers(*letter_target, file, tmp_path / name, parameters=GenerationParameters(max_tokens=6), batch_size=1)
    d, long = read(tmp_path / "one")
    assert [d, long] == [read(tmp_path / "other")[2], read(tmp_path / "other")[1]]


def test_a_file_of_another_run_is_rejected(source: Path, letter_target: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = letter_target
    output = tmp_path / "answers.jsonl"
    generate_answers(model, tokenizer, source, output, parameters=GenerationParameters(max_tokens=2))
    source.write_text(json.dumps(FORM[0]) + "\n")
    with pytest.raises(DataError, match=r"answers.jsonl: has 5 lines, but the input has 1"):
        generate_answers(model, tokenizer, source, output, parameters=GenerationParameters(max_tokens=2))
    source.write_text("".join(json.dumps(FORM[index]) + "\n" for index in (1, 0, 2, 3, 4)))
    with pytest.raises(DataError, match=r"answers.jsonl:1: answers another conversation than .*prompts.jsonl:1"):
        generate_answers(model, tokenizer, source, output, parameters=GenerationParameters(max_tokens=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_id": "sha256:1"}, "target 'sha256:0', and now it is 'sha256:1'; set a new output file"),
        ({"parameters": GenerationParameters(2, TemperatureMix.constant(1.5))}, "temperature '0', and now it is '1.5'"),
        ({"parameters": GenerationParameters(3)}, "max_tokens 2, and now it is 3"),
        ({"parameters": GenerationParameters(2, top_p=0.5)}, "top_p None, and now it is 0.5"),
        ({"parameters": GenerationParameters(2, seed=1)}, "seed 0, and now it is 1"),
        ({"batch_size": 4}, "rows 2, and now it is 4"),
        (
            {"template": TemplateArguments((), {"x": 1})},
            "template_arguments {}, and now it is {'chat_template_kwargs': {'x': 1}}",
        ),
        ({"tokenizer": "{{ x }}"}, "chat_template 'sha256:"),
    ],
)
@pytest.mark.parametrize("complete", [False, True])
def test_a_run_is_not_continued_with_other_inputs(
    source: Path,
    letter_target: tuple[Any, Any],
    tokenizer_of: Callable[..., Any],
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
    *,
    complete: bool,
) -> None:
    """Also not a complete one: its answers would be taken for those of the new target."""
    model, tokenizer = letter_target
    output = tmp_path / "answers.jsonl"
    arguments: dict[str, Any] = {"parameters": GenerationParameters(2), "batch_size": 2}
    generate_answers(model, tokenizer, source, output, **arguments)
    if not complete:
        output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:2]))
    written = output.read_bytes()
    inputs: dict[str, Any] = {"tokenizer": tokenizer, **arguments, **change}
    if isinstance(inputs["tokenizer"], str):
        inputs["tokenizer"] = tokenizer_of(inputs["tokenizer"])
    with pytest.raises(DataError) as caught:
        generate_answers(model, source=source, output=output, **inputs)
    assert str(caught.value).startswith(f"{output}: its answers were generated with {message}")
    assert output.read_bytes() == written


def test_answers_of_unknown_origin_are_not_continued(source: Path, letter_target: tuple[Any, Any], tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    generate_answers(*letter_target, source, output, parameters=GenerationParameters(2))
    (tmp_path / "answers.jsonl.run.json").unlink()
    with pytest.raises(DataError, match=r"answers.jsonl.run.json does not exist, which says what wrote them; set a new output"):
        generate_answers(*letter_target, source, output, parameters=GenerationParameters(2))


class ScriptedModel:
    """A target that generates given tokens, one answer after another."""

    device = torch.device("cpu")
    generation_config = None

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.answers = list(answers)

    def generate(self, input_ids: torch.Tensor, pad_token_id: int, **_: Any) -> torch.Tensor:
        rows = [torch.tensor(self.answers.pop(0), dtype=torch.long) for _ in range(len(input_ids))]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
        return torch.cat([input_ids, padded], dim=-1)


def test_a_conversation_ends_before_the_result_of_a_tool(letter_target: tuple[Any, Any], tmp_path: Path) -> None:
    """The recorded result answers nothing, because no call of the target is parsed here. Such a run is resumed too."""
    question, result = {"role": "user", "content": "a"}, {"role": "tool", "content": "r"}
    answer = {"role": "assistant", "content": "old"}
    source, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    conversations = [[question, answer, question, answer, result, answer], [question, answer, result], [question, result]]
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    assert generate_answers(*letter_target, source, output, parameters=GenerationParameters(4)) == 3
    roles = [[message["role"] for message in messages] for messages in read(output)]
    assert roles == [["user", "assistant", "user", "assistant"], ["user", "assistant"], ["user", "tool", "assistant"]]
    assert generate_answers(*letter_target, source, output, parameters=GenerationParameters(4)) == 0


def test_special_tokens_inside_an_answer_before_another_prompt_are_reported(
    tokenizer_of: Callable[..., Any], tmp_path: Path
) -> None:
    source, lines = tmp_path / "prompts.jsonl", list[str]()
    source.write_text("".join(json.dumps(FORM[1]) + "\n" for _ in range(3)))
    inside, plain = [97, 258, 97, 256], [97, 256]
    model = ScriptedModel([inside, plain, plain, plain, inside, plain])  # three first turns, then three second ones
    arguments: dict[str, Any] = {"parameters": GenerationParameters(8), "log": lines.append}
    generate_answers(model, tokenizer_of(), source, tmp_path / "a.jsonl", **arguments)
    assert [line.partition(".")[0] for line in lines] == [
        "warning: conversations with a prompt that lacks special tokens of the answer before it: 1"
    ]
    generate_answers(ScriptedModel([plain] * 6), tokenizer_of(), source, tmp_path / "b.jsonl", **arguments)
    assert len(lines) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_generation_configuration_of_the_target_changes_no_answer(
    source: Path, letter_target: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    parameters = GenerationParameters(12, TemperatureMix.constant(temperature))
    generate_answers(*letter_target, source, tmp_path / "neutral.jsonl", parameters=parameters)
    values = {"repetition_penalty": 3.0, "suppress_tokens": [97, 98], "min_new_tokens": 12, "min_p": 0.9, "typical_p": 0.1}
    for name, value in values.items():
        monkeypatch.setattr(letter_target[0].generation_config, name, value)
    generate_answers(*letter_target, source, tmp_path / "configured.jsonl", parameters=parameters)
    assert (tmp_path / "configured.jsonl").read_text() == (tmp_path / "neutral.jsonl").read_text()


ANSWER = st.lists(st.integers(0, 260), min_size=1, max_size=12)
"""Any tokens: bytes that are no UTF-8, special tokens, and tokens after the end of the turn (256)."""


@given(st.lists(ANSWER, min_size=3, max_size=3))
def test_what_the_target_generated_is_trained_on(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_of: Callable[..., Any], answers: list[list[int]]
) -> None:
    folder, tokenizer = tmp_path_factory.mktemp("exact"), tokenizer_of()
    (folder / "prompts.jsonl").write_text(json.dumps(FORM[1]) + "\n" + json.dumps(FORM[2]) + "\n")
    # The first turns of both conversations form a batch, then the second turn of the first conversation is alone.
    first, only, second = ([*answer, 256][: [*answer, 256].index(256) + 1] for answer in answers)
    model = ScriptedModel([first, only, second])
    output = folder / "answers.jsonl"
    generate_answers(model, tokenizer, folder / "prompts.jsonl", output, parameters=GenerationParameters(32))
    corpus = load_corpus([output], tokenizer, max_length=200)
    learned = []
    for index in range(len(corpus)):
        tokens, mask = corpus[index]
        changes = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int32)).eq(1).cumsum(0)
        learned += [tokens[mask & (changes == run)].tolist() for run in range(1, int(changes.max()) + 1)]
    assert learned == [first, second, only]
    prompt = tokenizer(tokenizer.apply_chat_template(FORM[1]["messages"][:2], tokenize=False, add_generation_prompt=True))  # type: ignore[index]
    assert corpus[0][0][: len(prompt["input_ids"])].tolist() == prompt["input_ids"]


def test_a_turn_whose_prompt_differs_from_the_earlier_tokens_is_a_sequence_of_its_own() -> None:
    turns = [Turn((1, 2), (3, 4)), Turn((1, 2, 3, 4, 5), (6,)), Turn((1, 2, 9), (7,))]
    first, second = join_turns(turns)
    assert (first.token_ids, first.answer_spans) == ((1, 2, 3, 4, 5, 6), ((2, 4), (5, 6)))
    assert (second.token_ids, second.answer_spans) == ((1, 2, 9, 7), ((3, 4),))


def test_temperatures_have_their_shares() -> None:
    mix = TemperatureMix.parse("0:0.5,0.7:0.25,1:0.25")
    drawn = [mix.draw(0, index) for index in range(4000)]
    assert [drawn.count(temperature) / 4000 for temperature in (0.0, 0.7, 1.0)] == pytest.approx([0.5, 0.25, 0.25], abs=0.03)
    assert drawn == [mix.draw(0, index) for index in range(4000)]
    assert TemperatureMix.parse("0.7").draw(3, 4) == 0.7
    assert str(mix) == "0:0.5,0.7:0.25,1:0.25"
    for text in ("", "hot", "0:", "0:-1", "-1", "0.5:0"):
        with pytest.raises(ConfigError, match="expected: a number, or TEMPERATURE:SHARE"):
            TemperatureMix.parse(text)
