"""The pods of the benchmark of a fleet that changes its drafter in place: their engines, and one server for many of them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from aerie.manifests.pod.drafter_plugin import DRAFTERS_PATH
from aerie_lab.engine.metrics.registry import register_counters
from aerie_lab.engine.serving.drafter import DrafterProfile
from aerie_vllm.counters import read_counts
from benchmarks import _inplace_fleet, _inplace_fleet_pods
from benchmarks._inplace_fleet_engine import REQUESTS_PER_SECOND, SteadyEngine, SteadyRegistry

TOKEN = "0" * 64
STEPS, TOKENS = "vllm:inter_token_latency_seconds_count", "vllm:generation_tokens_total"
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
FIRST_TOKENS, REQUESTS = "vllm:time_to_first_token_seconds_count", "vllm:request_success_total"


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def read_totals(registry: CollectorRegistry) -> Mapping[str, float]:
    """Return the sum of each series that the plugin reads."""
    return {name: sum(values.values()) for name, values in read_counts(registry).items()}


@pytest.fixture
def steady() -> tuple[SteadyEngine, SteadyRegistry, Clock]:
    clock = Clock()
    engine = SteadyEngine(1, clock)
    registry = SteadyRegistry(engine)
    register_counters(registry, engine.counters, "example/target")
    return engine, registry, clock


def test_counters_of_a_steady_engine_agree(steady: tuple[SteadyEngine, SteadyRegistry, Clock]) -> None:
    _, registry, clock = steady
    for _ in range(100):
        clock.now += 10
        read_counts(registry)
    totals = read_totals(registry)
    assert totals[STEPS] == totals[DRAFTS]
    assert totals[FIRST_TOKENS] == totals[REQUESTS] == pytest.approx(1000 * REQUESTS_PER_SECOND, rel=0.1)
    assert totals[TOKENS] == totals[DRAFTS] + totals[ACCEPTED] + totals[FIRST_TOKENS]


def test_steady_engine_counts_nothing_in_a_pause(steady: tuple[SteadyEngine, SteadyRegistry, Clock]) -> None:
    engine, registry, clock = steady
    clock.now += 60
    asyncio.run(engine.pause())
    before = read_totals(registry)
    clock.now += 60
    assert engine.is_paused
    assert read_totals(registry) == before
    engine.resume()
    assert read_totals(registry) == before
    clock.now += 60
    assert read_totals(registry)[REQUESTS] > before[REQUESTS]


def test_better_drafter_needs_fewer_steps(steady: tuple[SteadyEngine, SteadyRegistry, Clock]) -> None:
    engine, registry, clock = steady
    tokens_per_step, before = [], read_totals(registry)
    for name in ("worse", "first", "better"):
        engine.load(DrafterProfile("eagle3", "eagle3", (_inplace_fleet.LOGIT_SHIFTS[name],)))
        clock.now += 1000
        totals = read_totals(registry)
        tokens_per_step.append((totals[TOKENS] - before[TOKENS]) / (totals[STEPS] - before[STEPS]))
        before = totals
    assert all(better > 1.03 * worse for worse, better in itertools.pairwise(tokens_per_step))


class Pods:
    """Calls of the pods at addresses of the loopback interface."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._port, self._session = port, session

    async def call(self, pod: int, method: str, path: str = "/aerie/drafter", body: object = None) -> Any:
        async with self._session.request(method, f"http://127.0.1.{pod}:{self._port}{path}", json=body) as response:
            assert response.status < 300, await response.text()
            return await (response.json() if response.content_type == "application/json" else response.text())

    async def wait(self, pod: int, check: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(30):
            while not check(state := await self.call(pod, "GET")):
                await asyncio.sleep(0.01)
        return state


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the server reads it; drafters are read without a delay."""
    monkeypatch.setattr(_inplace_fleet_pods, "READ_SECONDS", 0.0)
    _inplace_fleet.write_drafters(tmp_path / "drafters")
    (tmp_path / "token").write_text(TOKEN)
    return tmp_path


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Pods]:
    application = _inplace_fleet_pods.Fleet(folder).build_application()
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", 0).start()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            yield Pods(runner.addresses[0][1], session)
    finally:
        await runner.cleanup()


async def load(pods: Pods, pod: int, name: str, **fields: object) -> Any:
    """Prepare a drafter, and load it with the files that the pod reports."""
    await pods.call(pod, "POST", "/aerie/drafter/prepare", {"folder": f"{DRAFTERS_PATH}/{name}"})
    state = await pods.wait(pod, lambda state: state["prepared"]["phase"] == "Ready")
    body = {"folder": f"{DRAFTERS_PATH}/{name}", "files": state["prepared"]["files"], **fields}
    return await pods.call(pod, "PUT", body=body)


def test_each_address_is_an_engine_of_its_own(folder: Path) -> None:
    async def run() -> None:
        async with served(folder) as pods:
            for pod in (1, 2):
                await pods.wait(pod, lambda state: state["own"] is not None)
            changed = await load(pods, 1, "better", lease_seconds=60, turn="1/0")
            other = await pods.call(2, "GET")
            assert changed["loaded"] != changed["own"] == other["own"] == other["loaded"]
            assert changed["process"]["id"] != other["process"]["id"]
            page = await pods.call(1, "GET", "/metrics")
            families = {family.name: family for family in text_string_to_metric_families(page)}
            (info,) = families["aerie_drafter_info"].samples
            assert info.labels["digest"] == changed["loaded"]["digest"]
            assert "vllm:spec_decode_num_drafts" in families
            returned = await pods.call(1, "DELETE")
            assert returned["loaded"] == returned["own"] == other["own"]

    asyncio.run(run())
    lines = (folder / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "start", "load", "load"]


def test_engine_that_starts_comes_to_the_expected_drafter(folder: Path) -> None:
    async def run() -> None:
        async with served(folder) as pods:
            await pods.wait(1, lambda state: state["own"] is not None)
            promoted = await load(pods, 1, "better")
            expected = {"folder": f"{DRAFTERS_PATH}/better", "files": promoted["own"]["files"]}
            (folder / "expected.json").write_text(json.dumps(expected))
            await pods.wait(2, lambda state: state["ready"] and state["own"] == promoted["own"])

    asyncio.run(run())
