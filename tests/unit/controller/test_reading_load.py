"""Cost of scraping many, slow and hostile pods, which delays no canary of another resource."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.controller.scraping import pod_scraper
from aerie.controller.scraping.scrape_pool import (
    MAX_CONCURRENT_SCRAPES,
    MAX_CONCURRENT_SCRAPES_PER_NAMESPACE,
    PARSE_BYTES_PER_SECOND,
)
from aerie.controller.scraping.sliding_window import SlidingWindow
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.exposition import MAX_EXPOSITION_BYTES, parse_exposition
from aerie.engine.metrics.sample import Counters, Sample
from benchmarks._hostile_pods import PAGES
from tests.snapshots import build_snapshot

from .scraped import AFTER, ARM_METRICS, BEFORE, ScraperHarness, deployment, pod, resource

Run = Callable[[Coroutine[Any, Any, None]], None]
Handler = Callable[[httpx.Request], Coroutine[Any, Any, httpx.Response]]


def exposition_response(body: bytes) -> httpx.Response:
    return httpx.Response(200, stream=httpx.ByteStream(body))


class LoadHarness(ScraperHarness):
    """A scraper of pods whose responses come from a handler; counts requests by namespace."""

    def __init__(self, handle: Handler) -> None:
        self.calls: list[tuple[float, str]] = []
        self.active: Counter[str] = Counter()
        self.max_active: Counter[str] = Counter()
        self._handle = handle
        super().__init__(httpx.MockTransport(self._count_request))

    async def _count_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.calls.append((asyncio.get_running_loop().time(), host))
        labels = ("all", host.partition(".")[0])
        for label in labels:
            self.active[label] += 1
            self.max_active[label] = max(self.max_active[label], self.active[label])
        try:
            return await self._handle(request)
        finally:
            self.active.subtract(labels)

    def track(self, namespace: str, tracked_resource: SpeculativeDeployment, pods: int, address: str) -> NamespacedName:
        name = tracked_resource.metadata.name
        key = NamespacedName(namespace, name)
        pods_of_deployment = (pod(number, name, address=f"{address}.{number // 250}.{number % 250}") for number in range(pods))
        self.scraper.track(
            key,
            build_snapshot(tracked_resource, (deployment(name),), pods=tuple(pods_of_deployment)),
            tracked_resource.status or Status(),
        )
        return key

    def longest_gap(self, host: str) -> float:
        return max(after - before for before, after in itertools.pairwise(at for at, called in self.calls if called == host))


def resource_with_replicas(replicas: int, **changes: Any) -> SpeculativeDeployment:
    small_resource = resource(**changes)
    return small_resource.model_copy(update={"spec": small_resource.spec.model_copy(update={"replicas": replicas})})


@pytest.mark.slow
def test_cost_of_a_scrape_is_independent_of_the_number_of_pods(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    call_count, counters = 0, SlidingWindow.counters

    def count_calls(self: SlidingWindow, now: float, stale_after: float) -> Counters | None:
        nonlocal call_count
        call_count += 1
        return counters(self, now, stale_after)

    monkeypatch.setattr(SlidingWindow, "counters", count_calls)

    async def handle(_: httpx.Request) -> httpx.Response:
        return exposition_response(BEFORE if asyncio.get_running_loop().time() < 40 else AFTER)

    async def scenario() -> None:
        harness = LoadHarness(handle)
        key = harness.track("default", resource_with_replicas(400, rolling=True), 400, "10.0")
        await harness.run_for(90)
        assert harness.scraper.metrics_by_deployment(key) == {"chat-r1": ARM_METRICS}
        assert key in {notified_key for _, notified_key in harness.notifications}
        assert harness.outcomes["done"] > 5 * 400
        assert call_count <= harness.outcomes["done"]

    run(scenario())


@pytest.mark.slow
def test_slow_pods_of_a_namespace_delay_no_other_namespace(run: Run) -> None:
    async def handle(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(4.9 if request.url.host.startswith("66.") else 0.01)
        return exposition_response(BEFORE)

    async def scenario() -> None:
        harness = LoadHarness(handle)
        for number in range(4):
            harness.track("evil", resource(f"slow{number}", "1s", rolling=True), 200, f"66.{number}")
        harness.track("default", resource("canary", rolling=True), 2, "10.0")
        await harness.run_for(600)
        assert harness.longest_gap("10.0.0.0") < 16
        assert harness.longest_gap("10.0.0.1") < 16
        assert harness.max_active["66"] == MAX_CONCURRENT_SCRAPES_PER_NAMESPACE
        assert harness.max_active["all"] <= MAX_CONCURRENT_SCRAPES

    run(scenario())


def test_one_response_is_parsed_at_a_time_and_then_others_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_sizes: list[tuple[float, int]] = []

    def record_parse(body: bytes) -> Sample:
        parsed_sizes.append((asyncio.get_running_loop().time(), len(body)))
        return parse_exposition(body)

    monkeypatch.setattr(pod_scraper, "parse_exposition", record_parse)
    expositions = [PAGES[form]() for form in ("families", "labels", "reasons", "newlines")]

    async def handle(request: httpx.Request) -> httpx.Response:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5 - loop.time() % 5)  # many at the same moment
        return exposition_response(expositions[int(request.url.host.rpartition(".")[2]) % len(expositions)])

    async def scenario() -> None:
        harness = LoadHarness(handle)
        harness.track("evil", resource(interval="1s", rolling=True), 20, "66.0")
        await harness.run_for(30)
        assert len(parsed_sizes) > 40
        for (at, size), (next_parse_at, _) in itertools.pairwise(parsed_sizes):
            assert next_parse_at - at >= 0.999 * size / PARSE_BYTES_PER_SECOND

    run(scenario())


def test_pod_with_large_responses_is_scraped_less_often(run: Run) -> None:
    largest = BEFORE + b"#" * (MAX_EXPOSITION_BYTES - len(BEFORE) - 1) + b"\n"

    async def handle(request: httpx.Request) -> httpx.Response:
        return exposition_response(largest if request.url.host == "66.0.0.0" else BEFORE)

    async def scenario() -> None:
        harness = LoadHarness(handle)
        harness.track("evil", resource(interval="1s", rolling=True), 2, "66.0")
        await harness.run_for(100)
        counts = Counter(host for _, host in harness.calls)
        assert 20 <= counts["66.0.0.0"] <= 25, "each 4.2 s"
        assert counts["66.0.0.1"] >= 95

    run(scenario())


def test_resource_with_many_pods_is_scraped_at_a_longer_interval(run: Run) -> None:
    async def handle(_: httpx.Request) -> httpx.Response:
        return exposition_response(b"# nothing of vLLM\n")

    async def scenario() -> None:
        harness = LoadHarness(handle)
        harness.track("default", resource_with_replicas(1000, interval="1s", rolling=True), 3, "10.0")
        harness.track("default", resource_with_replicas(100, name="small", interval="1s", rolling=True), 3, "11.0")
        asyncio.get_running_loop().call_later(15.9, lambda: counts.update(host for _, host in harness.calls))
        counts: Counter[str] = Counter()
        await harness.run_for(16)
        assert {counts[f"10.0.0.{number}"] for number in range(3)} == {1}
        assert min(counts[f"11.0.0.{number}"] for number in range(3)) >= 3

    run(scenario())


def from_prometheus(name: str, address: str) -> SpeculativeDeployment:
    scraped_resource = resource(name, rolling=True)
    source = {"prometheus": {"address": address}}
    document = scraped_resource.to_dict()
    document["spec"]["metrics"] = {"source": source}
    return SpeculativeDeployment.from_dict(document)


def test_slow_servers_of_a_namespace_delay_no_other_namespace(run: Run) -> None:
    async def handle(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(4.9 if request.url.host.startswith("66.") else 0.01)
        return exposition_response(b'{"status": "success", "data": {"resultType": "matrix", "result": []}}')

    async def scenario() -> None:
        harness = LoadHarness(handle)
        for number in range(40):
            harness.track("evil", from_prometheus(f"slow{number}", f"http://66.0.0.{number}:9090"), 20, f"1.{number}")
        harness.track("default", from_prometheus("canary", "http://10.0.0.1:9090"), 2, "2.0")
        await harness.run_for(600)
        assert harness.longest_gap("10.0.0.1") < 16
        assert harness.max_active["66"] == 1

    run(scenario())
