"""Pods that respond to GET /metrics as no engine does: what a tenant can make the operator read.

    HOSTILE_RESPONSES[form]() ─► bytes of an HTTP response, piece by piece ─► serve(host, port, form), one server per pod

Each connection gets its form again from the beginning, as raw bytes, so that a form may violate HTTP as well as the exposition
format. A client that disconnects ends only its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
from collections.abc import AsyncGenerator, Callable, Mapping

from aerie_lab.engine.counters import Counters
from aerie_lab.engine.exposition import render_exposition

Form = Callable[[], AsyncGenerator[bytes, None]]
SIZE = 1024 * 1024
"""Bytes of a padded exposition."""
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"


@functools.cache
def honest(engines: int = 1, model: str = "meta-llama/Llama-3.3-70B-Instruct") -> bytes:
    """Return an exposition as vLLM writes it, with `engines` data-parallel ranks."""
    lines = render_exposition(Counters(131072, 3), model, 1.7e9).splitlines(keepends=True)
    of_engine = [line for line in lines if 'engine="0"' in line]
    ranks = [line.replace('engine="0"', f'engine="{rank}"') for rank in range(1, engines) for line in of_engine]
    return "".join([*lines, *ranks]).encode()


def filled(piece: bytes, head: bytes = b"", tail: bytes = b"\n", size: int = SIZE) -> bytes:
    """Return a body of almost `size` bytes."""
    return head + piece * ((size - len(head) - len(tail)) // len(piece)) + tail


def numbered(line: str, size: int = SIZE) -> bytes:
    """Return a valid exposition, followed by this line with successive numbers."""
    body, longest = honest(), len(line.format(10**6))
    return body + "".join(line.format(number) for number in range((size - len(body)) // longest)).encode()


PAGES: Mapping[str, Callable[[], bytes]] = {
    "labels": lambda: filled(b'a="",', b"vllm:cache_config_info{", b"} 1.0\n"),
    "escapes": lambda: filled(b'a="\\"",', b"vllm:generation_tokens_total{", b"} 1.0\n"),
    "reasons": lambda: numbered('vllm:request_success_total{{engine="0",finished_reason="{}"}} 1.0\n'),
    "engines": lambda: numbered('vllm:generation_tokens_total{{engine="{}"}} 1.0\n'),
    "positions": lambda: numbered('vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{}"}} 1.0\n'),
    "edges": lambda: numbered('vllm:time_to_first_token_seconds_bucket{{le="{}.5"}} 1.0\n'),
    "huge": lambda: honest() + b'vllm:prompt_tokens_total{engine="1"} 1e308\nvllm:prompt_tokens_total{engine="2"} 1e308\n',
    "nan": lambda: honest() + b'vllm:prompt_tokens_total{engine="1"} NaN\n',
    "digits": lambda: filled(b"9", b'vllm:prompt_tokens_total{engine="1"} '),
    "families": lambda: honest() * (SIZE // len(honest())),
    "ranks": lambda: honest(16, "m" * 24),
    "newlines": lambda: filled(b"\n"),
    "names": lambda: filled(b"vllm:\n"),
    "sums": lambda: filled(b"vllm:prompt_tokens_total{} 1\n"),
    "line": lambda: filled(b"x"),
    "cut": lambda: honest()[:-9],
}
"""Bodies of complete responses."""


def whole(body: Callable[[], bytes], headers: bytes = b"") -> Form:
    """Return a response with this body."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        content = body()
        yield _OK + headers + b"Content-Length: %d\r\n\r\n" % len(content)
        yield content

    return pieces


def endless(piece: bytes, head: bytes = _OK + b"\r\n", seconds: float = 0.0) -> Form:
    """Return a response that never ends, with a piece every `seconds` seconds."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield head
        while True:
            yield piece
            await asyncio.sleep(seconds)

    return pieces


async def _late() -> AsyncGenerator[bytes, None]:
    await asyncio.sleep(4.9)
    async for piece in whole(honest)():
        yield piece


async def _silent() -> AsyncGenerator[bytes, None]:
    yield b""
    await asyncio.sleep(3600)


async def _closed() -> AsyncGenerator[bytes, None]:
    yield b""


_BOMB = gzip.compress(b"#" * (64 * SIZE), 9)
HOSTILE_RESPONSES: Mapping[str, Form] = {
    **{name: whole(body) for name, body in PAGES.items()},
    "gzip": whole(lambda: _BOMB, b"Content-Encoding: gzip\r\n"),
    "endless-line": endless(b"x" * 65536),
    "endless-page": endless(b"# HELP\n" * 9000),
    "drip": endless(b"#", seconds=0.05),
    "chunks": endless(b"1\r\n#\r\n" * 9000, _OK + b"Transfer-Encoding: chunked\r\n\r\n"),
    "chunk-size": endless(b"0" * 65536, _OK + b"Transfer-Encoding: chunked\r\n\r\n"),
    "interim": endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 2000, b""),
    "headers": endless(b"a:\r\n" * 9000, _OK),
    "header": endless(b"a" * 65536, _OK + b"A: "),
    "late": _late,
    "silent": _silent,
    "closed": _closed,
}
"""Complete responses, by the name of the form."""


async def serve(host: str, port: int, form: str) -> asyncio.Server:
    """Start a server that sends this response to each request until it is closed; port 0 for any."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            async with contextlib.aclosing(HOSTILE_RESPONSES[form]()) as pieces:
                async for piece in pieces:
                    writer.write(piece)
                    await writer.drain()

    return await asyncio.start_server(answer, host, port)
