"""Reads engines' metrics from Prometheus servers, for resources whose spec.metrics.source names one.

One reading is of all pods of a resource, in queries of a few pods each, one after the other. Guarantees: a server is asked only
where the operator's settings allow its address, and for the resource's own namespace and pods only; at most `AT_ONCE` queries are
under way over all resources; each answer has limits in time and size (aerie.controller.scraping.http_fetch), all of them together one in time,
and one answer at a time is taken apart. A token goes to the one address that the operator's settings name it for, whatever a
resource says, and is read anew each time, so that it may be renewed. What keeps a server from being of use is a sentence with the
way out (`Standing`), told once it has lasted; nothing of an answer is in it but its status and which of Prometheus' own types of
error it has. Not guaranteed: that nothing is learnt of an address that is allowed, such as whether somebody answers there.
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
"""Queries at once, over all servers and resources; who asks gives each namespace its turn (lanes.py)."""
MAX_POLL_SECONDS = 30.0
"""Seconds after which no further query of a reading is sent: those about a thousand pods take eight."""
PROMETHEUS_PARSE_BYTES_PER_SECOND = 20e6
"""Bytes of answers that are taken apart each second, of all servers together."""
PODS_PER_QUERY = 8
"""In one query: some 200 KiB of an answer, where the server scrapes as often as it is asked."""
QUERY_RANGE_INTERVALS, MIN_QUERY_RANGE_SECONDS = 2.0, 5.0
"""Intervals, and seconds at least, that a query reaches back: a scrape or two."""
MIN_SOURCE_FAILURES, MIN_SOURCE_FAILURE_SECONDS = 3, 60.0
"""A trouble is told once it was there so many times in a row, and for so many seconds."""
PROMETHEUS_FIELD_PATH = "spec.metrics.source.prometheus"


@dataclass(frozen=True)
class PrometheusAccess:
    """What the operator's settings say of servers."""

    token_files: Mapping[str, Path] = field(default_factory=dict)
    """By address, the file with the bearer token for it."""
    ca_file: Path | None = None
    """File with the certificate authorities of servers with https. Default: the usual public ones."""
    allowed_addresses: tuple[str, ...] = ()
    """Addresses of servers that may be asked, each with all paths below it; empty: any."""

    def allows(self, address: str) -> bool:
        """Whether a server there may be asked."""
        return not self.allowed_addresses or any(_is_at_or_below(address, one) for one in self.allowed_addresses)


class PrometheusClient:
    """Asks servers; close it."""

    def __init__(self, access: PrometheusAccess, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._token_files = {_normalize_address(address): path for address, path in access.token_files.items()}
        self._access, self._transport = access, transport
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._query_slots = asyncio.Semaphore(MAX_CONCURRENT_PROMETHEUS_QUERIES)
        self._parse_lock = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections."""
        for one in self._clients.values():
            await one.aclose()

    async def poll(
        self, server: PrometheusSource, namespace: str, pods: Sequence[str], interval: float
    ) -> AsyncIterator[Mapping[str, PrometheusScrape | str]]:
        """By pod its newest scrape, or why there is none, as the rest of a sentence about the pod; a few pods at a time. Raises
        ScrapeError."""
        if not self._access.allows(server.address):
            told = f"{server.address} is none of the addresses that this operator may ask: write one of them in {PROMETHEUS_FIELD_PATH}.address"
            raise ScrapeError("forbidden", f"{told}, or have it added to the chart value prometheus.allowed (--prometheus-allow)")
        clock, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        seconds = max(MIN_QUERY_RANGE_SECONDS, QUERY_RANGE_INTERVALS * interval)
        labels = {**server.match_labels, server.namespace_label: namespace}
        none = f"has no sample at {server.address} in the last {seconds:g} s, by the labels {_format_labels(server, namespace)}"
        for begin in range(0, len(pods), PODS_PER_QUERY):
            if clock.time() - began > MAX_POLL_SECONDS:
                raise ScrapeError(
                    "timeout",
                    f"{server.address} took more than {MAX_POLL_SECONDS:g} s for {PROMETHEUS_FIELD_PATH}: see to the server",
                )
            some = pods[begin : begin + PODS_PER_QUERY]
            async with self._query_slots:
                answer = await self._query(server.address, build_range_query(some, server.pod_label, labels, seconds))
            try:
                async with self._parse_lock:
                    answered = parse_newest_scrapes(answer, server.pod_label)
                    await asyncio.sleep(len(answer) / PROMETHEUS_PARSE_BYTES_PER_SECOND)
            except PrometheusResponseError as error:
                raise ScrapeError(
                    "broken", f"{server.address} {error}: {PROMETHEUS_FIELD_PATH}.address has to be a Prometheus server"
                ) from None
            yield {pod: answered.get(pod, none) for pod in some}

    async def _query(self, address: str, promql: str) -> bytes:
        url = f"{address.rstrip('/')}/api/v1/query"
        headers = {"Accept": "application/json"}
        if (path := self._token_files.get(_normalize_address(address))) is not None:
            try:
                headers["Authorization"] = f"Bearer {path.read_text().strip()}"
            except OSError as error:
                raise ScrapeError("token", f"the token for {address} cannot be read from {path}: {error.strerror}") from error
        try:
            status, body = await send_request(self._client(url), "POST", url, headers, {"query": promql})
        except ScrapeError as error:
            if error.reason in ("timeout", "unreachable"):
                way_out = f"correct {PROMETHEUS_FIELD_PATH}.address, or let the operator through (chart value networkPolicy.prometheusPeers)"
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    way_out = f"name the server's authority in the chart value prometheus.authorities, or correct {PROMETHEUS_FIELD_PATH}.address"
                raise ScrapeError(error.reason, f"{error}: {way_out}") from error
            raise
        if status != 200:
            raise ScrapeError("status", f"{url} answered with status {status}{_describe_error_response(status, body)}")
        return body

    def _client(self, url: str) -> httpx.AsyncClient:
        scheme = url.partition(":")[0]
        if scheme not in self._clients:
            authorities = None
            if scheme == "https":
                try:
                    authorities = httpx.create_ssl_context(verify=_load_ca_bundle(self._access.ca_file), trust_env=False)
                except (OSError, ssl.SSLError) as error:
                    told = f"the certificate authorities in {self._access.ca_file} cannot be read: {error}"
                    raise ScrapeError("token", told) from error
            self._clients[scheme] = create_http_client(self._transport, authorities)
        return self._clients[scheme]


def _load_ca_bundle(file: Path | None) -> ssl.SSLContext | bool:
    return True if file is None else ssl.create_default_context(cafile=str(file))


def _normalize_address(address: str) -> str:
    """The address in one way of writing it."""
    try:
        found = httpx.URL(address)
    except httpx.InvalidURL:
        return address
    return str(found.copy_with(path=found.path.rstrip("/") or "/"))


def _is_at_or_below(address: str, allowed: str) -> bool:
    """Whether the address is the one that is allowed, or below it; its path has no way up."""
    try:
        asked, base = httpx.URL(_normalize_address(address)), httpx.URL(_normalize_address(allowed))
    except httpx.InvalidURL:
        return False
    if (asked.scheme, asked.host, asked.port) != (base.scheme, base.host, base.port) or asked.userinfo:
        return False
    path, start = f"{asked.path.rstrip('/')}/", f"{base.path.rstrip('/')}/"
    return path.startswith(start) and not {".", ".."} & set(path.split("/"))


def _format_labels(server: PrometheusSource, namespace: str) -> str:
    labels = {server.namespace_label: namespace, server.pod_label: "<its name>", **server.match_labels}
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def _describe_error_response(status: int, body: bytes) -> str:
    """What the server says, and the way out."""
    said = format_error_type(body)
    match status:
        case 401 | 403:
            return f"{said}: name a token for this address in the chart value prometheus.tokens"
        case 400 | 422:
            return f"{said}: correct {PROMETHEUS_FIELD_PATH}"
        case 301 | 302 | 303 | 307 | 308 | 404 | 405:
            return f"{said}: {PROMETHEUS_FIELD_PATH}.address has to be where /api/v1/query of a Prometheus server begins"
        case _:
            return f"{said}: see to the server"


@dataclass(eq=False)
class SourceHealth:
    """Whether the server of a resource is of use, from how its readings went. Times are seconds of any one clock."""

    message: str | None = None
    """The trouble, once it has lasted; empty when there is none; None while that is not known."""
    _reported_reason: str = ""
    """What the trouble that was told is about."""
    _failing_since: float = 0.0
    _consecutive_failures: int = 0
    """Readings in a row that were of no use."""
    _last_reason: str = ""
    _consecutive_same_reason: int = 0
    """Readings in a row that were so for this reason."""

    def record_success(self) -> bool:
        """A reading went well; whether that is news."""
        news = bool(self.message)
        self.message, self._reported_reason, self._consecutive_failures, self._last_reason, self._consecutive_same_reason = (
            "",
            "",
            0,
            "",
            0,
        )
        return news

    def record_failure(self, reason: str, message: str, now: float) -> bool:
        """A reading was of no use; whether that is news. What was told stays until another reason has lasted."""
        if self._consecutive_failures == 0:
            self._failing_since = now
        self._consecutive_failures += 1
        self._consecutive_same_reason = self._consecutive_same_reason + 1 if reason == self._last_reason else 1
        self._last_reason = reason
        lasts = self._consecutive_failures >= MIN_SOURCE_FAILURES and now - self._failing_since >= MIN_SOURCE_FAILURE_SECONDS
        if (
            not lasts
            or reason == self._reported_reason
            or (self._reported_reason and self._consecutive_same_reason < MIN_SOURCE_FAILURES)
        ):
            return False
        self._reported_reason, self.message = reason, message
        return True
