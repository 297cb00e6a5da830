"""Pods with the plugin's own endpoint in front of a fake engine, on real sockets of the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from aerie.controller.tokens import derive_token
from aerie.engine.drafter_endpoint.calls import DrafterFiles, LoadDrafter
from aerie_vllm.endpoint import DrafterEndpoint
from tests.unit.controller.scraped import BEFORE
from tests.unit.plugin.conftest import FakeSources, Server, application
from tests.unit.plugin.fake_engine import FakeEngineClient, make_files

KEY = bytes(range(32))
TOKEN = derive_token(KEY, "uid-chat")
FAKE_SERIES = frozenset(("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens", "vllm:generation_tokens"))
"""Series that the fake engine counts itself."""


class VllmCounters(Collector):
    """The other metrics of a real engine: those of an exposition of vLLM 0.32, times `factor`."""

    def __init__(self) -> None:
        self.factor = 1.0
        families = text_string_to_metric_families(BEFORE.decode())
        self._families = [
            family
            for family in families
            if family.name.startswith("vllm:") and family.name.removesuffix("_created") not in FAKE_SERIES
        ]

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            scaled = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                scaled.add_sample(sample.name, sample.labels, sample.value * self.factor)
            yield scaled


class PluginPod:
    """A pod: fake engine, counters and endpoint."""

    def __init__(self, *, with_vllm_counters: bool = True) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.engine = FakeEngineClient(registry=self.registry)
        self.engine.serve_steps(0)  # vLLM's counters are there from the start
        self.sources = FakeSources(Path(os.environ["AERIE_DRAFTER_ROOTS"]))
        self.sources.seconds = 0.0
        self.counters = VllmCounters()
        if with_vllm_counters:
            self.registry.register(self.counters)
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request."""
        self.concurrent = self.max_concurrent = 0
        """Requests in progress, now and at most."""
        self.address = ""

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[PluginPod]:
        """Serve the endpoint until the end of the block."""
        endpoint = DrafterEndpoint(application, registry=self.registry, read_source=self.sources.read)
        end = asyncio.Event()
        scope = {"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))}
        lifespan = asyncio.ensure_future(endpoint(scope, end.wait, None))  # type: ignore[arg-type]
        app = web.Application()

        async def handle(request: web.Request) -> web.Response:
            self.requests.append((request.method, request.path_qs))
            self.concurrent += 1
            self.max_concurrent = max(self.max_concurrent, self.concurrent)
            try:
                return await call_application(endpoint, request)
            finally:
                self.concurrent -= 1

        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await asyncio.sleep(0.05)  # the workers report their drafter
            yield self
        finally:
            await runner.cleanup()
            end.set()
            await lifespan
        assert self.engine.violations == []


async def call_application(endpoint: DrafterEndpoint, request: web.Request) -> web.Response:
    """Return what an ASGI application answers to the request."""
    scope = {
        "type": "http",
        "method": request.method,
        "path": request.path,
        "query_string": request.query_string.encode(),
        "headers": [(name.lower(), value) for name, value in request.raw_headers],
    }
    messages = [{"type": "http.request", "body": await request.read(), "more_body": False}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await endpoint(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"] if name != b"content-length"}
    return web.Response(status=sent[0]["status"], headers=headers, body=sent[1]["body"])


class Drafters:
    """The drafters on the pods' disk, and the token file that all pods have."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = Server(folder, monkeypatch)
        self.write_token(TOKEN)

    def write_token(self, token: str) -> None:
        """Write the token that the pods accept."""
        self._server.token_file.write_text(token)

    def load(self, name: str, lease_seconds: float | None = 600.0, **fields: Any) -> LoadDrafter:
        """Return the call that loads the drafter with this name."""
        return LoadDrafter(DrafterFiles(make_files(name), str(self._server.root / name)), lease_seconds, **fields)
