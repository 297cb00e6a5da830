"""Prometheus servers that behave and others, and what becomes of what they say. Time is virtual."""

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

from .scraped import AFTER, BEFORE, FIGURES, Reader, deployment, pod, resource

Run = Callable[[Coroutine[Any, Any, None]], None]
URL = "http://prometheus.example:9090"
SERVER = PrometheusSource(address=URL)
T0 = 1_790_000_000.0
NOBODY = build_range_response({})


def asked(request: httpx.Request) -> tuple[list[str], float, str]:
    """The pods of a query, the seconds that it reaches back, and the query."""
    text = httpx.QueryParams(request.content.decode())["query"]
    pods, seconds = re.search(r'pod=~"(.*?)"', text), re.search(r"\[(\d+)ms\]$", text)
    assert pods is not None
    assert seconds is not None
    return pods[1].replace("\\", "").split("|"), int(seconds[1]) / 1000, text


def answers(status: int, body: bytes = b"", **headers: str) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(status, stream=httpx.ByteStream(body), headers=headers))


def said(document: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, stream=httpx.ByteStream(json.dumps(document).encode()))


async def ask(
    transport: httpx.AsyncBaseTransport, *pods: str, access: PrometheusAccess | None = None, server: PrometheusSource = SERVER
) -> Any:
    servers = PrometheusClient(access or PrometheusAccess(), transport)
    try:
        return {pod: found async for some in servers.poll(server, "default", pods, 15.0) for pod, found in some.items()}
    finally:
        await servers.close()


# --------------------------------------------------------------------------------------------------------------------- asking
def test_pods_are_asked_for_a_few_at_a_time_by_the_labels_that_the_resource_names(run: Run) -> None:
    calls = []

    def handle(request: httpx.Request) -> httpx.Response:
        pods, seconds, text = asked(request)
        calls.append((request.method, str(request.url), len(pods), seconds))
        assert 'cluster="west"' in text
        assert 'kube_namespace="default"' in text
        assert request.headers["Accept-Encoding"] == "identity"
        return said(build_range_response({pods[0]: [(T0, BEFORE)]}))

    async def story() -> None:
        server = PrometheusSource(address=f"{URL}/select/", namespace_label="kube_namespace", match_labels={"cluster": "west"})
        names = [f"chat-{number}" for number in range(2 * PODS_PER_QUERY + 1)]
        found = await ask(httpx.MockTransport(handle), *names, server=server)
        assert list(found) == names
        assert [isinstance(one, PrometheusScrape) for one in found.values()].count(True) == 3
        assert found["chat-1"] == (
            f"has no sample at {URL}/select/ in the last 30 s "
            "with the labels kube_namespace=default, pod=<its name>, cluster=west"
        )
        assert calls == [("POST", f"{URL}/select/api/v1/query", number, 30.0) for number in (PODS_PER_QUERY, PODS_PER_QUERY, 1)]

    run(story())


def test_what_a_server_says_of_other_pods_is_not_listened_to(run: Run) -> None:
    async def story() -> None:
        body = json.dumps(build_range_response({"chat-0": [(T0, BEFORE)], "stranger": [(T0, BEFORE)]})).encode()
        assert list(await ask(answers(200, body), "chat-0")) == ["chat-0"]

    run(story())


def test_queries_at_once_are_bounded_over_all_resources(run: Run) -> None:
    now = most = 0

    async def handle(_: httpx.Request) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(1)
        now -= 1
        return said(NOBODY)

    async def story() -> None:
        servers = PrometheusClient(PrometheusAccess(), httpx.MockTransport(handle))

        async def ask_about(namespace: str) -> None:
            async for _ in servers.poll(SERVER, namespace, ["chat-0"], 15.0):
                pass

        await asyncio.gather(*(ask_about(f"n{number}") for number in range(2 * MAX_CONCURRENT_PROMETHEUS_QUERIES)))
        await servers.close()
        assert most == MAX_CONCURRENT_PROMETHEUS_QUERIES

    run(story())


def test_a_token_is_read_each_time_and_goes_to_its_address_alone(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    seen: list[str | None] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization"))
        return said(NOBODY)

    async def story() -> None:
        access, transport = PrometheusAccess({f"{URL}/": file}), httpx.MockTransport(handle)
        await ask(transport, "chat-0", access=access)
        file.write_text("second")
        await ask(transport, "chat-0", access=access)
        for other in ("http://prometheus.example:9091", "http://prometheus.example.evil:9090", f"{URL}/other"):
            await ask(transport, "chat-0", access=access, server=PrometheusSource(address=other))
        assert seen == ["Bearer first", "Bearer second", None, None, None]
        file.unlink()
        with pytest.raises(ScrapeError, match=rf"the token for {URL} cannot be read from .*token: No such file"):
            await ask(transport, "chat-0", access=access)
        assert len(seen) == 5

    run(story())


@pytest.mark.parametrize(
    ("allowed", "address", "allows"),
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
def test_only_servers_that_the_operator_allows_are_asked(run: Run, allowed: tuple[str, ...], address: str, allows: bool) -> None:
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return said(NOBODY)

    async def story() -> None:
        server = PrometheusSource.model_construct(**{**dict(SERVER), "address": address})
        asking = ask(httpx.MockTransport(handle), "chat-0", access=PrometheusAccess(allowed_addresses=allowed), server=server)
        if allows:
            await asking
        else:
            with pytest.raises(ScrapeError) as failure:
                await asking
            assert str(failure.value).startswith(f"{address} ")
            assert failure.value.reason == "forbidden"
        assert bool(asked) == allows

    run(story())


def test_a_reading_of_a_slow_server_ends(run: Run) -> None:
    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(4.9)
        return said(NOBODY)

    async def story() -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(ScrapeError, match="took more than 30 s") as failure:
            await ask(httpx.MockTransport(slow), *(f"chat-{number}" for number in range(1000)))
        assert failure.value.reason == "timeout"
        assert asyncio.get_running_loop().time() - began < 36

    run(story())


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
def test_a_status_is_told_with_the_way_out(run: Run, messages: Messages, status: int, body: bytes, name: str) -> None:
    async def story() -> None:
        with pytest.raises(ScrapeError) as failure:
            await ask(answers(status, body, location="http://elsewhere.example/"), "chat-0")
        messages.check(name, str(failure.value))
        assert failure.value.reason == "status"

    run(story())


def test_servers_that_are_away_slow_endless_or_something_else(run: Run, messages: Messages) -> None:
    async def silent(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(10 * HTTP_RESPONSE_TIMEOUT_SECONDS)
        raise AssertionError

    async def refuses(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody listens")

    cases = [
        (httpx.MockTransport(silent), "timeout"),
        (httpx.MockTransport(refuses), "unreachable"),
        (answers(200, b" " * (MAX_HTTP_RESPONSE_BYTES + 1)), "too_large"),
        (answers(200, b"<html>"), "invalid_response"),
    ]

    async def story() -> None:
        for transport, reason in cases:
            with pytest.raises(ScrapeError) as failure:
                await ask(transport, "chat-0")
            messages.check(reason, str(failure.value))
            assert URL in str(failure.value)
            assert failure.value.reason == reason

    run(story())


# ----------------------------------------------------------------------------------------------------------------- its standing
def test_a_trouble_is_told_once_it_has_lasted_and_again_only_when_it_is_another() -> None:
    standing = SourceHealth()
    assert (standing.message, standing.record_success(), standing.message) == (None, False, "")
    assert [
        standing.record_failure("timeout", "slow", at) for at in (0, MIN_SOURCE_FAILURE_SECONDS, MIN_SOURCE_FAILURE_SECONDS + 1)
    ] == [False, False, True]
    assert standing.message == "slow"
    assert [standing.record_failure("timeout", "slower", MIN_SOURCE_FAILURE_SECONDS + n) for n in (2, 3, 4)] == [False] * 3
    assert [standing.record_failure(reason, "401", MIN_SOURCE_FAILURE_SECONDS + 5) for reason in ("status", "timeout") * 5] == [
        False
    ] * 10  # now this, now that
    assert [standing.record_failure("status", "401", MIN_SOURCE_FAILURE_SECONDS + 6) for _ in range(4)] == [
        False,
        False,
        True,
        False,
    ]
    assert standing.message == "401"
    assert standing.record_success()
    assert standing.message == ""
    assert not standing.record_success()
    assert not standing.record_failure("status", "401", MIN_SOURCE_FAILURE_SECONDS + 7)


def test_many_failures_in_a_moment_have_not_lasted() -> None:
    standing = SourceHealth()
    assert not any(standing.record_failure("timeout", "slow", second) for second in range(int(MIN_SOURCE_FAILURE_SECONDS)))
    assert standing.record_failure("timeout", "slow", MIN_SOURCE_FAILURE_SECONDS)


# ------------------------------------------------------------------------------------------------------------------ the scraper
class Server:
    """A Prometheus that scrapes pods each so many seconds of virtual time, and keeps what the engines' pages were then."""

    def __init__(self, every: float = 15.0, turns: float = 1e9) -> None:
        self.every, self.turns, self.status = every, turns, 200
        self.away: set[str] = set()
        self.calls: list[float] = []
        self.page: Callable[[float], bytes] = lambda at: BEFORE if at < self.turns else AFTER

    def __call__(self, request: httpx.Request) -> httpx.Response:
        now = asyncio.get_running_loop().time()
        self.calls.append(now)
        if request.url.path != "/api/v1/query":
            return httpx.Response(200, stream=httpx.ByteStream(self.page(now)))
        if self.status != 200:
            return httpx.Response(self.status, stream=httpx.ByteStream(b""))
        pods, seconds, text = asked(request)
        times = [n * self.every for n in range(int(now / self.every) + 1) if now - n * self.every <= seconds]
        scrapes = [(T0 + at, self.page(at)) for at in times]
        document = build_range_response({pod: scrapes for pod in pods if pod not in self.away})
        names = set(text.removeprefix('{__name__=~"').partition('"')[0].split("|"))
        result = [one for one in document["data"]["result"] if one["metric"]["__name__"] in names]
        return said({"status": "success", "data": {"resultType": "matrix", "result": result}})


class Follower(Reader):
    """Of resources that name the server."""

    def __init__(self, server: Server, access: PrometheusAccess | None = None) -> None:
        super().__init__(httpx.MockTransport(server), access)

    def follow(self, *pods: dict[str, Any], rolling: bool = False, source: bool = True, interval: str = "15s") -> NamespacedName:
        of = resource(rolling=rolling, interval=interval)
        metrics = of.spec.metrics.model_copy(update={"source": MetricsSource(prometheus=SERVER) if source else None})
        of = of.model_copy(update={"spec": of.spec.model_copy(update={"metrics": metrics})})
        return self.observe(build_snapshot(of, (deployment(),), pods=pods))


def test_figures_come_from_the_server_and_no_pod_is_read(run: Run) -> None:
    async def story() -> None:
        server = Server(turns=200)
        follower = Follower(server)
        assert follower.scraper.metrics_source_error(NamespacedName("default", "chat")) is None
        key = follower.follow(pod(), pod(1, address="10.0.0.2"))
        assert follower.scraper.metrics_source_error(key) is None
        await follower.for_(199)
        assert follower.scraper.metrics_by_deployment(key)["chat-r1"] == ArmMetrics()
        assert follower.scraper.metrics_source_error(key) == ""
        await follower.for_(61)
        assert follower.scraper.metrics_by_deployment(key) == {"chat-r1": FIGURES}
        assert follower.told
        assert set(follower.ends) == {"done"}
        assert len(server.calls) <= 6  # both pods at once, once a minute

    run(story())


def test_a_scrape_that_was_seen_before_is_no_reading(run: Run, messages: Messages) -> None:
    async def story() -> None:
        server = Server(every=60)
        follower = Follower(server)
        key = follower.follow(pod(), rolling=True)
        read_at = set()
        reading = asyncio.create_task(follower.for_(300))
        while not reading.done():
            await asyncio.sleep(3)
            read_at.add(follower.scraper.metrics.targets[NamespacedName("default", "chat-r1-hash-0")].last_sample_at)
        assert len(server.calls) >= 19
        assert len(read_at) <= 7  # one for each scrape, and nought before the first
        messages.check("Prometheus scrapes too rarely", follower.scraper.metrics_source_error(key) or "")
        server.every = 15
        await follower.for_(100)
        assert follower.scraper.metrics_source_error(key) == ""

    run(story())


def test_scrapes_as_often_as_they_are_asked_for_are_no_trouble(run: Run) -> None:
    async def story() -> None:
        for every in (5, 15, 15.2):
            follower = Follower(Server(every=every))
            key = follower.follow(pod(), rolling=True)
            await follower.for_(200)
            assert follower.scraper.metrics_source_error(key) == ""
            assert follower.told == []

    run(story())


def test_a_server_that_cannot_be_asked_is_a_trouble_that_passes(run: Run) -> None:
    async def story() -> None:
        server = Server(turns=100)
        follower = Follower(server)
        key = follower.follow(pod(), rolling=True)
        await follower.for_(200)
        assert follower.scraper.metrics_by_deployment(key) == {"chat-r1": FIGURES}
        server.status = 401
        follower.told.clear()
        await follower.for_(400)
        assert follower.scraper.metrics_source_error(key) == (
            f"{URL}/api/v1/query answered with status 401: name a token for this address in the chart value prometheus.tokens"
        )
        assert len(follower.told) == 1
        assert follower.scraper.metrics_by_deployment(key) == {}
        server.calls.clear()
        await follower.for_(600)
        assert len(server.calls) <= 11  # less and less often, down to once a minute
        server.status = 200
        await follower.for_(100)
        assert follower.scraper.metrics_source_error(key) == ""
        assert len(follower.told) >= 2

    run(story())


def test_a_pod_that_the_server_does_not_scrape_is_named(run: Run) -> None:
    async def story() -> None:
        server = Server()
        server.away.add("chat-r1-hash-1")
        follower = Follower(server)
        key = follower.follow(pod(), pod(1, address="10.0.0.2"), rolling=True)
        await follower.for_(30)
        assert not follower.scraper.metrics_source_error(key)  # it may have begun just now
        await follower.for_(170)
        assert (follower.scraper.metrics_source_error(key) or "").startswith("pod chat-r1-hash-1 has no sample at ")
        follower.follow(pod(), rolling=True)
        await follower.for_(40)
        assert follower.scraper.metrics_source_error(key) == ""

    run(story())


def test_pages_that_cannot_be_believed_count_once_for_each_scrape(run: Run) -> None:
    async def story() -> None:
        server = Server(every=60)
        server.page = lambda _: b"# nothing\n"
        follower = Follower(server)
        key = follower.follow(pod(), rolling=True)
        await follower.for_(60 * INVALID_SAMPLE_LIMIT - 61)
        assert follower.scraper.invalid_metrics(key) == {}
        await follower.for_(80)
        reason = follower.scraper.invalid_metrics(key)["chat-r1-hash-0"]
        assert "according to Prometheus, the metrics response has no vllm:" in reason

    run(story())


def test_the_source_may_change_and_the_server_may_be_another(run: Run) -> None:
    async def story() -> None:
        server = Server()
        follower = Follower(server)
        key = follower.follow(pod(), rolling=True)
        await follower.for_(100)
        assert follower.scraper.metrics_source_error(key) == ""
        server.calls.clear()
        follower.follow(pod(), rolling=True, source=False)
        await follower.for_(100)
        assert follower.scraper.metrics_source_error(key) == ""
        assert len(server.calls) >= 6
        follower.follow(pod(), rolling=True)
        server.status = 500
        await follower.for_(200)
        assert "status 500" in (follower.scraper.metrics_source_error(key) or "")
        follower.scraper.forget(key)
        server.calls.clear()
        await follower.for_(200)
        assert server.calls == []

    run(story())


def test_a_resource_without_pods_asks_nobody(run: Run) -> None:
    async def story() -> None:
        server = Server()
        follower = Follower(server)
        key = follower.follow(rolling=True)
        await follower.for_(100)
        assert server.calls == []
        assert follower.scraper.metrics_source_error(key) == ""

    run(story())


def test_a_server_that_is_not_allowed_is_a_trouble_of_its_resource_and_is_not_asked(run: Run, messages: Messages) -> None:
    async def story() -> None:
        server = Server()
        follower = Follower(server, PrometheusAccess(allowed_addresses=("http://other.example",)))
        key = follower.follow(pod(), rolling=True)
        await follower.for_(300)
        assert server.calls == []
        assert set(follower.ends) == {"forbidden"}
        messages.check("address not allowed", follower.scraper.metrics_source_error(key) or "")

    run(story())
