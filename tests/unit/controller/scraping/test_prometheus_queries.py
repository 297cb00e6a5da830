"""Queries to Prometheus servers: the pods and servers they name, who gets a token, and errors with a reason. Time is virtual."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from aerie.api.metrics import PrometheusSource
from aerie.controller.scraping.http_fetch import HTTP_RESPONSE_TIMEOUT_SECONDS, MAX_HTTP_RESPONSE_BYTES, ScrapeError
from aerie.controller.scraping.prometheus import (
    MAX_CONCURRENT_PROMETHEUS_QUERIES,
    PODS_PER_QUERY,
    PrometheusAccess,
    PrometheusClient,
)
from aerie.engine.metrics.promql import PrometheusScrape
from aerie_lab.testing.prometheus import build_range_response
from tests.golden import Messages
from tests.unit.controller.conftest import Run
from tests.unit.controller.scraped import BEFORE
from tests.unit.controller.scraping.prometheus_responses import SERVER, T0, URL, json_response, parse_query

EMPTY_RESPONSE = build_range_response({})


def fixed_response(status: int, body: bytes = b"", **headers: str) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(status, stream=httpx.ByteStream(body), headers=headers))


async def poll(
    transport: httpx.AsyncBaseTransport, *pods: str, access: PrometheusAccess | None = None, server: PrometheusSource = SERVER
) -> Any:
    client = PrometheusClient(access or PrometheusAccess(), transport)
    try:
        return {pod: scrape async for scrapes in client.poll(server, "default", pods, 15.0) for pod, scrape in scrapes.items()}
    finally:
        await client.close()


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


# ---------------------------------------------------------------------------------------------------------------------- failures
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
