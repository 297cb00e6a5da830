"""Lists of everything into the mirror, and what cannot be listed.

    each kind of each namespace ─┬─ listed ──────► mirror; again after RESYNC, or soon after Kopf has listed
                                 └─ not listed ──► again after a back-off; log, metric, /readyz, `gaps` of its resources

Kopf tells nothing of an object that was deleted while it had no watch (after a 410 it lists anew, and what is not in the list it
never mentions). So these lists fill the mirror: once before the first pass, soon after each time that Kopf has listed, and now
and then anyhow, when each resource is looked at too, whatever is known of it.

Guarantees: a list that fails holds up no other one, but that of a namespace whose resources cannot be listed nothing else is
asked for. `filled` is set when everything has been tried once and the resources of one namespace at least are known; until then
each page is a sign of life. In the middle of a list a page that fails is asked for again, after the time that the server names; a
list of which the server has forgotten the version (410) begins anew, and no other one. What is told of a failure stays the same
for as long as the failure does. Not guaranteed: that a list which failed once or twice is told of in conditions; it may have been
a hiccup, and what matters in a pass is read live anyhow.

Where the cluster does not know a kind (HTTPRoute without the Gateway API), there are none of it. A kind that comes while the
operator runs is listed from then on, and watched after its next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import (
    CHILD_KINDS,
    HTTP_ROUTES,
    PODS,
    SPECULATIVE_DEPLOYMENTS,
    ApiError,
    Cluster,
    ObjectDict,
    ResourceKind,
)
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.work_queue import Backoff, WorkQueue
from aerie.manifests import naming

_log = logging.getLogger(__name__)
RESYNC_INTERVAL_SECONDS = 300.0
"""Seconds between two lists of everything, when nothing calls for one earlier."""
RELIST_DELAY_SECONDS = 10.0
"""Seconds from a list of Kopf's to one of ours: its other watches will have listed too."""
LIST_BACKOFF = Backoff(2.0, 60.0)
"""Seconds until a list that failed is tried again."""
PAGE_BACKOFF = Backoff(1.0, 30.0)
"""Seconds until a page that failed is asked for again. Longer than any pause within a list, silence is a sign of death."""
MAX_PAGE_ATTEMPTS = 6
MAX_LIST_RESTARTS = 3
"""Times that a list begins anew at once because it has taken too long."""
MIN_REPORTED_LIST_FAILURES = 3
"""Failures in a row after which resources are told."""
_MAX_CONCURRENT_NAMESPACES = 4
"""Namespaces that are listed at the same time."""

CACHED_KIND_SELECTORS: Mapping[ResourceKind, str] = {
    SPECULATIVE_DEPLOYMENTS: "",
    **dict.fromkeys(CHILD_KINDS, naming.NAME_LABEL),
    PODS: naming.REVISION_LABEL,
}
"""What is listed and watched, with the label that tells our own: pods of engines bear the resource's name in another label than
those of preflight Jobs, and both bear a revision."""


@dataclass(frozen=True)
class CacheGaps:
    """What is not known of one resource's surroundings."""

    is_pending: bool = False
    """Nothing is done before more is known, and nothing said: it may be a matter of seconds."""
    errors_by_kind: Mapping[str, str] = field(default_factory=dict)
    """Kinds that cannot be listed and that it may have some of, each with a sentence on it."""
    skipped_kinds: frozenset[str] = frozenset()
    """Kinds that cannot be listed, whether it may have some or not."""
    is_forbidden: bool = False
    """Whether all of them are refused, rather than failing."""


NO_CACHE_GAPS = CacheGaps()


@dataclass
class _ListState:
    """The lists of one kind in one namespace."""

    kind: ResourceKind
    namespace: str | None
    has_succeeded: bool = False
    """Whether one has ended well."""
    failures: int = 0
    """Since the last that ended well."""
    error: ApiError | None = None
    """The first of these failures that is like the last one."""
    next_attempt: float = 0.0

    @property
    def scope(self) -> str:
        return "all namespaces" if self.namespace is None else f"namespace {self.namespace}"

    @property
    def message(self) -> str:
        """Why it fails, as a sentence without an end."""
        return f"{self.kind.kind}s of {self.scope} cannot be listed: {self.error}" if self.error else ""


class Lister:
    """See the module. To be used from one event loop."""

    def __init__(
        self, cluster: Cluster, cache: ObjectCache, queue: WorkQueue, namespaces: Iterable[str], metrics: OperatorMetrics
    ) -> None:
        """`namespaces` empty: all."""
        self._cluster, self._cache, self._queue, self._metrics = cluster, cache, queue, metrics
        self._lists: dict[str | None, dict[ResourceKind, _ListState]] = {
            namespace: {kind: _ListState(kind, namespace) for kind in CACHED_KIND_SELECTORS}
            for namespace in tuple(namespaces) or (None,)
        }
        self.synced = asyncio.Event()
        self.relist_requested = asyncio.Event()
        """To be set when Kopf has listed instead of watched."""
        self.active_lists = 0
        """Lists that have begun and not ended."""

    # ------------------------------------------------------------------------------------------------------------- telling
    def list_errors(self) -> list[str]:
        """What cannot be listed, each as a sentence without an end."""
        return [one.message for one in self._iter_lists() if one.error is not None]

    def is_unable_to_list(self) -> bool:
        """Whether nothing can be done at all, because no resources can be listed."""
        return all(lists[SPECULATIVE_DEPLOYMENTS].failures >= MIN_REPORTED_LIST_FAILURES for lists in self._lists.values())

    def find_gaps(self, document: ObjectDict) -> CacheGaps:
        """What is not known of the surroundings of this resource."""
        lists = self._lists.get(None) or self._lists[document["metadata"]["namespace"]]
        unlisted = [one for one in lists.values() if _is_missing(one)]
        missing = [one for one in unlisted if _may_have_kind(document, one.kind)]
        waiting = any(one.failures < MIN_REPORTED_LIST_FAILURES or one.kind is SPECULATIVE_DEPLOYMENTS for one in missing)
        forbidden = all(one.error is not None and one.error.status == 403 for one in missing)
        skipped = frozenset(one.kind.kind for one in unlisted)
        return CacheGaps(waiting, {one.kind.kind: one.message for one in missing}, skipped, forbidden)

    # ------------------------------------------------------------------------------------------------------------- listing
    async def run(self) -> None:
        """List everything, and again now and then, until cancelled."""
        loop = asyncio.get_running_loop()
        resync, settled = loop.time(), math.inf
        while True:
            now = loop.time()
            look, refresh = now >= resync, now >= settled
            if look or refresh:
                self.relist_requested.clear()
                settled = math.inf
                for one in self._iter_lists():
                    one.next_attempt = now if one.error is None else one.next_attempt
            await self.run_due_lists()
            if look:
                resync = now + RESYNC_INTERVAL_SECONDS
                for key in self._cache.list_resources():
                    self._queue.add(key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(
                    min([resync, settled, *(one.next_attempt for one in self._iter_lists() if one.error is not None)])
                ):
                    if settled == math.inf:
                        await self.relist_requested.wait()
                        settled = loop.time() + RELIST_DELAY_SECONDS
                    else:
                        await asyncio.Event().wait()

    async def run_due_lists(self) -> None:
        """List all that is due."""
        gate = asyncio.Semaphore(_MAX_CONCURRENT_NAMESPACES)

        async def namespace(lists: Mapping[ResourceKind, _ListState]) -> None:
            async with gate:
                await self._list_namespace(lists)

        await asyncio.gather(*(namespace(lists) for lists in self._lists.values()))
        if any(lists[SPECULATIVE_DEPLOYMENTS].has_succeeded for lists in self._lists.values()):
            self.synced.set()

    async def _list_namespace(self, lists: Mapping[ResourceKind, _ListState]) -> None:
        loop = asyncio.get_running_loop()
        resources = lists[SPECULATIVE_DEPLOYMENTS]
        failed = resources.error is not None
        for one in lists.values():
            if one.next_attempt <= loop.time():
                await self._attempt_list(one)
            if resources.error is not None:
                return
            if failed:  # it is back, and what happened meanwhile was not heard
                failed = False
                for other in lists.values():
                    other.next_attempt = loop.time()
                resources.next_attempt = math.inf

    async def _attempt_list(self, state: _ListState) -> None:
        before = (_is_missing(state), state.failures >= MIN_REPORTED_LIST_FAILURES)
        self.active_lists += 1
        try:
            await self._list_with_restarts(state)
        except ApiError as error:
            state.failures += 1
            state.next_attempt = asyncio.get_running_loop().time() + LIST_BACKOFF.delay(state.failures)
            if state.error is None or (state.error.status, state.error.reason) != (error.status, error.reason):
                state.error = error
                _log.warning("%s; it is tried again and again, and what depends on it waits", state.message)
        else:
            if state.error is not None:
                _log.warning("%ss of %s can be listed again", state.kind.kind, state.scope)
            state.has_succeeded, state.failures, state.error, state.next_attempt = True, 0, None, math.inf
        finally:
            self.active_lists -= 1
        self._metrics.record_heartbeat()
        self._metrics.set_list_failure(state.kind.kind, state.namespace, failed=state.error is not None)
        if before != (_is_missing(state), state.failures >= MIN_REPORTED_LIST_FAILURES) and self.synced.is_set():
            for key in self._cache.list_resources():
                if state.namespace in (None, key.namespace):
                    self._queue.add(key)

    async def _list_with_restarts(self, state: _ListState) -> None:
        """Raises ApiError."""
        for restart in range(MAX_LIST_RESTARTS + 1):
            try:
                await self._read_pages(state)
                return
            except ApiError as error:
                if error.status != 410 or restart == MAX_LIST_RESTARTS:
                    raise
            self._metrics.record_heartbeat()

    async def _read_pages(self, state: _ListState) -> None:
        pages = tries = 0

        async def patience(error: ApiError) -> None:
            nonlocal tries
            self._metrics.record_heartbeat()
            tries += 1
            passing = error.status is None or error.status >= 500
            if tries >= MAX_PAGE_ATTEMPTS or not (error.status == 429 or (passing and pages)):
                raise error
            await asyncio.sleep(min(error.retry_after_seconds or PAGE_BACKOFF.delay(tries), PAGE_BACKOFF.max_seconds))

        listing = self._cache.start_relist(state.kind, state.namespace)
        version: str | None = None
        pages_of = self._cluster.list_pages(state.kind, state.namespace, CACHED_KIND_SELECTORS[state.kind], patience)
        async for page, version in pages_of:  # all pages are of one version
            if not pages and version is not None and listing.begin(version):
                _log.warning("%ss of %s are older than they were: all is believed anew", state.kind.kind, state.scope)
            pages, tries = pages + 1, 0
            self._metrics.record_heartbeat()
            for item in page:
                listing.add((item,))
                await asyncio.sleep(0)
        listing.end(version)

    def _iter_lists(self) -> Iterator[_ListState]:
        return (one for lists in self._lists.values() for one in lists.values())


def _is_missing(state: _ListState) -> bool:
    return not state.has_succeeded or state.failures >= MIN_REPORTED_LIST_FAILURES


def _may_have_kind(document: ObjectDict, kind: ResourceKind) -> bool:
    """Whether the resource may have any of that kind."""
    rollout = (document.get("spec") or {}).get("rollout") or {}
    return kind is not HTTP_ROUTES or (rollout.get("traffic") or {}).get("gateway") is not None
