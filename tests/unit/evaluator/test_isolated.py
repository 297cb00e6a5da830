"""Requests to an isolated engine: new ones in the first window of a pair, and the same in the second one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from aerie.evaluator import isolated, turns
from aerie.evaluator.batches import BatchLog
from aerie.evaluator.isolated import IsolatedEngine, TurnPipeline
from aerie.evaluator.keyed_hash import KeyedHash
from aerie.evaluator.metrics import EvaluatorMetrics
from aerie.evaluator.prompts import open_prompts
from aerie.evaluator.replay import create_session
from aerie.evaluator.requests import CHAT_PATH, ReplayRequest, ReplayRules
from tests.unit.controller.served import serve_http

IN_FLIGHT = 3


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows whose wash-out is short, and in which requests may be sent for as long as a test takes."""
    monkeypatch.setattr(turns, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(turns, "MAX_LATENESS_SECONDS", 1e6)
    monkeypatch.setattr(isolated, "POLL_SECONDS", 0.01)


@dataclass
class Engine:
    """An isolated engine, whose turn the test sets."""

    turn: str | None = None
    bodies: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    reads: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    """Event without which no request is answered."""
    status: int = 200
    report: Callable[[], web.Response] | None = None
    """What it reports instead of its turn."""
    metrics: EvaluatorMetrics = field(default_factory=EvaluatorMetrics)
    """Counts of the evaluator before it."""

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/aerie/ready":
            self.reads.put_nowait(None)
            if self.report is not None:
                return self.report()
            return web.json_response({"ready": False, "reason": "Isolated", "turn": self.turn}, status=503)
        self.bodies.put_nowait(await request.read())
        await self.is_open.wait()
        return web.json_response({}, status=self.status)

    async def begin(self, turn: str | None) -> None:
        """Begin a turn, and wait until it was seen."""
        self.turn = turn
        for _ in range(2 + self.reads.qsize()):
            await self.reads.get()

    async def receive(self, count: int) -> list[bytes]:
        return [await self.bodies.get() for _ in range(count)]


@contextlib.asynccontextmanager
async def serve(engine: Engine) -> AsyncIterator[TurnPipeline]:
    async with serve_http("*", "/{rest:.*}", engine.handle) as url, create_session() as session:
        log = BatchLog(engine.metrics, lambda: 0.0)
        pipeline = TurnPipeline(session, IsolatedEngine(url, window_seconds=1e6), IN_FLIGHT, log)
        task = asyncio.create_task(pipeline.follow_turns())
        try:
            yield pipeline
        finally:
            task.cancel()
            await pipeline.close()


def request(number: int) -> ReplayRequest:
    return ReplayRequest(CHAT_PATH, b"%d" % number, number, is_greedy=True, is_plain=False, is_exact=False)


async def admit(pipeline: TurnPipeline) -> None:
    """Wait until a request is admitted."""
    while not await pipeline.try_admit():
        await asyncio.sleep(0.01)


def test_the_second_window_gets_the_requests_of_the_first_one() -> None:
    async def work() -> None:
        engine = Engine()
        engine.is_open.set()
        async with serve(engine) as pipeline:
            await engine.begin(None)
            assert not await pipeline.try_admit()
            for pair in range(2):
                await engine.begin(f"1/{2 * pair}")
                for number in range(4):
                    await admit(pipeline)
                    pipeline.start(request(10 * pair + number))
                sent = await engine.receive(4)
                assert sorted(sent) == sorted(b"%d" % (10 * pair + number) for number in range(4))
                await engine.begin(f"1/{2 * pair + 1}")
                assert not await pipeline.try_admit()
                assert sorted(await engine.receive(4)) == sorted(sent)
            assert engine.bodies.empty()

    asyncio.run(work())


@pytest.mark.parametrize(
    "report",
    [
        lambda: web.Response(status=404),
        lambda: web.Response(body=b"[" * 50_000),
        lambda: web.Response(body=b'{"turn": "1/1", "more": "' + b"x" * 1_000_000 + b'"}'),
        lambda: web.Response(body=b"\xff\xfe"),
        lambda: web.Response(status=307, headers={"Location": "/aerie/elsewhere"}),
    ],
    ids=["absent", "nested", "large", "no text", "redirect"],
)
def test_an_engine_that_reports_no_turn_keeps_its_window(report: Callable[[], web.Response]) -> None:
    async def work() -> None:
        engine = Engine()
        engine.is_open.set()
        async with serve(engine) as pipeline:
            await engine.begin(None)
            await engine.begin("1/0")
            await admit(pipeline)
            pipeline.start(request(1))
            await engine.receive(1)
            engine.report = report
            await engine.begin("1/1")
            assert engine.bodies.empty()
            engine.report = None
            assert await engine.receive(1) == [b"1"]

    asyncio.run(work())


def test_what_a_window_keeps_in_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "MAX_RECORDED_BYTES", 5)

    async def work() -> None:
        engine = Engine()
        engine.is_open.set()
        async with serve(engine) as pipeline:
            await engine.begin(None)
            await engine.begin("1/0")
            for number in range(5):
                await admit(pipeline)
                pipeline.start(request(number))
            await engine.receive(5)
            assert not await pipeline.try_admit()
            await engine.begin("1/1")
            await engine.receive(5)
            await engine.begin("1/2")
            await admit(pipeline)
            pipeline.release()

    asyncio.run(work())


def test_no_more_requests_are_sent_at_once_than_the_engine_may_have() -> None:
    async def work() -> None:
        engine = Engine()
        async with serve(engine) as pipeline:
            await engine.begin(None)
            await engine.begin("1/0")
            for number in range(IN_FLIGHT):
                await admit(pipeline)
                pipeline.start(request(number))
            await engine.receive(IN_FLIGHT)
            assert not await pipeline.try_admit()
            engine.is_open.set()
            await admit(pipeline)
            pipeline.release()

    asyncio.run(work())


def test_an_admitted_request_whose_window_has_ended_is_dropped() -> None:
    async def work() -> None:
        engine = Engine()
        async with serve(engine) as pipeline:
            await engine.begin(None)
            await engine.begin("1/0")
            await admit(pipeline)
            await engine.begin("1/1")
            pipeline.start(request(0))
            assert b"aerie_evaluator_requests_dropped_total 1.0" in engine.metrics.render()
            assert engine.bodies.empty()

    asyncio.run(work())


@pytest.mark.parametrize(("status", "reason"), [(400, "rejected"), (500, "both_failed")])
def test_requests_without_an_answer_are_counted(status: int, reason: str) -> None:
    async def work() -> None:
        engine = Engine(status=status)
        engine.is_open.set()
        async with serve(engine) as pipeline:
            await engine.begin(None)
            await engine.begin("1/0")
            await admit(pipeline)
            pipeline.start(request(0))
            await engine.receive(1)
            counted = b'aerie_evaluator_requests_skipped_total{reason="%s"} 1.0' % reason.encode()
            while counted not in engine.metrics.render():
                await asyncio.sleep(0.01)

    asyncio.run(work())


def test_prompts_of_a_file_are_repeated(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    async def work() -> None:
        engine = Engine()
        engine.is_open.set()
        prompts = open_prompts(path, ReplayRules(64, reads_answers=False), KeyedHash(b"key"))
        with prompts.stream:
            async with serve(engine) as pipeline:
                task = asyncio.create_task(pipeline.send_prompts(prompts))
                await engine.begin(None)
                await engine.begin("1/0")
                first = await engine.receive(3)
                assert b"logprobs" not in first[0]
                engine.turn = "1/1"
                while len(first) < 1000:  # what is sent until the turn is seen belongs to the first window
                    first += await engine.receive(1)
                    if len(first) != len(set(first)):
                        break
                assert len(first) > len(set(first)), "seeds differ, so equal bodies are repeats"
                task.cancel()

    asyncio.run(work())
