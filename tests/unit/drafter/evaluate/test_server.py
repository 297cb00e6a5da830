"""Evaluation of a server, here a mock transport of httpx that counts like vLLM."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from aerie_drafter.errors import DataError
from aerie_drafter.evaluate.acceptance import AcceptanceCounts
from aerie_drafter.evaluate.prompts import Prompt
from aerie_drafter.evaluate.server import AcceptanceCounters, ServerEvaluation, VllmServer

PROMPTS = [
    Prompt("coding", ({"role": "user", "content": "a"},)),
    Prompt("coding", ({"role": "user", "content": "b"},)),
    Prompt("qa", text="c"),
]


class Engine:
    """Fake engine: every request drafts ten times; a chat has 7, 5 and 2 drafts accepted, a completion 4, 1 and 0."""

    def __init__(self) -> None:
        self.drafts, self.accepted, self.finished = 100, [50, 20, 10], 7
        self.bodies: list[dict[str, object]] = []
        self.has_foreign_requests = False
        self.late: list[tuple[int, ...]] = []

    def exposition(self) -> str:
        lines = [
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {self.drafts}.0',
            "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="{at}"}} {count}.0'
            for at, count in enumerate(self.accepted)
        ]
        lines += ["# TYPE vllm:request_success_total counter"]
        lines += [f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {self.finished}.0', ""]
        return "\n".join(lines)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            exposition = self.exposition()
            for step in self.late:  # counted only after the first reading
                self.drafts += step[0]
                self.accepted = [a + b for a, b in zip(self.accepted, step[1:], strict=True)]
            self.late = []
            return httpx.Response(200, text=exposition)
        self.bodies.append(json.loads(request.content))
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"count": 12})
        self.finished += 2 if self.has_foreign_requests else 1
        self.late.append((10, 7, 5, 2) if "chat" in request.url.path else (10, 4, 1, 0))
        return httpx.Response(200, json={})


def evaluate(engine: Engine) -> ServerEvaluation:
    async def run() -> ServerEvaluation:
        async with httpx.AsyncClient(transport=httpx.MockTransport(engine), base_url="http://engine") as client:
            return await VllmServer(client, "m", poll_interval_seconds=0).evaluate(PROMPTS, max_tokens=9)

    return asyncio.run(run())


def test_each_category_gets_its_own_difference() -> None:
    engine = Engine()
    evaluation = evaluate(engine)
    assert evaluation == ServerEvaluation(
        {"coding": AcceptanceCounts(20, (14, 10, 4)), "qa": AcceptanceCounts(10, (4, 1, 0))}, foreign_requests=0
    )
    assert evaluation.acceptance_by_category["coding"].acceptance_length == pytest.approx(1 + 28 / 20)
    assert [body["max_tokens"] for body in engine.bodies] == [9, 9, 9]
    assert engine.bodies[2]["prompt"] == "c"


def test_foreign_requests_are_counted() -> None:
    engine = Engine()
    engine.has_foreign_requests = True
    assert evaluate(engine).foreign_requests == 3


def test_engines_behind_one_address_are_summed() -> None:
    exposition = Engine().exposition()
    both = exposition.replace("\n# TYPE", '\nvllm:spec_decode_num_drafts_total{engine="1"} 5.0\n# TYPE', 1)
    assert AcceptanceCounters.parse(both).drafts == 105


def test_a_server_without_speculation_is_rejected() -> None:
    with pytest.raises(DataError, match="runs without --speculative-config"):
        AcceptanceCounters.parse("# TYPE vllm:request_success_total counter\nvllm:request_success_total 3.0\n")


def test_a_restart_during_the_evaluation_is_an_error() -> None:
    with pytest.raises(DataError, match="the server restarted"):
        AcceptanceCounters(3, (1,), 1).acceptance_since(AcceptanceCounters(4, (1,), 1))


@pytest.mark.parametrize("status", [404, 500])
def test_an_error_status_of_the_server_is_reported(status: int) -> None:
    async def run() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, text="no such model"))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            await VllmServer(client, "m").count_tokens(PROMPTS[0])

    with pytest.raises(DataError, match=f"/tokenize: status {status}: no such model"):
        asyncio.run(run())
