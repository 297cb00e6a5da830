"""The HTTP endpoints.

    POST /v1/...     mirrored requests, on any host: answered with 202 before they are recorded
    GET  /healthz    200 while prompts can be stored; else 503
    GET  /metrics    counts for Prometheus

Guarantees: a request that is not recorded is answered without its body being read or parsed. Headers are not used. Whoever sends
a malformed request, nothing of it is logged. Not guaranteed: who sends the requests; a NetworkPolicy has to admit the gateway
only.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

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

# The server logs errors with what the client has sent: headers, or a body where it expects a header.
_silent_log = logging.getLogger("aerie.recorder.http")
_silent_log.disabled = True


class Endpoints:
    """Handlers of the endpoints. `clock`: seconds; `draw`: random numbers from 0 to below 1."""

    def __init__(
        self, pipeline: Pipeline, sampler: Sampler, clock: Callable[[], float], draw: Callable[[], float] = random.random
    ) -> None:
        self._pipeline, self._sampler, self._clock, self._draw = pipeline, sampler, clock, draw

    def build_runner(self) -> web.AppRunner:
        """Return the server."""
        app = web.Application()
        app.router.add_get("/healthz", self._send_health)
        app.router.add_get("/metrics", self._send_metrics)
        app.router.add_post("/v1/{rest:.*}", self._receive_request)
        return web.AppRunner(app, access_log=None, logger=_silent_log, shutdown_timeout=1.0)

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
        problem = self._pipeline.storage_problem
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

    async def _send_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._pipeline.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})
