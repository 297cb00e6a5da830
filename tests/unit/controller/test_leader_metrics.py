"""Only the leader exports the metrics of resources: from the start of its term until its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aerie.controller import operator
from aerie.controller.kubernetes import watches
from aerie.controller.kubernetes.client import ApiError
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.tracing import NO_TRACER
from aerie.controller.work_queue import WorkQueue
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.manifests.preflight_job import PreflightJobConfig
from tests.unit.controller.operator_harness import Server

PHASE = ("aerie_resource_phase", {"namespace": "default", "name": "chat", "phase": "Preflight"})


class LeadersServer(Server):
    """An API server whose answers have no date, and whose CustomResourceDefinition may not be read."""

    def server_time(self) -> None:
        return None

    async def request(self, verb: str, path: str, *arguments: Any, **options: Any) -> Any:
        if "customresourcedefinitions" in path:
            raise ApiError(403, "Forbidden", path)
        return await super().request(verb, path, *arguments, **options)


def test_metrics_of_resources_begin_and_end_with_leadership(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_stop(_cache: Any, _namespaces: Any, stop: asyncio.Event, _relist_requested: Any) -> None:
        await stop.wait()

    monkeypatch.setattr(watches, "run_watches", wait_for_stop)
    options = operator.OperatorOptions(
        PreflightJobConfig("aerie.dev/aerie:test"), "test", DrafterCatalog(()), lease_namespace="default"
    )

    async def work() -> None:
        server, metrics, stop, queue = LeadersServer(), OperatorMetrics(), asyncio.Event(), WorkQueue()
        server.edit()
        assert metrics.registry.get_sample_value(*PHASE) is None
        term = asyncio.create_task(operator._run_as_leader(options, server, queue, metrics, NO_TRACER, stop, asyncio.Event()))
        async with asyncio.timeout(60):
            while metrics.registry.get_sample_value(*PHASE) is None and not term.done():
                await asyncio.sleep(0.02)
        assert metrics.registry.get_sample_value(*PHASE) == 1
        assert metrics.registry.get_sample_value("aerie_leader") == 1
        stop.set()
        assert await term == 0
        assert metrics.registry.get_sample_value(*PHASE) is None

    asyncio.run(work())
