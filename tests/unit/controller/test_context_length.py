"""Who is asked how long a request it takes, when, and what becomes of it. Time is virtual, engines are made up."""

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
from tests.unit.controller.test_equivalence import CANARY, CHAT, CONTROL, OTHER, PODS, STABLE, observed, pod, status


def body(length: Any, model: str = "chat") -> bytes:
    return json.dumps({"object": "list", "data": [{"id": model, "max_model_len": length}]}).encode()


class Engines:
    """Answers of the pods, by address, and whom was asked when."""

    def __init__(self, **special: Any) -> None:
        self.asked: list[tuple[float, str]] = []
        self.special: dict[str, Any] = dict.fromkeys((CANARY, CONTROL, STABLE, OTHER), body(8192))
        for name, answer in special.items():
            self.special[{"canary": CANARY, "control": CONTROL, "stable": STABLE}[name]] = answer
        self.transport = httpx.MockTransport(self.answer)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path, request.url.port) == ("GET", "/v1/models", 8000)
        self.asked.append((asyncio.get_running_loop().time(), request.url.host))
        answer = self.special[request.url.host]
        code, content = (200, answer) if isinstance(answer, bytes) else answer
        return httpx.Response(code, stream=httpx.ByteStream(content))

    def counts(self) -> dict[str, int]:
        return dict(Counter(host for _, host in self.asked))


async def said(engines: Engines, *looks: tuple[Snapshot, Status, float]) -> ContextLengths | None:
    """What is known after each look was followed for so many seconds."""
    heard: list[NamespacedName] = []
    contexts = ContextLengthProber(heard.append, engines.transport)
    running = asyncio.create_task(contexts.run())
    try:
        for seen, state, seconds in looks:
            contexts.track(CHAT, seen, state)
            await asyncio.sleep(seconds)
        found = contexts.lengths(CHAT)
        assert bool(heard) == (found is not None), "who waits is told"
        return found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("phase", ["Starting", "WarmingUp", "Analyzing", "Held", "AwaitingApproval", "Ramping", "Promoting"])
def test_one_pod_of_each_arm_is_asked_once(run: Run, phase: str) -> None:
    async def test() -> None:
        engines = Engines(canary=body(4096))
        looks = [(observed(), status(phase), 60.0)] * 3
        assert await said(engines, *looks) == ContextLengths(4096, 8192)
        assert engines.counts() == {CANARY: 1, CONTROL: 1, STABLE: 1}

    run(test())


def test_of_the_stable_revisions_pods_the_least_counts(run: Run) -> None:
    async def test() -> None:
        assert await said(Engines(stable=body(2048)), (observed(), status(), 10.0)) == ContextLengths(8192, 2048)
        alone = Engines()
        assert await said(alone, (observed(*PODS[:2]), status(), 10.0)) == ContextLengths(8192, 8192)
        assert alone.counts() == {CANARY: 1, CONTROL: 1}, "the control is the only one"

    run(test())


def sourced() -> Snapshot:
    found = observed().resource.to_dict()
    found["spec"]["metrics"] = {"source": {"prometheus": {"address": "http://prometheus:9090"}}}
    return build_snapshot(SpeculativeDeployment.from_dict(found), observed().cluster.children, pods=PODS)


@pytest.mark.parametrize(
    ("seen", "state"), [(observed(), status("RollingBack")), (observed(), Status()), (sourced(), status("Analyzing"))]
)
def test_nobody_is_asked_otherwise(run: Run, seen: Snapshot, state: Status) -> None:
    async def test() -> None:
        engines = Engines()
        assert await said(engines, (seen, state, 600.0)) is None
        assert engines.asked == []

    run(test())


def test_it_waits_for_pods_that_serve_and_asks_nobody_elses(run: Run) -> None:
    async def test() -> None:
        strange = pod("a", "chat-new", CANARY)
        strange["metadata"]["ownerReferences"] = []
        engines = Engines()
        looks = [(observed(*pods, *PODS[1:]), status("Starting"), 60.0) for pods in ((), (strange,))]
        assert await said(engines, *looks) is None
        assert engines.asked == []
        assert await said(engines, *looks, (observed(), status("Starting"), 1.0)) == ContextLengths(8192, 8192)

    run(test())


@pytest.mark.parametrize("answer", [(503, b""), (500, b"{}"), b" " * (MAX_MODELS_RESPONSE_BYTES + 1)])
def test_one_that_does_not_answer_is_asked_later_and_later(run: Run, answer: Any) -> None:
    async def test() -> None:
        engines = Engines(canary=answer)
        assert await said(engines, (observed(), status(), 3600.0)) is None
        assert engines.counts().keys() == {CANARY}, "the others are asked only after it"
        assert 5 < len(engines.asked) < 20
        engines = Engines(control=answer)
        contexts = ContextLengthProber(lambda _: None, engines.transport)
        running = asyncio.create_task(contexts.run())
        contexts.track(CHAT, observed(), status())
        await asyncio.sleep(60.0)
        assert contexts.lengths(CHAT) is None
        engines.special[CONTROL] = body(8192)
        await asyncio.sleep(120.0)
        assert contexts.lengths(CHAT) == ContextLengths(8192, 8192)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(test())


@pytest.mark.parametrize("answer", [(401, b""), (404, b""), b"no json", body(None), body(4096, "another")])
def test_one_that_does_not_say_it_is_asked_once(run: Run, answer: Any) -> None:
    async def test() -> None:
        engines = Engines(canary=answer)
        assert await said(engines, (observed(), status(), 3600.0), (observed(), status("Analyzing"), 3600.0)) is None
        assert engines.counts()[CANARY] == 1

    run(test())


def test_another_canary_is_asked_anew_and_what_is_gone_is_forgotten(run: Run) -> None:
    async def test() -> None:
        engines = Engines()
        contexts = ContextLengthProber(lambda _: None, engines.transport)
        running = asyncio.create_task(contexts.run())
        contexts.track(CHAT, observed(), status())
        await asyncio.sleep(1.0)
        assert contexts.lengths(CHAT) is not None
        contexts.track(CHAT, observed(), status(began="2026-01-02T00:00:00Z"))
        assert contexts.lengths(CHAT) is None
        await asyncio.sleep(1.0)
        assert contexts.lengths(CHAT) == ContextLengths(8192, 8192)
        contexts.forget(CHAT)
        assert contexts.lengths(CHAT) is None
        assert engines.counts()[CANARY] == 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(test())
