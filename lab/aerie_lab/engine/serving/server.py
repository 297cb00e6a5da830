"""One simulated engine as a process: vLLM's command line in, vLLM's HTTP interface out.

    start-up: the port is closed --> serving --SIGTERM--> draining or cut off --> exit 0
                                            --SIGUSR1--> as when an engine process of vLLM dies: 503, then exit

Each state behaves as measured on vLLM 0.32.0 (docs/reference/simulator.md). Metrics are those of `exposition`
and `http_exposition`.
With vLLM's flags for Aerie's plugin, `/aerie/` is the plugin's own endpoint (`drafter_endpoint`): the drafter changes in place.
Two paths are the simulator's own. POST /simulator/metrics-corruption with `{"corruption": NAME or null}` determines what /metrics
exposes from then on (`metrics_corruption`). POST /simulator/drafter-fault with `{"fault": NAME or null}` does so for failures of
the change of a drafter (`drafter_faults`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aiohttp import web

from aerie_lab.engine.core.replica import Replica
from aerie_lab.engine.load_generation.workload import LengthDistribution, PoissonArrivals, TrafficClass, generate_turns
from aerie_lab.engine.metrics.exposition import render_exposition
from aerie_lab.engine.metrics.http_exposition import HttpCounters, render_process_metrics
from aerie_lab.engine.metrics.metrics_corruption import MetricsCorruptor, parse_corruption
from aerie_lab.engine.performance_model.request import Request
from aerie_lab.engine.serving import api
from aerie_lab.engine.serving.api import ApiError
from aerie_lab.engine.serving.arguments import SimulatorArguments, parse_simulator_arguments
from aerie_lab.engine.serving.drafter import DrafterProfile, EngineError
from aerie_lab.engine.serving.driver import EngineStoppedError, ReplicaDriver, RequestHandle
from aerie_lab.engine.serving.engine_core import SimulatedEngineCore
from aerie_lab.engine.serving.options import SimulatorOptions, read_options
from aerie_lab.engine.serving.request_metrics import RequestMetricsConfig
from aerie_lab.engine.serving.setup import EngineSetup, compute_acceptance, prepare_engine
from aerie_lab.errors import StateError

if TYPE_CHECKING:
    from aerie_lab.engine.serving.drafter_endpoint import SimulatedDrafterEndpoint

_UNCOUNTED_PATHS = frozenset(
    ("/metrics", "/health", "/load", "/ping", "/version", "/server_info", "/simulator/metrics-corruption")
) | {"/simulator/drafter-fault", "/aerie/{path}"}
_WATCHDOG_INTERVAL_SECONDS = 5.0
"""Interval in which vLLM checks whether its engine is dead (vllm/entrypoints/launchers/launcher.py)."""

API_KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's own variable, which counts where there is no --api-key."""
_PROCESS_END_SECONDS = 1.5
"""Seconds that vLLM's processes take to end after the port is closed."""

log = logging.getLogger("aerie_lab.engine")


class SimulatorServer:
    """The HTTP interface of one engine."""

    def __init__(self, arguments: SimulatorArguments, options: SimulatorOptions, setup: EngineSetup, start_time: float) -> None:
        self.arguments = arguments
        self.options = options
        self.setup = setup
        self.start_time = start_time
        self.created = time.time()
        replica = Replica(setup.settings, options.step_time, seed=options.seed, drift=options.drift, start_time=self.created)
        self.driver = ReplicaDriver(replica)
        self.http_counters = HttpCounters()
        self.metrics_corruptor = MetricsCorruptor(options.metrics_corruption)
        self.is_shutting_down = False
        """Whether the engine takes no new requests, because the process is ending."""
        self.open_requests = 0
        self.engine_death_noticed = asyncio.Event()
        self._acceptance = setup.acceptance
        self._altered_share = setup.drafter.altered_share if setup.drafter is not None else 0.0
        self.engine_core = SimulatedEngineCore()
        self._drafter_endpoint = self._create_drafter_endpoint() if arguments.has_drafter_endpoint else None
        self._metrics_config = RequestMetricsConfig(
            arguments.per_request_spec_decode_metrics,
            arguments.enable_per_request_metrics,
            setup.settings.num_speculative_tokens or 0,
        )
        self._request_limits = api.RequestLimits(
            arguments.served_model_names,
            setup.settings.max_model_len,
            setup.settings.block_size,
            options.bytes_per_token,
            setup.drafter is not None,
        )

    def build_application(self) -> web.Application:
        app = web.Application(middlewares=[self._count_requests, self._authorize], client_max_size=64 * 2**20)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        for path in ("/health", "/ping"):
            app.router.add_get(path, self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/load", self._load)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/simulator/metrics-corruption", self._set_metrics_corruption)
        if self._drafter_endpoint is not None:
            self._drafter_endpoint.add_to(app)
        return app

    def _create_drafter_endpoint(self) -> SimulatedDrafterEndpoint:
        # Most engines have none, and would wait for the import of prometheus_client.
        from aerie_lab.engine.serving.drafter_endpoint import SimulatedDrafterEndpoint

        return SimulatedDrafterEndpoint(
            self.arguments,
            self.options,
            self.setup.drafter,
            self.driver,
            self.engine_core,
            self._load_drafter,
            lambda: self.is_engine_dead,
        )

    def _load_drafter(self, drafter: DrafterProfile) -> None:
        """Draft with another drafter, also for the requests in progress."""
        self._acceptance, self._altered_share = compute_acceptance(self.options, drafter), drafter.altered_share
        self.driver.change_acceptance(self._acceptance)

    @property
    def is_engine_dead(self) -> bool:
        """Whether the engine has ended, and the server not yet."""
        return self.driver.stopped and not self.is_shutting_down

    # --- around every request -----------------------------------------------------------------------------------------

    @web.middleware
    async def _count_requests(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        route = request.match_info.route.resource
        name = route.canonical if route is not None else "none"
        began, status, sent = time.perf_counter(), 500, 0
        try:
            response = await handler(request)
            status, sent = response.status, int(response.headers.get("Content-Length", 0))
            return response
        except web.HTTPException as error:
            status = error.status
            return web.json_response({"detail": error.reason}, status=error.status)
        finally:
            if name not in _UNCOUNTED_PATHS:
                self.http_counters.observe(
                    name, request.method, status, request.content_length or 0, sent, time.perf_counter() - began
                )

    @web.middleware
    async def _authorize(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        keys = self.arguments.api_keys
        if keys and request.path.startswith("/v1") and request.headers.get("Authorization") not in {f"Bearer {k}" for k in keys}:
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    # --- answers ------------------------------------------------------------------------------------------------------

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate("completion", request)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate("chat", request)

    async def _generate(self, kind: api.RequestKind, http_request: web.Request) -> web.StreamResponse:
        name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex[:16]}"
        self.open_requests += 1
        handle, altered_share = None, self._altered_share
        try:
            generation = api.parse_request(kind, await http_request.read(), self._request_limits)
            if self.is_shutting_down:
                raise ApiError(500, "cannot schedule new futures after shutdown", "InternalServerError")
            traffic_class = http_request.headers.get("x-traffic-class", self.options.default_class)
            if traffic_class not in self._acceptance:
                traffic_class = self.options.default_class
            engine_request = self._build_engine_request(name, generation, traffic_class)
            await self.engine_core.add_request_async(engine_request)
            handle = self.driver.submit(engine_request, traffic_class, stream=generation.stream)
            if generation.stream:
                return await self._stream(http_request, generation, handle)
            async for _ in handle.progress():
                pass
            done = handle.request
            reason, version, metrics = done.finish_reason or "", self.options.version, self._metrics_config.build(done)
            body = api.build_response(
                generation, name, int(time.time()), done.generated_tokens, reason, version, altered_share, metrics
            )
            return web.json_response(body)
        except ApiError as api_error:
            return web.json_response(api_error.body, status=api_error.status)
        except EngineStoppedError:
            error = ApiError(
                500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", "InternalServerError"
            )
            return web.json_response(error.body, status=500)
        finally:
            self.open_requests -= 1
            if handle is not None:
                self.driver.release(handle)

    def _build_engine_request(self, name: str, request: api.GenerationRequest, traffic_class: str) -> Request:
        acceptance, stop_after = self._acceptance[traffic_class], None
        if self.options.answer_tokens is not None and not request.ignore_eos:
            mean = self.options.answer_tokens
            stop_after = (
                request.draw_answer_length(mean) if request.greedy else int(self.driver.replica.random.geometric(1 / mean))
            )
        return Request(
            *(name, request.prompt_tokens, request.max_tokens, acceptance, stop_after),
            segments=request.segments,
            cache_salt=request.cache_salt,
            accepted_by_step=[] if self._metrics_config.records_steps else None,
        )

    async def _stream(
        self, http_request: web.Request, generation: api.GenerationRequest, handle: RequestHandle
    ) -> web.StreamResponse:
        request, created, altered_share = handle.request, int(time.time()), self._altered_share
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http_request)
        chunks, sent_tokens, last = api.ChunkEncoder(generation, request.name, created, altered_share), 0, b""
        with contextlib.suppress(ConnectionError):
            if generation.kind == "chat":
                await response.write(api.encode_event(api.build_first_chunk(generation, request.name, created)))
            try:
                async for new in handle.progress():
                    if request.finish_reason is None:
                        await response.write(chunks.encode(sent_tokens, new))
                    else:
                        reason = request.finish_reason
                        last = api.encode_event(
                            api.build_chunk(generation, request.name, created, sent_tokens, new, reason, altered_share)
                        )
                    sent_tokens += new
            except EngineStoppedError:
                last = api.encode_event(_build_engine_dead_error().body)
            else:
                if generation.include_usage:
                    metrics = self._metrics_config.build(request)
                    last += api.encode_event(
                        api.build_usage_chunk(generation, request.name, created, sent_tokens, self.options.version, metrics)
                    )
            await response.write_eof(last + b"data: [DONE]\n\n")
        return response

    async def _models(self, _: web.Request) -> web.Response:
        names, longest = self.arguments.served_model_names, self.setup.settings.max_model_len
        return web.json_response(api.build_models_response(names, self.arguments.model, int(self.created), longest))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_engine_dead else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.options.version})

    async def _load(self, _: web.Request) -> web.Response:
        return web.json_response({"server_load": self.open_requests})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.driver.advance_to_now()
        text = render_process_metrics(self.start_time)
        if not self.arguments.disable_log_stats:
            counters = self.driver.replica.counters
            text += render_exposition(counters, self.arguments.served_model_names[0], self.created, self.setup.cache_config)
        text += self.http_counters.render(self.created)
        if self._drafter_endpoint is not None:
            text += self._drafter_endpoint.render_metrics()
        shown = self.metrics_corruptor.corrupt(text)
        if shown is None:
            raise web.HTTPNotFound
        return web.Response(body=shown.encode(), headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def _set_metrics_corruption(self, request: web.Request) -> web.Response:
        try:
            name = (await request.json())["corruption"]
            self.metrics_corruptor.set_corruption(None if name is None else parse_corruption(name))
        except (ValueError, KeyError, TypeError, StateError) as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({})

    # --- requests of its own ------------------------------------------------------------------------------------------

    async def generate_own_traffic(self) -> None:
        """Send `own_requests_per_second` without clients, until the engine accepts no more."""
        name = self.options.default_class
        kind = TrafficClass(name, self._acceptance[name], LengthDistribution(200, 0.5), LengthDistribution(40, 0.5))
        began = self.driver.now()
        async with asyncio.TaskGroup() as tasks:
            arrivals, max_tokens = PoissonArrivals(self.options.own_requests_per_second), self.setup.settings.max_model_len
            for turn in generate_turns([kind], arrivals, 0.0, 1e9, self.options.seed, max_tokens):
                await asyncio.sleep(began + turn.time - self.driver.now())
                if self.is_shutting_down or self.driver.stopped:
                    return
                prompt_tokens = min(turn.prompt_tokens, max_tokens - turn.answer_tokens - 1)
                request = Request(f"own-{turn.number}", prompt_tokens, turn.answer_tokens, self._acceptance[name])
                handle = self.driver.submit(request, name, stream=False, has_client=False)
                tasks.create_task(self._wait_for_answer(handle))

    async def _wait_for_answer(self, handle: RequestHandle) -> None:
        try:
            async for _ in handle.progress():
                pass
        except EngineStoppedError:
            pass
        finally:
            self.driver.release(handle)


def _build_engine_dead_error() -> ApiError:
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return ApiError(500, message, "InternalServerError")


async def run_simulator(arguments: SimulatorArguments, options: SimulatorOptions, setup: EngineSetup | EngineError) -> int:
    """Run until a signal ends it; the exit status."""
    loop, started = asyncio.get_running_loop(), time.time()
    terminate, crash = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, terminate.set)
    loop.add_signal_handler(signal.SIGUSR1, crash.set)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(terminate.wait(), options.startup_seconds)
        return 0
    if isinstance(setup, EngineError):
        sys.stderr.write(f"{setup}\n")
        return 1
    server = SimulatorServer(arguments, options, setup, started)
    runner = web.AppRunner(
        server.build_application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        keepalive_timeout=options.keep_alive_seconds,
    )
    await runner.setup()
    site = web.TCPSite(runner, arguments.host or "0.0.0.0", arguments.port, backlog=2048)
    try:
        await site.start()
    except OSError as error:
        sys.stderr.write(f"OSError: {error}\n")
        return 1
    form = setup.drafter.variant if setup.drafter is not None else "none"
    log.info("simulated vLLM %s: model %s, drafter %s, port %d", options.version, arguments.model, form, arguments.port)
    asking = asyncio.create_task(server.generate_own_traffic()) if options.own_requests_per_second else None
    waiting = {asyncio.create_task(event.wait()) for event in (terminate, crash)}
    _, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in (*rest, *([asking] if asking else [])):
        task.cancel()
    if crash.is_set():
        server.driver.stop()
        watch = _WATCHDOG_INTERVAL_SECONDS - (time.time() - server.created) % _WATCHDOG_INTERVAL_SECONDS
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.engine_death_noticed.wait(), watch)
    else:
        await _drain(server, arguments.shutdown_timeout)
    await site.stop()
    if runner.server is not None:
        runner.server.pre_shutdown()  # idle connections are closed with the port
    while server.open_requests:  # as long as their clients stay, as vLLM's HTTP server does
        await asyncio.sleep(0.02)
    await asyncio.sleep(_PROCESS_END_SECONDS)
    await runner.cleanup()
    return 0


async def _drain(server: SimulatorServer, timeout: int) -> None:
    """Let accepted requests finish for `timeout` seconds. Requests that are still open then get no more tokens, and no end."""
    server.is_shutting_down = True
    if timeout:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.driver.wait_until_idle(), timeout)
    server.driver.freeze()


def main(argv: Sequence[str]) -> int:
    """Run the process: parse, prepare, serve. Return the exit status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(asctime)s %(message)s")
    try:
        options = read_options()
    except StateError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    arguments = parse_simulator_arguments(argv, options.version)
    if not arguments.api_keys and (key := os.environ.get(API_KEY_VARIABLE)):
        arguments = replace(arguments, api_keys=(key,))
    setup: EngineSetup | EngineError
    try:
        setup = prepare_engine(arguments, options)
    except EngineError as error:
        setup = error
    return asyncio.run(run_simulator(arguments, options, setup))
