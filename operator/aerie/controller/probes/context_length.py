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
from aerie.controller.probes.equivalence import Pods, Subject, whom
from aerie.controller.scraping.http_fetch import ScrapeError, client, exchange
from aerie.controller.work_queue import Backoff, Key, WorkQueue
from aerie.engine import context_length
from aerie.rollout.facts.context_length import ContextLengths
from aerie.rollout.facts.snapshot import Observed

_log = logging.getLogger(__name__)

AT_ONCE = 16
"""Resources whose engines are asked at the same time."""
LARGEST = 256 * 1024
"""Bytes of one answer; that of one model takes about 500."""
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
"""Seconds until an engine that has not answered is asked again: at first, and at most."""
_SILENT = frozenset((401, 403, 404))
"""Statuses of an engine that will not say it later either."""


@dataclass(eq=False)
class _Asking:
    """The question to the engines of one canary, and their answer."""

    subject: Subject
    pods: Pods | None = None
    lengths: ContextLengths | None = None
    over: bool = False
    """Whether there is no use in asking again."""


class Contexts:
    """The questions of all resources. `tell` is called with a resource whose engines have answered."""

    def __init__(self, tell: Callable[[Key], None], transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._tell, self._transport = tell, transport
        self._queue = WorkQueue(Backoff(first=FIRST_PAUSE, most=LONGEST_PAUSE))
        self._free = asyncio.Semaphore(AT_ONCE)
        self._asking: dict[Key, _Asking] = {}

    def follow(self, key: Key, observed: Observed, status: Status) -> None:
        """Ask the resource's engines from now on, as was observed and as its status is."""
        canary, spec = status.canary, observed.resource.spec
        if canary is None or canary.phase == "RollingBack" or spec.metrics.source is not None:
            self._asking.pop(key, None)
            return
        wanted = Subject(canary.revision, canary.started_at, observed.resource.served_name)
        asking = self._asking.get(key)
        if asking is None or asking.subject != wanted:
            asking = self._asking[key] = _Asking(wanted)
            self._queue.forget(key)
        before, asking.pods = asking.pods, whom(observed, status, context_length.PATH)
        if asking.pods is not None and before is None and not asking.over:
            self._queue.add(key)

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._asking.pop(key, None)

    def lengths(self, key: Key) -> ContextLengths | None:
        """What the resource's engines have said; None while one has not."""
        asking = self._asking.get(key)
        return None if asking is None else asking.lengths

    async def run(self) -> None:
        """Ask until cancelled."""
        async with client(self._transport) as through, asyncio.TaskGroup() as group:
            while True:
                await self._free.acquire()
                key, _ = await self._queue.get()
                group.create_task(self._turn(key, through))

    async def _turn(self, key: Key, through: httpx.AsyncClient) -> None:
        asking = self._asking.get(key)
        try:
            if asking is None or asking.over or asking.pods is None:
                return
            pods, model = asking.pods, asking.subject.model
            try:
                # The canary first: what does not become an engine with the new drafter meets no other.
                canary = await _length(through, pods.canary, model)
                others = [await _length(through, url, model) for url in dict.fromkeys((pods.control, pods.stable))]
            except ScrapeError as error:
                _log.debug("%s: context length: %s", key, error)
                if self._asking.get(key) is asking:
                    self._queue.failed(key)
                return
            asking.over = True
            known = [length for length in others if length is not None]
            if canary is None or len(known) < len(others):
                _log.info("%s: its engines do not say how long a request they take", key)
                return
            asking.lengths = ContextLengths(canary, min(known))
            if self._asking.get(key) is asking:
                self._tell(key)
        except Exception:  # noqa: BLE001 - one resource's engines must not end the asking of the others
            _log.exception("%s: the question for context lengths ended with an error of Aerie's own", key)
        finally:
            self._queue.done(key)
            self._free.release()


async def _length(through: httpx.AsyncClient, url: str, model: str) -> int | None:
    """What the engine says; None where it refuses to. Raises ScrapeError where it has to be asked again."""
    status, body = await exchange(through, "GET", url, {"Accept": "application/json"}, largest=LARGEST)
    if status == 200:
        return context_length.length(body, model)
    if status in _SILENT:
        return None
    raise ScrapeError("status", f"{url} answered with status {status}")
