"""Reads the maximum context length from one pod of each arm of a rollout, once (`aerie.engine.context_length`).

    reconcile ─ track(snapshot) ─► pods to query ─► /v1/models of canary, control and another stable pod ─► ContextLengths
    reconcile ◄─ lengths, once all have answered ───────────────────────────────────────────────────────────────────┘

Guarantees: only pods that the resource owns are queried. An answer has limits in time and size (http_fetch.py), and the number of
resources whose engines are queried at the same time has one. An engine that does not answer is queried again with growing delays,
as long as the canary exists. One that rejects the query (status 401, 403, 404, no such model) is not. Engines whose metrics come
from a Prometheus server may be unreachable and are not queried. Not guaranteed: persistence over a restart of the operator; the
next operator queries again.
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
"""Resources whose engines are queried at the same time."""
MAX_MODELS_RESPONSE_BYTES = 256 * 1024
"""Size limit of one answer in bytes; that of one model takes about 500."""
INITIAL_CONTEXT_LENGTH_RETRY_SECONDS = 5.0
"""Seconds until an engine that has not answered is queried again for the first time."""
MAX_CONTEXT_LENGTH_RETRY_SECONDS = 300.0
"""Maximum seconds between two queries of an engine that has not answered."""
_FINAL_STATUS_CODES = frozenset((401, 403, 404))
"""Status codes after which a further query would give no answer either."""


@dataclass(eq=False)
class _ContextLengthQuery:
    """Query to the engines of one canary, and their answers."""

    request: ProbeRequest
    urls: ProbeUrls | None = None
    lengths: ContextLengths | None = None
    is_finished: bool = False
    """True when a further query would change nothing."""


class ContextLengthProber:
    """Queries of all resources. `enqueue` is called with a resource whose engines have answered."""

    def __init__(self, enqueue: Callable[[NamespacedName], None], transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._enqueue, self._transport = enqueue, transport
        self._queue = WorkQueue(
            Backoff(initial_seconds=INITIAL_CONTEXT_LENGTH_RETRY_SECONDS, max_seconds=MAX_CONTEXT_LENGTH_RETRY_SECONDS)
        )
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_CONTEXT_LENGTH_QUERIES)
        self._queries: dict[NamespacedName, _ContextLengthQuery] = {}

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status) -> None:
        """Query the resource's engines from now on, according to its snapshot and status."""
        canary, spec = status.canary, snapshot.resource.spec
        if canary is None or canary.phase == "RollingBack" or spec.metrics.source is not None:
            self._queries.pop(key, None)
            return
        request = ProbeRequest(canary.revision, canary.start_time, snapshot.resource.served_name)
        query = self._queries.get(key)
        if query is None or query.request != request:
            query = self._queries[key] = _ContextLengthQuery(request)
            self._queue.forget(key)
        previous_urls, query.urls = query.urls, find_probe_urls(snapshot, status, context_length.MODELS_PATH)
        if query.urls is not None and previous_urls is None and not query.is_finished:
            self._queue.add(key)

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""
        self._queries.pop(key, None)

    def lengths(self, key: NamespacedName) -> ContextLengths | None:
        """Return the context lengths of the resource's engines; None while one has not answered."""
        query = self._queries.get(key)
        return None if query is None else query.lengths

    async def run(self) -> None:
        """Query engines until cancelled."""
        async with create_http_client(self._transport) as http_client, asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                key, _ = await self._queue.get()
                group.create_task(self._query_engines(key, http_client))

    async def _query_engines(self, key: NamespacedName, http_client: httpx.AsyncClient) -> None:
        query = self._queries.get(key)
        try:
            if query is None or query.is_finished or query.urls is None:
                return
            urls, model = query.urls, query.request.model
            try:
                # The canary comes first: a request that harms an engine with the new drafter then reaches no other engine.
                canary = await _query_context_length(http_client, urls.canary, model)
                others = [
                    await _query_context_length(http_client, url, model) for url in dict.fromkeys((urls.control, urls.stable))
                ]
            except ScrapeError as error:
                _log.debug("%s: context length: %s", key, error)
                if self._queries.get(key) is query:
                    self._queue.add_rate_limited(key)
                return
            query.is_finished = True
            known_lengths = [length for length in others if length is not None]
            if canary is None or len(known_lengths) < len(others):
                _log.info("%s: its engines do not report their context length", key)
                return
            query.lengths = ContextLengths(canary, min(known_lengths))
            if self._queries.get(key) is query:
                self._enqueue(key)
        except Exception:  # noqa: BLE001 - one resource's engines must not stop the queries of the others
            _log.exception("%s: the query of context lengths failed with an internal error", key)
        finally:
            self._queue.done(key)
            self._slots.release()


async def _query_context_length(http_client: httpx.AsyncClient, url: str, model: str) -> int | None:
    """Return the engine's context length; None when it rejects the query.

    Raises ScrapeError when the query has to be repeated.
    """
    status, body = await send_request(
        http_client, "GET", url, {"Accept": "application/json"}, max_bytes=MAX_MODELS_RESPONSE_BYTES
    )
    if status == 200:
        return context_length.read_max_model_len(body, model)
    if status in _FINAL_STATUS_CODES:
        return None
    raise ScrapeError("status", f"{url} answered with status {status}")
