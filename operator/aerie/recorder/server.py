"""The HTTP endpoints.

    POST /v1/...     mirrored requests, on any host: answered with 202 before they are recorded
    GET  /healthz    200 while prompts can be stored and deleted; else 503
    GET  /metrics    counts for Prometheus

Guarantees: a request that is not recorded is answered without its body being read or parsed. Headers are not used. Whoever sends
a malformed request, nothing of it is logged. Memory for what arrives is bounded by MAX_CONNECTIONS and RECEIVED_BYTES: of a
further connection, GET /healthz alone is answered, and its copies are lost. Not guaranteed: who sends the requests; a
NetworkPolicy has to admit the gateway only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from aerie.recorder.pipeline import Pipeline
from aerie.recorder.prompts import CHAT_PATH
from aerie.recorder.sampling import Sampler
from aerie.recorder.skip_reasons import SkipReason
from aerie.request_body import BodyTooLargeError, IncompleteBodyError, read_body

MAX_REQUEST_BYTES = 1024 * 1024
"""Size limit of a mirrored request."""
BODY_TIMEOUT_SECONDS = 10.0
"""Limit for the arrival of a body."""
MAX_CONNECTIONS = 1024
"""Open connections: as many as Envoy has to a Service by default."""
PROBE_CONNECTIONS = 16
"""Connections beyond these, for the readiness probe; a further one replaces the oldest."""
RECEIVED_BYTES = 16 * 1024
"""Bytes of a connection that are in a buffer of the kernel, and in one of the process, before they are read."""
IDLE_SECONDS = 30.0
"""Time after which a connection without a request is closed."""

# The server logs errors with what the client has sent: headers, or a body where it expects a header.
_silent_log = logging.getLogger("aerie.recorder.http")
_silent_log.disabled = True


class Endpoints:
    """Handlers of the endpoints. `clock`: seconds; `draw`: random numbers from 0 to below 1."""

    def __init__(
        self, pipeline: Pipeline, sampler: Sampler, clock: Callable[[], float], draw: Callable[[], float] = random.random
    ) -> None:
        self._pipeline, self._sampler, self._clock, self._draw = pipeline, sampler, clock, draw

    @contextlib.asynccontextmanager
    async def serve(self, host: str | None, port: int) -> AsyncIterator[None]:
        """Serve within the block. `host`: address to listen on; None for all. Raises OSError."""
        app = web.Application()
        app.router.add_get("/healthz", self._send_health)
        app.router.add_get("/metrics", self._send_metrics)
        app.router.add_post("/v1/{rest:.*}", self._receive_request)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_silent_log,
            shutdown_timeout=1.0,
            keepalive_timeout=IDLE_SECONDS,
            read_bufsize=RECEIVED_BYTES,
        )
        await runner.setup()
        server = runner.server
        assert server is not None
        probes: deque[_ProbeConnection] = deque()

        def accept() -> asyncio.BaseProtocol:
            return server() if len(server.connections) < MAX_CONNECTIONS else _ProbeConnection(self._describe_health, probes)

        try:
            # Not by a site of aiohttp, which accepts any number of connections, with buffers of any size.
            listener = await asyncio.get_running_loop().create_server(accept, host, port)
            for listening in listener.sockets:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_BYTES)  # those that it accepts inherit it
            try:
                yield
            finally:
                listener.close()
                for probe in tuple(probes):
                    probe.abort()
        finally:
            await runner.cleanup()

    async def _receive_request(self, request: web.Request) -> web.Response:
        self._pipeline.metrics.received.inc()
        reason = await self._take_request(request)
        if reason is not None:
            self._pipeline.metrics.skip(reason)
        return web.Response(status=202)

    async def _take_request(self, request: web.Request) -> SkipReason | None:
        """Return why the request is not taken over; None if it is."""
        if request.path != CHAT_PATH:
            return SkipReason.UNSUPPORTED_PATH
        if (request.content_length or 0) > MAX_REQUEST_BYTES:
            return SkipReason.TOO_LARGE
        reason = self._sampler.admit(self._draw(), self._clock())
        if reason is not None:
            return reason
        if not self._pipeline.try_admit():
            return SkipReason.BUSY
        try:
            body = await read_body(request, MAX_REQUEST_BYTES, BODY_TIMEOUT_SECONDS)
        except BaseException as error:
            self._pipeline.release()
            if isinstance(error, BodyTooLargeError):
                return SkipReason.TOO_LARGE
            if isinstance(error, IncompleteBodyError):
                return SkipReason.INCOMPLETE
            raise
        self._pipeline.start(body)
        return None

    async def _send_health(self, _request: web.Request) -> web.Response:
        status, text = self._describe_health()
        return web.Response(status=status, text=text)

    def _describe_health(self) -> tuple[int, str]:
        problem = self._pipeline.problem
        return 503 if problem else 200, f"{problem or 'ok'}\n"

    async def _send_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._pipeline.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})


class _ProbeConnection(asyncio.Protocol):
    """A connection that is closed with the answer to GET /healthz, or at the first byte of another request."""

    _BEGINNING = b"GET /healthz HTTP/1."
    _MAX_HEAD_BYTES = 4096

    def __init__(self, describe_health: Callable[[], tuple[int, str]], open_ones: deque[_ProbeConnection]) -> None:
        self._describe_health, self._open_ones = describe_health, open_ones
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._open_ones) >= PROBE_CONNECTIONS:
            self._open_ones.popleft().abort()
        self._open_ones.append(self)

    def data_received(self, data: bytes) -> None:
        self._head += data
        if self._head[: len(self._BEGINNING)] != self._BEGINNING[: len(self._head)] or len(self._head) > self._MAX_HEAD_BYTES:
            self.abort()
        elif b"\r\n\r\n" in self._head:
            status, text = self._describe_health()
            fields = f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(text.encode())}\r\nConnection: close"
            self._transport.write(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{fields}\r\n\r\n{text}".encode())
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if self in self._open_ones:
            self._open_ones.remove(self)

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()
