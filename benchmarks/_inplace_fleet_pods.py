"""The engines of a lab of processless pods, with Aerie's plugin: `python -m benchmarks._inplace_fleet_pods SOCKET PORT FOLDER`.

    pod's address ─► the lab's loopback ─► one server ─► the pod's own endpoint (aerie_vllm) ─► worker and engine, simulated
    SOCKET ────────► PORT of the loopback: the operator's own metrics, for a reader outside of the lab

It runs in the lab's own network. An engine starts with the first request to its address. FOLDER has what pods would mount:

    drafters/NAME   the claim with the drafters, at /models/drafters in the pods
    token           the token of the endpoint
    expected.json   the drafter that a pod which starts comes to; may be missing
    log.jsonl       is written: when engines started (`start`) and drafters were loaded (`load`, with the drafter's logit shift)

The files of a drafter are small; READ_SECONDS and SWAP_SECONDS are what those of a real one take. Ends with its standard input.

Guarantees: endpoint, leases, windows and checks are the plugin's own code, once for each address. Not guaranteed: a process of
its own for each pod; all share one event loop, so a pause is longer under load than in a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from aiohttp import web

from aerie.manifests.pod.drafter_plugin import DRAFTERS_PATH
from aerie_lab.engine.metrics.exposition import render_exposition
from aerie_lab.engine.metrics.http_exposition import render_process_metrics
from aerie_lab.engine.metrics.registry import register_counters, render_other_families
from aerie_lab.engine.serving.asgi import AsgiMiddleware
from aerie_lab.engine.serving.drafter import DrafterProfile
from aerie_lab.engine.serving.drafter_worker import SimulatedWorker
from aerie_lab.engine.serving.engine_client import SimulatedEngineClient
from aerie_lab.engine.serving.engine_core import SimulatedEngineCore
from aerie_vllm.checkpoint import CheckpointError, open_checkpoint
from aerie_vllm.endpoint import DrafterEndpoint
from aerie_vllm.rejection import RejectionError
from aerie_vllm.requests import DrafterFiles, DrafterSource
from aerie_vllm.settings import Settings
from aerie_vllm.source_reader import SourceFiles
from benchmarks._inplace_fleet_engine import SteadyEngine, SteadyRegistry
from benchmarks._scale_pages import PORT, forward_socket, take_addresses

OWN_DRAFTER = "first"
"""The drafter of the pods' arguments."""
READ_SECONDS = 2.0
"""Seconds in which some hundred megabytes are hashed, or read into memory."""
SWAP_SECONDS = 0.05
MODEL_NAME = "example/target"


@dataclass(frozen=True)
class MountedSettings(Settings):
    """The settings of a pod, whose claim is the one root."""

    def resolve_folder(self, folder: str, names: Iterable[str]) -> str:
        """Return where a folder of the pod is. Raises RejectionError."""
        (claim,) = self.roots
        return super().resolve_folder(folder.replace(DRAFTERS_PATH, str(claim), 1), names)


class Pod:
    """The engine at one address."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address, self._folder, self._start_time = address, folder, time.time()
        self._settings = MountedSettings(folder / "token", (folder / "drafters",), folder / "expected.json")
        self._engine = engine = SteadyEngine(zlib.crc32(address.encode()))
        self._registry = SteadyRegistry(engine)
        register_counters(self._registry, engine.counters, MODEL_NAME)
        model = str(folder / "drafters" / OWN_DRAFTER)
        worker = SimulatedWorker("eagle3", model, None, load=self._load, swap_seconds=SWAP_SECONDS)
        worker.stage_seconds = READ_SECONDS
        client = SimulatedEngineClient(engine, SimulatedEngineCore(), worker, 1, lambda: False)
        self.endpoint = AsgiMiddleware(
            lambda app: DrafterEndpoint(app, registry=self._registry, settings=self._settings, read_source=self._read_source),
            SimpleNamespace(engine_client=client),
        )
        self._log("start")

    def render_metrics(self) -> str:
        """Return the page of metrics."""
        self._engine.advance()
        page = render_exposition(self._engine.counters, MODEL_NAME, self._start_time)
        return render_process_metrics(self._start_time) + page + render_other_families(self._registry)

    def _load(self, drafter: DrafterProfile) -> None:
        self._engine.load(drafter)
        self._log("load", logit_shift=drafter.logit_shifts[0])

    def _log(self, event: str, **fields: object) -> None:
        with (self._folder / "log.jsonl").open("a") as log:
            log.write(json.dumps({"time": time.time(), "address": self._address, "event": event, **fields}) + "\n")

    async def _read_source(self, source: DrafterSource, _needed: object) -> SourceFiles:
        """Hash a drafter of the claim. Raises RejectionError."""
        await asyncio.sleep(READ_SECONDS)
        folder = source.folder or ""
        try:
            files = await asyncio.to_thread(hash_files, Path(self._settings.resolve_folder(folder, ())))
        except CheckpointError as error:
            raise RejectionError(422, error.reason, str(error)) from error
        return SourceFiles(DrafterFiles(folder, files), None)


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of a drafter's files. Raises CheckpointError."""
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.hash_files(lambda: False)


class Fleet:
    """The pods of all addresses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pods: dict[str, asyncio.Task[Pod]] = {}
        self._stack = contextlib.AsyncExitStack()

    def build_application(self) -> web.Application:
        """Return the application that answers for every pod."""
        app = web.Application()
        app.router.add_get("/metrics", self._answer_metrics)
        app.router.add_route("*", "/aerie/{path:.*}", self._answer_endpoint)
        app.cleanup_ctx.append(self._end_pods)
        return app

    async def _answer_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=(await self._find_pod(request)).render_metrics())

    async def _answer_endpoint(self, request: web.Request) -> web.Response:
        return await (await self._find_pod(request)).endpoint.answer(request)

    async def _find_pod(self, request: web.Request) -> Pod:
        """Return the pod that the request is for; it starts with its first request."""
        assert request.transport is not None
        address: str = request.transport.get_extra_info("sockname")[0]
        if address not in self._pods:
            self._pods[address] = asyncio.ensure_future(self._start_pod(address))
        return await asyncio.shield(self._pods[address])

    async def _start_pod(self, address: str) -> Pod:
        pod = Pod(address, self._folder)
        await self._stack.enter_async_context(contextlib.asynccontextmanager(pod.endpoint.run_lifespan)(web.Application()))
        return pod

    async def _end_pods(self, _: web.Application) -> AsyncIterator[None]:
        async with self._stack:
            yield


async def serve(socket: Path, port: int, folder: Path) -> None:
    """Serve until standard input ends."""
    runner = web.AppRunner(Fleet(folder).build_application(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", PORT, backlog=1024, reuse_port=True).start()
        async with forward_socket(socket, port):
            print("serves", flush=True)
            await asyncio.to_thread(sys.stdin.read)
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    take_addresses()
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
