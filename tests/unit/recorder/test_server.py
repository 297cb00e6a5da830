"""The endpoints: copies are answered at once, dropped before they are read, and cost nothing while hook or storage hangs."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from aerie.recorder import hook as hook_module
from aerie.recorder import objects, pipeline, process, server, storage, storage_thread
from aerie.recorder.files import PromptFolder
from aerie.recorder.hook import Hook
from aerie.recorder.pipeline import MAX_IN_WORK
from aerie.recorder.server import MAX_REQUEST_BYTES
from tests.unit.recorder.failing_store import run_failing_store
from tests.unit.recorder.running_recorder import CHAT, RunningRecorder, free_port, read_records, run, run_hook, run_recorder


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


def test_hook_that_always_fails_is_reported_until_it_redacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline, "MAINTENANCE_SECONDS", 0.05)
    fails = True
    contents: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        document = await request.json()
        contents.append(document["messages"][0]["content"])
        return web.Response(status=404) if fails else web.json_response(document)

    async def work() -> None:
        nonlocal fails
        async with run_hook(handle) as hook, run_recorder(tmp_path, hook=hook) as recorder:
            await recorder.send()
            await recorder.wait_for(hook_failed=1)
            await asyncio.sleep(0.2)
            assert await recorder.fetch("/healthz") == (200, "ok\n")
            assert contents == ["hello"]
            monkeypatch.setattr(hook_module, "FAILURE_SECONDS", 0.1)
            await wait_for_health(recorder, 503, "the redaction hook fails for all prompts")
            await asyncio.sleep(0.2)
            fails = False
            await wait_for_health(recorder, 200)
            calls = len(contents)
            await asyncio.sleep(0.2)
            assert len(contents) == calls
            await recorder.send()
            await recorder.wait_for(hook_failed=1, recorded=1)

    run(work)
    assert caplog.text.count("The redaction hook fails for all prompts") == 1
    assert set(contents) == {"hello", "This is a test of the redaction hook."}
    assert [record["messages"] for record in read_records(tmp_path)] == [CHAT["messages"]]


def test_hook_that_fails_for_some_prompts_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAINTENANCE_SECONDS", 0.02)
    monkeypatch.setattr(hook_module, "FAILURE_SECONDS", 0.0)

    async def handle(request: web.Request) -> web.StreamResponse:
        document = await request.json()
        return web.Response(status=422) if document == CHAT else web.json_response(document)

    async def work() -> None:
        async with run_hook(handle) as hook, run_recorder(tmp_path, hook=hook) as recorder:
            for count in range(1, 20):
                await recorder.send()
                await recorder.wait_for(hook_failed=count)
                assert await recorder.fetch("/healthz") == (200, "ok\n")

    run(work)


def test_defect_of_the_hooks_test_does_not_end_the_maintenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline, "MAINTENANCE_SECONDS", 0.02)

    async def fail(_: object) -> None:
        raise RuntimeError("a message with a prompt")

    monkeypatch.setattr(hook_module.HookClient, "test", fail)
    old = tmp_path / "20260101T000000Z-00000000.jsonl"

    async def work() -> None:
        async with run_recorder(tmp_path, hook=Hook("http://127.0.0.1:1/redact", 1.0)):
            await asyncio.sleep(0.1)
            old.write_bytes(b"1\n")
            while old.exists():
                await asyncio.sleep(0.02)

    run(work)
    assert "A test of the hook caused a defect of Aerie (RuntimeError): report it." in caplog.text
    assert "a message" not in caplog.text


def test_storage_that_hangs_delays_nobody_and_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_thread, "STUCK_SECONDS", 0.1)
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


async def wait_for_health(recorder: RunningRecorder, status: int, text: str = "") -> None:
    """Return once the health has this status and a text with these words."""
    while (answer := await recorder.fetch("/healthz"))[0] != status or text not in answer[1]:
        await asyncio.sleep(0.02)


def test_store_that_hangs_delays_no_line_and_one_that_fails_is_reported_at_the_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "MAINTENANCE_SECONDS", 0.05)
    monkeypatch.setattr(objects, "_RETRIES", 0)

    async def work() -> None:
        with run_failing_store() as store:
            store.statuses["GET"] = 403
            async with run_recorder(tmp_path, bucket=store.bucket) as recorder:
                await wait_for_health(recorder, 503, "403 Forbidden")
                store.statuses.clear()
                await wait_for_health(recorder, 200)
                store.answers.clear()
                for count in range(1, 4 * MAX_IN_WORK):
                    await recorder.send()
                    await recorder.wait_for(recorded=count)
                store.statuses["GET"] = 500
                store.answers.set()
                while "aerie_recorder_storage_failures_total 0.0" in (await recorder.fetch("/metrics"))[1]:
                    await asyncio.sleep(0.02)
                assert (await recorder.fetch("/healthz"))[0] == 200
                monkeypatch.setattr(storage, "MAX_SPOOLED_BYTES", 0)
                await wait_for_health(recorder, 503, "wait for their upload")

    run(work)


@pytest.mark.parametrize("method", ["PUT", "POST", "GET"])
def test_uploads_or_deletions_that_fail_for_long_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(pipeline, "MAINTENANCE_SECONDS", 0.05)
    monkeypatch.setattr(objects, "_RETRIES", 0)

    async def wait_for_failures(recorder: RunningRecorder, count: int) -> None:
        while f"aerie_recorder_storage_failures_total {count}.0" not in (await recorder.fetch("/metrics"))[1]:
            await asyncio.sleep(0.01)

    async def work() -> None:
        with run_failing_store() as store:
            async with run_recorder(tmp_path, bucket=store.bucket) as recorder:
                await wait_for_health(recorder, 200)
                store.statuses[method] = 403
                store.objects["20260101T000000Z-00000000.jsonl"] = b"1\n"
                (tmp_path / "20260301T142000Z-00000000.jsonl").write_bytes(b"1\n")
                await wait_for_failures(recorder, 2)
                assert await recorder.fetch("/healthz") == (200, "ok\n")
                monkeypatch.setattr(pipeline, "MAX_UNKEPT_SECONDS", 0.2)
                await wait_for_health(recorder, 503, "Error: ")
                store.statuses.clear()
                await wait_for_health(recorder, 200)
                assert list(store.objects) == ["20260301T142000Z-00000000.jsonl"]

    run(work)


def test_store_that_hangs_for_long_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAINTENANCE_SECONDS", 0.05)
    monkeypatch.setattr(storage_thread, "STUCK_SECONDS", 0.1)

    async def work() -> None:
        with run_failing_store() as store:
            async with run_recorder(tmp_path, bucket=store.bucket) as recorder:
                await wait_for_health(recorder, 200)
                store.answers.clear()
                await asyncio.sleep(0.3)
                assert await recorder.fetch("/healthz") == (200, "ok\n")
                monkeypatch.setattr(pipeline, "MAX_UNKEPT_SECONDS", 0.2)
                await wait_for_health(recorder, 503, "an operation of the storage does not end")
                store.answers.set()
                await wait_for_health(recorder, 200)

    run(work)


def test_retention_goes_on_while_uploads_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAINTENANCE_SECONDS", 0.05)
    monkeypatch.setattr(objects, "_RETRIES", 0)
    (tmp_path / "20260301T140000Z-00000000.jsonl").write_bytes(b"1\n")

    async def work() -> None:
        with run_failing_store() as store:
            store.statuses["PUT"] = 403
            store.objects["20260101T000000Z-00000000.jsonl"] = b"1\n"
            async with run_recorder(tmp_path, bucket=store.bucket) as recorder:
                while store.objects:
                    await asyncio.sleep(0.02)
                await wait_for_health(recorder, 503, "PermissionDenied")

    run(work)


def test_maintenance_survives_an_unforeseen_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline, "MAINTENANCE_SECONDS", 0.05)

    def fail(_: PromptFolder) -> None:
        raise RuntimeError("a message with a prompt")

    async def work() -> None:
        async with run_recorder(tmp_path) as recorder:
            await wait_for_health(recorder, 200)
            monkeypatch.setattr(PromptFolder, "rotate", fail)
            await wait_for_health(recorder, 503, "a defect of Aerie: RuntimeError")
            monkeypatch.undo()
            await wait_for_health(recorder, 200)

    run(work)
    assert "a defect of Aerie: RuntimeError" in caplog.text
    assert "a message" not in caplog.text


def test_hook_that_hangs_at_the_end_keeps_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CLOSE_SECONDS", 2.0)
    received = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        document = await request.json()
        if document["messages"][0]["content"] == "hangs":
            received.set()
            await asyncio.sleep(30)
        return web.json_response(document)

    async def work() -> None:
        async with run_hook(handle, timeout=20) as hook, run_recorder(tmp_path, hook=hook) as recorder:
            await recorder.send()
            await recorder.wait_for(recorded=1)
            await recorder.send({"messages": [{"role": "user", "content": "hangs"}]})
            await received.wait()

    run(work)
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"]
    assert len(read_records(tmp_path)) == 1


def test_connection_beyond_the_limit_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)

    async def work() -> None:
        async with run_recorder(tmp_path) as recorder:
            port = int(recorder.url.rpartition(":")[2])
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(2):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    stack.callback(writer.close)
                    writer.write(b"POST")
                    await writer.drain()
                await asyncio.sleep(0.1)
                with pytest.raises(aiohttp.ClientConnectionError):
                    await recorder.send()
            await asyncio.sleep(0.1)
            assert await recorder.send() == 202
            await recorder.wait_for(recorded=1)

    run(work)


@contextlib.asynccontextmanager
async def recorder_with_all_connections_in_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningRecorder]:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    async with run_recorder(folder) as recorder, contextlib.AsyncExitStack() as stack:
        await wait_for_health(recorder, 200)
        await recorder.client.connector.close()  # type: ignore[union-attr]  # the client's own connection
        await asyncio.sleep(0.1)
        for _ in range(2):
            writer = await open_connection(recorder, stack)
            writer.write(b"POST")
            await writer.drain()
        await asyncio.sleep(0.1)
        yield recorder


async def open_connection(recorder: RunningRecorder, stack: contextlib.AsyncExitStack) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", int(recorder.url.rpartition(":")[2]))
    stack.callback(writer.close)
    return writer


async def probe(recorder: RunningRecorder) -> tuple[int, str]:
    async with aiohttp.ClientSession() as client, client.get(f"{recorder.url}/healthz") as response:
        return response.status, await response.text()


def test_readiness_probe_is_answered_while_all_connections_are_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with recorder_with_all_connections_in_use(tmp_path, monkeypatch) as recorder, contextlib.AsyncExitStack() as stack:
            assert await probe(recorder) == (200, "ok\n")
            silent = [await asyncio.open_connection("127.0.0.1", int(recorder.url.rpartition(":")[2])) for _ in range(40)]
            for _, writer in silent:
                stack.callback(writer.close)
            assert await probe(recorder) == (200, "ok\n")
            await asyncio.sleep(0.1)
            assert sum(not reader.at_eof() for reader, _ in silent) < server.PROBE_CONNECTIONS
            recorder.pipeline._writing.failure = "the volume is full"
            assert await probe(recorder) == (503, "the volume is full\n")

    run(work)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"G\r\n",
        b"GET /healthz HTTP/1.1\r\nA: " + b"a" * 5000,
    ],
)
def test_nothing_but_the_probe_is_answered_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_bytes: bytes
) -> None:
    async def work() -> None:
        async with recorder_with_all_connections_in_use(tmp_path, monkeypatch) as recorder:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(recorder.url.rpartition(":")[2]))
            writer.write(request_bytes)
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            assert answer == b""

    run(work)


def test_prompt_that_replacements_make_too_large_is_not_recorded(tmp_path: Path) -> None:
    async def work() -> None:
        async with run_recorder(tmp_path, {"[0-9]": "#" * 128}) as recorder:
            await recorder.send({"messages": [{"role": "user", "content": "1" * 900_000}]})
            await recorder.wait_for(too_large=1)
            await recorder.send({"messages": [{"role": "user", "content": "\x85" * 500_000}]})  # six bytes each, in a line
            await recorder.wait_for(too_large=2)

    run(work)
    assert read_records(tmp_path) == []


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
