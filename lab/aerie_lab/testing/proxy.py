"""Proxies of a lab's API server that inject faults: calls are counted, delayed, rejected, lost, or never forwarded.

    async def slow(call: ApiCall, forward: ForwardCall) -> web.StreamResponse:
        await asyncio.sleep(2)
        return await forward()

    with ApiServerProxy(lab) as proxy:
        endpoint = proxy.open_endpoint(slow)
        endpoint.write_kubeconfig(path)

Clients with the kubeconfig are the administrator, over plain HTTP on this machine. Each endpoint has its own address and
behaviour; all of them run in one thread. Guarantees: a behaviour's unchanged calls reach both sides unchanged, watches event by
event; when the API server is down, the caller's connection breaks as it would without a proxy. Not guaranteed: upgraded
connections (exec, port-forward), of which the lab has none.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
import yaml
from aiohttp import web

from aerie_lab.cluster import Lab
from aerie_lab.kube.connector import ApiServerConnector, build_tls_context

T = TypeVar("T")
_FORWARDED_HEADERS = ("Accept", "Content-Type", "User-Agent")
_RESOURCE_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/[^/]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>.+))?)?$"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class ApiCall:
    """One call of the API server, as its audit log would name it."""

    verb: str
    """get, list, watch, create, update, patch or delete."""
    resource: str
    """Plural, with the subresource: deployments, speculativedeployments/status. Empty where there is no object: discovery."""
    namespace: str
    name: str

    @classmethod
    def from_request(cls, method: str, path: str, *, watch: bool = False) -> ApiCall:
        """Return the call of a request."""
        match = _RESOURCE_PATH.match(path)
        plural, namespace, name, sub = match.group("plural", "namespace", "name", "sub") if match else ("", "", "", "")
        reads = "watch" if watch else "get" if name or not plural else "list"
        verb = _VERBS.get(method, reads)
        return cls(verb, f"{plural}/{sub}" if sub else plural or "", namespace or "", name or "")

    @property
    def is_write(self) -> bool:
        """Whether the call may change an object."""
        return self.verb in _VERBS.values()


ForwardCall = Callable[[], Awaitable[web.StreamResponse]]
ProxyBehaviour = Callable[[ApiCall, ForwardCall], Awaitable[web.StreamResponse]]
"""Handles a call: forwards it or not, and returns the response. That to a watch has been sent when the forwarding returns."""


def build_error_response(code: int, reason: str, message: str) -> web.Response:
    """Build an error response as the API server's."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}
    return web.json_response(status, status=code)


class ApiServerProxy:
    """The proxy endpoints of one lab."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._runners: list[web.AppRunner] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._http = self.run(self._create_session())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the proxy's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def open_endpoint(self, behaviour: ProxyBehaviour) -> ProxyEndpoint:
        """Open an endpoint with this behaviour."""
        return self.run(self._open_endpoint(behaviour))

    async def _create_session(self) -> aiohttp.ClientSession:
        connector = ApiServerConnector(build_tls_context(self._lab.folder / "certificates", "admin"), limit=0)
        return aiohttp.ClientSession(self._lab.api_url, connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def _open_endpoint(self, behaviour: ProxyBehaviour) -> ProxyEndpoint:
        endpoint = ProxyEndpoint(self, self._http, behaviour)
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", endpoint.handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (address, *_) = runner.addresses
        endpoint.url = f"http://127.0.0.1:{address[1]}"
        return endpoint

    async def _close(self) -> None:
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        await self._http.close()


class ProxyEndpoint:
    """One address of the API server with a behaviour, which may be replaced at any time."""

    url = ""

    def __init__(self, proxy: ApiServerProxy, http: aiohttp.ClientSession, behaviour: ProxyBehaviour) -> None:
        self.behaviour = behaviour
        self._proxy, self._http = proxy, http
        self._watch_tasks: set[asyncio.Task[Any]] = set()

    def write_kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig for this endpoint, and return its path."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "proxy", "cluster": {"server": self.url}}],
            "users": [{"name": "admin", "user": {}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "admin"}}],
            "current-context": "proxy",
        }
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return path

    def break_watches(self) -> int:
        """Break all open watches, as a load balancer or a restarted API server does; return their number."""

        async def cancel_watches() -> int:
            streams = list(self._watch_tasks)
            for stream in streams:
                stream.cancel()
            return len(streams)

        return self._proxy.run(cancel_watches())

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Handle one request."""
        body = await request.read()
        call = ApiCall.from_request(request.method, request.path, watch=request.query.get("watch", "") in ("true", "1"))

        async def forward() -> web.StreamResponse:
            return await (self._forward_watch if call.verb == "watch" else self._forward)(request, body)

        try:
            return await self.behaviour(call, forward)
        except aiohttp.ClientError as error:
            if request.transport is not None:
                request.transport.abort()
            raise web.HTTPBadGateway(text=str(error)) from error

    def _send_upstream(self, request: web.Request, body: bytes) -> Any:
        headers = {name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers}
        return self._http.request(
            request.method, request.rel_url, data=body or None, headers=headers | {"Accept-Encoding": "identity"}
        )

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        async with self._send_upstream(request, body) as answer:
            headers = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
            return web.Response(status=answer.status, body=await answer.read(), headers=headers)

    async def _forward_watch(self, request: web.Request, body: bytes) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._watch_tasks.add(task)
        try:
            async with self._send_upstream(request, body) as answer:
                headers = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        finally:
            self._watch_tasks.discard(task)
