"""Fetch of a metrics response over the network, from servers that are correct, slow, broken or hostile."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from pathlib import Path

import pytest
from aiohttp import web

from aerie.controller.scraping import http_fetch
from aerie.engine.metrics.exposition import ExpositionError, parse_exposition
from benchmarks._hostile_pods import serve
from tests.golden import Messages

from .served import Handler, serve_http

pytestmark = pytest.mark.usefixtures("long_timeouts")
EXPOSITION = (Path(__file__).parents[1] / "engine" / "data" / "vllm-0.32.0-ngram-1.prom").read_bytes()


def fetch_from(handle: Handler, path: str = "/metrics") -> bytes:
    """Fetch the body from a server with this handler."""

    async def fetch() -> bytes:
        async with serve_http("GET", "/metrics", handle) as url, http_fetch.create_http_client() as client:
            return await http_fetch.fetch_metrics(client, f"{url}{path}")

    return asyncio.run(fetch())


def assert_fetch_fails(reason: str, handle: Handler) -> None:
    with pytest.raises(http_fetch.ScrapeError) as failure:
        fetch_from(handle)
    assert failure.value.reason == reason


async def serve_exposition(request: web.Request) -> web.Response:
    assert request.headers["Accept"] == "text/plain"
    assert request.headers["Accept-Encoding"] == "identity"
    return web.Response(body=EXPOSITION, content_type="text/plain")


def test_response_of_vllm_is_fetched() -> None:
    assert fetch_from(serve_exposition) == EXPOSITION


def test_error_status_is_rejected() -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(status=500, body=EXPOSITION)

    assert_fetch_fails("status", handle)


def test_a_redirect_is_not_followed() -> None:
    async def handle(_: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/")

    assert_fetch_fails("status", handle)


def test_endless_response_is_too_large() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"# a comment\n" * 10_000)

    assert_fetch_fails("too_large", handle)


def test_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "HTTP_RESPONSE_TIMEOUT_SECONDS", 0.3)

    async def handle(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    assert_fetch_fails("timeout", handle)


def test_trickling_response_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "HTTP_RESPONSE_TIMEOUT_SECONDS", 0.5)

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"#\n")
            await asyncio.sleep(0.01)

    assert_fetch_fails("timeout", handle)


def test_truncated_response_is_invalid() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(EXPOSITION))})
        await response.prepare(request)
        await response.write(EXPOSITION[:1000])
        assert request.transport is not None
        request.transport.close()
        return response

    assert_fetch_fails("invalid_response", handle)


@pytest.mark.parametrize(
    "body", [b"", b"\x00\xff garbage \n", b"<html>\n", gzip.compress(EXPOSITION)], ids=["empty", "bytes", "html", "gzip"]
)
def test_invalid_body_is_fetched_and_not_parsed(body: bytes) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=body)

    with pytest.raises(ExpositionError):
        parse_exposition(fetch_from(handle))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("chunks", "invalid_response"),
        ("chunk-size", "invalid_response"),
        ("interim", "invalid_response"),
        ("headers", "invalid_response"),
        ("header", "invalid_response"),
        ("closed", "invalid_response"),
        ("gzip", "invalid_response"),
        ("endless-line", "too_large"),
        ("endless-page", "too_large"),
    ],
)
def test_malformed_response_is_reported_without_its_content(messages: Messages, form: str, reason: str) -> None:
    async def run() -> str:
        server = await serve("127.0.0.1", 0, form)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
        async with server, http_fetch.create_http_client() as client:
            with pytest.raises(http_fetch.ScrapeError) as failure:
                await http_fetch.fetch_metrics(client, url)
        assert failure.value.reason == reason
        return str(failure.value).removeprefix(url).strip()

    messages.check(form, asyncio.run(run()))


@pytest.mark.parametrize("form", ["drip", "silent"])
def test_slow_response_times_out(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "HTTP_RESPONSE_TIMEOUT_SECONDS", 0.3)

    async def run() -> None:
        server = await serve("127.0.0.1", 0, form)
        async with server, http_fetch.create_http_client() as client:
            await http_fetch.fetch_metrics(client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics")

    with pytest.raises(http_fetch.ScrapeError) as failure:
        asyncio.run(run())
    assert failure.value.reason == "timeout"


RAW = [
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nab\n\r\nA\r\n0123456789\r\n0\r\n\r\n", b"ab\n0123456789"),
    (b"HTTP/1.0 200\r\n\r\nuntil the end\n", b"until the end\n"),
    (b"HTTP/1.1 200 OK\r\ncontent-length:4\r\n\r\nabc\nand more", b"abc\n"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc\n", None),
    (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nabc\n", None),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 4\r\n\r\nabc\n", None),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", None),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", None),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n", None),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", None),
    (b"HTTP/2 200 OK\r\n\r\n", None),
    (b"HTTP/1.1 200 OK\r\nContent-Le", None),
]


@pytest.mark.parametrize(("raw_response", "body"), RAW, ids=range(len(RAW)))
def test_body_ends_where_its_headers_state(raw_response: bytes, body: bytes | None) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            for offset in range(0, len(raw_response), 7):  # however it is cut
                writer.write(raw_response[offset : offset + 7])
                await writer.drain()
                await asyncio.sleep(0)

    async def run() -> bytes:
        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        async with server, http_fetch.create_http_client() as client:
            return await http_fetch.fetch_metrics(client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics")

    if body is not None:
        assert asyncio.run(run()) == body
        return
    with pytest.raises(http_fetch.ScrapeError) as failure:
        asyncio.run(run())
    assert failure.value.reason == "invalid_response"


def test_closed_port_is_unreachable() -> None:
    with socket.socket() as bound_socket:  # bound and not listening: nobody else can take the port meanwhile
        bound_socket.bind(("127.0.0.1", 0))
        port = bound_socket.getsockname()[1]

        async def fetch() -> None:
            async with http_fetch.create_http_client() as client:
                await http_fetch.fetch_metrics(client, f"http://127.0.0.1:{port}/metrics")

        with pytest.raises(http_fetch.ScrapeError) as failure:
            asyncio.run(fetch())
    assert failure.value.reason == "unreachable"


def test_response_that_is_not_http_is_invalid() -> None:
    async def fetch() -> None:
        async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-none\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server, http_fetch.create_http_client() as client:
            port = server.sockets[0].getsockname()[1]
            await http_fetch.fetch_metrics(client, f"http://127.0.0.1:{port}/metrics")

    with pytest.raises(http_fetch.ScrapeError) as failure:
        asyncio.run(fetch())
    assert failure.value.reason == "invalid_response"
