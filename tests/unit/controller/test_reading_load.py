"""What reading costs with many pods, slow ones and hostile ones, and that nobody else's canary waits for them."""

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

from .scraped import AFTER, BEFORE, FIGURES, Reader, deployment, pod, resource

Run = Callable[[Coroutine[Any, Any, None]], None]
Answer = Callable[[httpx.Request], Coroutine[Any, Any, httpx.Response]]


def page(body: bytes) -> httpx.Response:
    return httpx.Response(200, stream=httpx.ByteStream(body))


class Cluster(Reader):
    """Pods behind an answer, in namespaces."""

    def __init__(self, answer: Answer) -> None:
        self.calls: list[tuple[float, str]] = []
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._answer = answer
        super().__init__(httpx.MockTransport(self._counted))

    async def _counted(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.calls.append((asyncio.get_running_loop().time(), host))
        whose = ("all", host.partition(".")[0])
        for one in whose:
            self.now[one] += 1
            self.most[one] = max(self.most[one], self.now[one])
        try:
            return await self._answer(request)
        finally:
            self.now.subtract(whose)

    def follow(self, namespace: str, of: SpeculativeDeployment, pods: int, address: str) -> NamespacedName:
        name = of.metadata.name
        key = NamespacedName(namespace, name)
        made = (pod(number, name, address=f"{address}.{number // 250}.{number % 250}") for number in range(pods))
        self.scraper.track(key, build_snapshot(of, (deployment(name),), pods=tuple(made)), of.status or Status())
        return key

    def longest_gap(self, host: str) -> float:
        return max(after - before for before, after in itertools.pairwise(at for at, called in self.calls if called == host))


def sized(replicas: int, **changes: Any) -> SpeculativeDeployment:
    made = resource(**changes)
    return made.model_copy(update={"spec": made.spec.model_copy(update={"replicas": replicas})})


@pytest.mark.slow
def test_a_page_costs_as_much_with_four_hundred_pods_as_with_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    windows, whole = 0, SlidingWindow.counters

    def counted(self: SlidingWindow, now: float, stale_after: float) -> Counters | None:
        nonlocal windows
        windows += 1
        return whole(self, now, stale_after)

    monkeypatch.setattr(SlidingWindow, "counters", counted)

    async def answer(_: httpx.Request) -> httpx.Response:
        return page(BEFORE if asyncio.get_running_loop().time() < 40 else AFTER)

    async def story() -> None:
        cluster = Cluster(answer)
        key = cluster.follow("default", sized(400, rolling=True), 400, "10.0")
        await cluster.for_(90)
        assert cluster.scraper.metrics_by_deployment(key) == {"chat-r1": FIGURES}
        assert key in {told for _, told in cluster.told}
        assert cluster.ends["done"] > 5 * 400
        assert windows <= cluster.ends["done"]

    run(story())


@pytest.mark.slow
def test_slow_pods_of_one_namespace_keep_no_other_waiting(run: Run) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(4.9 if request.url.host.startswith("66.") else 0.01)
        return page(BEFORE)

    async def story() -> None:
        cluster = Cluster(answer)
        for number in range(4):
            cluster.follow("evil", resource(f"slow{number}", "1s", rolling=True), 200, f"66.{number}")
        cluster.follow("default", resource("canary", rolling=True), 2, "10.0")
        await cluster.for_(600)
        assert cluster.longest_gap("10.0.0.0") < 16
        assert cluster.longest_gap("10.0.0.1") < 16
        assert cluster.most["66"] == MAX_CONCURRENT_SCRAPES_PER_NAMESPACE
        assert cluster.most["all"] <= MAX_CONCURRENT_SCRAPES

    run(story())


def test_one_page_at_a_time_is_parsed_and_then_others_have_their_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[tuple[float, int]] = []

    def timed(body: bytes) -> Sample:
        parsed.append((asyncio.get_running_loop().time(), len(body)))
        return parse_exposition(body)

    monkeypatch.setattr(pod_scraper, "parse_exposition", timed)
    evil = [PAGES[form]() for form in ("families", "labels", "reasons", "newlines")]

    async def answer(request: httpx.Request) -> httpx.Response:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5 - loop.time() % 5)  # many at the same moment
        return page(evil[int(request.url.host.rpartition(".")[2]) % len(evil)])

    async def story() -> None:
        cluster = Cluster(answer)
        cluster.follow("evil", resource(interval="1s", rolling=True), 20, "66.0")
        await cluster.for_(30)
        assert len(parsed) > 40
        for (at, size), (following, _) in itertools.pairwise(parsed):
            assert following - at >= 0.999 * size / PARSE_BYTES_PER_SECOND

    run(story())


def test_a_pod_with_large_pages_is_read_less_often(run: Run) -> None:
    largest = BEFORE + b"#" * (MAX_EXPOSITION_BYTES - len(BEFORE) - 1) + b"\n"

    async def answer(request: httpx.Request) -> httpx.Response:
        return page(largest if request.url.host == "66.0.0.0" else BEFORE)

    async def story() -> None:
        cluster = Cluster(answer)
        cluster.follow("evil", resource(interval="1s", rolling=True), 2, "66.0")
        await cluster.for_(100)
        counts = Counter(host for _, host in cluster.calls)
        assert 20 <= counts["66.0.0.0"] <= 25, "each 4.2 s"
        assert counts["66.0.0.1"] >= 95

    run(story())


def test_a_resource_of_very_many_pods_is_read_at_a_longer_interval(run: Run) -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        return page(b"# nothing of vLLM\n")

    async def story() -> None:
        cluster = Cluster(answer)
        cluster.follow("default", sized(1000, interval="1s", rolling=True), 3, "10.0")
        cluster.follow("default", sized(100, name="small", interval="1s", rolling=True), 3, "11.0")
        asyncio.get_running_loop().call_later(15.9, lambda: counts.update(host for _, host in cluster.calls))
        counts: Counter[str] = Counter()
        await cluster.for_(16)
        assert {counts[f"10.0.0.{number}"] for number in range(3)} == {1}
        assert min(counts[f"11.0.0.{number}"] for number in range(3)) >= 3

    run(story())


def from_prometheus(name: str, address: str) -> SpeculativeDeployment:
    made = resource(name, rolling=True)
    source = {"prometheus": {"address": address}}
    document = made.to_dict()
    document["spec"]["metrics"] = {"source": source}
    return SpeculativeDeployment.from_dict(document)


def test_slow_servers_of_one_namespace_keep_no_other_waiting(run: Run) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(4.9 if request.url.host.startswith("66.") else 0.01)
        return page(b'{"status": "success", "data": {"resultType": "matrix", "result": []}}')

    async def story() -> None:
        cluster = Cluster(answer)
        for number in range(40):
            cluster.follow("evil", from_prometheus(f"slow{number}", f"http://66.0.0.{number}:9090"), 20, f"1.{number}")
        cluster.follow("default", from_prometheus("canary", "http://10.0.0.1:9090"), 2, "2.0")
        await cluster.for_(600)
        assert cluster.longest_gap("10.0.0.1") < 16
        assert cluster.most["66"] == 1

    run(story())
