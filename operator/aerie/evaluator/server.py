"""The HTTP endpoints.

    POST /v1/...            mirrored requests, on any host: answered with 202 before they are evaluated
    GET  /aerie/pairs       the counts, for the operator: bearer token, `process` and `after` acknowledge batches
    GET  /healthz           whether the process runs
    GET  /metrics           the counts for Prometheus

Guarantees: a request that exceeds the capacity is answered without its body being read or parsed. Whoever sends a malformed
request, nothing of it is logged. Not guaranteed: who sends the requests; a NetworkPolicy has to admit the gateway only.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from typing import Protocol

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from aerie.evaluator.batches import BatchLog
from aerie.evaluator.keyed_hash import KeyedHash
from aerie.evaluator.metrics import EvaluatorMetrics
from aerie.evaluator.pipeline import report_defect
from aerie.evaluator.requests import PATHS, SEED_BITS, ReplayRequest, ReplayRules, build_replay
from aerie.evaluator.skip_reasons import SkipReason
from aerie.request_body import BodyTooLargeError, IncompleteBodyError, read_body

MAX_REQUEST_BYTES = 1024 * 1024
"""Size limit of a mirrored request."""
BODY_TIMEOUT_SECONDS = 10.0
"""Limit for the arrival of a body."""

# The server logs errors with what the client has sent: headers, or a body where it expects a header.
_silent_log = logging.getLogger("aerie.evaluator.http")
_silent_log.disabled = True


class RequestSink(Protocol):
    """What becomes of requests that are received."""

    log: BatchLog

    async def try_admit(self) -> bool:
        """Admit a request that is to be read, and return True, or return False immediately."""

    def release(self) -> None:
        """Give up an admitted request."""

    def start(self, request: ReplayRequest) -> None:
        """Take over an admitted request."""


class Endpoints:
    """Handlers of the endpoints. `token`: the operator's; None: there are no pairs to fetch. `cluster_header`: name of the header
    that names a request's cluster."""

    def __init__(
        self,
        sink: RequestSink,
        metrics: EvaluatorMetrics,
        keyed_hash: KeyedHash,
        rules: ReplayRules,
        token: str | None,
        cluster_header: str,
    ) -> None:
        self._sink, self._metrics, self._keyed_hash, self._rules = sink, metrics, keyed_hash, rules
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._cluster_header = cluster_header

    def build_runner(self, accepts_requests: bool) -> web.AppRunner:
        """Return the server. `accepts_requests`: whether there are mirrored requests."""
        app = web.Application()
        if self._authorization is not None:
            app.router.add_get("/aerie/pairs", self._send_pairs)
        app.router.add_get("/healthz", self._send_health)
        app.router.add_get("/metrics", self._send_metrics)
        if accepts_requests:
            app.router.add_post("/v1/{rest:.*}", self._receive_request)
        return web.AppRunner(app, access_log=None, logger=_silent_log, shutdown_timeout=1.0)

    async def _receive_request(self, request: web.Request) -> web.Response:
        sink, log = self._sink, self._sink.log
        log.receive()
        if request.path not in PATHS:
            log.skip(SkipReason.UNSUPPORTED_PATH)
        elif (request.content_length or 0) > MAX_REQUEST_BYTES:
            log.skip(SkipReason.TOO_LARGE)
        elif not await sink.try_admit():
            log.drop()
        else:
            replay = await self._read_request(request)
            if isinstance(replay, SkipReason):
                log.skip(replay)
                sink.release()
            else:
                sink.start(replay)
        return web.Response(status=202)

    async def _read_request(self, request: web.Request) -> ReplayRequest | SkipReason:
        try:
            body = await read_body(request, MAX_REQUEST_BYTES, BODY_TIMEOUT_SECONDS)
            header = request.headers.get(self._cluster_header, "")
            return build_replay(request.path, body, header, secrets.randbits(SEED_BITS), self._rules, self._keyed_hash)
        except BodyTooLargeError:
            return SkipReason.TOO_LARGE
        except IncompleteBodyError:
            return SkipReason.INCOMPLETE
        except Exception as error:  # noqa: BLE001 - a defect; the text of an unforeseen error may quote the request
            return report_defect(error)

    async def _send_pairs(self, request: web.Request) -> web.Response:
        assert self._authorization is not None
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(errors="replace"), self._authorization):
            return web.json_response({"error": "send the bearer token of the evaluator's token file."}, status=401)
        after = request.query.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) < 19):
            return web.json_response(
                {"error": "after is no number: set the number of the last batch that is counted."}, status=400
            )
        return web.json_response(self._sink.log.fetch(request.query.get("process", ""), int(after)))

    async def _send_health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _send_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})
