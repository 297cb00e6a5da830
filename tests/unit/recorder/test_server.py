"""The endpoints: copies are answered at once, dropped before they are read, and cost nothing while hook or storage hangs."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from aerie.recorder import pipeline, server
from aerie.recorder.files import PromptFolder
from aerie.recorder.hook import Hook
from aerie.recorder.pipeline import MAX_IN_WORK
from aerie.recorder.server import MAX_REQUEST_BYTES
from tests.unit.recorder.running_recorder import CHAT, free_port, read_records, run, run_hook, run_recorder


def test_requests_become_redacted_lines(tmp_path: Path) -> None:
    async def work() -> None:
        async with run_recorder(tmp_path, {"[0-9]+": "#"}) as recorder:
            for number in range(3):
                body = {"messages": [{"role": "user", "content": f"number {number}"}], "temperature": 0}
                assert await recorder.send(body) == 202
            await recorder.wait_for(recorded=3)
            assert await recorder.fetch("/healthz") == (200, "ok\n")

    run(work)
    expected = {
        "messages": [{"role": "user", "content": "number #"}],
        "sampling": {"temperature": 0},
        "time": "2026-03-01T14:00:00Z",
    }
    assert read_records(tmp_path) == [expected] * 3
    assert len(list(tmp_path.glob("*.jsonl"))) == 1  # completed at the end


def test_reasons_why_requests_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with run_recorder(tmp_path, max_per_minute=5) as recorder:
            for path in ("/v1/completions", "/v1/responses", "/v1/embeddings"):
                assert await recorder.send(path=path) == 202
            assert await recorder.send(b"x" * (MAX_REQUEST_BYTES + 1)) == 202
            assert await recorder.send(b"{") == 202
            assert await recorder.send(b'{"messages": "\xff"}') == 202
            bomb = gzip.compress(b"x" * (50 * MAX_REQUEST_BYTES))
            assert await recorder.send(bomb, headers={"Content-Encoding": "gzip"}) == 202
            monkeypatch.setattr(server, "BODY_TIMEOUT_SECONDS", 0.2)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(recorder.url.rpartition(":")[2]))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            assert (await reader.readline()).startswith(b"HTTP/1.1 202")
            writer.close()
            monkeypatch.undo()
            await recorder.wait_for(unsupported_path=3, too_large=2, invalid=2, incomplete=1)
            assert await recorder.send() == 202
            assert await recorder.send() == 202
            await recorder.wait_for(unsupported_path=3, too_large=2, invalid=2, incomplete=1, recorded=1, over_limit=1)

    run(work)
    assert len(read_records(tmp_path)) == 1


def test_body_of_a_request_outside_of_the_share_is_not_awaited(tmp_path: Path) -> None:
    async def work() -> None:
        async with run_recorder(tmp_path, rate=0.0) as recorder:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(recorder.url.rpartition(":")[2]))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            assert (await reader.readline()).startswith(b"HTTP/1.1 202")
            writer.close()
            assert await recorder.counts() == {"not_sampled": 1}

    run(work)


def test_hook_redacts_what_the_patterns_left(tmp_path: Path) -> None:
    received = []

    async def handle(request: web.Request) -> web.StreamResponse:
        document = await request.json()
        received.append(json.loads(json.dumps(document)))
        document["messages"][0]["content"] = document["messages"][0]["content"].replace("Bob", "<name>")
        return web.json_response(document | {"further": "ignored"})

    async def work() -> None:
        async with run_hook(handle) as hook, run_recorder(tmp_path, {"[0-9]+": "#"}, hook) as recorder:
            body = {"messages": [{"role": "user", "content": "Bob is 42"}], "temperature": 0.5, "user": "bob"}
            await recorder.send(body | {"tools": [{"type": "function"}], "chat_template_kwargs": {"a": "b"}})
            await recorder.wait_for(recorded=1)

    run(work)
    prompt = {"tools": [{"type": "function"}], "chat_template_kwargs": {"a": "b"}}
    assert received == [prompt | {"messages": [{"role": "user", "content": "Bob is #"}]}]
    (record,) = read_records(tmp_path)
    expected = prompt | {"messages": [{"role": "user", "content": "<name> is #"}]}
    assert record == expected | {"sampling": {"temperature": 0.5}, "time": "2026-03-01T14:00:00Z"}


@contextlib.asynccontextmanager
async def failing_hook(kind: str) -> AsyncIterator[Hook]:
    """Run a hook that fails in this way."""

    async def handle(request: web.Request) -> web.StreamResponse:
        document = await request.json()
        if kind == "hangs":
            await asyncio.sleep(30)
        if kind == "redirects":
            return web.Response(status=307, headers={"Location": "/elsewhere"})
        answers = {"no JSON": "{", "no prompt": "{}", "no text": '{"messages": [{"role": "user", "content": 1}]}', "endless": "x"}
        status = {"error": 500, "empty": 204}.get(kind, 200)
        text = answers.get(kind, json.dumps(document)) * (3 * 2**20 if kind == "endless" else 1)
        return web.Response(status=status, text=text if status != 204 else None)

    if kind == "absent":
        yield Hook(f"http://127.0.0.1:{free_port()}/redact", 1.0)
        return
    async with run_hook(handle, timeout=0.3 if kind == "hangs" else 5.0) as hook:
        yield hook


@pytest.mark.parametrize("kind", ["absent", "hangs", "redirects", "error", "empty", "no JSON", "no prompt", "no text", "endless"])
def test_nothing_is_stored_while_the_hook_fails(tmp_path: Path, kind: str) -> None:
    async def work() -> None:
        async with failing_hook(kind) as hook, run_recorder(tmp_path, hook=hook) as recorder:
            assert await recorder.send() == 202
            await recorder.wait_for(hook_failed=1)

    run(work)
    assert read_records(tmp_path) == []


def test_storage_that_hangs_delays_nobody_and_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "STUCK_SECONDS", 0.1)
    opened = threading.Event()
    append = PromptFolder.append

    def wait_and_append(self: PromptFolder, line: bytes) -> None:
        opened.wait(30)
        append(self, line)

    monkeypatch.setattr(PromptFolder, "append", wait_and_append)

    async def work() -> None:
        async with run_recorder(tmp_path) as recorder:
            async with asyncio.timeout(10):
                assert [await recorder.send() for _ in range(MAX_IN_WORK + 7)] == [202] * (MAX_IN_WORK + 7)
            await recorder.wait_for(busy=7)
            await asyncio.sleep(0.2)
            assert await recorder.fetch("/healthz") == (503, "an operation of the storage does not end\n")
            opened.set()
            await recorder.wait_for(busy=7, recorded=MAX_IN_WORK)
            await recorder.send()
            await recorder.wait_for(busy=7, recorded=MAX_IN_WORK + 1)

    run(work)
    assert len(read_records(tmp_path)) == MAX_IN_WORK + 1


def test_storage_that_fails_is_reported_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAINTENANCE_SECONDS", 0.05)
    folder = tmp_path / "prompts"
    folder.write_text("a file where the folder has to be")

    async def work() -> None:
        async with run_recorder(folder) as recorder:
            await recorder.send()
            await recorder.wait_for(storage_failed=1)
            status, text = await recorder.fetch("/healthz")
            assert status == 503
            assert "File exists" in text
            folder.unlink()
            while (await recorder.fetch("/healthz"))[0] != 200:
                await asyncio.sleep(0.02)
            await recorder.send()
            await recorder.wait_for(storage_failed=1, recorded=1)

    run(work)
    assert len(read_records(folder)) == 1


def test_defect_costs_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(document: object) -> None:
        raise RuntimeError(f"a message with {document}")

    monkeypatch.setattr(pipeline, "parse_request", fail)

    async def work() -> None:
        async with run_recorder(tmp_path) as recorder:
            for _ in range(MAX_IN_WORK + 1):  # each makes room for the next
                await recorder.send()
                await asyncio.sleep(0.01)
            await recorder.wait_for(defect=MAX_IN_WORK + 1)

    run(work)
    assert "A request caused a defect of Aerie (RuntimeError): report it." in caplog.text
    assert str(CHAT["messages"][0]["content"]) not in caplog.text
