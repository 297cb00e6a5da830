"""A file of prompts: which lines are accepted, in which order they are sent, and what an error says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from aerie.evaluator.prompts import MAX_LINE_BYTES, PromptError, open_prompts
from aerie.evaluator.requests import CHAT_PATH, COMPLETIONS_PATH, ReplayRequest
from aerie.evaluator.skip_reasons import SkipReason
from tests.unit.evaluator.fake_engine import KEYED_HASH, RULES

MARKER = "a-secret-prompt"


def write(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def chat(text: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def test_all_prompts_are_sent_each_time_in_another_order_with_other_seeds(tmp_path: Path) -> None:
    path = write(tmp_path, *(chat(str(number), model="gpt-4") for number in range(50)), "", {"prompt": [1, 2], "max_tokens": 9})
    prompts = open_prompts(path, RULES, KEYED_HASH)
    with prompts.stream:
        requests = list(itertools.islice(prompts.requests(), 3 * 51))
    assert all(isinstance(request, ReplayRequest) for request in requests)
    replays = [request for request in requests if isinstance(request, ReplayRequest)]
    assert {request.path for request in replays} == {CHAT_PATH, COMPLETIONS_PATH}
    documents = [json.loads(request.body) for request in replays]
    assert len({document.pop("seed") for document in documents}) == 3 * 51
    assert not any("model" in document for document in documents)
    rounds = [[json.dumps(document) for document in documents[start : start + 51]] for start in (0, 51, 102)]
    assert len({tuple(sorted(texts)) for texts in rounds}) == 1
    assert len({tuple(texts) for texts in rounds}) == 3
    assert len({len({request.bucket for request in replays[start : start + 51]}) for start in (0, 51, 102)}) == 1


def test_the_bundles_prompts_are_accepted() -> None:
    path = Path(__file__).parents[3] / "drafter/bundle/prompts.jsonl"
    prompts = open_prompts(path, RULES, KEYED_HASH)
    prompts.stream.close()
    assert len(prompts.offsets) == len(path.read_text().splitlines())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (MARKER, "it is no JSON object: write a request such as"),
        ([MARKER], "it is no JSON object: write a request such as"),
        ({"text": MARKER}, "it needs messages or prompt, and not both: write one request on each line."),
        (chat(MARKER, prompt=MARKER), "it needs messages or prompt, and not both: write one request on each line."),
        ({"messages": MARKER}, "a field has a wrong type: set messages to a list of objects"),
        (chat(MARKER, max_tokens=MARKER), "a field has a wrong type: set messages to a list of objects"),
        (chat(MARKER, n=2), "requires several answers: write a line for each prompt"),
        ({"prompt": [MARKER, MARKER]}, "requires several answers: write a line for each prompt"),
        (chat(MARKER, max_tokens=1), "max_tokens or max_completion_tokens is below 2: set 2 or more"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{MARKER}"}}]}]},
            "messages has an image, audio or video at an address: use a data: URL.",
        ),
        (chat("x" * MAX_LINE_BYTES), f"it is longer than {MAX_LINE_BYTES} bytes: shorten the prompt."),
    ],
)
def test_an_error_names_file_line_and_fix_and_quotes_no_prompt(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path, chat("fine"), line)
    with pytest.raises(PromptError) as error:
        open_prompts(path, RULES, KEYED_HASH)
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert message in str(error.value)
    assert MARKER not in str(error.value)
    assert error.value.__cause__ is None


def test_a_file_without_prompts_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"has no prompt: write a JSON object with messages or prompt on each line\.$"):
        open_prompts(write(tmp_path, "", ""), RULES, KEYED_HASH)
    with pytest.raises(
        PromptError, match=r"cannot be read \(No such file or directory\): mount the file, or correct --prompts\.$"
    ):
        open_prompts(tmp_path / "missing", RULES, KEYED_HASH)


def test_a_file_that_changes_costs_the_changed_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, chat("first"), chat("second"))
    prompts = open_prompts(path, RULES, KEYED_HASH)
    path.write_bytes(b"#" * path.stat().st_size)
    with prompts.stream:
        assert list(itertools.islice(prompts.requests(), 4)) == [SkipReason.INVALID] * 4
