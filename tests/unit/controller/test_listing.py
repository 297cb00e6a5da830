"""Lists of the cache: a failure delays no other list, is logged once and retried; a hanging list fails the liveness check."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Self, cast

import pytest
from kubernetes.aio.client import ApiClient

from aerie.controller.kubernetes import listing
from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import (
    DEPLOYMENTS,
    HTTP_ROUTES,
    PODS,
    SPECULATIVE_DEPLOYMENTS,
    ApiError,
    Cluster,
    ObjectDict,
    ResourceKind,
)
from aerie.controller.kubernetes.listing import Lister
from aerie.controller.metrics import HEARTBEAT_TIMEOUT_SECONDS, OperatorMetrics
from aerie.controller.work_queue import NamespacedName, WorkQueue
from aerie.manifests import naming

Run = Callable[[Coroutine[Any, Any, None]], None]
FORBIDDEN = ApiError(403, "Forbidden", "httproutes is forbidden")
BROKEN = ApiError(500, "InternalError", "the conversion webhook does not answer")
BUSY = ApiError(429, "TooManyRequests", "later", 7.0)
EXPIRED = ApiError(410, "Expired", "the list took too long")


class FakeApiServer(Cluster):
    """An API server with one resource `chat` and one Deployment in each namespace; requests raise the errors in `faults`."""

    def __init__(self, pages: int = 1, seconds: float = 0.0) -> None:
        super().__init__(cast("ApiClient", None))
        self.count, self.seconds = pages, seconds
        self.faults: dict[tuple[ResourceKind, str | None], Iterator[ApiError | None]] = {}
        """Errors by kind and namespace, one for each requested page."""
        self.requests: list[tuple[ResourceKind, str | None]] = []
        self.hangs = False

    async def request(self, verb: str, path: str, query: Any = None, *_: Any, **__: Any) -> Any:  # noqa: ARG002
        plural, namespace = (
            path.rpartition("/")[2],
            path.split("/namespaces/")[1].split("/")[0] if "/namespaces/" in path else None,
        )
        kind = next(kind for kind in listing.CACHED_KIND_SELECTORS if kind.plural == plural)
        self.requests.append((kind, namespace))
        await asyncio.sleep(self.seconds)
        if self.hangs:
            await asyncio.Event().wait()
        error = next(self.faults.get((kind, namespace), iter(())), None)
        if error is not None:
            raise error
        page = int(dict(query).get("continue") or 0)
        items = [self.item(kind, namespace or "a")] if page == 0 and kind in (SPECULATIVE_DEPLOYMENTS, DEPLOYMENTS) else []
        last = page + 1 >= self.count
        return {"items": items, "metadata": {"resourceVersion": "5", "continue": "" if last else str(page + 1)}}

    @staticmethod
    def item(kind: ResourceKind, namespace: str) -> ObjectDict:
        metadata = {"name": "chat", "namespace": namespace, "resourceVersion": "3", "labels": {naming.NAME_LABEL: "chat"}}
        return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": {}}


class ListerHarness:
    """A lister that runs in the background while a test checks it."""

    def __init__(self, api: FakeApiServer, *namespaces: str) -> None:
        self.api, self.queue, self.metrics = api, WorkQueue(), OperatorMetrics()
        self.cache = ObjectCache(self.queue.add)
        self.lister = Lister(api, self.cache, self.queue, namespaces, self.metrics)
        self.metrics.ready, self.metrics.cache_sync = True, self.lister
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self.metrics.set_leader(True)
        self.tasks = [
            asyncio.create_task(self.lister.run()),
            asyncio.create_task(self.metrics.monitor_event_loop(lambda: len(self.queue))),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def list_failed_metric(self, kind: ResourceKind, namespace: str) -> float | None:
        return self.metrics.registry.get_sample_value("aerie_list_failed", {"kind": kind.kind, "namespace": namespace})

    async def take_keys(self) -> set[NamespacedName]:
        """Remove the waiting keys from the queue and return them."""
        keys = set()
        while len(self.queue):
            key, _ = await self.queue.get()
            self.queue.done(key)
            keys.add(key)
        return keys


def resource(namespace: str, *, gateway: bool = False) -> ObjectDict:
    item = FakeApiServer.item(SPECULATIVE_DEPLOYMENTS, namespace)
    item["spec"] = {"rollout": {"traffic": {"gateway": {}}}} if gateway else {}
    return item


def test_forbidden_namespace_blocks_no_other_and_is_logged_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    api = FakeApiServer()
    api.faults[SPECULATIVE_DEPLOYMENTS, "b"] = itertools.repeat(FORBIDDEN)

    async def work() -> None:
        async with ListerHarness(api, "a", "b") as harness:
            await harness.lister.synced.wait()
            assert harness.cache.list_resources() == [NamespacedName("a", "chat")]
            assert not harness.lister.find_gaps(resource("a")).errors_by_kind
            await asyncio.sleep(1000)
            assert harness.list_failed_metric(SPECULATIVE_DEPLOYMENTS, "b") == 1
            assert harness.list_failed_metric(SPECULATIVE_DEPLOYMENTS, "a") is None
            ready, text = harness.metrics.readiness()
            assert ready
            assert text.splitlines() == ["ready", f"SpeculativeDeployments of namespace b cannot be listed: {FORBIDDEN}"]
            assert {kind for kind, namespace in api.requests if namespace == "b"} == {SPECULATIVE_DEPLOYMENTS}, (
                "nothing else matters there"
            )
            assert len([request for request in api.requests if request[1] == "b"]) < 30, "with a back-off"
            assert len([request for request in api.requests if request == (PODS, "a")]) == 4, (
                "the successful lists are not repeated for it"
            )
            assert harness.lister.find_gaps(resource("b")).is_pending

    with caplog.at_level(logging.INFO):
        run(work())
    assert len(caplog.records) == 1


def test_restored_namespace_is_listed_and_reconciled(run: Run) -> None:
    api = FakeApiServer()
    api.faults[SPECULATIVE_DEPLOYMENTS, "b"] = iter([FORBIDDEN] * 8)

    async def work() -> None:
        async with ListerHarness(api, "a", "b") as harness:
            await harness.lister.synced.wait()
            await asyncio.sleep(1)
            assert await harness.take_keys() == {NamespacedName("a", "chat")}
            await asyncio.sleep(295)
            assert NamespacedName("b", "chat") in await harness.take_keys()
            assert len(harness.cache.list_owned_objects(NamespacedName("b", "chat"))) == 1
            assert harness.list_failed_metric(SPECULATIVE_DEPLOYMENTS, "b") == 0
            assert harness.metrics.readiness() == (True, "ready")
            assert not harness.lister.find_gaps(resource("b")).is_pending

    run(work())


@pytest.mark.parametrize(("error", "forbidden"), [(FORBIDDEN, True), (BROKEN, False)])
def test_unlistable_kind_affects_only_resources_that_may_have_it(run: Run, error: ApiError, forbidden: bool) -> None:
    api = FakeApiServer()
    api.faults[HTTP_ROUTES, None] = itertools.chain([error] * 6, itertools.repeat(None))

    async def work() -> None:
        async with ListerHarness(api) as harness:
            await harness.lister.synced.wait()
            assert len(harness.cache._entries) == 2
            assert not harness.lister.find_gaps(resource("a")).errors_by_kind, "without a gateway there are no routes"
            assert harness.lister.find_gaps(resource("a")).skipped_kinds == {"HTTPRoute"}
            assert harness.lister.find_gaps(resource("a", gateway=True)).is_pending, "it may be a hiccup"
            await asyncio.sleep(1)
            await harness.take_keys()
            await asyncio.sleep(20)
            gaps = harness.lister.find_gaps(resource("a", gateway=True))
            assert (gaps.is_pending, gaps.is_forbidden) == (False, forbidden)
            assert gaps.errors_by_kind == {"HTTPRoute": f"HTTPRoutes of all namespaces cannot be listed: {error}"}
            assert await harness.take_keys() == {NamespacedName("a", "chat")}, "now its status names the error"
            await asyncio.sleep(150)
            assert not harness.lister.find_gaps(resource("a", gateway=True)).errors_by_kind
            assert await harness.take_keys() == {NamespacedName("a", "chat")}, "and now the error ends"

    run(work())


def test_resync_failure_is_reported_when_it_persists(run: Run) -> None:
    api = FakeApiServer()
    api.faults[DEPLOYMENTS, None] = itertools.chain([None], [BROKEN] * 4, itertools.repeat(None))

    async def work() -> None:
        async with ListerHarness(api) as harness:
            await asyncio.sleep(listing.RESYNC_INTERVAL_SECONDS + 1)
            assert harness.list_failed_metric(DEPLOYMENTS, "") == 1
            assert not harness.lister.find_gaps(resource("a")).errors_by_kind, (
                "watches continue, and necessary objects are read live"
            )
            await asyncio.sleep(10)
            assert set(harness.lister.find_gaps(resource("a")).errors_by_kind) == {"Deployment"}
            assert len(harness.cache._entries) == 2, "objects that a failed list lacks are not removed"

    run(work())


def test_operator_that_can_list_nothing_is_alive_and_not_ready(run: Run) -> None:
    api = FakeApiServer()
    api.faults[SPECULATIVE_DEPLOYMENTS, None] = itertools.repeat(FORBIDDEN)

    async def work() -> None:
        async with ListerHarness(api) as harness:
            await asyncio.sleep(1)
            assert harness.metrics.readiness()[0], "it may be a hiccup"
            for _ in range(100):
                await asyncio.sleep(10)
                assert harness.metrics.is_alive(), "a restart would change nothing"
            ready, text = harness.metrics.readiness()
            assert not ready
            assert "SpeculativeDeployments of all namespaces" in text
            assert not harness.lister.synced.is_set()

    run(work())


def test_long_initial_lists_pass_the_liveness_check(run: Run) -> None:
    """130 pages of one kind at 2 s each, and of each other kind; the server sometimes requests a delay."""
    api = FakeApiServer(pages=130, seconds=2.0)
    api.faults[SPECULATIVE_DEPLOYMENTS, None] = itertools.cycle([None] * 9 + [BUSY])
    api.faults[PODS, None] = itertools.cycle([None] * 40 + [ApiError(None, "TimeoutError", "no answer")])

    async def work() -> None:
        async with ListerHarness(api) as harness:
            while not harness.lister.synced.is_set():
                await asyncio.sleep(1)
                assert harness.metrics.is_alive()
            assert asyncio.get_running_loop().time() > 8 * 130 * 2
            assert len(api.requests) < 8 * 130 + 30, "a failed page is requested again, and not the whole list"
            assert len(harness.cache._entries) == 2

    run(work())


def test_retry_after_of_the_server_delays_the_next_request(run: Run) -> None:
    api = FakeApiServer()
    api.faults[SPECULATIVE_DEPLOYMENTS, None] = iter([BUSY])

    async def work() -> None:
        async with ListerHarness(api) as harness:
            await harness.lister.synced.wait()
            assert asyncio.get_running_loop().time() == BUSY.retry_after_seconds
            assert harness.list_failed_metric(SPECULATIVE_DEPLOYMENTS, "") is None

    run(work())


def test_expired_list_restarts_and_others_do_not(run: Run) -> None:
    api = FakeApiServer(pages=3)
    api.faults[DEPLOYMENTS, None] = iter([None, None, EXPIRED])

    async def work() -> None:
        async with ListerHarness(api) as harness:
            await harness.lister.synced.wait()
            counts = {kind: api.requests.count((kind, None)) for kind in listing.CACHED_KIND_SELECTORS}
            assert counts.pop(DEPLOYMENTS) == 6
            assert set(counts.values()) == {3}
            assert not harness.lister.list_errors()

    run(work())


def test_hanging_list_fails_the_liveness_check(run: Run) -> None:
    api = FakeApiServer()
    api.hangs = True

    async def work() -> None:
        async with ListerHarness(api) as harness:
            await asyncio.sleep(HEARTBEAT_TIMEOUT_SECONDS - 2)
            assert harness.metrics.is_alive()
            await asyncio.sleep(4)
            assert not harness.metrics.is_alive()

    run(work())


def test_stalled_reconciles_fail_the_liveness_check(run: Run) -> None:
    async def work() -> None:
        async with ListerHarness(FakeApiServer()) as harness:
            await harness.lister.synced.wait()
            await asyncio.sleep(HEARTBEAT_TIMEOUT_SECONDS - 2)
            assert harness.metrics.is_alive()
            await asyncio.sleep(4)
            assert len(harness.queue)
            assert not harness.metrics.is_alive()

    run(work())


class CountingApiServer(FakeApiServer):
    """Counts complete lists; the first ones may fail."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.faults[SPECULATIVE_DEPLOYMENTS, None] = iter([BROKEN] * failures)

    @property
    def list_count(self) -> int:
        return self.requests.count((SPECULATIVE_DEPLOYMENTS, None))


@pytest.mark.parametrize("failures", [0, 2])
def test_cache_is_listed_before_the_first_reconcile_and_on_request(run: Run, failures: int) -> None:
    api = CountingApiServer(failures)

    async def work() -> None:
        async with ListerHarness(api) as harness:
            await harness.lister.synced.wait()
            assert harness.cache.list_resources() == [NamespacedName("a", "chat")]
            assert api.list_count == failures + 1
            await asyncio.sleep(1)
            assert api.list_count == failures + 1
            for _ in range(3):  # Kopf's watches, one after the other
                harness.lister.relist_requested.set()
                await asyncio.sleep(1)
            await asyncio.sleep(listing.RELIST_DELAY_SECONDS)
            assert api.list_count == failures + 2
            await harness.take_keys()
            await asyncio.sleep(listing.RESYNC_INTERVAL_SECONDS)
            assert api.list_count == failures + 3
            assert len(harness.queue) == 1, "each resource is reconciled periodically"

    run(work())
