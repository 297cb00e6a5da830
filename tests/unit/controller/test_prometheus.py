"""Prometheus servers, valid and invalid, and the metrics read from their responses. Time is virtual."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from aerie.api.metrics import MetricsSource, PrometheusSource
from aerie.controller.scraping.http_fetch import HTTP_RESPONSE_TIMEOUT_SECONDS, MAX_HTTP_RESPONSE_BYTES, ScrapeError
from aerie.controller.scraping.prometheus import (
    MAX_CONCURRENT_PROMETHEUS_QUERIES,
    MIN_SOURCE_FAILURE_SECONDS,
    PODS_PER_QUERY,
    PrometheusAccess,
    PrometheusClient,
    SourceHealth,
)
from aerie.controller.scraping.scrape_pool import INVALID_SAMPLE_LIMIT
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.promql import PrometheusScrape
from aerie.rollout.facts.arm_metrics import ArmMetrics
from aerie_lab.testing.prometheus import build_range_response
from tests.golden import Messages
from tests.snapshots import build_snapshot

from .scraped import AFTER, ARM_METRICS, BEFORE, ScraperHarness, deployment, pod, resource

Run = Callable[[Coroutine[Any, Any, None]], None]
URL = "http://prometheus.example:9090"
SERVER = PrometheusSource(address=URL)
T0 = 1_790_000_000.0
EMPTY_RESPONSE = build_range_response({})


def parse_query(request: httpx.Request) -> tuple[list[str], float, str]:
    """Return the pods of a query, its range in seconds, and the query."""
    text = httpx.QueryParams(request.content.decode())["query"]
    pods, seconds = re.search(r'pod=~"(.*?)"', text), re.search(r"\[(\d+)ms\]$", text)
    assert pods is not None
    assert seconds is not None
    return pods[1].replace("\\", "").split("|"), int(seconds[1]) / 1000, text


def fixed_response(status: int, body: bytes = b"", **headers: str) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(status, stream=httpx.ByteStream(body), headers=headers))


def json_response(document: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, stream=httpx.ByteStream(json.dumps(document).encode()))


async def poll(
    transport: httpx.AsyncBaseTransport, *pods: str, access: PrometheusAccess | None = None, server: PrometheusSource = SERVER
) -> Any:
    client = PrometheusClient(access or PrometheusAccess(), transport)
    try:
        return {pod: scrape async for scrapes in client.poll(server, "default", pods, 15.0) for pod, scrape in scrapes.items()}
    finally:
        await client.close()


# -------------------------------------------------------------------------------------------------------------------- queries
def test_query_selects_a_few_pods_by_the_labels_of_the_resource(run: Run) -> None:
    calls = []

    def handle(request: httpx.Request) -> httpx.Response:
        pods, seconds, text = parse_query(request)
        calls.append((request.method, str(request.url), len(pods), seconds))
        assert 'cluster="west"' in text
        assert 'kube_namespace="default"' in text
        assert request.headers["Accept-Encoding"] == "identity"
        return json_response(build_range_response({pods[0]: [(T0, BEFORE)]}))

    async def scenario() -> None:
        server = PrometheusSource(address=f"{URL}/select/", namespace_label="kube_namespace", match_labels={"cluster": "west"})
        names = [f"chat-{number}" for number in range(2 * PODS_PER_QUERY + 1)]
        scrapes = await poll(httpx.MockTransport(handle), *names, server=server)
        assert list(scrapes) == names
        assert [isinstance(scrape, PrometheusScrape) for scrape in scrapes.values()].count(True) == 3
        assert scrapes["chat-1"] == (
            f"has no sample at {URL}/select/ in the last 30 s "
            "with the labels kube_namespace=default, pod=<its name>, cluster=west"
        )
        assert calls == [("POST", f"{URL}/select/api/v1/query", number, 30.0) for number in (PODS_PER_QUERY, PODS_PER_QUERY, 1)]

    run(scenario())


def test_series_of_other_pods_are_ignored(run: Run) -> None:
    async def scenario() -> None:
        body = json.dumps(build_range_response({"chat-0": [(T0, BEFORE)], "stranger": [(T0, BEFORE)]})).encode()
        assert list(await poll(fixed_response(200, body), "chat-0")) == ["chat-0"]

    run(scenario())


def test_concurrent_queries_are_bounded_over_all_resources(run: Run) -> None:
    active = max_active = 0

    async def handle(_: httpx.Request) -> httpx.Response:
        nonlocal active, max_active
        active += 1
        max_active = max(max_active, active)
        await asyncio.sleep(1)
        active -= 1
        return json_response(EMPTY_RESPONSE)

    async def scenario() -> None:
        client = PrometheusClient(PrometheusAccess(), httpx.MockTransport(handle))

        async def poll_namespace(namespace: str) -> None:
            async for _ in client.poll(SERVER, namespace, ["chat-0"], 15.0):
                pass

        await asyncio.gather(*(poll_namespace(f"n{number}") for number in range(2 * MAX_CONCURRENT_PROMETHEUS_QUERIES)))
        await client.close()
        assert max_active == MAX_CONCURRENT_PROMETHEUS_QUERIES

    run(scenario())


def test_token_is_reread_and_sent_only_to_its_address(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    authorization_headers: list[str | None] = []

    def handle(request: httpx.Request) -> httpx.Response:
        authorization_headers.append(request.headers.get("Authorization"))
        return json_response(EMPTY_RESPONSE)

    async def scenario() -> None:
        access, transport = PrometheusAccess({f"{URL}/": file}), httpx.MockTransport(handle)
        await poll(transport, "chat-0", access=access)
        file.write_text("second")
        await poll(transport, "chat-0", access=access)
        for other in ("http://prometheus.example:9091", "http://prometheus.example.evil:9090", f"{URL}/other"):
            await poll(transport, "chat-0", access=access, server=PrometheusSource(address=other))
        assert authorization_headers == ["Bearer first", "Bearer second", None, None, None]
        file.unlink()
        with pytest.raises(ScrapeError, match=rf"the token for {URL} cannot be read from .*token: No such file"):
            await poll(transport, "chat-0", access=access)
        assert len(authorization_headers) == 5

    run(scenario())


@pytest.mark.parametrize(
    ("allowed", "address", "is_allowed"),
    [
        ((), "http://169.254.169.254", True),
        ((URL,), URL, True),
        ((URL,), f"{URL}/", True),
        ((f"{URL}/",), URL, True),
        ((URL,), f"{URL}/tenant", True),
        ((URL,), "http://PROMETHEUS.example:9090", True),
        (("http://other.example", URL), URL, True),
        (("http://prometheus.example",), "http://prometheus.example:80/", True),
        ((URL,), "http://prometheus.example:9091", False),
        ((URL,), "http://prometheus.example", False),
        ((URL,), "https://prometheus.example:9090", False),
        ((URL,), "http://prometheus.example.evil:9090", False),
        ((URL,), "http://10.0.0.1:9090", False),
        ((URL,), "http://prometheus.example:9090@10.0.0.1:9090", False),
        ((f"{URL}/tenant",), f"{URL}/tenant/a", True),
        ((f"{URL}/tenant",), f"{URL}/tenants", False),
        ((f"{URL}/tenant",), f"{URL}/tenant/../other", False),
        ((f"{URL}/tenant",), f"{URL}/tenant/%2e%2e/other", False),
        ((f"{URL}/tenant",), URL, False),
    ],
)
def test_only_allowed_servers_are_queried(run: Run, allowed: tuple[str, ...], address: str, is_allowed: bool) -> None:
    requested_urls: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requested_urls.append(str(request.url))
        return json_response(EMPTY_RESPONSE)

    async def scenario() -> None:
        server = PrometheusSource.model_construct(**{**dict(SERVER), "address": address})
        polling = poll(httpx.MockTransport(handle), "chat-0", access=PrometheusAccess(allowed_addresses=allowed), server=server)
        if is_allowed:
            await polling
        else:
            with pytest.raises(ScrapeError) as failure:
                await polling
            assert str(failure.value).startswith(f"{address} ")
            assert failure.value.reason == "forbidden"
        assert bool(requested_urls) == is_allowed

    run(scenario())


def test_poll_of_a_slow_server_times_out(run: Run) -> None:
    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(4.9)
        return json_response(EMPTY_RESPONSE)

    async def scenario() -> None:
        started_at = asyncio.get_running_loop().time()
        with pytest.raises(ScrapeError, match="took more than 30 s") as failure:
            await poll(httpx.MockTransport(slow), *(f"chat-{number}" for number in range(1000)))
        assert failure.value.reason == "timeout"
        assert asyncio.get_running_loop().time() - started_at < 36

    run(scenario())


@pytest.mark.parametrize(
    ("status", "body", "name"),
    [
        (401, b"Unauthorized", "status 401"),
        (403, b"", "status 403"),
        (302, b"", "status 302"),
        (404, b"404 page not found", "status 404"),
        (422, b'{"errorType": "execution", "error": "too many samples"}', "status 422 with a known type"),
        (422, b'{"errorType": "root-password: hunter2", "error": "x"}', "status 422 with an unknown type"),
        (503, b'{"errorType": ["x"], "error": ["x"]}', "status 503"),
        (503, b"[" * 100_000, "status 503"),
    ],
)
def test_error_status_is_reported_with_a_fix(run: Run, messages: Messages, status: int, body: bytes, name: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ScrapeError) as failure:
            await poll(fixed_response(status, body, location="http://elsewhere.example/"), "chat-0")
        messages.check(name, str(failure.value))
        assert failure.value.reason == "status"

    run(scenario())


def test_server_failure_has_a_reason_and_a_message(run: Run, messages: Messages) -> None:
    async def silent(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(10 * HTTP_RESPONSE_TIMEOUT_SECONDS)
        raise AssertionError

    async def refuses(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody listens")

    cases = [
        (httpx.MockTransport(silent), "timeout"),
        (httpx.MockTransport(refuses), "unreachable"),
        (fixed_response(200, b" " * (MAX_HTTP_RESPONSE_BYTES + 1)), "too_large"),
        (fixed_response(200, b"<html>"), "invalid_response"),
    ]

    async def scenario() -> None:
        for transport, reason in cases:
            with pytest.raises(ScrapeError) as failure:
                await poll(transport, "chat-0")
            messages.check(reason, str(failure.value))
            assert URL in str(failure.value)
            assert failure.value.reason == reason

    run(scenario())


# ----------------------------------------------------------------------------------------------------------------- its health
def test_source_failure_is_reported_once_it_lasts_and_when_it_changes() -> None:
    health = SourceHealth()
    assert (health.message, health.record_success(), health.message) == (None, False, "")
    assert [
        health.record_failure("timeout", "slow", at) for at in (0, MIN_SOURCE_FAILURE_SECONDS, MIN_SOURCE_FAILURE_SECONDS + 1)
    ] == [False, False, True]
    assert health.message == "slow"
    assert [health.record_failure("timeout", "slower", MIN_SOURCE_FAILURE_SECONDS + n) for n in (2, 3, 4)] == [False] * 3
    assert [health.record_failure(reason, "401", MIN_SOURCE_FAILURE_SECONDS + 5) for reason in ("status", "timeout") * 5] == [
        False
    ] * 10  # alternating reasons
    assert [health.record_failure("status", "401", MIN_SOURCE_FAILURE_SECONDS + 6) for _ in range(4)] == [
        False,
        False,
        True,
        False,
    ]
    assert health.message == "401"
    assert health.record_success()
    assert health.message == ""
    assert not health.record_success()
    assert not health.record_failure("status", "401", MIN_SOURCE_FAILURE_SECONDS + 7)


def test_failures_within_a_short_time_are_not_reported() -> None:
    health = SourceHealth()
    assert not any(health.record_failure("timeout", "slow", second) for second in range(int(MIN_SOURCE_FAILURE_SECONDS)))
    assert health.record_failure("timeout", "slow", MIN_SOURCE_FAILURE_SECONDS)


# ------------------------------------------------------------------------------------------------------------------ the scraper
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
            f"{URL}/api/v1/query answered with status 401: name a token for this address in the chart value prometheus.tokens"
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


def test_resource_without_pods_causes_no_query(run: Run) -> None:
    async def scenario() -> None:
        server = FakePrometheus()
        harness = PrometheusHarness(server)
        key = harness.track(rolling=True)
        await harness.run_for(100)
        assert server.calls == []
        assert harness.scraper.metrics_source_error(key) == ""

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
