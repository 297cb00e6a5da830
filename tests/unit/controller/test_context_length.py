"""Queries of the maximum context length: which pods get them, when, and with which result. Virtual time, fake engines."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import pytest

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.controller.probes.context_length import MAX_MODELS_RESPONSE_BYTES, ContextLengthProber
from aerie.controller.work_queue import NamespacedName
from aerie.rollout.facts.context_length import ContextLengths
from aerie.rollout.facts.snapshot import Snapshot
from tests.snapshots import build_snapshot
from tests.unit.controller.conftest import Run
from tests.unit.controller.test_equivalence import CANARY, CHAT, CONTROL, OTHER, PODS, STABLE, pod, snapshot_of, status


def models_body(length: Any, model: str = "chat") -> bytes:
    return json.dumps({"object": "list", "data": [{"id": model, "max_model_len": length}]}).encode()


class FakeEngines:
    """Responses of the pods by address; records the time and host of each request."""

    def __init__(self, **responses: Any) -> None:
        self.requests: list[tuple[float, str]] = []
        self.responses: dict[str, Any] = dict.fromkeys((CANARY, CONTROL, STABLE, OTHER), models_body(8192))
        for arm, response in responses.items():
            self.responses[{"canary": CANARY, "control": CONTROL, "stable": STABLE}[arm]] = response
        self.transport = httpx.MockTransport(self.respond)

    async def respond(self, request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path, request.url.port) == ("GET", "/v1/models", 8000)
        self.requests.append((asyncio.get_running_loop().time(), request.url.host))
        response = self.responses[request.url.host]
        code, content = (200, response) if isinstance(response, bytes) else response
        return httpx.Response(code, stream=httpx.ByteStream(content))

    def counts(self) -> dict[str, int]:
        return dict(Counter(host for _, host in self.requests))


async def run_prober(engines: FakeEngines, *observations: tuple[Snapshot, Status, float]) -> ContextLengths | None:
    """Return the lengths after each observation was tracked for its number of seconds."""
    notified_keys: list[NamespacedName] = []
    prober = ContextLengthProber(notified_keys.append, engines.transport)
    running = asyncio.create_task(prober.run())
    try:
        for snapshot, deployment_status, seconds in observations:
            prober.track(CHAT, snapshot, deployment_status)
            await asyncio.sleep(seconds)
        lengths = prober.lengths(CHAT)
        assert bool(notified_keys) == (lengths is not None), "a waiting reconcile is notified"
        return lengths
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("phase", ["Starting", "WarmingUp", "Analyzing", "Held", "AwaitingApproval", "Ramping", "Promoting"])
def test_one_pod_per_arm_is_queried_once(run: Run, phase: str) -> None:
    async def test() -> None:
        engines = FakeEngines(canary=models_body(4096))
        observations = [(snapshot_of(), status(phase), 60.0)] * 3
        assert await run_prober(engines, *observations) == ContextLengths(4096, 8192)
        assert engines.counts() == {CANARY: 1, CONTROL: 1, STABLE: 1}

    run(test())


def test_smallest_length_of_the_stable_pods_counts(run: Run) -> None:
    async def test() -> None:
        assert await run_prober(FakeEngines(stable=models_body(2048)), (snapshot_of(), status(), 10.0)) == ContextLengths(
            8192, 2048
        )
        engines = FakeEngines()
        assert await run_prober(engines, (snapshot_of(*PODS[:2]), status(), 10.0)) == ContextLengths(8192, 8192)
        assert engines.counts() == {CANARY: 1, CONTROL: 1}, "the control is the only one"

    run(test())


def snapshot_with_prometheus_source() -> Snapshot:
    document = snapshot_of().resource.to_dict()
    document["spec"]["metrics"] = {"source": {"prometheus": {"address": "http://prometheus:9090"}}}
    return build_snapshot(SpeculativeDeployment.from_dict(document), snapshot_of().cluster.children, pods=PODS)


@pytest.mark.parametrize(
    ("snapshot", "deployment_status"),
    [
        (snapshot_of(), status("RollingBack")),
        (snapshot_of(), Status()),
        (snapshot_with_prometheus_source(), status("Analyzing")),
    ],
)
def test_no_query_after_the_canary_or_with_a_prometheus_source(run: Run, snapshot: Snapshot, deployment_status: Status) -> None:
    async def test() -> None:
        engines = FakeEngines()
        assert await run_prober(engines, (snapshot, deployment_status, 600.0)) is None
        assert engines.requests == []

    run(test())


def test_query_waits_for_ready_pods_and_skips_foreign_pods(run: Run) -> None:
    async def test() -> None:
        foreign_pod = pod("a", "chat-new", CANARY)
        foreign_pod["metadata"]["ownerReferences"] = []
        engines = FakeEngines()
        observations = [(snapshot_of(*pods, *PODS[1:]), status("Starting"), 60.0) for pods in ((), (foreign_pod,))]
        assert await run_prober(engines, *observations) is None
        assert engines.requests == []
        assert await run_prober(engines, *observations, (snapshot_of(), status("Starting"), 1.0)) == ContextLengths(8192, 8192)

    run(test())


@pytest.mark.parametrize("answer", [(503, b""), (500, b"{}"), b" " * (MAX_MODELS_RESPONSE_BYTES + 1)])
def test_failed_query_is_retried_at_growing_intervals(run: Run, answer: Any) -> None:
    async def test() -> None:
        engines = FakeEngines(canary=answer)
        assert await run_prober(engines, (snapshot_of(), status(), 3600.0)) is None
        assert engines.counts().keys() == {CANARY}, "the others are queried only after it"
        assert 5 < len(engines.requests) < 20
        engines = FakeEngines(control=answer)
        prober = ContextLengthProber(lambda _: None, engines.transport)
        running = asyncio.create_task(prober.run())
        prober.track(CHAT, snapshot_of(), status())
        await asyncio.sleep(60.0)
        assert prober.lengths(CHAT) is None
        engines.responses[CONTROL] = models_body(8192)
        await asyncio.sleep(120.0)
        assert prober.lengths(CHAT) == ContextLengths(8192, 8192)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(test())


@pytest.mark.parametrize("answer", [(401, b""), (404, b""), b"no json", models_body(None), models_body(4096, "another")])
def test_pod_that_reports_no_length_is_queried_once(run: Run, answer: Any) -> None:
    async def test() -> None:
        engines = FakeEngines(canary=answer)
        assert await run_prober(engines, (snapshot_of(), status(), 3600.0), (snapshot_of(), status("Analyzing"), 3600.0)) is None
        assert engines.counts()[CANARY] == 1

    run(test())


def test_new_canary_is_queried_again_and_a_removed_one_forgotten(run: Run) -> None:
    async def test() -> None:
        engines = FakeEngines()
        prober = ContextLengthProber(lambda _: None, engines.transport)
        running = asyncio.create_task(prober.run())
        prober.track(CHAT, snapshot_of(), status())
        await asyncio.sleep(1.0)
        assert prober.lengths(CHAT) is not None
        prober.track(CHAT, snapshot_of(), status(start_time="2026-01-02T00:00:00Z"))
        assert prober.lengths(CHAT) is None
        await asyncio.sleep(1.0)
        assert prober.lengths(CHAT) == ContextLengths(8192, 8192)
        prober.forget(CHAT)
        assert prober.lengths(CHAT) is None
        assert engines.counts()[CANARY] == 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(test())
