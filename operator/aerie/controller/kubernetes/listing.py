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

from aerie.controller.kubernetes.cache import Mirror
from aerie.controller.kubernetes.client import CHILDREN, PODS, RESOURCES, ROUTES, ApiError, Cluster, Kind, Object
from aerie.controller.metrics import Telemetry
from aerie.controller.work_queue import Backoff, WorkQueue
from aerie.manifests import naming

_log = logging.getLogger(__name__)
RESYNC = 300.0
"""Seconds between two lists of everything, when nothing calls for one earlier."""
SETTLE = 10.0
"""Seconds from a list of Kopf's to one of ours: its other watches will have listed too."""
LIST_BACKOFF = Backoff(2.0, 60.0)
"""Seconds until a list that failed is tried again."""
PAGE_BACKOFF = Backoff(1.0, 30.0)
"""Seconds until a page that failed is asked for again. Longer than any pause within a list, silence is a sign of death."""
PAGE_TRIES = 6
RESTARTS = 3
"""Times that a list begins anew at once because it has taken too long."""
TOLD = 3
"""Failures in a row after which resources are told."""
_AT_ONCE = 4
"""Namespaces that are listed at the same time."""

MIRRORED: Mapping[Kind, str] = {RESOURCES: "", **dict.fromkeys(CHILDREN, naming.NAME), PODS: naming.REVISION}
"""What is listed and watched, with the label that tells our own: pods of engines bear the resource's name in another label than
those of preflight Jobs, and both bear a revision."""


@dataclass(frozen=True)
class Gaps:
    """What is not known of one resource's surroundings."""

    waiting: bool = False
    """Nothing is done before more is known, and nothing said: it may be a matter of seconds."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Kinds that cannot be listed and that it may have some of, each with a sentence on it."""
    skipped: frozenset[str] = frozenset()
    """Kinds that cannot be listed, whether it may have some or not."""
    forbidden: bool = False
    """Whether all of them are refused, rather than failing."""


NO_GAPS = Gaps()


@dataclass
class _List:
    """The lists of one kind in one namespace."""

    kind: Kind
    namespace: str | None
    known: bool = False
    """Whether one has ended well."""
    failures: int = 0
    """Since the last that ended well."""
    error: ApiError | None = None
    """The first of these failures that is like the last one."""
    due: float = 0.0

    @property
    def place(self) -> str:
        return "all namespaces" if self.namespace is None else f"namespace {self.namespace}"

    @property
    def trouble(self) -> str:
        """Why it fails, as a sentence without an end."""
        return f"{self.kind.kind}s of {self.place} cannot be listed: {self.error}" if self.error else ""


class Lister:
    """See the module. To be used from one event loop."""

    def __init__(
        self, cluster: Cluster, mirror: Mirror, queue: WorkQueue, namespaces: Iterable[str], telemetry: Telemetry
    ) -> None:
        """`namespaces` empty: all."""
        self._cluster, self._mirror, self._queue, self._telemetry = cluster, mirror, queue, telemetry
        self._lists: dict[str | None, dict[Kind, _List]] = {
            namespace: {kind: _List(kind, namespace) for kind in MIRRORED} for namespace in tuple(namespaces) or (None,)
        }
        self.filled = asyncio.Event()
        self.relisted = asyncio.Event()
        """To be set when Kopf has listed instead of watched."""
        self.under_way = 0
        """Lists that have begun and not ended."""

    # ------------------------------------------------------------------------------------------------------------- telling
    def troubles(self) -> list[str]:
        """What cannot be listed, each as a sentence without an end."""
        return [one.trouble for one in self._all() if one.error is not None]

    def blind(self) -> bool:
        """Whether nothing can be done at all, because no resources can be listed."""
        return all(lists[RESOURCES].failures >= TOLD for lists in self._lists.values())

    def gaps(self, document: Object) -> Gaps:
        """What is not known of the surroundings of this resource."""
        lists = self._lists.get(None) or self._lists[document["metadata"]["namespace"]]
        unlisted = [one for one in lists.values() if _is_missing(one)]
        missing = [one for one in unlisted if _needs(document, one.kind)]
        waiting = any(one.failures < TOLD or one.kind is RESOURCES for one in missing)
        forbidden = all(one.error is not None and one.error.status == 403 for one in missing)
        skipped = frozenset(one.kind.kind for one in unlisted)
        return Gaps(waiting, {one.kind.kind: one.trouble for one in missing}, skipped, forbidden)

    # ------------------------------------------------------------------------------------------------------------- listing
    async def run(self) -> None:
        """List everything, and again now and then, until cancelled."""
        loop = asyncio.get_running_loop()
        resync, settled = loop.time(), math.inf
        while True:
            now = loop.time()
            look, refresh = now >= resync, now >= settled
            if look or refresh:
                self.relisted.clear()
                settled = math.inf
                for one in self._all():
                    one.due = now if one.error is None else one.due
            await self.fill()
            if look:
                resync = now + RESYNC
                for key in self._mirror.resources():
                    self._queue.add(key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min([resync, settled, *(one.due for one in self._all() if one.error is not None)])):
                    if settled == math.inf:
                        await self.relisted.wait()
                        settled = loop.time() + SETTLE
                    else:
                        await asyncio.Event().wait()

    async def fill(self) -> None:
        """List all that is due."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def namespace(lists: Mapping[Kind, _List]) -> None:
            async with gate:
                await self._namespace(lists)

        await asyncio.gather(*(namespace(lists) for lists in self._lists.values()))
        if any(lists[RESOURCES].known for lists in self._lists.values()):
            self.filled.set()

    async def _namespace(self, lists: Mapping[Kind, _List]) -> None:
        loop = asyncio.get_running_loop()
        resources = lists[RESOURCES]
        failed = resources.error is not None
        for one in lists.values():
            if one.due <= loop.time():
                await self._try(one)
            if resources.error is not None:
                return
            if failed:  # it is back, and what happened meanwhile was not heard
                failed = False
                for other in lists.values():
                    other.due = loop.time()
                resources.due = math.inf

    async def _try(self, one: _List) -> None:
        before = (_is_missing(one), one.failures >= TOLD)
        self.under_way += 1
        try:
            await self._list(one)
        except ApiError as error:
            one.failures += 1
            one.due = asyncio.get_running_loop().time() + LIST_BACKOFF.after(one.failures)
            if one.error is None or (one.error.status, one.error.reason) != (error.status, error.reason):
                one.error = error
                _log.warning("%s; it is tried again and again, and what depends on it waits", one.trouble)
        else:
            if one.error is not None:
                _log.warning("%ss of %s can be listed again", one.kind.kind, one.place)
            one.known, one.failures, one.error, one.due = True, 0, None, math.inf
        finally:
            self.under_way -= 1
        self._telemetry.lives()
        self._telemetry.list_failed(one.kind.kind, one.namespace, failed=one.error is not None)
        if before != (_is_missing(one), one.failures >= TOLD) and self.filled.is_set():
            for key in self._mirror.resources():
                if one.namespace in (None, key.namespace):
                    self._queue.add(key)

    async def _list(self, one: _List) -> None:
        """Raises ApiError."""
        for restart in range(RESTARTS + 1):
            try:
                await self._read(one)
                return
            except ApiError as error:
                if error.status != 410 or restart == RESTARTS:
                    raise
            self._telemetry.lives()

    async def _read(self, one: _List) -> None:
        pages = tries = 0

        async def patience(error: ApiError) -> None:
            nonlocal tries
            self._telemetry.lives()
            tries += 1
            passing = error.status is None or error.status >= 500
            if tries >= PAGE_TRIES or not (error.status == 429 or (passing and pages)):
                raise error
            await asyncio.sleep(min(error.retry_after or PAGE_BACKOFF.after(tries), PAGE_BACKOFF.most))

        listing = self._mirror.listing(one.kind, one.namespace)
        version: str | None = None
        pages_of = self._cluster.pages(one.kind, one.namespace, MIRRORED[one.kind], patience)
        async for page, version in pages_of:  # all pages are of one version
            if not pages and version is not None and listing.begin(version):
                _log.warning("%ss of %s are older than they were: all is believed anew", one.kind.kind, one.place)
            pages, tries = pages + 1, 0
            self._telemetry.lives()
            for item in page:
                listing.add((item,))
                await asyncio.sleep(0)
        listing.end(version)

    def _all(self) -> Iterator[_List]:
        return (one for lists in self._lists.values() for one in lists.values())


def _is_missing(one: _List) -> bool:
    return not one.known or one.failures >= TOLD


def _needs(document: Object, kind: Kind) -> bool:
    """Whether the resource may have any of that kind."""
    rollout = (document.get("spec") or {}).get("rollout") or {}
    return kind is not ROUTES or (rollout.get("traffic") or {}).get("gateway") is not None
