"""Metrics from a Prometheus server in the scraper: its samples, and source errors for as long as they last. Time is virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from aerie.api.metrics import MetricsSource
from aerie.controller.scraping.prometheus import PrometheusAccess
from aerie.controller.scraping.scrape_pool import INVALID_SAMPLE_LIMIT
from aerie.controller.work_queue import NamespacedName
from aerie.rollout.facts.arm_metrics import ArmMetrics
from aerie_lab.testing.prometheus import build_range_response
from tests.golden import Messages
from tests.snapshots import build_snapshot
from tests.unit.controller.conftest import Run
from tests.unit.controller.scraped import AFTER, ARM_METRICS, BEFORE, ScraperHarness, deployment, pod, resource
from tests.unit.controller.scraping.prometheus_responses import SERVER, T0, URL, json_response, parse_query


class FakePrometheus:
    """A Prometheus that scrapes pods at an interval of virtual time, and stores the exposition of each time."""

    def __init__(self, scrape_interval: float = 15.0, changes_at: float = 1e9) -> None:
        self.scrape_interval, self.changes_at, self.status = scrape_interval, changes_at, 200
        self.unscraped_pods: set[str] = set()
        self.calls: list[float] = []
        self.exposition: Callable[[float], bytes] = lambda at: BEFORE if at < self.changes_at else AFTER

    def __call__(self, request: httpx.Request) -> httpx.Response:
        now = asyncio.get_running_loop().time()
        self.calls.append(now)
        if request.url.path != "/api/v1/query":
            return httpx.Response(200, stream=httpx.ByteStream(self.exposition(now)))
        if self.status != 200:
            return httpx.Response(self.status, stream=httpx.ByteStream(b""))
        pods, seconds, text = parse_query(request)
        times = [
            n * self.scrape_interval
            for n in range(int(now / self.scrape_interval) + 1)
            if now - n * self.scrape_interval <= seconds
        ]
        scrapes = [(T0 + at, self.exposition(at)) for at in times]
        document = build_range_response({pod: scrapes for pod in pods if pod not in self.unscraped_pods})
        names = set(text.removeprefix('{__name__=~"').partition('"')[0].split("|"))
        result = [series for series in document["data"]["result"] if series["metric"]["__name__"] in names]
        return json_response({"status": "success", "data": {"resultType": "matrix", "result": result}})


class PrometheusHarness(ScraperHarness):
    """A scraper of resources whose metrics source is the server."""

    def __init__(self, server: FakePrometheus, access: PrometheusAccess | None = None) -> None:
        super().__init__(httpx.MockTransport(server), access)

    def track(self, *pods: dict[str, Any], rolling: bool = False, source: bool = True, interval: str = "15s") -> NamespacedName:
        tracked_resource = resource(rolling=rolling, interval=interval)
        metrics = tracked_resource.spec.metrics.model_copy(
            update={"source": MetricsSource(prometheus=SERVER) if source else None}
        )
        tracked_resource = tracked_resource.model_copy(
            update={"spec": tracked_resource.spec.model_copy(update={"metrics": metrics})}
        )
        return self.track_pods(build_snapshot(tracked_resource, (deployment(),), pods=pods))


def test_metrics_come_from_the_server_and_not_from_pods(run: Run) -> None:
    async def scenario() -> None:
        server = FakePrometheus(changes_at=200)
        harness = PrometheusHarness(server)
        assert harness.scraper.metrics_source_error(NamespacedName("default", "chat")) is None
        key = harness.track(pod(), pod(1, address="10.0.0.2"))
        assert harness.scraper.metrics_source_error(key) is None
        await harness.run_for(199)
        assert harness.scraper.metrics_by_deployment(key)["chat-r1"] == ArmMetrics()
        assert harness.scraper.metrics_source_error(key) == ""
        await harness.run_for(61)
        assert harness.scraper.metrics_by_deployment(key) == {"chat-r1": ARM_METRICS}
        assert harness.notifications
        assert set(harness.outcomes) == {"done"}
        assert len(server.calls) <= 6  # both pods at once, once a minute

    run(scenario())


def test_repeated_scrape_is_no_new_sample(run: Run, messages: Messages) -> None:
    async def scenario() -> None:
        server = FakePrometheus(scrape_interval=60)
        harness = PrometheusHarness(server)
        key = harness.track(pod(), rolling=True)
        sample_times = set()
        scraping = asyncio.create_task(harness.run_for(300))
        while not scraping.done():
            await asyncio.sleep(3)
            sample_times.add(harness.scraper.metrics.targets[NamespacedName("default", "chat-r1-hash-0")].last_sample_at)
        assert len(server.calls) >= 19
        assert len(sample_times) <= 7  # one for each scrape, and None before the first
        messages.check("Prometheus scrapes too rarely", harness.scraper.metrics_source_error(key) or "")
        server.scrape_interval = 15
        await harness.run_for(100)
        assert harness.scraper.metrics_source_error(key) == ""

    run(scenario())


def test_scrapes_at_the_interval_cause_no_source_error(run: Run) -> None:
    async def scenario() -> None:
        for interval in (5, 15, 15.2):
            harness = PrometheusHarness(FakePrometheus(scrape_interval=interval))
            key = harness.track(pod(), rolling=True)
            await harness.run_for(200)
            assert harness.scraper.metrics_source_error(key) == ""
            assert harness.notifications == []

    run(scenario())


def test_invalid_sample_is_counted_once_per_scrape(run: Run) -> None:
    async def scenario() -> None:
        server = FakePrometheus(scrape_interval=60)
        server.exposition = lambda _: b"# nothing\n"
        harness = PrometheusHarness(server)
        key = harness.track(pod(), rolling=True)
        await harness.run_for(60 * INVALID_SAMPLE_LIMIT - 61)
        assert harness.scraper.invalid_metrics(key) == {}
        await harness.run_for(80)
        reason = harness.scraper.invalid_metrics(key)["chat-r1-hash-0"]
        assert "according to Prometheus, the metrics response has no vllm:" in reason

    run(scenario())


def test_resource_without_pods_causes_no_query(run: Run) -> None:
    async def scenario() -> None:
        server = FakePrometheus()
        harness = PrometheusHarness(server)
        key = harness.track(rolling=True)
        await harness.run_for(100)
        assert server.calls == []
        assert harness.scraper.metrics_source_error(key) == ""

    run(scenario())


# ----------------------------------------------------------------------------------------------------------------- source errors
def test_unavailable_server_causes_a_temporary_source_error(run: Run) -> None:
    async def scenario() -> None:
        server = FakePrometheus(changes_at=100)
        harness = PrometheusHarness(server)
        key = harness.track(pod(), rolling=True)
        await harness.run_for(200)
        assert harness.scraper.metrics_by_deployment(key) == {"chat-r1": ARM_METRICS}
        server.status = 401
        harness.notifications.clear()
        await harness.run_for(400)
        assert harness.scraper.metrics_source_error(key) == (
            f"{URL}/api/v1/query returned status 401: name a token for this address in the chart value prometheus.tokens"
        )
        assert len(harness.notifications) == 1
        assert harness.scraper.metrics_by_deployment(key) == {}
        server.calls.clear()
        await harness.run_for(600)
        assert len(server.calls) <= 11  # with back-off, down to once a minute
        server.status = 200
        await harness.run_for(100)
        assert harness.scraper.metrics_source_error(key) == ""
        assert len(harness.notifications) >= 2

    run(scenario())


def test_source_error_names_a_pod_without_samples(run: Run) -> None:
    async def scenario() -> None:
        server = FakePrometheus()
        server.unscraped_pods.add("chat-r1-hash-1")
        harness = PrometheusHarness(server)
        key = harness.track(pod(), pod(1, address="10.0.0.2"), rolling=True)
        await harness.run_for(30)
        assert not harness.scraper.metrics_source_error(key)  # it may have begun just now
        await harness.run_for(170)
        assert (harness.scraper.metrics_source_error(key) or "").startswith("pod chat-r1-hash-1 has no sample at ")
        harness.track(pod(), rolling=True)
        await harness.run_for(40)
        assert harness.scraper.metrics_source_error(key) == ""

    run(scenario())


def test_metrics_source_may_change(run: Run) -> None:
    async def scenario() -> None:
        server = FakePrometheus()
        harness = PrometheusHarness(server)
        key = harness.track(pod(), rolling=True)
        await harness.run_for(100)
        assert harness.scraper.metrics_source_error(key) == ""
        server.calls.clear()
        harness.track(pod(), rolling=True, source=False)
        await harness.run_for(100)
        assert harness.scraper.metrics_source_error(key) == ""
        assert len(server.calls) >= 6
        harness.track(pod(), rolling=True)
        server.status = 500
        await harness.run_for(200)
        assert "status 500" in (harness.scraper.metrics_source_error(key) or "")
        harness.scraper.forget(key)
        server.calls.clear()
        await harness.run_for(200)
        assert server.calls == []

    run(scenario())


def test_forbidden_server_is_a_source_error_and_not_queried(run: Run, messages: Messages) -> None:
    async def scenario() -> None:
        server = FakePrometheus()
        harness = PrometheusHarness(server, PrometheusAccess(allowed_addresses=("http://other.example",)))
        key = harness.track(pod(), rolling=True)
        await harness.run_for(300)
        assert server.calls == []
        assert set(harness.outcomes) == {"forbidden"}
        messages.check("address not allowed", harness.scraper.metrics_source_error(key) or "")

    run(scenario())
