"""A request at both engines: what makes a pair, and how engines that fail are counted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from aerie.analysis.paired.sums import PairSums
from aerie.evaluator import pipeline, replay
from aerie.evaluator.prompts import open_prompts
from aerie.evaluator.replay import MAX_ANSWER_BYTES, Engines
from aerie.evaluator.requests import COMPLETIONS_PATH
from tests.unit.evaluator.fake_engine import (
    CHAT,
    COMPLETION,
    KEYED_HASH,
    RULES,
    FakeEngine,
    RunningEvaluator,
    build_answer,
    run,
    run_with_engines,
)


async def batch_of(evaluator: RunningEvaluator) -> dict[str, Any]:
    (batch,) = (await evaluator.fetch())["batches"]
    assert isinstance(batch, dict)
    return batch


def test_both_engines_get_the_same_request_and_their_counts_are_a_pair() -> None:
    async def work() -> None:
        canary = FakeEngine(lambda path, _: build_answer(path, histogram=(0, 0, 0, 3), tokens=12, seconds=1.0))
        control = FakeEngine(lambda path, _: build_answer(path, histogram=(11, 0, 0, 0), tokens=12, seconds=2.0))
        async with run_with_engines(canary, control) as evaluator:
            assert await evaluator.evaluate(COMPLETION | {"temperature": 0.5}, COMPLETIONS_PATH) == "pair"
            assert canary.requests == control.requests
            assert canary.requests[0]["prompt"] == "Hello"
            batch = await batch_of(evaluator)
            steps, seconds = PairSums.from_dict(batch["steps"]), PairSums.from_dict(batch["seconds"])
            assert (steps.canary_total, steps.control_total) == (3 / 2, 11 / 2)
            assert (seconds.canary_total, seconds.control_total) == (0.5, 1.0)
            assert batch["answers"]["lengths"][0] == 1

    run(work)


def test_without_the_time_of_either_engine_both_times_are_the_evaluators() -> None:
    async def work() -> None:
        canary = FakeEngine(lambda path, _: build_answer(path, seconds=10_000.0))
        async with run_with_engines(canary) as evaluator:
            assert await evaluator.evaluate(CHAT) == "pair"
            seconds = PairSums.from_dict((await batch_of(evaluator))["seconds"])
            assert 0 < seconds.canary_total < 1000
            assert 0 < seconds.control_total < 1000

    run(work)


def test_both_engines_work_at_the_same_time_in_either_order() -> None:
    async def work() -> None:
        orders: list[str] = []

        def engine(name: str) -> FakeEngine:
            def answer(path: str, _body: dict[str, Any]) -> dict[str, Any]:
                orders.append(name)
                return build_answer(path)

            return FakeEngine(answer)

        async with run_with_engines(engine("canary"), engine("control")) as evaluator:
            engines = (evaluator.canary, evaluator.control)
            for running in engines:
                running.is_open.clear()
            assert await evaluator.send(CHAT | {"temperature": 0.5}) == 202
            for running in engines:
                await running.arrivals.get()  # both have the request before either has answered
            for running in engines:
                running.is_open.set()
            assert await evaluator.log.outcomes.get() == "pair"
            for number in range(40):
                assert await evaluator.evaluate(CHAT | {"temperature": 0.5, "max_tokens": 2 + number}) == "pair"
            assert {orders[start] for start in range(2, 82, 2)} == {"canary", "control"}

    run(work)


def test_each_pair_goes_to_any_engine_of_each_arm() -> None:
    async def work() -> None:
        second = FakeEngine()
        async with (
            second.serve() as second_url,
            run_with_engines(urls=lambda canary, control: Engines((canary, second_url), (control,))) as evaluator,
        ):
            for _ in range(40):
                assert await evaluator.evaluate(CHAT | {"temperature": 0.5}) == "pair"
            assert len(evaluator.canary.requests) + len(second.requests) == len(evaluator.control.requests) == 40
            assert evaluator.canary.requests
            assert second.requests

    run(work)


def test_every_pair_has_a_seed_of_its_own_even_for_the_same_request() -> None:
    async def work() -> None:
        async with run_with_engines() as evaluator:
            for _ in range(10):
                assert await evaluator.evaluate(CHAT | {"temperature": 0.5, "seed": 42}) == "pair"
            assert len({request["seed"] for request in evaluator.canary.requests}) == 10
            assert [request["seed"] for request in evaluator.canary.requests] == [
                request["seed"] for request in evaluator.control.requests
            ]

    run(work)


def test_some_greedy_requests_are_sent_again_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "GREEDY_REPEAT_INTERVAL", 1)

    async def work() -> None:
        async with run_with_engines() as evaluator:
            assert await evaluator.evaluate(CHAT) == "pair"
            assert await evaluator.evaluate(CHAT | {"temperature": 0.5}) == "pair"
            assert len(evaluator.canary.requests) == len(evaluator.control.requests) == 3
            assert (await batch_of(evaluator))["answers"]["repeated_requests"] == 1

    run(work)


# ------------------------------------------------------------------------------------------------------------ authentication
@pytest.mark.parametrize("api_key", ["", "key-of-the-engines"])
def test_no_header_of_the_user_reaches_the_engines(api_key: str) -> None:
    async def work() -> None:
        async with run_with_engines(urls=lambda canary, control: Engines((canary,), (control,), api_key)) as evaluator:
            headers = {"Authorization": "Bearer of-the-user", "Cookie": "a=b", "X-Session-ID": "s", "X-Request-Id": "r"}
            assert await evaluator.evaluate(CHAT, headers=headers) == "pair"
            for sent in (*evaluator.canary.headers, *evaluator.control.headers):
                assert sent.pop("Authorization", None) == (f"Bearer {api_key}" if api_key else None)
                assert sent.keys() <= {
                    *("Host", "Accept", "Accept-Encoding", "Content-Type", "Content-Length", "User-Agent", "Connection")
                }

    run(work)


# ------------------------------------------------------------------------------------------------------------------ failures
def respond(status: int, text: str = "") -> web.Response:
    return web.Response(status=status, text=text)


ANSWERS: dict[str, Any] = {
    "counts": lambda path, _: build_answer(path),
    "400": lambda *_: respond(400),
    "404": lambda *_: respond(404),
    "401": lambda *_: respond(401),
    "429": lambda *_: respond(429),
    "500": lambda *_: respond(500),
    "503": lambda *_: respond(503),
    "redirect": lambda *_: web.Response(status=307, headers={"Location": "http://example.com"}),
    "no JSON": lambda *_: respond(200, "{"),
    "too long": lambda *_: respond(200, " " * (MAX_ANSWER_BYTES + 1)),
    "no counts": lambda path, _: build_answer(path) | {"metrics": None},
    "stop string": lambda path, _: build_answer(path, stop_reason="x") | {"metrics": None},
    "one token": lambda path, _: build_answer(path, histogram=(0, 0), tokens=1),
}


@pytest.mark.parametrize(
    ("canary", "control", "outcome"),
    [
        ("counts", "counts", "pair"),
        ("one token", "counts", "pair"),
        ("one token", "one token", "too_short"),
        ("400", "404", "rejected"),
        ("400", "counts", "canary_failed"),  # such as a canary with a lower maximum length
        ("404", "no counts", "canary_failed"),
        *((failure, "counts", "canary_failed") for failure in ("401", "500", "redirect", "no JSON", "too long")),
        ("counts", "500", "control_failed"),
        ("stop string", "500", "control_failed"),
        ("429", "counts", "canary_unavailable"),
        ("counts", "503", "control_unavailable"),  # a paused engine
        ("500", "503", "unavailable"),
        ("503", "503", "unavailable"),
        ("500", "500", "both_failed"),
        ("400", "500", "both_failed"),
        ("no counts", "counts", "without_metrics"),
        ("no counts", "no counts", "without_metrics"),
        ("stop string", "stop string", "stop_string"),
        ("counts", "stop string", "stop_string"),
        ("no counts", "stop string", "stop_string"),
    ],
)
def test_outcomes_of_two_answers(canary: str, control: str, outcome: str) -> None:
    async def work() -> None:
        async with run_with_engines(FakeEngine(ANSWERS[canary]), FakeEngine(ANSWERS[control])) as evaluator:
            assert await evaluator.evaluate(CHAT | {"temperature": 0.5}) == outcome
            evaluator.canary.answer = evaluator.control.answer = ANSWERS["counts"]
            assert await evaluator.evaluate(CHAT) == "pair"  # the capacity is there again

    run(work)


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """Yield an address on which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_an_engine_that_cannot_be_reached_fails() -> None:
    async def work() -> None:
        with closed_port() as url:
            async with run_with_engines(urls=lambda _, control: Engines((url,), (control,))) as evaluator:
                assert await evaluator.evaluate(CHAT) == "canary_failed"

    run(work)


def test_an_engine_that_hangs_fails_and_is_left() -> None:
    async def work() -> None:
        canary = FakeEngine()
        canary.is_open.clear()
        async with run_with_engines(canary, timeout_seconds=0.2) as evaluator:
            outcome = await evaluator.evaluate(CHAT)
            assert outcome in ("canary_failed", "both_failed")  # both: a machine so busy that the control took as long
            canary.is_open.set()

    run(work)


@pytest.mark.parametrize("arm", ["canary", "control"])
def test_an_engine_that_hangs_fails_soon_after_the_other_one_has_answered(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MIN_SECOND_ANSWER_SECONDS", 0.1)

    async def work() -> None:
        async with run_with_engines(timeout_seconds=3600.0) as evaluator:
            engine: FakeEngine = getattr(evaluator, arm)
            engine.is_open.clear()
            assert await evaluator.evaluate(CHAT) == f"{arm}_failed"
            counts = (await batch_of(evaluator))["failures"]
            assert (counts[arm], counts["outage_attempts"]) == (1, 1 if arm == "canary" else 0)
            engine.is_open.set()

    run(work)


def test_an_engine_that_ends_in_the_middle_of_an_answer_fails() -> None:
    async def work() -> None:
        class Broken(FakeEngine):
            async def handle(self, request: web.Request) -> web.StreamResponse:
                assert request.transport is not None
                response = web.StreamResponse()
                response.content_length = 100
                await response.prepare(request)
                await response.write(b"{")
                request.transport.close()
                return response

        async with run_with_engines(Broken()) as evaluator:
            assert await evaluator.evaluate(CHAT) == "canary_failed"

    run(work)


# ------------------------------------------------------------------------------------------------------------------- prompts
def test_prompts_are_sent_as_fast_as_the_engines_answer(tmp_path: Any) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n')

    async def work() -> None:
        async with run_with_engines(in_flight=2, waiting=1) as evaluator:
            prompts = open_prompts(path, RULES, KEYED_HASH)
            with prompts.stream:
                task = asyncio.create_task(evaluator.pipeline.send_prompts(prompts))
                assert [await evaluator.log.outcomes.get() for _ in range(20)] == ["pair"] * 20
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    run(work)


def test_engines_that_fail_are_not_flooded_with_prompts(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "FAILURE_PAUSE_SECONDS", 3600.0)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n')

    async def work() -> None:
        canary = FakeEngine(ANSWERS["500"])
        async with run_with_engines(canary, in_flight=2, waiting=3) as evaluator:
            prompts = open_prompts(path, RULES, KEYED_HASH)
            with prompts.stream:
                task = asyncio.create_task(evaluator.pipeline.send_prompts(prompts))
                assert [await evaluator.log.outcomes.get() for _ in range(2)] == ["canary_failed"] * 2
                for _ in range(100):  # whatever else could be sent would be sent in these turns of the loop
                    await asyncio.sleep(0)
                assert len(canary.requests) == 2
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    run(work)


def test_an_evaluator_that_stops_counts_no_request_in_progress() -> None:
    async def work() -> None:
        canary = FakeEngine()
        async with run_with_engines(canary) as evaluator:
            canary.is_open.clear()
            assert await evaluator.send(CHAT) == 202
            await canary.arrivals.get()
            await evaluator.pipeline.close()
            batch = await batch_of(evaluator)
            assert (batch["received"], batch["skipped"], batch["steps"]["buckets"]) == (1, {}, [])
            canary.is_open.set()

    run(work)
