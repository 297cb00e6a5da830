"""Cached blocks of real vLLM across changes of the drafter: each drafter continues with its own blocks only.

In 0.33 more depends on it: 0.32 computes the last cached block of a prompt again.

Acceptance is compared with that of a user salt that no request had before, so without any cached block, as in a fresh engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from aerie_drafter.bundle import find_bundle_path
from aerie_drafter.evaluate.prompts import read_prompts
from aerie_vllm.counters import ACCEPTED_TOKENS, DRAFTS
from tests.nightly import use_each_nth
from tests.vllm.inplace_server import InPlaceServer, serve_in_place

pytestmark = pytest.mark.timeout(2400)  # the first test may have to install vLLM

OWN = "eagle31"
CHANGES = ("eagle3", "weak", "eagle31", "weak", "eagle3", "eagle31")
"""Each change from one of three drafters to another once, beginning with the own one."""
HITS = "vllm:prefix_cache_hits_total"
QUESTIONS = [prompt.messages[-1]["content"] for prompt in read_prompts(find_bundle_path("prompts.jsonl"))]
PREFIX = "\n".join(QUESTIONS[:24])
"""300 tokens, which are two blocks."""


@pytest.fixture(scope="module", params=["vllm", "vllm_0_33"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InPlaceServer]:
    with serve_in_place(request.getfixturevalue(request.param), tmp_path_factory.mktemp("inplace"), OWN) as running:
        yield running


def load(server: InPlaceServer, drafter: str) -> None:
    response = server.put(drafter, lease_seconds=1800.0)
    assert response.status_code == 200, response.text


def read_counts(server: InPlaceServer, *names: str) -> list[float]:
    """Return the sums of counters once they no longer change: vLLM counts a step after it has sent the answer."""
    before: list[float] | None = None
    while (counts := [sum(total_of(server, name)) for name in names]) != before:
        before = counts
        time.sleep(0.3)
    return counts


def total_of(server: InPlaceServer, name: str) -> list[float]:
    lines = server.client.get("/metrics").text.splitlines()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{")]


def send(server: InPlaceServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    fields = {"model": "target", "temperature": 0, **body}
    answer = server.client.post(path, json=fields).raise_for_status().json()
    assert isinstance(answer, dict)
    return answer


@dataclass(frozen=True)
class Served:
    """What an engine made of the questions behind the prefix."""

    acceptance_length: float
    answers: Sequence[str]


def serve(server: InPlaceServer, **fields: str) -> Served:
    """Send the questions behind the prefix."""

    def ask(question: str) -> str:
        messages = [{"role": "user", "content": f"{PREFIX}\n{question}"}]
        answer = send(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 48, **fields})
        return str(answer["choices"][0]["message"]["content"])

    before = read_counts(server, DRAFTS, ACCEPTED_TOKENS)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, QUESTIONS[30:70]))
    drafts, accepted = (after - count for after, count in zip(read_counts(server, DRAFTS, ACCEPTED_TOKENS), before, strict=True))
    return Served(1 + accepted / drafts, answers)


def test_acceptance_after_each_change_is_that_of_an_engine_without_cached_blocks(server: InPlaceServer) -> None:
    fresh = {}
    for drafter in ("eagle3", "weak", OWN):
        load(server, drafter)
        fresh[drafter] = serve(server, cache_salt=f"without blocks of {drafter}")
    serve(server)
    ratios = {}
    for number, drafter in enumerate(CHANGES):
        load(server, drafter)
        served = serve(server)
        ratios[number, drafter] = served.acceptance_length / fresh[drafter].acceptance_length
        assert served.answers == fresh[OWN].answers
    assert all(ratio == pytest.approx(1, abs=0.005) for ratio in ratios.values()), ratios


def continue_conversation(server: InPlaceServer, number: int, turns: int, **fields: str) -> list[dict[str, str]]:
    """Hold a conversation of long questions, and return its messages."""
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": "\n".join(QUESTIONS[8 * turn + number : 8 * turn + number + 8])})
        body = {"messages": messages, "max_tokens": 48, **fields}
        answer = send(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": str(answer)})
    return messages


@pytest.mark.nightly  # the blocks of complete turns, which are most of them, are those of the test above
def test_conversations_that_continue_across_changes(server: InPlaceServer) -> None:
    """Blocks that a turn in progress at a change leaves to the drafter before are few, and their effect is small."""

    def measure_last_turn(drafter: str, **fields: str) -> Served:
        load(server, drafter)
        before = read_counts(server, DRAFTS, ACCEPTED_TOKENS)
        with ThreadPoolExecutor(4) as pool:
            bodies = [{"messages": messages[:-1], "max_tokens": 48, **fields} for messages in conversations]
            answers = list(pool.map(lambda body: send(server, "/v1/chat/completions", body), bodies))
        counts = zip(read_counts(server, DRAFTS, ACCEPTED_TOKENS), before, strict=True)
        drafts, accepted = (after - count for after, count in counts)
        return Served(1 + accepted / drafts, [str(answer["choices"][0]["message"]["content"]) for answer in answers])

    drafters = (OWN, "eagle3")
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(continue_conversation, server, number, 5) for number in range(8)]
        changes = 0
        while not all(conversation.done() for conversation in running):
            changes += 1
            load(server, drafters[changes % 2])
            time.sleep(1)
        conversations = [conversation.result() for conversation in running]
    assert changes > 4
    continued = {drafter: measure_last_turn(drafter) for drafter in drafters}
    fresh = {drafter: measure_last_turn(drafter, cache_salt=f"conversations with {drafter}") for drafter in drafters}
    ratios = {drafter: continued[drafter].acceptance_length / fresh[drafter].acceptance_length for drafter in drafters}
    assert {tuple(served.answers) for served in (*continued.values(), *fresh.values())} == {
        tuple(messages[-1]["content"] for messages in conversations)
    }
    assert all(ratio == pytest.approx(1, abs=0.02) for ratio in ratios.values()), ratios


def ask_chat(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


def ask_two_answers(text: str) -> tuple[str, dict[str, Any]]:
    path, body = ask_chat(text)
    return path, {**body, "n": 2, "temperature": 1}


def ask_completion(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": text, "max_tokens": 4}


def ask_response(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": text, "max_output_tokens": 4}


@pytest.mark.parametrize("ask", use_each_nth(2, [ask_chat, ask_two_answers, ask_completion, ask_response]))
def test_a_drafter_finds_only_its_own_blocks(server: InPlaceServer, ask: Any) -> None:
    path, body = ask(f"{ask.__name__}: {PREFIX}")

    def hits(**fields: str) -> float:
        (before,) = read_counts(server, HITS)
        send(server, path, {**body, **fields})
        (after,) = read_counts(server, HITS)
        return after - before

    load(server, OWN)
    absent, present = hits(), hits()
    assert absent < present
    # The second of two answers finds the first one's blocks.
    assert absent == 0 or ask is ask_two_answers
    user, other_user = {"cache_salt": "a user"}, {"cache_salt": "another user"}
    assert [hits(**user), hits(**user)] == [absent, present]
    load(server, "eagle3")
    assert [hits(), hits(), hits(**user), hits(**user), hits(**other_user)] == [absent, present, absent, present, absent]
    assert server.put("eagle3", lease_seconds=None).status_code == 200
    assert [hits(), hits(**user)] == [present, present], "a promotion keeps the blocks"
    load(server, OWN)
    assert [hits(), hits(**user), hits(**other_user)] == [present, present, absent]
