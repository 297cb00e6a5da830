"""An ASGI middleware on an aiohttp server, for paths that it answers itself.

Behind the middleware is an application that answers every request with 404. Specification of the messages:
https://asgi.readthedocs.io/en/latest/specs/main.html.

Guarantees: the middleware's lifespan begins before the port opens and ends with the server. Not guaranteed: streams; an answer is
sent once it is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

from aiohttp import web

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class AsgiMiddleware:
    """A middleware, and the server that it sees."""

    def __init__(self, create: Callable[[Application], Application], state: object) -> None:
        """Create the middleware by `create(application)`; it finds `state` as `scope["app"].state`."""
        self._middleware = create(_answer_not_found)
        self._app = SimpleNamespace(state=state)

    async def run_lifespan(self, _: web.Application) -> AsyncIterator[None]:
        """Run the middleware's lifespan (a context of `aiohttp.web.Application.cleanup_ctx`). Raises what its start raises."""
        to_middleware: asyncio.Queue[Message] = asyncio.Queue()
        started = asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                started.set()

        to_middleware.put_nowait({"type": "lifespan.startup"})
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "app": self._app}
        lifespan = asyncio.ensure_future(self._middleware(scope, to_middleware.get, send))
        waiting = asyncio.ensure_future(started.wait())
        await asyncio.wait((lifespan, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if lifespan.done():
            lifespan.result()
        yield
        to_middleware.put_nowait({"type": "lifespan.shutdown"})
        await lifespan

    async def answer(self, request: web.Request) -> web.Response:
        """Return the middleware's answer."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.scheme,
            "path": request.path,
            "query_string": request.rel_url.raw_query_string.encode(),
            "headers": [(name.lower(), value) for name, value in request.raw_headers],
            "app": self._app,
        }
        sent: list[Message] = []

        async def receive() -> Message:
            body = await request.content.readany()
            return {"type": "http.request", "body": body, "more_body": not request.content.at_eof()}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._middleware(scope, receive, send)
        start, *parts = sent
        headers = [(name.decode(), value.decode()) for name, value in start["headers"]]
        response = web.Response(status=start["status"], headers=headers, body=b"".join(part["body"] for part in parts))
        if ("connection", "close") in headers:
            response.force_close()
        return response


async def _answer_not_found(scope: Message, receive: Receive, send: Send) -> None:
    """Answer as vLLM answers for a path that it does not have."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b'{"detail":"Not Found"}'})
