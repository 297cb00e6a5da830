"""The endpoints: mirrored requests are answered before they are evaluated, and dropped before they are read."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator

import pytest

from aerie.evaluator import pipeline, server
from aerie.evaluator.requests import COMPLETIONS_PATH
from aerie.evaluator.server import MAX_REQUEST_BYTES
from tests.unit.evaluator.fake_engine import AUTHORIZATION, CHAT, COMPLETION, TOKEN, FakeEngine, run, run_with_engines


def test_a_request_is_answered_before_it_is_evaluated() -> None:
    async def work() -> None:
        canary = FakeEngine()
        async with run_with_engines(canary) as evaluator:
            canary.is_open.clear()
            assert await evaluator.send(COMPLETION, COMPLETIONS_PATH, {"Host": "chat.example-shadow"}) == 202
            await canary.arrivals.get()
            canary.is_open.set()
            assert await evaluator.log.outcomes.get() == "pair"

    run(work)


def test_requests_above_the_capacity_are_dropped_and_not_parsed() -> None:
    async def work() -> None:
        canary = FakeEngine()
        async with run_with_engines(canary, in_flight=1, waiting=2) as evaluator:
            canary.is_open.clear()
            for _ in range(3):
                assert await evaluator.send(CHAT | {"temperature": 1}) == 202
            await canary.arrivals.get()
            for body in (b"{ no JSON", json.dumps(CHAT).encode()):
                assert await evaluator.evaluate(body) == "dropped"
            assert canary.arrivals.empty()  # the others wait
            canary.is_open.set()
            assert [await evaluator.log.outcomes.get() for _ in range(3)] == ["pair"] * 3
            (batch,) = (await evaluator.fetch())["batches"]
            assert (batch["received"], batch["dropped"], batch["skipped"]) == (5, 2, {})

    run(work)


@contextlib.asynccontextmanager
async def connect(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def test_a_dropped_request_is_answered_while_its_body_is_still_coming() -> None:
    async def work() -> None:
        canary = FakeEngine()
        async with run_with_engines(canary) as evaluator:
            canary.is_open.clear()
            assert await evaluator.send(CHAT) == 202
            await canary.arrivals.get()
            async with connect(evaluator.url) as (reader, writer):
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
                assert (await reader.readline()).startswith(b"HTTP/1.1 202")
            assert await evaluator.log.outcomes.get() == "dropped"
            canary.is_open.set()
            await evaluator.log.outcomes.get()

    run(work)


def test_a_body_that_does_not_arrive_in_time_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_TIMEOUT_SECONDS", 0.05)

    async def work() -> None:
        async with run_with_engines() as evaluator:
            async with connect(evaluator.url) as (_, writer):
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
                assert await evaluator.log.outcomes.get() == "incomplete"
            monkeypatch.undo()
            assert await evaluator.evaluate(CHAT) == "pair"

    run(work)


def test_a_client_that_leaves_makes_room() -> None:
    async def work() -> None:
        async with run_with_engines() as evaluator:
            async with connect(evaluator.url) as (_, writer):
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
                await writer.drain()
            assert await evaluator.log.outcomes.get() == "incomplete"
            assert await evaluator.evaluate(CHAT) == "pair"

    run(work)


def test_bodies_have_a_size_limit_however_they_come() -> None:
    async def work() -> None:
        async with run_with_engines() as evaluator:
            large = json.dumps(CHAT | {"padding": "x" * MAX_REQUEST_BYTES}).encode()
            assert await evaluator.evaluate(large) == "too_large"
            packed = gzip.compress(b" " * 10 * MAX_REQUEST_BYTES)
            assert await evaluator.evaluate(packed, headers={"Content-Encoding": "gzip"}) == "too_large"

            async def chunks() -> AsyncIterator[bytes]:
                for start in range(0, len(large), 100_000):
                    yield large[start : start + 100_000]

            async with evaluator.client.post(evaluator.url + COMPLETIONS_PATH, data=chunks()) as response:
                assert response.status == 202
            assert await evaluator.log.outcomes.get() == "too_large"
            assert await evaluator.evaluate(b"no gzip", headers={"Content-Encoding": "gzip"}) == "incomplete"
            assert (
                await evaluator.evaluate(gzip.compress(json.dumps(CHAT).encode()), headers={"Content-Encoding": "gzip"}) == "pair"
            )

    run(work)


def test_other_endpoints_of_the_engine_are_counted() -> None:
    async def work() -> None:
        async with run_with_engines() as evaluator:
            for path in ("/v1/responses", "/v1/messages", "/v1/chat/completions/"):
                assert await evaluator.evaluate(CHAT, path) == "unsupported_path"
            async with evaluator.client.get(evaluator.url + "/v1/models") as response:
                assert response.status == 405

    run(work)


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": f"Bearer {TOKEN[1:]}"}, {"Authorization": TOKEN}, {"Authorization": "Bearer \u00e9"}]
)
def test_counts_need_the_token_and_stay_without_it(headers: dict[str, str]) -> None:
    async def work() -> None:
        async with run_with_engines() as evaluator:
            assert await evaluator.evaluate(CHAT) == "pair"
            query = {"process": evaluator.log.process, "after": "9"}
            async with evaluator.client.get(evaluator.url + "/aerie/pairs", params=query, headers=headers) as response:
                assert response.status == 401
            (batch,) = (await evaluator.fetch())["batches"]
            assert batch["number"] == 1

    run(work)


@pytest.mark.parametrize("after", ["x", "-1", "1.5", "\u0661", "9" * 5000])
def test_after_has_to_be_a_number(after: str) -> None:
    async def work() -> None:
        async with (
            run_with_engines() as evaluator,
            evaluator.client.get(evaluator.url + "/aerie/pairs", params={"after": after}, headers=AUTHORIZATION) as response,
        ):
            assert response.status == 400
            assert (await response.json())["error"].startswith("after is no number: ")

    run(work)


def test_batches_are_acknowledged_over_http() -> None:
    async def work() -> None:
        async with run_with_engines() as evaluator:
            assert await evaluator.evaluate(CHAT) == "pair"
            first = await evaluator.fetch()
            assert await evaluator.fetch(process="another", after=1) == first
            assert await evaluator.fetch(process=first["process"], after=1) == {"process": first["process"], "batches": []}

    run(work)


def test_health_and_metrics() -> None:
    async def work() -> None:
        async with run_with_engines() as evaluator:
            assert await evaluator.evaluate(CHAT) == "pair"
            assert await evaluator.evaluate(b"{") == "invalid"
            async with evaluator.client.get(evaluator.url + "/healthz") as response:
                assert (response.status, await response.text()) == (200, "ok\n")
            async with evaluator.client.get(evaluator.url + "/metrics") as response:
                lines = (await response.text()).splitlines()
            assert "aerie_evaluator_pairs_total 1.0" in lines
            assert "aerie_evaluator_requests_received_total 2.0" in lines
            assert 'aerie_evaluator_requests_skipped_total{reason="invalid"} 1.0' in lines
            assert 'aerie_evaluator_requests_skipped_total{reason="canary_failed"} 0.0' in lines

    run(work)


def test_a_defect_costs_one_request_and_its_text_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise KeyError("a-secret-prompt")

    async def work() -> None:
        async with run_with_engines() as evaluator:
            with monkeypatch.context() as patch:
                patch.setattr(pipeline, "replay_request", fail)
                assert await evaluator.evaluate(CHAT) == "defect"
            with monkeypatch.context() as patch:
                patch.setattr(server, "build_replay", fail)
                assert await evaluator.evaluate(CHAT) == "defect"
            assert await evaluator.evaluate(CHAT) == "pair"

    run(work)
    assert [record.getMessage() for record in caplog.records] == ["A request caused a defect of Aerie (KeyError): report it."] * 2
