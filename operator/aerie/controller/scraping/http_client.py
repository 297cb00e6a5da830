"""HTTP/1.1 to untrusted servers: one request, one answer, one connection, and limits on everything that a server may send.

It is a transport for httpx, in place of its own. That one accepts headers, interim answers and chunks in any number, and
processes what has arrived of them at once. A server could thus block the event loop for a third of a second with each 64 KiB that
it sends.

Guarantees: a head has at most `MAX_HEAD_BYTES` bytes and `MAX_HEADER_LINES` lines, and is the final one. A body ends where its
length says, or has at most `MAX_BODY_CHUNKS` chunks. Whatever a server sends, the event loop continues after 64 KiB of it or 64
chunks. No error message quotes an answer. Not guaranteed: limits on the time and the size of a body, which the reader of the
answer sets (http_fetch.py).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator

import httpx

CONNECT_TIMEOUT_SECONDS = 2.0
"""Timeout of the connection, including TLS."""
MAX_HEAD_BYTES = 16 * 1024
MAX_HEADER_LINES = 100
READ_CHUNK_BYTES = 64 * 1024
MAX_BODY_CHUNKS = 4096
"""Maximum chunks of one answer; 2 MiB from a server that writes 2 KiB at a time are 1,024."""
_CHUNKS_PER_LOOP_TURN = 64
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([2-5][0-9][0-9])(?: [^\r\n]*)?")
_CHUNK_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]{0,64})?\r\n")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,12}")


class LimitedHttpTransport(httpx.AsyncBaseTransport):
    """Transport with limits. Without a `tls_context`, which verifies servers with https, it supports plain HTTP only."""

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
            raise httpx.RemoteProtocolError("the response head is too long", request=request) from None
        except (OSError, EOFError):
            writer.transport.abort()
            raise httpx.ReadError("the connection ended before the response", request=request) from None
        except BaseException:
            writer.transport.abort()
            raise

    async def _connect(self, request: httpx.Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url, uses_tls = request.url, request.url.scheme == "https"
        if uses_tls and self._tls_context is None:
            raise httpx.UnsupportedProtocol("https needs CA certificates", request=request)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                return await asyncio.open_connection(
                    url.host,
                    url.port or (443 if uses_tls else 80),
                    ssl=self._tls_context if uses_tls else None,
                    limit=MAX_HEAD_BYTES,
                )
        except TimeoutError:
            raise httpx.ConnectTimeout("no connection in time", request=request) from None
        except OSError as error:  # TLS errors too; the message is from this machine's libraries
            raise httpx.ConnectError(str(error), request=request) from error


class _ResponseStream(httpx.AsyncByteStream):
    """Body of an answer. Closing it ends the connection."""

    def __init__(self, writer: asyncio.StreamWriter, chunks: AsyncIterator[bytes]) -> None:
        self._writer, self._chunks = writer, chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks:
                yield chunk
        except (OSError, EOFError):
            raise httpx.ReadError("the connection ended in the middle of the response") from None
        except asyncio.LimitOverrunError:
            raise httpx.RemoteProtocolError("a chunk is malformed") from None

    async def aclose(self) -> None:
        self._writer.transport.abort()


def _build_request_head(request: httpx.Request) -> bytes:
    lines = [f"{request.method} ".encode() + request.url.raw_path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join([*lines, b"", b""])


def _parse_response_head(head: bytes) -> tuple[int, httpx.Headers]:
    status_line, *lines = head[:-4].split(b"\r\n", MAX_HEADER_LINES + 1)
    status = _STATUS_LINE.fullmatch(status_line)
    if status is None:
        raise httpx.RemoteProtocolError("the first line is not a final HTTP status")
    if len(lines) > MAX_HEADER_LINES:
        raise httpx.RemoteProtocolError("there are too many headers")
    pairs = [line.partition(b":") for line in lines]
    return int(status[1]), httpx.Headers([(name.strip(), value.strip()) for name, _, value in pairs])


async def _read_body(reader: asyncio.StreamReader, headers: httpx.Headers) -> AsyncIterator[bytes]:
    if "transfer-encoding" in headers:
        if headers["transfer-encoding"].lower() != "chunked":
            raise httpx.RemoteProtocolError("the transfer encoding is unknown")
        async for chunk in _read_chunked_body(reader):
            yield chunk
    elif "content-length" in headers:
        if not _CONTENT_LENGTH.fullmatch(headers["content-length"]):
            raise httpx.RemoteProtocolError("the content length is not a number")
        async for chunk in _read_exactly(reader, int(headers["content-length"])):
            yield chunk
    else:
        while chunk := await reader.read(READ_CHUNK_BYTES):
            yield chunk


async def _read_exactly(reader: asyncio.StreamReader, byte_count: int) -> AsyncIterator[bytes]:
    while byte_count:
        chunk = await reader.read(min(byte_count, READ_CHUNK_BYTES))
        if not chunk:
            raise EOFError
        byte_count -= len(chunk)
        yield chunk


async def _read_chunked_body(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    for chunk_number in range(MAX_BODY_CHUNKS):
        if chunk_number % _CHUNKS_PER_LOOP_TURN == 0:
            await asyncio.sleep(0)  # reads of buffered data do not yield
        size_line = _CHUNK_SIZE_LINE.fullmatch(await reader.readuntil(b"\r\n"))
        if size_line is None:
            raise httpx.RemoteProtocolError("a chunk is malformed")
        chunk_size = int(size_line[1], 16)
        if chunk_size == 0:
            return
        async for chunk in _read_exactly(reader, chunk_size):
            yield chunk
        if await reader.readexactly(2) != b"\r\n":
            raise httpx.RemoteProtocolError("a chunk is malformed")
    raise httpx.RemoteProtocolError("there are too many chunks")
