"""Prompts, answers and names of users: none of them is logged, counted by name, or returned to the operator."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from aiohttp import web

from aerie.evaluator import pipeline
from aerie.evaluator.requests import CHAT_PATH, COMPLETIONS_PATH
from tests.unit.evaluator.fake_engine import AUTHORIZATION, FakeEngine, build_answer, run, run_with_engines
from tests.unit.evaluator.test_server import connect

PROMPT, ANSWER, USER = "prompt-marker-4711", "answer-marker-4712", "user-marker-4713"
MARKERS = (PROMPT, ANSWER, USER)

REQUESTS: tuple[tuple[str, Any], ...] = (
    (CHAT_PATH, {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "user": USER}),
    (CHAT_PATH, {"messages": [{"role": "user", "content": PROMPT}], PROMPT: PROMPT, "max_tokens": PROMPT, "user": USER}),
    (CHAT_PATH, {"messages": [{"role": "user", "content": PROMPT}], "n": PROMPT}),
    (COMPLETIONS_PATH, {"prompt": PROMPT, "model": PROMPT, "cache_salt": USER, "session_id": USER, "temperature": 0.9}),
    (COMPLETIONS_PATH, f'{{"prompt": "{PROMPT}'.encode()),
    (f"/v1/{PROMPT}", {"input": PROMPT}),
)


def answers_with_the_marker(path: str, body: dict[str, Any], number: int) -> web.StreamResponse | dict[str, Any]:
    """Return an answer, one with the marker in each field that is read, or an error with the marker."""
    top = {f"{ANSWER}-{rank}": -float(rank) for rank in range(1, 7)}
    content = [
        {"token": ANSWER, "logprob": -0.1, "top_logprobs": [{"token": token, "logprob": value} for token, value in top.items()]}
    ]
    match number % 5:
        case 0:
            return build_answer(path, text=ANSWER, logprobs={"content": content})
        case 1:
            return build_answer(path, text=ANSWER, finish_reason=ANSWER, stop_reason=ANSWER) | {"metrics": {ANSWER: ANSWER}}
        case 2:
            return web.Response(status=400, text=f"{ANSWER}: {body}")
        case 3:
            return web.Response(status=200, text=f"{{{ANSWER}")
        case _:
            return build_answer(path, text=ANSWER) | {"usage": {"completion_tokens": ANSWER}}


def test_no_marker_is_in_logs_metrics_or_batches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "GREEDY_REPEAT_INTERVAL", 1)
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []

    async def work() -> None:
        numbers = {"canary": 0, "control": 0}

        def engine(name: str, every: int) -> FakeEngine:
            def answer(path: str, body: dict[str, Any]) -> web.StreamResponse | dict[str, Any]:
                numbers[name] += 1
                return answers_with_the_marker(path, body, numbers[name] // every)

            return FakeEngine(answer)

        headers = {"X-Session-ID": USER, "Authorization": f"Bearer {USER}", "X-Prompt": PROMPT}
        async with run_with_engines(engine("canary", 1), engine("control", 5), in_flight=2) as evaluator:
            outcomes = {await evaluator.evaluate(body, path, headers) for _ in range(30) for path, body in REQUESTS}
            assert {"pair", "invalid", "canary_failed", "control_failed", "rejected", "stop_string"} <= outcomes
            for malformed in (
                f"POST {CHAT_PATH} HTTP/1.1\r\nHost: a\r\n{PROMPT} {USER}\r\n\r\n",
                f"{PROMPT} / HTTP/1.1\r\n\r\n",
                f"POST {CHAT_PATH} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{PROMPT}\r\n",
            ):
                async with connect(evaluator.url) as (reader, writer):
                    writer.write(malformed.encode())
                    writer.write_eof()
                    await reader.read()
            for path, own_headers in (("/metrics", {}), ("/aerie/pairs", AUTHORIZATION), ("/healthz", {})):
                async with evaluator.client.get(evaluator.url + path, headers=own_headers) as response:
                    assert response.status == 200
                    texts.append(await response.text())

    run(work)
    output = capfd.readouterr()
    texts += [caplog.text, output.out, output.err]
    assert [marker for marker in MARKERS for text in texts if marker in text] == []
