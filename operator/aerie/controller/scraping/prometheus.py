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

from aerie.api.metrics import Prometheus
from aerie.controller.scraping.http_fetch import ScrapeError, client, exchange
from aerie.engine.metrics.promql import AnswerError, Scrape, error_type, query, read

AT_ONCE = 16
"""Queries at once, over all servers and resources; who asks gives each namespace its turn (lanes.py)."""
LONGEST = 30.0
"""Seconds after which no further query of a reading is sent: those about a thousand pods take eight."""
SPEED = 20e6
"""Bytes of answers that are taken apart each second, of all servers together."""
PODS = 8
"""In one query: some 200 KiB of an answer, where the server scrapes as often as it is asked."""
SPAN, SHORTEST_SPAN = 2.0, 5.0
"""Intervals, and seconds at least, that a query reaches back: a scrape or two."""
LASTS, LASTING = 3, 60.0
"""A trouble is told once it was there so many times in a row, and for so many seconds."""
FIELD = "spec.metrics.source.prometheus"


@dataclass(frozen=True)
class Access:
    """What the operator's settings say of servers."""

    tokens: Mapping[str, Path] = field(default_factory=dict)
    """By address, the file with the bearer token for it."""
    authorities: Path | None = None
    """File with the certificate authorities of servers with https. Default: the usual public ones."""
    allowed: tuple[str, ...] = ()
    """Addresses of servers that may be asked, each with all paths below it; empty: any."""

    def allows(self, address: str) -> bool:
        """Whether a server there may be asked."""
        return not self.allowed or any(_below(address, one) for one in self.allowed)


class Servers:
    """Asks servers; close it."""

    def __init__(self, access: Access, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._tokens = {_normal(address): path for address, path in access.tokens.items()}
        self._access, self._transport = access, transport
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._free = asyncio.Semaphore(AT_ONCE)
        self._turn_to_parse = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections."""
        for one in self._clients.values():
            await one.aclose()

    async def ask(
        self, server: Prometheus, namespace: str, pods: Sequence[str], interval: float
    ) -> AsyncIterator[Mapping[str, Scrape | str]]:
        """By pod its newest scrape, or why there is none, as the rest of a sentence about the pod; a few pods at a time. Raises
        ScrapeError."""
        if not self._access.allows(server.address):
            told = f"{server.address} is none of the addresses that this operator may ask: write one of them in {FIELD}.address"
            raise ScrapeError("forbidden", f"{told}, or have it added to the chart value prometheus.allowed (--prometheus-allow)")
        clock, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        seconds = max(SHORTEST_SPAN, SPAN * interval)
        labels = {**server.match_labels, server.namespace_label: namespace}
        none = f"has no sample at {server.address} in the last {seconds:g} s, by the labels {_said(server, namespace)}"
        for begin in range(0, len(pods), PODS):
            if clock.time() - began > LONGEST:
                raise ScrapeError("timeout", f"{server.address} took more than {LONGEST:g} s for {FIELD}: see to the server")
            some = pods[begin : begin + PODS]
            async with self._free:
                answer = await self._post(server.address, query(some, server.pod_label, labels, seconds))
            try:
                async with self._turn_to_parse:
                    answered = read(answer, server.pod_label)
                    await asyncio.sleep(len(answer) / SPEED)
            except AnswerError as error:
                raise ScrapeError("broken", f"{server.address} {error}: {FIELD}.address has to be a Prometheus server") from None
            yield {pod: answered.get(pod, none) for pod in some}

    async def _post(self, address: str, promql: str) -> bytes:
        url = f"{address.rstrip('/')}/api/v1/query"
        headers = {"Accept": "application/json"}
        if (path := self._tokens.get(_normal(address))) is not None:
            try:
                headers["Authorization"] = f"Bearer {path.read_text().strip()}"
            except OSError as error:
                raise ScrapeError("token", f"the token for {address} cannot be read from {path}: {error.strerror}") from error
        try:
            status, body = await exchange(self._client(url), "POST", url, headers, {"query": promql})
        except ScrapeError as error:
            if error.reason in ("timeout", "unreachable"):
                way_out = f"correct {FIELD}.address, or let the operator through (chart value networkPolicy.prometheusPeers)"
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    way_out = f"name the server's authority in the chart value prometheus.authorities, or correct {FIELD}.address"
                raise ScrapeError(error.reason, f"{error}: {way_out}") from error
            raise
        if status != 200:
            raise ScrapeError("status", f"{url} answered with status {status}{_why(status, body)}")
        return body

    def _client(self, url: str) -> httpx.AsyncClient:
        scheme = url.partition(":")[0]
        if scheme not in self._clients:
            authorities = None
            if scheme == "https":
                try:
                    authorities = httpx.create_ssl_context(verify=_authorities(self._access.authorities), trust_env=False)
                except (OSError, ssl.SSLError) as error:
                    told = f"the certificate authorities in {self._access.authorities} cannot be read: {error}"
                    raise ScrapeError("token", told) from error
            self._clients[scheme] = client(self._transport, authorities)
        return self._clients[scheme]


def _authorities(file: Path | None) -> ssl.SSLContext | bool:
    return True if file is None else ssl.create_default_context(cafile=str(file))


def _normal(address: str) -> str:
    """The address in one way of writing it."""
    try:
        found = httpx.URL(address)
    except httpx.InvalidURL:
        return address
    return str(found.copy_with(path=found.path.rstrip("/") or "/"))


def _below(address: str, allowed: str) -> bool:
    """Whether the address is the one that is allowed, or below it; its path has no way up."""
    try:
        asked, base = httpx.URL(_normal(address)), httpx.URL(_normal(allowed))
    except httpx.InvalidURL:
        return False
    if (asked.scheme, asked.host, asked.port) != (base.scheme, base.host, base.port) or asked.userinfo:
        return False
    path, start = f"{asked.path.rstrip('/')}/", f"{base.path.rstrip('/')}/"
    return path.startswith(start) and not {".", ".."} & set(path.split("/"))


def _said(server: Prometheus, namespace: str) -> str:
    labels = {server.namespace_label: namespace, server.pod_label: "<its name>", **server.match_labels}
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def _why(status: int, body: bytes) -> str:
    """What the server says, and the way out."""
    said = error_type(body)
    match status:
        case 401 | 403:
            return f"{said}: name a token for this address in the chart value prometheus.tokens"
        case 400 | 422:
            return f"{said}: correct {FIELD}"
        case 301 | 302 | 303 | 307 | 308 | 404 | 405:
            return f"{said}: {FIELD}.address has to be where /api/v1/query of a Prometheus server begins"
        case _:
            return f"{said}: see to the server"


@dataclass(eq=False)
class Standing:
    """Whether the server of a resource is of use, from how its readings went. Times are seconds of any one clock."""

    told: str | None = None
    """The trouble, once it has lasted; empty when there is none; None while that is not known."""
    _about: str = ""
    """What the trouble that was told is about."""
    _since: float = 0.0
    _ill: int = 0
    """Readings in a row that were of no use."""
    _reason: str = ""
    _times: int = 0
    """Readings in a row that were so for this reason."""

    def well(self) -> bool:
        """A reading went well; whether that is news."""
        news = bool(self.told)
        self.told, self._about, self._ill, self._reason, self._times = "", "", 0, "", 0
        return news

    def ill(self, reason: str, sentence: str, now: float) -> bool:
        """A reading was of no use; whether that is news. What was told stays until another reason has lasted."""
        if self._ill == 0:
            self._since = now
        self._ill += 1
        self._times = self._times + 1 if reason == self._reason else 1
        self._reason = reason
        lasts = self._ill >= LASTS and now - self._since >= LASTING
        if not lasts or reason == self._about or (self._about and self._times < LASTS):
            return False
        self._about, self.told = reason, sentence
        return True
