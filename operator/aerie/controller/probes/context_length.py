"""Asks one pod of each arm of a rollout, once, how long a request it takes (`aerie.engine.context_length`).

    pass ─ follow(what was observed) ─► pods to ask ─► /v1/models of canary, control and another stable pod ─► ContextLengths
    pass ◄─ lengths, once all have answered ─────────────────────────────────────────────────────────────────┘

Guarantees: only pods that the resource owns are asked; an answer has limits in time and size (fetch.py), and so has the number of
resources whose engines are asked at once. An engine that does not answer is asked again, later and later, for as long as there
is the canary; one that refuses to say it (status 401, 403, 404, no such model) is not. Engines whose metrics come from a
Prometheus server may be out of reach and are not asked. Not guaranteed: anything over a restart of the operator; another one
asks anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from aerie.api.status import Status
from aerie.controller.probes.equivalence import ProbeRequest, ProbeUrls, find_probe_urls
from aerie.controller.scraping.http_fetch import ScrapeError, create_http_client, send_request
from aerie.controller.work_queue import Backoff, NamespacedName, WorkQueue
from aerie.engine import context_length
from aerie.rollout.facts.context_length import ContextLengths
from aerie.rollout.facts.snapshot import Snapshot

_log = logging.getLogger(__name__)

MAX_CONCURRENT_CONTEXT_LENGTH_QUERIES = 16
"""Resources whose engines are asked at the same time."""
MAX_MODELS_RESPONSE_BYTES = 256 * 1024
"""Bytes of one answer; that of one model takes about 500."""
INITIAL_CONTEXT_LENGTH_RETRY_SECONDS, MAX_CONTEXT_LENGTH_RETRY_SECONDS = 5.0, 300.0
"""Seconds until an engine that has not answered is asked again: at first, and at most."""
_FINAL_STATUS_CODES = frozenset((401, 403, 404))
"""Statuses of an engine that will not say it later either."""


@dataclass(eq=False)
class _ContextLengthQuery:
    """The question to the engines of one canary, and their answer."""

    request: ProbeRequest
    urls: ProbeUrls | None = None
    lengths: ContextLengths | None = None
    is_finished: bool = False
    """Whether there is no use in asking again."""


class ContextLengthProber:
    """The questions of all resources. `tell` is called with a resource whose engines have answered."""

    def __init__(self, enqueue: Callable[[NamespacedName], None], transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._enqueue, self._transport = enqueue, transport
        self._queue = WorkQueue(
            Backoff(initial_seconds=INITIAL_CONTEXT_LENGTH_RETRY_SECONDS, max_seconds=MAX_CONTEXT_LENGTH_RETRY_SECONDS)
        )
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CONTEXT_LENGTH_QUERIES)
        self._queries: dict[NamespacedName, _ContextLengthQuery] = {}

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status) -> None:
        """Ask the resource's engines from now on, as was observed and as its status is."""
        canary, spec = status.canary, snapshot.resource.spec
        if canary is None or canary.phase == "RollingBack" or spec.metrics.source is not None:
            self._queries.pop(key, None)
            return
        wanted = ProbeRequest(canary.revision, canary.started_at, snapshot.resource.served_name)
        asking = self._queries.get(key)
        if asking is None or asking.request != wanted:
            asking = self._queries[key] = _ContextLengthQuery(wanted)
            self._queue.forget(key)
        before, asking.urls = asking.urls, find_probe_urls(snapshot, status, context_length.MODELS_PATH)
        if asking.urls is not None and before is None and not asking.is_finished:
            self._queue.add(key)

    def forget(self, key: NamespacedName) -> None:
        """The resource is gone."""
        self._queries.pop(key, None)

    def lengths(self, key: NamespacedName) -> ContextLengths | None:
        """What the resource's engines have said; None while one has not."""
        asking = self._queries.get(key)
        return None if asking is None else asking.lengths

    async def run(self) -> None:
        """Ask until cancelled."""
        async with create_http_client(self._transport) as through, asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                key, _ = await self._queue.get()
                group.create_task(self._query_engines(key, through))

    async def _query_engines(self, key: NamespacedName, http_client: httpx.AsyncClient) -> None:
        asking = self._queries.get(key)
        try:
            if asking is None or asking.is_finished or asking.urls is None:
                return
            pods, model = asking.urls, asking.request.model
            try:
                # The canary first: what does not become an engine with the new drafter meets no other.
                canary = await _query_context_length(http_client, pods.canary, model)
                others = [
                    await _query_context_length(http_client, url, model) for url in dict.fromkeys((pods.control, pods.stable))
                ]
            except ScrapeError as error:
                _log.debug("%s: context length: %s", key, error)
                if self._queries.get(key) is asking:
                    self._queue.add_rate_limited(key)
                return
            asking.is_finished = True
            known = [length for length in others if length is not None]
            if canary is None or len(known) < len(others):
                _log.info("%s: its engines do not say how long a request they take", key)
                return
            asking.lengths = ContextLengths(canary, min(known))
            if self._queries.get(key) is asking:
                self._enqueue(key)
        except Exception:  # noqa: BLE001 - one resource's engines must not end the asking of the others
            _log.exception("%s: the question for context lengths ended with an error of Aerie's own", key)
        finally:
            self._queue.done(key)
            self._slots.release()


async def _query_context_length(http_client: httpx.AsyncClient, url: str, model: str) -> int | None:
    """What the engine says; None where it refuses to. Raises ScrapeError where it has to be asked again."""
    status, body = await send_request(
        http_client, "GET", url, {"Accept": "application/json"}, max_bytes=MAX_MODELS_RESPONSE_BYTES
    )
    if status == 200:
        return context_length.read_max_model_len(body, model)
    if status in _FINAL_STATUS_CODES:
        return None
    raise ScrapeError("status", f"{url} answered with status {status}")
