"""HTTP/1.1 to servers that nobody vouches for: one request, one answer, one connection, limits on all that a server may send.

A transport for httpx, in place of its own: that one takes headers, interim answers and chunks in any number, and works through
what it has of them in one go, which lets a server hold the event loop for a third of a second with each 64 KiB that it sends.

Guarantees: a head has at most `HEAD` bytes and `HEADERS` lines and is the final one; a body ends where its length says, or comes
in `CHUNKS` chunks at most; whatever a server sends, the loop goes on after 64 KiB of it or 64 chunks. An error's message has no
byte of an answer in it. Not guaranteed: a limit in time and in the size of a body, which who reads the answer sets (fetch.py).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator

import httpx

CONNECT_TIMEOUT_SECONDS = 2.0
"""For a connection, with TLS."""
MAX_HEAD_BYTES, MAX_HEADER_LINES = 16 * 1024, 100
READ_CHUNK_BYTES = 64 * 1024
MAX_BODY_CHUNKS = 4096
"""Of one answer: 2 MiB from a server that writes 2 KiB at a time are 1,024."""
_CHUNKS_PER_LOOP_TURN = 64
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([2-5][0-9][0-9])(?: [^\r\n]*)?")
_CHUNK_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]{0,64})?\r\n")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,12}")


class LimitedHttpTransport(httpx.AsyncBaseTransport):
    """See the module. `authorities` vouch for servers with https; without any, it is for plain HTTP alone."""

    def __init__(self, tls_context: ssl.SSLContext | None = None) -> None:
        self._tls_context = tls_context

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        reader, writer = await self._connect(request)
        try:
            writer.write(_build_request_head(request) + await request.aread())
            status, headers = _parse_response_head(await reader.readuntil(b"\r\n\r\n"))
            return httpx.Response(status, headers=headers, stream=_ResponseStream(writer, _read_body(reader, headers)))
        except asyncio.LimitOverrunError:
            writer.transport.abort()
            raise httpx.RemoteProtocolError("its head is too long", request=request) from None
        except (OSError, EOFError):
            writer.transport.abort()
            raise httpx.ReadError("the connection ended before the answer", request=request) from None
        except BaseException:
            writer.transport.abort()
            raise

    async def _connect(self, request: httpx.Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url, secure = request.url, request.url.scheme == "https"
        if secure and self._tls_context is None:
            raise httpx.UnsupportedProtocol("https needs authorities", request=request)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                return await asyncio.open_connection(
                    url.host,
                    url.port or (443 if secure else 80),
                    ssl=self._tls_context if secure else None,
                    limit=MAX_HEAD_BYTES,
                )
        except TimeoutError:
            raise httpx.ConnectTimeout("no connection in time", request=request) from None
        except OSError as error:  # of TLS too; its words are those of this machine's libraries
            raise httpx.ConnectError(str(error), request=request) from error


class _ResponseStream(httpx.AsyncByteStream):
    """What follows a head; closing it ends the connection."""

    def __init__(self, writer: asyncio.StreamWriter, chunks: AsyncIterator[bytes]) -> None:
        self._writer, self._chunks = writer, chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._chunks:
                yield piece
        except (OSError, EOFError):
            raise httpx.ReadError("the connection ended in the middle of the answer") from None
        except asyncio.LimitOverrunError:
            raise httpx.RemoteProtocolError("its chunks are none") from None

    async def aclose(self) -> None:
        self._writer.transport.abort()


def _build_request_head(request: httpx.Request) -> bytes:
    lines = [f"{request.method} ".encode() + request.url.raw_path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join([*lines, b"", b""])


def _parse_response_head(head: bytes) -> tuple[int, httpx.Headers]:
    first, *lines = head[:-4].split(b"\r\n", MAX_HEADER_LINES + 1)
    status = _STATUS_LINE.fullmatch(first)
    if status is None:
        raise httpx.RemoteProtocolError("its first line is no final status of HTTP")
    if len(lines) > MAX_HEADER_LINES:
        raise httpx.RemoteProtocolError("its headers are too many")
    pairs = [line.partition(b":") for line in lines]
    return int(status[1]), httpx.Headers([(name.strip(), value.strip()) for name, _, value in pairs])


async def _read_body(reader: asyncio.StreamReader, headers: httpx.Headers) -> AsyncIterator[bytes]:
    if "transfer-encoding" in headers:
        if headers["transfer-encoding"].lower() != "chunked":
            raise httpx.RemoteProtocolError("its transfer encoding is none that is known")
        async for piece in _read_chunked_body(reader):
            yield piece
    elif "content-length" in headers:
        if not _CONTENT_LENGTH.fullmatch(headers["content-length"]):
            raise httpx.RemoteProtocolError("its length is no number")
        async for piece in _read_exactly(reader, int(headers["content-length"])):
            yield piece
    else:
        while piece := await reader.read(READ_CHUNK_BYTES):
            yield piece


async def _read_exactly(reader: asyncio.StreamReader, byte_count: int) -> AsyncIterator[bytes]:
    while byte_count:
        piece = await reader.read(min(byte_count, READ_CHUNK_BYTES))
        if not piece:
            raise EOFError
        byte_count -= len(piece)
        yield piece


async def _read_chunked_body(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    for number in range(MAX_BODY_CHUNKS):
        if number % _CHUNKS_PER_LOOP_TURN == 0:
            await asyncio.sleep(0)  # what is there already is read without a pause
        size = _CHUNK_SIZE_LINE.fullmatch(await reader.readuntil(b"\r\n"))
        if size is None:
            raise httpx.RemoteProtocolError("its chunks are none")
        left = int(size[1], 16)
        if left == 0:
            return
        async for piece in _read_exactly(reader, left):
            yield piece
        if await reader.readexactly(2) != b"\r\n":
            raise httpx.RemoteProtocolError("its chunks are none")
    raise httpx.RemoteProtocolError("its chunks are too many")
