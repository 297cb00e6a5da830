"""Lists: what fails holds up nothing else, is told once, and is tried again; a long list is no sign of death, a hanging one is
one."""

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


class Api(Cluster):
    """An API server of one chat in each namespace, with a Deployment, whose pages fail as `faults` say."""

    def __init__(self, pages: int = 1, seconds: float = 0.0) -> None:
        super().__init__(cast("ApiClient", None))
        self.count, self.seconds = pages, seconds
        self.faults: dict[tuple[ResourceKind, str | None], Iterator[ApiError | None]] = {}
        """By kind and namespace, for each page that is asked for."""
        self.asked: list[tuple[ResourceKind, str | None]] = []
        self.hangs = False

    async def request(self, verb: str, path: str, query: Any = None, *_: Any, **__: Any) -> Any:  # noqa: ARG002
        plural, namespace = (
            path.rpartition("/")[2],
            path.split("/namespaces/")[1].split("/")[0] if "/namespaces/" in path else None,
        )
        kind = next(kind for kind in listing.CACHED_KIND_SELECTORS if kind.plural == plural)
        self.asked.append((kind, namespace))
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


class Listing:
    """Lists that go on while a test looks."""

    def __init__(self, api: Api, *namespaces: str) -> None:
        self.api, self.queue, self.telemetry = api, WorkQueue(), OperatorMetrics()
        self.mirror = ObjectCache(self.queue.add)
        self.lists = Lister(api, self.mirror, self.queue, namespaces, self.telemetry)
        self.telemetry.ready, self.telemetry.cache_sync = True, self.lists
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self.telemetry.set_leader(True)
        self.tasks = [
            asyncio.create_task(self.lists.run()),
            asyncio.create_task(self.telemetry.monitor_event_loop(lambda: len(self.queue))),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def failed(self, kind: ResourceKind, namespace: str) -> float | None:
        return self.telemetry.registry.get_sample_value("aerie_list_failed", {"kind": kind.kind, "namespace": namespace})

    async def taken(self) -> set[NamespacedName]:
        """The keys that wait, taken out of the queue."""
        found = set()
        while len(self.queue):
            key, _ = await self.queue.get()
            self.queue.done(key)
            found.add(key)
        return found


def resource(namespace: str, *, gateway: bool = False) -> ObjectDict:
    item = Api.item(SPECULATIVE_DEPLOYMENTS, namespace)
    item["spec"] = {"rollout": {"traffic": {"gateway": {}}}} if gateway else {}
    return item


def test_one_forbidden_namespace_stops_no_other_one_and_is_told_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    api = Api()
    api.faults[SPECULATIVE_DEPLOYMENTS, "b"] = itertools.repeat(FORBIDDEN)

    async def work() -> None:
        async with Listing(api, "a", "b") as at:
            await at.lists.synced.wait()
            assert at.mirror.list_resources() == [NamespacedName("a", "chat")]
            assert not at.lists.find_gaps(resource("a")).errors_by_kind
            await asyncio.sleep(1000)
            assert at.failed(SPECULATIVE_DEPLOYMENTS, "b") == 1
            assert at.failed(SPECULATIVE_DEPLOYMENTS, "a") is None
            ready, text = at.telemetry.readiness()
            assert ready
            assert text.splitlines() == ["ready", f"SpeculativeDeployments of namespace b cannot be listed: {FORBIDDEN}"]
            assert {kind for kind, namespace in api.asked if namespace == "b"} == {SPECULATIVE_DEPLOYMENTS}, (
                "nothing else matters there"
            )
            assert len([one for one in api.asked if one[1] == "b"]) < 30, "with a back-off"
            assert len([one for one in api.asked if one == (PODS, "a")]) == 4, "the good lists are not repeated for it"
            assert at.lists.find_gaps(resource("b")).is_pending

    with caplog.at_level(logging.INFO):
        run(work())
    assert len(caplog.records) == 1


def test_a_namespace_that_is_back_is_listed_and_looked_at(run: Run) -> None:
    api = Api()
    api.faults[SPECULATIVE_DEPLOYMENTS, "b"] = iter([FORBIDDEN] * 8)

    async def work() -> None:
        async with Listing(api, "a", "b") as at:
            await at.lists.synced.wait()
            await asyncio.sleep(1)
            assert await at.taken() == {NamespacedName("a", "chat")}
            await asyncio.sleep(295)
            assert NamespacedName("b", "chat") in await at.taken()
            assert len(at.mirror.list_owned_objects(NamespacedName("b", "chat"))) == 1
            assert at.failed(SPECULATIVE_DEPLOYMENTS, "b") == 0
            assert at.telemetry.readiness() == (True, "ready")
            assert not at.lists.find_gaps(resource("b")).is_pending

    run(work())


@pytest.mark.parametrize(("error", "forbidden"), [(FORBIDDEN, True), (BROKEN, False)])
def test_a_kind_that_cannot_be_listed_concerns_those_alone_that_may_have_some(run: Run, error: ApiError, forbidden: bool) -> None:
    api = Api()
    api.faults[HTTP_ROUTES, None] = itertools.chain([error] * 6, itertools.repeat(None))

    async def work() -> None:
        async with Listing(api) as at:
            await at.lists.synced.wait()
            assert len(at.mirror._entries) == 2
            assert not at.lists.find_gaps(resource("a")).errors_by_kind, "without a gateway there are no routes"
            assert at.lists.find_gaps(resource("a")).skipped_kinds == {"HTTPRoute"}
            assert at.lists.find_gaps(resource("a", gateway=True)).is_pending, "it may be a hiccup"
            await asyncio.sleep(1)
            await at.taken()
            await asyncio.sleep(20)
            gaps = at.lists.find_gaps(resource("a", gateway=True))
            assert (gaps.is_pending, gaps.is_forbidden) == (False, forbidden)
            assert gaps.errors_by_kind == {"HTTPRoute": f"HTTPRoutes of all namespaces cannot be listed: {error}"}
            assert await at.taken() == {NamespacedName("a", "chat")}, "now its status can say so"
            await asyncio.sleep(150)
            assert not at.lists.find_gaps(resource("a", gateway=True)).errors_by_kind
            assert await at.taken() == {NamespacedName("a", "chat")}, "and now it need not any more"

    run(work())


def test_a_list_that_fails_after_it_has_ended_well_is_told_when_it_goes_on_failing(run: Run) -> None:
    api = Api()
    api.faults[DEPLOYMENTS, None] = itertools.chain([None], [BROKEN] * 4, itertools.repeat(None))

    async def work() -> None:
        async with Listing(api) as at:
            await asyncio.sleep(listing.RESYNC_INTERVAL_SECONDS + 1)
            assert at.failed(DEPLOYMENTS, "") == 1
            assert not at.lists.find_gaps(resource("a")).errors_by_kind, "watches go on, and what matters is read live"
            await asyncio.sleep(10)
            assert set(at.lists.find_gaps(resource("a")).errors_by_kind) == {"Deployment"}
            assert len(at.mirror._entries) == 2, "what did not come in a list that failed is not gone"

    run(work())


def test_nothing_can_be_listed(run: Run) -> None:
    api = Api()
    api.faults[SPECULATIVE_DEPLOYMENTS, None] = itertools.repeat(FORBIDDEN)

    async def work() -> None:
        async with Listing(api) as at:
            await asyncio.sleep(1)
            assert at.telemetry.readiness()[0], "it may be a hiccup"
            for _ in range(100):
                await asyncio.sleep(10)
                assert at.telemetry.is_alive(), "a restart would change nothing"
            ready, text = at.telemetry.readiness()
            assert not ready
            assert "SpeculativeDeployments of all namespaces" in text
            assert not at.lists.synced.is_set()

    run(work())


def test_the_first_lists_of_a_large_cluster_are_no_sign_of_death(run: Run) -> None:
    """130 pages of one kind at 2 s each, and each of the others; the server asks for patience now and then."""
    api = Api(pages=130, seconds=2.0)
    api.faults[SPECULATIVE_DEPLOYMENTS, None] = itertools.cycle([None] * 9 + [BUSY])
    api.faults[PODS, None] = itertools.cycle([None] * 40 + [ApiError(None, "TimeoutError", "no answer")])

    async def work() -> None:
        async with Listing(api) as at:
            while not at.lists.synced.is_set():
                await asyncio.sleep(1)
                assert at.telemetry.is_alive()
            assert asyncio.get_running_loop().time() > 8 * 130 * 2
            assert len(api.asked) < 8 * 130 + 30, "a page that failed is asked for again, and not the whole list"
            assert len(at.mirror._entries) == 2

    run(work())


def test_the_server_names_the_time_until_a_page_is_asked_for_again(run: Run) -> None:
    api = Api()
    api.faults[SPECULATIVE_DEPLOYMENTS, None] = iter([BUSY])

    async def work() -> None:
        async with Listing(api) as at:
            await at.lists.synced.wait()
            assert asyncio.get_running_loop().time() == BUSY.retry_after_seconds
            assert at.failed(SPECULATIVE_DEPLOYMENTS, "") is None

    run(work())


def test_a_list_that_took_too_long_begins_anew_and_no_other_one_does(run: Run) -> None:
    api = Api(pages=3)
    api.faults[DEPLOYMENTS, None] = iter([None, None, EXPIRED])

    async def work() -> None:
        async with Listing(api) as at:
            await at.lists.synced.wait()
            counts = {kind: api.asked.count((kind, None)) for kind in listing.CACHED_KIND_SELECTORS}
            assert counts.pop(DEPLOYMENTS) == 6
            assert set(counts.values()) == {3}
            assert not at.lists.list_errors()

    run(work())


def test_a_list_that_hangs_is_a_sign_of_death(run: Run) -> None:
    api = Api()
    api.hangs = True

    async def work() -> None:
        async with Listing(api) as at:
            await asyncio.sleep(HEARTBEAT_TIMEOUT_SECONDS - 2)
            assert at.telemetry.is_alive()
            await asyncio.sleep(4)
            assert not at.telemetry.is_alive()

    run(work())


def test_passes_that_stand_still_are_a_sign_of_death_once_everything_is_listed(run: Run) -> None:
    async def work() -> None:
        async with Listing(Api()) as at:
            await at.lists.synced.wait()
            await asyncio.sleep(HEARTBEAT_TIMEOUT_SECONDS - 2)
            assert at.telemetry.is_alive()
            await asyncio.sleep(4)
            assert len(at.queue)
            assert not at.telemetry.is_alive()

    run(work())


class Counting(Api):
    """Counts whole lists; the first ones may fail."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.faults[SPECULATIVE_DEPLOYMENTS, None] = iter([BROKEN] * failures)

    @property
    def lists(self) -> int:
        return self.asked.count((SPECULATIVE_DEPLOYMENTS, None))


@pytest.mark.parametrize("failures", [0, 2])
def test_the_mirror_is_filled_before_the_first_pass_and_again_when_kopf_has_listed(run: Run, failures: int) -> None:
    api = Counting(failures)

    async def work() -> None:
        async with Listing(api) as at:
            await at.lists.synced.wait()
            assert at.mirror.list_resources() == [NamespacedName("a", "chat")]
            assert api.lists == failures + 1
            await asyncio.sleep(1)
            assert api.lists == failures + 1
            for _ in range(3):  # Kopf's watches, one after the other
                at.lists.relist_requested.set()
                await asyncio.sleep(1)
            await asyncio.sleep(listing.RELIST_DELAY_SECONDS)
            assert api.lists == failures + 2
            await at.taken()
            await asyncio.sleep(listing.RESYNC_INTERVAL_SECONDS)
            assert api.lists == failures + 3
            assert len(at.queue) == 1, "now and then each resource is looked at, whatever was heard"

    run(work())
