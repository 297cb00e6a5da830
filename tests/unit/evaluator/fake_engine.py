"""Engines on loopback that answer as vLLM does, and an evaluator before them whose every count can be awaited."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from aiohttp import web

from aerie.evaluator.admission import Admission
from aerie.evaluator.batches import BatchLog
from aerie.evaluator.keyed_hash import KeyedHash
from aerie.evaluator.metrics import EvaluatorMetrics
from aerie.evaluator.pairs import Pair
from aerie.evaluator.pipeline import Pipeline
from aerie.evaluator.replay import Engines, create_session
from aerie.evaluator.requests import CHAT_PATH, COMPLETIONS_PATH, ReplayRules
from aerie.evaluator.server import Endpoints
from aerie.evaluator.skip_reasons import SkipReason
from tests.unit.controller.served import serve_http

TOKEN = "t" * 32
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
KEYED_HASH = KeyedHash(b"key")
RULES = ReplayRules(max_tokens=64)


def build_answer(
    path: str = CHAT_PATH,
    *,
    histogram: tuple[int, ...] = (1, 1, 0, 2),
    tokens: int = 12,
    text: str = "hello",
    finish_reason: str = "stop",
    seconds: float | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Return a response of vLLM 0.32. `fields` replace those of the choice."""
    rows = [f"token_id:{number}" for number in range(tokens)]
    top = {f"token_id:{900 + rank}": -2.0 - rank for rank in range(5)}
    if path == CHAT_PATH:
        content = [
            {"token": row, "logprob": -0.5, "top_logprobs": [{"token": key, "logprob": value} for key, value in top.items()]}
            for row in rows
        ]
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "logprobs": {"content": content}}
    else:
        logprobs = {"tokens": rows, "token_logprobs": [-0.5] * tokens, "top_logprobs": [{row: -0.5} | top for row in rows]}
        choice = {"text": text, "logprobs": logprobs}
    speculation = {
        "mean_acceptance_length": 1.0,
        "acceptance_histogram": list(histogram),
        "num_spec_steps": sum(histogram),
        "num_spec_tokens": len(histogram) - 1,
    }
    milliseconds = None if seconds is None else seconds * 1000
    return {
        "choices": [{"index": 0, "finish_reason": finish_reason, "stop_reason": None, **choice, **fields}],
        "usage": {"completion_tokens": tokens},
        "metrics": {"generation_time_ms": milliseconds, "speculative_decoding": speculation},
    }


@dataclass
class FakeEngine:
    """An engine. `answer` gets path and body, and returns a response or the fields of one."""

    answer: Callable[[str, dict[str, Any]], web.StreamResponse | dict[str, Any]] = lambda path, _body: build_answer(path)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    """Event without which no request is answered; it is set at first."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrivals: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    """A path for each request."""

    def __post_init__(self) -> None:
        self.is_open.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.arrivals.put_nowait(request.path)
        await self.is_open.wait()
        answer = self.answer(request.path, body)
        return web.json_response(answer) if isinstance(answer, dict) else answer

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Yield the base URL."""
        async with serve_http("POST", "/v1/{rest:.*}", self.handle) as url:
            yield url


class AwaitedLog(BatchLog):
    """A log that reports each request that is finished."""

    def __init__(self, metrics: EvaluatorMetrics) -> None:
        super().__init__(metrics, lambda: 1000.0)
        self.outcomes: asyncio.Queue[str] = asyncio.Queue()

    def drop(self) -> None:
        super().drop()
        self.outcomes.put_nowait("dropped")

    def skip(self, reason: SkipReason) -> None:
        super().skip(reason)
        self.outcomes.put_nowait(str(reason))

    def add(self, pair: Pair) -> None:
        super().add(pair)
        self.outcomes.put_nowait("pair")


@dataclass
class RunningEvaluator:
    """An evaluator on loopback."""

    url: str
    client: aiohttp.ClientSession
    pipeline: Pipeline
    log: AwaitedLog
    canary: FakeEngine
    control: FakeEngine

    async def send(self, body: object, path: str = CHAT_PATH, headers: dict[str, str] | None = None) -> int:
        """Send a mirrored request, and return the status."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=io.BytesIO(data), headers=headers) as response:
            assert await response.read() == b""
            return response.status

    async def evaluate(self, body: object, path: str = CHAT_PATH, headers: dict[str, str] | None = None) -> str:
        """Send a mirrored request, and return `pair`, `dropped` or the reason why it is skipped."""
        assert await self.send(body, path, headers) == 202
        return await self.log.outcomes.get()

    async def fetch(self, **query: Any) -> dict[str, Any]:
        """Return what the operator gets."""
        async with self.client.get(self.url + "/aerie/pairs", params=query, headers=AUTHORIZATION) as response:
            assert response.status == 200
            body = await response.json()
            assert isinstance(body, dict)
            return body


@contextlib.asynccontextmanager
async def run_with_engines(
    canary: FakeEngine | None = None,
    control: FakeEngine | None = None,
    *,
    in_flight: int = 1,
    waiting: int = 0,
    urls: Callable[[str, str], Engines] = lambda canary, control: Engines((canary,), (control,)),
    timeout_seconds: float = 120.0,
) -> AsyncIterator[RunningEvaluator]:
    """Run an evaluator and its engines."""
    canary, control = canary or FakeEngine(), control or FakeEngine()
    metrics = EvaluatorMetrics()
    log = AwaitedLog(metrics)
    async with canary.serve() as canary_url, control.serve() as control_url, create_session() as session:
        engines = replace(urls(canary_url, control_url), timeout_seconds=timeout_seconds)
        pipeline = Pipeline(session, engines, Admission(in_flight, waiting), log)
        runner = Endpoints(pipeline, metrics, KEYED_HASH, RULES, TOKEN, "X-Session-ID").build_runner(accepts_requests=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            async with create_session() as client:
                yield RunningEvaluator(f"http://{host}:{port}", client, pipeline, log, canary, control)
        finally:
            await runner.cleanup()
            await pipeline.close()


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine function to its end."""

    async def await_work() -> None:
        async with asyncio.timeout(120):
            await work()

    asyncio.run(await_work())


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello?"}], "temperature": 0}
COMPLETION: dict[str, Any] = {"prompt": "Hello", "max_tokens": 32, "temperature": 0}
REQUESTS = {CHAT_PATH: CHAT, COMPLETIONS_PATH: COMPLETION}
