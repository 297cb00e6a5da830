"""Reads engines' metrics from Prometheus servers, for resources whose spec.metrics.source names one.

One poll covers all pods of a resource, in queries of a few pods each, one after the other.

Guarantees: a server is queried only where the operator's settings allow its address, and only for the resource's own namespace
and pods. At most `MAX_CONCURRENT_PROMETHEUS_QUERIES` queries are in progress over all resources. Each answer has limits in time
and size (aerie.controller.scraping.http_fetch), all answers of a poll together have one in time, and one answer at a time is
parsed. A token is sent only to the address that the operator's settings name it for, whatever a resource says. It is read again
for each query, so that it may be renewed.

A problem with a server is a message with the fix (`SourceHealth`), reported once it has lasted. It has nothing of an answer but
its status and Prometheus' own error type. Not guaranteed: secrecy of what an allowed address reveals, such as whether a server
answers there.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from aerie.api.metrics import PrometheusSource
from aerie.controller.scraping.http_fetch import ScrapeError, create_http_client, send_request
from aerie.engine.metrics.promql import (
    PrometheusResponseError,
    PrometheusScrape,
    build_range_query,
    format_error_type,
    parse_newest_scrapes,
)

MAX_CONCURRENT_PROMETHEUS_QUERIES = 16
"""Queries in progress at once, over all servers and resources; the caller gives each namespace its turn (scrape_pool.py)."""
MAX_POLL_SECONDS = 30.0
"""Seconds after which a poll sends no further query; the queries for a thousand pods take eight."""
PROMETHEUS_PARSE_BYTES_PER_SECOND = 20e6
"""Bytes of answers that are parsed per second, of all servers together."""
PODS_PER_QUERY = 8
"""Pods in one query: their answer has some 200 KiB when the server scrapes as often as it is queried."""
QUERY_RANGE_INTERVALS = 2.0
"""Range of a query in intervals: a scrape or two."""
MIN_QUERY_RANGE_SECONDS = 5.0
"""Minimum range of a query in seconds."""
MIN_SOURCE_FAILURES = 3
"""Failures in a row before a problem with a server is reported."""
MIN_SOURCE_FAILURE_SECONDS = 60.0
"""Seconds of failures before a problem with a server is reported."""
PROMETHEUS_FIELD_PATH = "spec.metrics.source.prometheus"


@dataclass(frozen=True)
class PrometheusAccess:
    """Settings of the operator for access to Prometheus servers."""

    token_files: Mapping[str, Path] = field(default_factory=dict)
    """File with the bearer token, by address of the server."""
    ca_file: Path | None = None
    """File with the CA certificates of servers with https. Default: the usual public ones."""
    allowed_addresses: tuple[str, ...] = ()
    """Addresses of servers that may be queried, each with all paths below it; empty: any."""

    def allows(self, address: str) -> bool:
        """Return True when a server at the address may be queried."""
        return not self.allowed_addresses or any(
            _is_at_or_below(address, allowed_address) for allowed_address in self.allowed_addresses
        )


class PrometheusClient:
    """Client of Prometheus servers. The caller has to close it."""

    def __init__(self, access: PrometheusAccess, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._token_files = {_normalize_address(address): path for address, path in access.token_files.items()}
        self._access, self._transport = access, transport
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._query_slots = asyncio.Semaphore(MAX_CONCURRENT_PROMETHEUS_QUERIES)
        self._parse_lock = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.aclose()

    async def poll(
        self, server: PrometheusSource, namespace: str, pods: Sequence[str], interval: float
    ) -> AsyncIterator[Mapping[str, PrometheusScrape | str]]:
        """Yield the newest scrape by pod, a few pods at a time. Raises ScrapeError.

        A pod without a scrape has the reason instead, as the rest of a sentence about the pod.
        """
        if not self._access.allows(server.address):
            message = (
                f"{server.address} is not an address that this operator may query: use an allowed one in "
                f"{PROMETHEUS_FIELD_PATH}.address"
            )
            raise ScrapeError(
                "forbidden", f"{message}, or have it added to the chart value prometheus.allowed (--prometheus-allow)"
            )
        loop, started = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        seconds = max(MIN_QUERY_RANGE_SECONDS, QUERY_RANGE_INTERVALS * interval)
        labels = {**server.match_labels, server.namespace_label: namespace}
        missing_message = (
            f"has no sample at {server.address} in the last {seconds:g} s with the labels {_format_labels(server, namespace)}"
        )
        for offset in range(0, len(pods), PODS_PER_QUERY):
            if loop.time() - started > MAX_POLL_SECONDS:
                raise ScrapeError(
                    "timeout",
                    f"{server.address} took more than {MAX_POLL_SECONDS:g} s for {PROMETHEUS_FIELD_PATH}: check the server",
                )
            query_pods = pods[offset : offset + PODS_PER_QUERY]
            async with self._query_slots:
                response = await self._query(server.address, build_range_query(query_pods, server.pod_label, labels, seconds))
            try:
                async with self._parse_lock:
                    scrapes = parse_newest_scrapes(response, server.pod_label)
                    await asyncio.sleep(len(response) / PROMETHEUS_PARSE_BYTES_PER_SECOND)
            except PrometheusResponseError as error:
                raise ScrapeError(
                    "invalid_response",
                    f"{server.address} returned {error}: {PROMETHEUS_FIELD_PATH}.address must be a Prometheus server",
                ) from None
            yield {pod: scrapes.get(pod, missing_message) for pod in query_pods}

    async def _query(self, address: str, promql: str) -> bytes:
        url = f"{address.rstrip('/')}/api/v1/query"
        headers = {"Accept": "application/json"}
        if (path := self._token_files.get(_normalize_address(address))) is not None:
            try:
                headers["Authorization"] = f"Bearer {path.read_text().strip()}"
            except OSError as error:
                raise ScrapeError(
                    "credentials", f"the token for {address} cannot be read from {path}: {error.strerror}"
                ) from error
        try:
            status, body = await send_request(self._client(url), "POST", url, headers, {"query": promql})
        except ScrapeError as error:
            if error.reason in ("timeout", "unreachable"):
                fix = (
                    f"correct {PROMETHEUS_FIELD_PATH}.address, or let the operator through "
                    "(chart value networkPolicy.prometheusPeers)"
                )
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    fix = (
                        "add the server's CA certificate to the chart value prometheus.caBundle, or correct "
                        f"{PROMETHEUS_FIELD_PATH}.address"
                    )
                raise ScrapeError(error.reason, f"{error}: {fix}") from error
            raise
        if status != 200:
            raise ScrapeError("status", f"{url} answered with status {status}{_describe_error_response(status, body)}")
        return body

    def _client(self, url: str) -> httpx.AsyncClient:
        scheme = url.partition(":")[0]
        if scheme not in self._clients:
            tls_context = None
            if scheme == "https":
                try:
                    tls_context = httpx.create_ssl_context(verify=_load_ca_bundle(self._access.ca_file), trust_env=False)
                except (OSError, ssl.SSLError) as error:
                    message = f"the CA certificates in {self._access.ca_file} cannot be read: {error}"
                    raise ScrapeError("credentials", message) from error
            self._clients[scheme] = create_http_client(self._transport, tls_context)
        return self._clients[scheme]


def _load_ca_bundle(file: Path | None) -> ssl.SSLContext | bool:
    return True if file is None else ssl.create_default_context(cafile=str(file))


def _normalize_address(address: str) -> str:
    """Return the address in a canonical form."""
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL:
        return address
    return str(url.copy_with(path=url.path.rstrip("/") or "/"))


def _is_at_or_below(address: str, allowed: str) -> bool:
    """Return True when the address is the allowed one or below it, without dot segments in its path."""
    try:
        url, allowed_url = httpx.URL(_normalize_address(address)), httpx.URL(_normalize_address(allowed))
    except httpx.InvalidURL:
        return False
    if (url.scheme, url.host, url.port) != (allowed_url.scheme, allowed_url.host, allowed_url.port) or url.userinfo:
        return False
    url_path, allowed_path = f"{url.path.rstrip('/')}/", f"{allowed_url.path.rstrip('/')}/"
    return url_path.startswith(allowed_path) and not {".", ".."} & set(url_path.split("/"))


def _format_labels(server: PrometheusSource, namespace: str) -> str:
    labels = {server.namespace_label: namespace, server.pod_label: "<its name>", **server.match_labels}
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def _describe_error_response(status: int, body: bytes) -> str:
    """Return the server's error type, and the fix."""
    error_type = format_error_type(body)
    match status:
        case 401 | 403:
            return f"{error_type}: name a token for this address in the chart value prometheus.tokens"
        case 400 | 422:
            return f"{error_type}: correct {PROMETHEUS_FIELD_PATH}"
        case 301 | 302 | 303 | 307 | 308 | 404 | 405:
            fix = "must be the address of a Prometheus server, without /api/v1/query"
            return f"{error_type}: {PROMETHEUS_FIELD_PATH}.address {fix}"
        case _:
            return f"{error_type}: check the server"


@dataclass(eq=False)
class SourceHealth:
    """Health of a resource's metrics source, from the outcomes of its polls. Times are seconds of any one clock."""

    message: str | None = None
    """Message about the problem once it has lasted; empty when there is none; None before that is known."""
    _reported_reason: str = ""
    """Reason of the problem that `message` reports."""
    _failing_since: float = 0.0
    _consecutive_failures: int = 0
    """Failed polls in a row."""
    _last_reason: str = ""
    _consecutive_same_reason: int = 0
    """Failed polls in a row for `_last_reason`."""

    def record_success(self) -> bool:
        """Record a successful poll, and return True if that changes the message."""
        had_problem = bool(self.message)
        self.message = self._reported_reason = self._last_reason = ""
        self._consecutive_failures = self._consecutive_same_reason = 0
        return had_problem

    def record_failure(self, reason: str, message: str, now: float) -> bool:
        """Record a failed poll, and return True if that changes the message.

        The message stays until another reason has lasted.
        """
        if self._consecutive_failures == 0:
            self._failing_since = now
        self._consecutive_failures += 1
        self._consecutive_same_reason = self._consecutive_same_reason + 1 if reason == self._last_reason else 1
        self._last_reason = reason
        has_lasted = self._consecutive_failures >= MIN_SOURCE_FAILURES and now - self._failing_since >= MIN_SOURCE_FAILURE_SECONDS
        if (
            not has_lasted
            or reason == self._reported_reason
            or (self._reported_reason and self._consecutive_same_reason < MIN_SOURCE_FAILURES)
        ):
            return False
        self._reported_reason, self.message = reason, message
        return True
