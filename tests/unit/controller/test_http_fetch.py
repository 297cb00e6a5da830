"""One metrics page over the network, from servers that behave and from others."""

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

from .served import Answer, served

pytestmark = pytest.mark.usefixtures("patient")
PAGE = (Path(__file__).parents[1] / "engine" / "data" / "vllm-0.32.0-ngram-1.prom").read_bytes()


def got(answer: Answer, path: str = "/metrics") -> bytes:
    """What is fetched from a server that answers so."""

    async def run() -> bytes:
        async with served("GET", "/metrics", answer) as url, http_fetch.create_http_client() as through:
            return await http_fetch.fetch_metrics(through, f"{url}{path}")

    return asyncio.run(run())


def fails(reason: str, answer: Answer) -> None:
    with pytest.raises(http_fetch.ScrapeError) as failure:
        got(answer)
    assert failure.value.reason == reason


async def page(request: web.Request) -> web.Response:
    assert request.headers["Accept"] == "text/plain"
    assert request.headers["Accept-Encoding"] == "identity"
    return web.Response(body=PAGE, content_type="text/plain")


def test_a_page_as_vllm_serves_it() -> None:
    assert got(page) == PAGE


def test_another_status_than_200() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=500, body=PAGE)

    fails("status", answer)


def test_a_redirect_is_not_followed() -> None:
    async def answer(_: web.Request) -> web.Response:
        raise web.HTTPFound("http://127.0.0.1:1/")

    fails("status", answer)


def test_a_page_without_end() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"# a comment\n" * 10_000)

    fails("too_large", answer)


def test_a_page_that_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "HTTP_RESPONSE_TIMEOUT_SECONDS", 0.3)

    async def answer(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    fails("timeout", answer)


def test_a_page_that_trickles_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "HTTP_RESPONSE_TIMEOUT_SECONDS", 0.5)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"#\n")
            await asyncio.sleep(0.01)

    fails("timeout", answer)


def test_a_page_that_is_cut() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(PAGE))})
        await response.prepare(request)
        await response.write(PAGE[:1000])
        assert request.transport is not None
        request.transport.close()
        return response

    fails("invalid_response", answer)


@pytest.mark.parametrize(
    "body", [b"", b"\x00\xff garbage \n", b"<html>\n", gzip.compress(PAGE)], ids=["empty", "bytes", "html", "gzip"]
)
def test_garbage_is_fetched_and_refused_as_a_page(body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body)

    with pytest.raises(ExpositionError):
        parse_exposition(got(answer))


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
def test_servers_that_send_without_end_are_left_in_words_that_are_not_theirs(messages: Messages, form: str, reason: str) -> None:
    async def run() -> str:
        server = await serve("127.0.0.1", 0, form)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
        async with server, http_fetch.create_http_client() as through:
            with pytest.raises(http_fetch.ScrapeError) as failure:
                await http_fetch.fetch_metrics(through, url)
        assert failure.value.reason == reason
        return str(failure.value).removeprefix(url).strip()

    messages.check(form, asyncio.run(run()))


@pytest.mark.parametrize("form", ["drip", "silent"])
def test_servers_that_take_their_time_are_left_when_it_is_over(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetch, "HTTP_RESPONSE_TIMEOUT_SECONDS", 0.3)

    async def run() -> None:
        server = await serve("127.0.0.1", 0, form)
        async with server, http_fetch.create_http_client() as through:
            await http_fetch.fetch_metrics(through, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics")

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


@pytest.mark.parametrize(("sent", "body"), RAW, ids=range(len(RAW)))
def test_where_a_body_ends(sent: bytes, body: bytes | None) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            for at in range(0, len(sent), 7):  # however it is cut
                writer.write(sent[at : at + 7])
                await writer.drain()
                await asyncio.sleep(0)

    async def run() -> bytes:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, http_fetch.create_http_client() as through:
            return await http_fetch.fetch_metrics(through, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics")

    if body is not None:
        assert asyncio.run(run()) == body
        return
    with pytest.raises(http_fetch.ScrapeError) as failure:
        asyncio.run(run())
    assert failure.value.reason == "invalid_response"


def test_nobody_listens() -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else can take the port meanwhile
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        async def run() -> None:
            async with http_fetch.create_http_client() as through:
                await http_fetch.fetch_metrics(through, f"http://127.0.0.1:{port}/metrics")

        with pytest.raises(http_fetch.ScrapeError) as failure:
            asyncio.run(run())
    assert failure.value.reason == "unreachable"


def test_what_speaks_no_http() -> None:
    async def run() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-none\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, http_fetch.create_http_client() as through:
            port = server.sockets[0].getsockname()[1]
            await http_fetch.fetch_metrics(through, f"http://127.0.0.1:{port}/metrics")

    with pytest.raises(http_fetch.ScrapeError) as failure:
        asyncio.run(run())
    assert failure.value.reason == "invalid_response"
