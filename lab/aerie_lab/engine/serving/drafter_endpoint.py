"""The endpoint under `/aerie/` of a simulated engine: the plugin's own middleware (`aerie_vllm.endpoint`), not a copy of it.

So the operator meets in a simulated fleet the code that runs in vLLM, with its leases, windows, errors and metrics. What is
simulated is the engine below: its pause (`driver`), its worker (`drafter_worker`) and its counters.

Guarantees: the settings are the plugin's environment variables (`aerie_vllm.settings`); without a token file the paths are not
there. POST /simulator/drafter-fault is there only with the plugin's flags.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from aiohttp import web
from prometheus_client import CollectorRegistry

from aerie_lab.engine.metrics.registry import register_counters, render_other_families
from aerie_lab.engine.serving.arguments import SimulatorArguments
from aerie_lab.engine.serving.asgi import AsgiMiddleware
from aerie_lab.engine.serving.drafter import DrafterProfile
from aerie_lab.engine.serving.drafter_faults import parse_drafter_fault
from aerie_lab.engine.serving.drafter_worker import SimulatedWorker
from aerie_lab.engine.serving.driver import ReplicaDriver
from aerie_lab.engine.serving.engine_client import SimulatedEngineClient
from aerie_lab.engine.serving.engine_core import SimulatedEngineCore
from aerie_lab.engine.serving.options import SimulatorOptions
from aerie_lab.errors import StateError
from aerie_vllm.endpoint import DrafterEndpoint


class SimulatedDrafterEndpoint:
    """The plugin in one server."""

    def __init__(
        self,
        arguments: SimulatorArguments,
        options: SimulatorOptions,
        profile: DrafterProfile | None,
        driver: ReplicaDriver,
        engine_core: SimulatedEngineCore,
        load: Callable[[DrafterProfile], None],
        has_ended: Callable[[], bool],
    ) -> None:
        """Serve a driver's engine.

        Args:
            arguments: vLLM's.
            options: the simulation's.
            profile: the drafter of the arguments.
            driver: of the engine.
            engine_core: through which requests go.
            load: makes the engine draft with another drafter.
            has_ended: whether the engine has ended.
        """
        speculation = arguments.speculative_config or {}
        model, revision = str(speculation.get("model") or ""), speculation.get("revision")
        method = profile.method if profile is not None else ""
        self._worker = SimulatedWorker(method, model, revision, load, options.swap_seconds)
        self._worker.fault = options.drafter_fault
        worker = self._worker if arguments.has_drafter_worker else None
        client = SimulatedEngineClient(driver, engine_core, worker, arguments.api_server_count, has_ended)
        self._registry = registry = CollectorRegistry()
        if not arguments.disable_log_stats:
            register_counters(registry, driver.replica.counters, arguments.served_model_names[0])
        self._middleware = AsgiMiddleware(
            lambda app: DrafterEndpoint(app, registry=registry), SimpleNamespace(engine_client=client)
        )

    def add_to(self, app: web.Application) -> None:
        """Add the paths and the lifespan."""
        app.router.add_route("*", "/aerie/{path:.*}", self._middleware.answer)
        app.router.add_post("/simulator/drafter-fault", self._set_fault)
        app.cleanup_ctx.append(self._middleware.run_lifespan)

    def render_metrics(self) -> str:
        """Render the plugin's metrics."""
        return render_other_families(self._registry)

    async def _set_fault(self, request: web.Request) -> web.Response:
        try:
            name = (await request.json())["fault"]
            self._worker.fault = None if name is None else parse_drafter_fault(name)
        except (ValueError, KeyError, TypeError, StateError) as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({})
