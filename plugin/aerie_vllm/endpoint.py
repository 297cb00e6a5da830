"""The endpoint under `/aerie/`: an ASGI middleware for vLLM's `--middleware aerie_vllm.endpoint.DrafterEndpoint`.

| call | meaning |
|---|---|
| GET `/aerie/drafter?after=N` | what is loaded, and the windows numbered above N (without `after`: the current one) |
| PUT `/aerie/drafter` | load a drafter: `requests.ChangeRequest` |
| DELETE `/aerie/drafter` | return to the own drafter, and end the isolation |
| POST `/aerie/drafter/prepare` | fetch, hash and check a drafter: `requests.DrafterSource`; 202 until it is prepared, then 200 |
| POST `/aerie/drafter/lease` | renew the lease: `requests.LeaseRequest` |
| POST `/aerie/isolation` | isolate the pod from users for `lease_seconds`; a change with `isolated` renews that |
| GET `/aerie/ready` | 200 if the engine lives, has the drafter that it should have, and is not isolated; needs no token |

All answers are JSON objects; an error has `reason` and `message`, but that of `/aerie/ready` only the reason, because a route
may lead strangers there, and of an isolated pod the current turn, by which the evaluator repeats requests. The message is in
GET `/aerie/drafter` (`problem`) and in the log. Without `AERIE_DRAFTER_TOKEN_FILE` the middleware does nothing.

Guarantees: all other requests and their answers pass unchanged. The token is compared before a body is read; a body has at most
`MAX_BODY_BYTES` and has to arrive within `BODY_SECONDS`. A change runs to its end also if the client disconnects. No call raises
into vLLM's application. Not guaranteed: a limit of the rate of calls; a network policy admits only the operator.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import REGISTRY, CollectorRegistry

from aerie_vllm.control import DrafterControl, Durations
from aerie_vllm.counters import read_counts
from aerie_vllm.engine import Engine
from aerie_vllm.metrics import DrafterCollector, Metrics
from aerie_vllm.rejection import EndpointError, RejectionError
from aerie_vllm.requests import parse_change, parse_isolation, parse_lease, parse_preparation
from aerie_vllm.settings import Settings
from aerie_vllm.source_reader import ReadSource, read_source

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 64 * 1024
BODY_SECONDS = 10.0
SHUTDOWN_SECONDS = 30.0
"""Longest wait of the server's end for a swap in progress."""
_PREFIX, _DRAFTER, _LEASE, _READY = "/aerie/", "/aerie/drafter", "/aerie/drafter/lease", "/aerie/ready"
_PREPARE, _ISOLATION = "/aerie/drafter/prepare", "/aerie/isolation"
_METHODS = {
    _DRAFTER: ("GET", "PUT", "DELETE"),
    _LEASE: ("POST",),
    _PREPARE: ("POST",),
    _ISOLATION: ("POST",),
    _READY: ("GET",),
}
_log = logging.getLogger(f"vllm.{__name__}")


class DrafterEndpoint:
    """The middleware; vLLM creates it once for each server."""

    def __init__(
        self,
        app: Application,
        *,
        registry: CollectorRegistry = REGISTRY,
        settings: Settings | None = None,
        read_source: ReadSource = read_source,
    ) -> None:
        """vLLM passes `app` only: the settings are those of the environment then."""
        self._app, self._registry, self._read_source = app, registry, read_source
        self._settings = settings or Settings.from_environment(os.environ)
        self._metrics: Metrics | None = None
        self._control: DrafterControl | None = None
        self._changes: set[asyncio.Task[Durations]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._settings is not None and scope["type"] == "lifespan":
            await self._run_lifespan(self._settings, scope, receive, send)
        elif self._settings is not None and scope["type"] == "http" and scope["path"].startswith(_PREFIX):
            await self._answer(self._settings, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _run_lifespan(self, settings: Settings, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the control from the server's start to its end."""
        engine = Engine(scope["app"].state.engine_client)
        self._metrics = metrics = Metrics(self._registry)
        self._control = control = DrafterControl(
            engine, settings, lambda: read_counts(self._registry), metrics, time.time, self._read_source
        )
        self._registry.register(DrafterCollector(control))
        task = asyncio.ensure_future(control.run())
        task.add_done_callback(_log_failure)
        try:
            await self._app(scope, receive, send)
        finally:
            task.cancel()
            await control.close()
            await asyncio.wait({task, *self._changes}, timeout=SHUTDOWN_SECONDS)

    async def _answer(self, settings: Settings, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[str, str] = {}
        try:
            status, answer = await self._route(settings, scope, receive)
        except EndpointError as error:
            status, answer = error.status, {**error.problem}
            if status == 401:
                headers["www-authenticate"] = "Bearer"
            if status == 405:
                headers["allow"] = ", ".join(_METHODS[scope["path"]])
            if self._metrics is not None:
                self._metrics.count_rejection(error.reason)
        except Exception:  # noqa: BLE001 - vLLM's handlers end the server for some errors
            _log.exception("a call of the endpoint failed")
            status, answer = 500, {"reason": "InternalError", "message": "the endpoint failed: its log has the cause."}
        body = json.dumps(answer).encode()
        headers |= {"content-type": "application/json", "content-length": str(len(body)), "cache-control": "no-store"}
        if status >= 400:
            headers["connection"] = "close"  # the rest of a body that was not read is not waited for
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})

    async def _route(self, settings: Settings, scope: Scope, receive: Receive) -> tuple[int, dict[str, object]]:
        """Answer a call. Raises EndpointError."""
        path, method = scope["path"], scope["method"]
        if path not in _METHODS:
            raise RejectionError(404, "NotFound", f"there is no such path: call {', '.join(_METHODS)}.")
        if method not in _METHODS[path]:
            raise RejectionError(405, "MethodNotAllowed", f"{path} has no {method[:20]}: use {', '.join(_METHODS[path])}.")
        if path == _READY:
            problem = (control := self._require_control()).find_unready_reason()
            if problem is None:
                return 200, {"ready": True}
            turn = {"turn": control.turn} if problem["reason"] == "Isolated" else {}
            return 503, {"ready": False, "reason": problem["reason"], **turn}
        authorizations = [value for name, value in scope["headers"] if name == b"authorization"]
        settings.check_token(authorizations[0] if len(authorizations) == 1 else None)
        control = self._require_control()
        if method == "GET":
            return 200, control.describe(_parse_after(scope["query_string"]))
        durations: Durations | None = None
        status = 200
        if path == _PREPARE:
            status = 200 if control.prepare(parse_preparation(await _read_body(scope, receive))) else 202
        elif path == _LEASE:
            control.renew(parse_lease(await _read_body(scope, receive)))
        elif path == _ISOLATION:
            control.isolate(parse_isolation(await _read_body(scope, receive)))
        elif method == "PUT":
            request = parse_change(await _read_body(scope, receive))
            durations = await self._run_to_end(control.change(request))
        else:
            durations = await self._run_to_end(control.return_to_own())
        return status, {"durations": durations, **control.describe(None)}

    def _require_control(self) -> DrafterControl:
        if self._control is None:
            raise RejectionError(503, "NotStarted", "the server has not started: wait some seconds.")
        return self._control

    async def _run_to_end(self, change: Awaitable[Durations]) -> Durations:
        """Run a change in a task of its own, which a disconnected client does not cancel."""
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(_log_failure)
        return await asyncio.shield(task)


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Log why a task failed; also so that an exception which no caller waits for is retrieved."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("%s: %s", type(error).__name__, error, exc_info=None if isinstance(error, EndpointError) else error)


def _parse_after(query: bytes) -> int | None:
    """Return the parameter `after`, or None. Raises RejectionError."""
    fields = parse_qs(query[:1000].decode("latin-1"), keep_blank_values=True)
    value = fields.pop("after", [""])
    if fields or len(value) != 1 or (value != [""] and not (value[0].isascii() and value[0].isdigit() and len(value[0]) < 16)):
        raise RejectionError(400, "InvalidQuery", "the query is not `after=N`: send the number of the last window that was read.")
    return int(value[0]) if value[0] else None


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    """Return the body. Raises RejectionError if it is too large or too slow, or the client disconnects."""
    too_large = RejectionError(
        413, "BodyTooLarge", f"the body has more than {MAX_BODY_BYTES} bytes: send the digests of one drafter."
    )
    if int(next((value for name, value in scope["headers"] if name == b"content-length"), b"0")) > MAX_BODY_BYTES:
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RejectionError(400, "Disconnected", "the client disconnected before the body had arrived.")
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                raise too_large
            if not message.get("more_body", False):
                return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:  # a class of its own in Python 3.10
        message = f"the body did not arrive within {BODY_SECONDS:.0f} s: send it at once."
        raise RejectionError(408, "BodyTooSlow", message) from None
