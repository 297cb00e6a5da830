"""Lists all cached kinds into the cache, and reports what cannot be listed.

    each kind of each namespace ─┬─ listed ──────► cache; again after RESYNC_INTERVAL_SECONDS, or soon after Kopf has listed
                                 └─ not listed ──► again after a back-off; log, metric, /readyz, gaps of its resources

Kopf does not report an object that was deleted while it had no watch: after a 410 it relists, and never mentions an object that
is missing from the list. So these lists fill the cache: once before the first reconcile, soon after each list of Kopf's, and
periodically. With the periodic lists, every resource is reconciled too, whether or not it has changed.

Guarantees: a list that fails delays no other one, with one exception. In a namespace whose resources cannot be listed, no other
kind is listed. `synced` is set when everything has been tried once, and the resources of at least one namespace are known. Until
then each page is a sign of life. A page that fails in the middle of a list is retried, after the time that the server names. A
list whose version the server no longer has (410) restarts, and no other one does. The message about a failure stays the same for
as long as the failure does.

Not guaranteed: that conditions report a list that has failed only once or twice. The failure may be temporary, and a reconcile
reads live whatever it depends on.

Where the cluster does not know a kind (HTTPRoute without the Gateway API), there are no objects of it. If the kind is installed
while the operator runs, it is listed from then on, and watched after the next start.
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
"""Seconds between two lists of everything, when nothing requests one earlier."""
RELIST_DELAY_SECONDS = 10.0
"""Seconds from a list of Kopf's to ours. By then, Kopf's other watches will have listed too."""
LIST_BACKOFF = Backoff(2.0, 60.0)
"""Seconds until a list that failed is retried."""
PAGE_BACKOFF = Backoff(1.0, 30.0)
"""Seconds until a page that failed is retried. A list that is silent for longer than any of these pauses counts as dead."""
MAX_PAGE_ATTEMPTS = 6
MAX_LIST_RESTARTS = 3
"""Number of immediate restarts of a list that has taken too long."""
MIN_REPORTED_LIST_FAILURES = 3
"""Failures in a row after which the conditions of resources report them."""
_MAX_CONCURRENT_NAMESPACES = 4
"""Namespaces that are listed at the same time."""

CACHED_KIND_SELECTORS: Mapping[ResourceKind, str] = {
    SPECULATIVE_DEPLOYMENTS: "",
    **dict.fromkeys(CHILD_KINDS, naming.NAME_LABEL),
    PODS: naming.REVISION_LABEL,
}
"""Kinds that are listed and watched, each with the label that selects our own objects.

Pods of engines have the resource's name in another label than pods of preflight Jobs. Both have a revision label.
"""


@dataclass(frozen=True)
class CacheGaps:
    """Kinds that could not be listed for one resource."""

    is_pending: bool = False
    """True while more must be known before anything is done.

    Nothing is reported either, because it may be a matter of seconds.
    """
    errors_by_kind: Mapping[str, str] = field(default_factory=dict)
    """Message about each kind that cannot be listed and that the resource may have objects of."""
    skipped_kinds: frozenset[str] = frozenset()
    """Kinds that cannot be listed, whether or not the resource may have objects of them."""
    is_forbidden: bool = False
    """True when all of them are forbidden, rather than failing."""


NO_CACHE_GAPS = CacheGaps()


@dataclass
class _ListState:
    """State of the lists of one kind in one namespace."""

    kind: ResourceKind
    namespace: str | None
    has_succeeded: bool = False
    """True when at least one list has completed."""
    failures: int = 0
    """Failures since the last complete list."""
    error: ApiError | None = None
    """First of these failures that is of the same kind as the latest one."""
    next_attempt: float = 0.0

    @property
    def scope(self) -> str:
        return "all namespaces" if self.namespace is None else f"namespace {self.namespace}"

    @property
    def message(self) -> str:
        """Reason of the failure, as a sentence without a period."""
        return f"{self.kind.kind}s of {self.scope} cannot be listed: {self.error}" if self.error else ""


class Lister:
    """Lister of all kinds in all namespaces, for use from one event loop."""

    def __init__(
        self, cluster: Cluster, cache: ObjectCache, queue: WorkQueue, namespaces: Iterable[str], metrics: OperatorMetrics
    ) -> None:
        """Create a lister of these namespaces; none means all of them."""
        self._cluster, self._cache, self._queue, self._metrics = cluster, cache, queue, metrics
        self._lists: dict[str | None, dict[ResourceKind, _ListState]] = {
            namespace: {kind: _ListState(kind, namespace) for kind in CACHED_KIND_SELECTORS}
            for namespace in tuple(namespaces) or (None,)
        }
        self.synced = asyncio.Event()
        self.relist_requested = asyncio.Event()
        """Event that the watches set when Kopf has listed instead of watched."""
        self.active_lists = 0
        """Number of lists in progress."""

    # ----------------------------------------------------------------------------------------------------------- reporting
    def list_errors(self) -> list[str]:
        """Return a message for each list that fails, as a sentence without a period."""
        return [state.message for state in self._iter_lists() if state.error is not None]

    def is_unable_to_list(self) -> bool:
        """Return True when nothing can be done at all, because resources cannot be listed in any namespace."""
        return all(lists[SPECULATIVE_DEPLOYMENTS].failures >= MIN_REPORTED_LIST_FAILURES for lists in self._lists.values())

    def find_gaps(self, document: ObjectDict) -> CacheGaps:
        """Return the kinds that could not be listed for this resource."""
        lists = self._lists.get(None) or self._lists[document["metadata"]["namespace"]]
        missing_lists = [state for state in lists.values() if _is_missing(state)]
        relevant_lists = [state for state in missing_lists if _may_have_kind(document, state.kind)]
        is_pending = any(
            state.failures < MIN_REPORTED_LIST_FAILURES or state.kind is SPECULATIVE_DEPLOYMENTS for state in relevant_lists
        )
        is_forbidden = all(state.error is not None and state.error.status == 403 for state in relevant_lists)
        skipped_kinds = frozenset(state.kind.kind for state in missing_lists)
        return CacheGaps(is_pending, {state.kind.kind: state.message for state in relevant_lists}, skipped_kinds, is_forbidden)

    # ------------------------------------------------------------------------------------------------------------- listing
    async def run(self) -> None:
        """List everything, and repeat it periodically, until cancelled."""
        loop = asyncio.get_running_loop()
        next_resync, relist_at = loop.time(), math.inf
        while True:
            now = loop.time()
            is_resync_due, is_relist_due = now >= next_resync, now >= relist_at
            if is_resync_due or is_relist_due:
                self.relist_requested.clear()
                relist_at = math.inf
                for state in self._iter_lists():
                    state.next_attempt = now if state.error is None else state.next_attempt
            await self.run_due_lists()
            if is_resync_due:
                next_resync = now + RESYNC_INTERVAL_SECONDS
                for key in self._cache.list_resources():
                    self._queue.add(key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(
                    min(
                        [next_resync, relist_at, *(state.next_attempt for state in self._iter_lists() if state.error is not None)]
                    )
                ):
                    if relist_at == math.inf:
                        await self.relist_requested.wait()
                        relist_at = loop.time() + RELIST_DELAY_SECONDS
                    else:
                        await asyncio.Event().wait()

    async def run_due_lists(self) -> None:
        """Run all lists that are due."""
        namespace_slots = asyncio.Semaphore(_MAX_CONCURRENT_NAMESPACES)

        async def list_namespace(lists: Mapping[ResourceKind, _ListState]) -> None:
            async with namespace_slots:
                await self._list_namespace(lists)

        await asyncio.gather(*(list_namespace(lists) for lists in self._lists.values()))
        if any(lists[SPECULATIVE_DEPLOYMENTS].has_succeeded for lists in self._lists.values()):
            self.synced.set()

    async def _list_namespace(self, lists: Mapping[ResourceKind, _ListState]) -> None:
        loop = asyncio.get_running_loop()
        resource_state = lists[SPECULATIVE_DEPLOYMENTS]
        had_failed = resource_state.error is not None
        for state in lists.values():
            if state.next_attempt <= loop.time():
                await self._attempt_list(state)
            if resource_state.error is not None:
                return
            if had_failed:  # the resources can be listed again, and events of the meantime were missed
                had_failed = False
                for other_state in lists.values():
                    other_state.next_attempt = loop.time()
                resource_state.next_attempt = math.inf

    async def _attempt_list(self, state: _ListState) -> None:
        previous = (_is_missing(state), state.failures >= MIN_REPORTED_LIST_FAILURES)
        self.active_lists += 1
        try:
            await self._list_with_restarts(state)
        except ApiError as error:
            state.failures += 1
            state.next_attempt = asyncio.get_running_loop().time() + LIST_BACKOFF.delay(state.failures)
            if state.error is None or (state.error.status, state.error.reason) != (error.status, error.reason):
                state.error = error
                _log.warning("%s; the list is retried, and the resources that depend on it wait", state.message)
        else:
            if state.error is not None:
                _log.warning("%ss of %s can be listed again", state.kind.kind, state.scope)
            state.has_succeeded, state.failures, state.error, state.next_attempt = True, 0, None, math.inf
        finally:
            self.active_lists -= 1
        self._metrics.record_heartbeat()
        self._metrics.set_list_failure(state.kind.kind, state.namespace, failed=state.error is not None)
        if previous != (_is_missing(state), state.failures >= MIN_REPORTED_LIST_FAILURES) and self.synced.is_set():
            for key in self._cache.list_resources():
                if state.namespace in (None, key.namespace):
                    self._queue.add(key)

    async def _list_with_restarts(self, state: _ListState) -> None:
        """List the kind, with restarts when a list takes too long. Raises ApiError."""
        for restart in range(MAX_LIST_RESTARTS + 1):
            try:
                await self._read_pages(state)
                return
            except ApiError as error:
                if error.status != 410 or restart == MAX_LIST_RESTARTS:
                    raise
            self._metrics.record_heartbeat()

    async def _read_pages(self, state: _ListState) -> None:
        page_count = attempts = 0

        async def wait_before_retry(error: ApiError) -> None:
            nonlocal attempts
            self._metrics.record_heartbeat()
            attempts += 1
            is_temporary = error.status is None or error.status >= 500
            if attempts >= MAX_PAGE_ATTEMPTS or not (error.status == 429 or (is_temporary and page_count)):
                raise error
            await asyncio.sleep(min(error.retry_after_seconds or PAGE_BACKOFF.delay(attempts), PAGE_BACKOFF.max_seconds))

        relist = self._cache.start_relist(state.kind, state.namespace)
        version: str | None = None
        pages = self._cluster.list_pages(state.kind, state.namespace, CACHED_KIND_SELECTORS[state.kind], wait_before_retry)
        async for page, version in pages:  # all pages are of one version
            if not page_count and version is not None and relist.begin(version):
                _log.warning("%ss of %s are older than in the previous list: the cache is replaced", state.kind.kind, state.scope)
            page_count, attempts = page_count + 1, 0
            self._metrics.record_heartbeat()
            for item in page:
                relist.add((item,))
                await asyncio.sleep(0)
        relist.end(version)

    def _iter_lists(self) -> Iterator[_ListState]:
        return (state for lists in self._lists.values() for state in lists.values())


def _is_missing(state: _ListState) -> bool:
    return not state.has_succeeded or state.failures >= MIN_REPORTED_LIST_FAILURES


def _may_have_kind(document: ObjectDict, kind: ResourceKind) -> bool:
    """Return True when the resource may have objects of that kind."""
    rollout = (document.get("spec") or {}).get("rollout") or {}
    return kind is not HTTP_ROUTES or (rollout.get("traffic") or {}).get("gateway") is not None
