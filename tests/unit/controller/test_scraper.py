"""Which pods are read, when, and what becomes of it. Time is virtual; pages are captured ones of vLLM."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from aerie.api import SpeculativeDeployment
from aerie.controller.scraping.scrape_pool import MAX_CONCURRENT_SCRAPES, MAX_NORMAL_SCRAPE_DELAY_SECONDS
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.scraping.targets import EngineEndpoint, find_engine_endpoints
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.sample import Sample
from aerie.rollout.facts.arm_metrics import ArmMetrics
from tests.snapshots import build_snapshot

from .scraped import AFTER, BEFORE, FIGURES, OLD, Reader, deployment, pod, resource

Run = Callable[[Coroutine[Any, Any, None]], None]


def found(*pods: dict[str, Any], **of: Any) -> list[str]:
    return [name for name, _ in find_engine_endpoints(build_snapshot(resource(), (deployment(**of),), pods=pods))]


# ------------------------------------------------------------------------------------------------------------------ which pods
def test_a_pod_that_the_resource_owns_is_read_on_the_port_that_it_names() -> None:
    observed = build_snapshot(resource(), (deployment(),), pods=(pod(address="10.0.0.7"),))
    assert list(find_engine_endpoints(observed)) == [
        ("chat-r1-hash-0", EngineEndpoint("http://10.0.0.7:8000/metrics", "chat-r1", "c1 0"))
    ]
    other = pod(address="fd00::7", spec__containers=[{"name": "engine", "ports": [{"name": "http", "containerPort": 9000}]}])
    assert [target.url for _, target in find_engine_endpoints(build_snapshot(resource(), (deployment(),), pods=(other,)))] == [
        "http://[fd00::7]:9000/metrics"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata__ownerReferences": []},
        {"metadata__ownerReferences": [{"controller": True, "apiVersion": "batch/v1", "kind": "Job", "name": "chat-r1-hash"}]},
        {
            "metadata__ownerReferences": [
                {"controller": True, "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "other-r1-hash"}
            ]
        },
        {"metadata__labels": {"aerie.dev/name": "chat", "aerie.dev/revision": "r1", "aerie.dev/control": "false"}},
        {
            "metadata__labels": {
                "aerie.dev/name": "chat",
                "aerie.dev/revision": "r2",
                "aerie.dev/control": "false",
                "pod-template-hash": "hash",
            }
        },
        {"metadata__deletionTimestamp": OLD},
        {"status__podIP": None},
        {"status__containerStatuses": [{"name": "engine", "started": False}]},
        {"spec__containers": [{"name": "engine"}]},
    ],
    ids=[
        "no owner",
        "a Job's",
        "another Deployment's",
        "no hash",
        "another revision",
        "on its way out",
        "no address",
        "loads",
        "no port",
    ],
)
def test_other_pods_are_not(changes: dict[str, Any]) -> None:
    assert found(pod()) == ["chat-r1-hash-0"]
    assert found(pod(**changes)) == []


def test_a_deployment_of_somebody_else_has_none() -> None:
    assert found(pod(), uid="another") == []


# ---------------------------------------------------------------------------------------------------------------- what becomes
class Engines:
    """Engines behind addresses. Each serves one page before `turns` and another one after; some do not answer."""

    def __init__(self, turns: float = 1e9) -> None:
        self.turns, self.silent = turns, re.compile("never")
        self.calls: list[tuple[float, str]] = []
        self.now = self.most = 0

    async def answer(self, request: httpx.Request) -> httpx.Response:
        loop, host = asyncio.get_running_loop(), request.url.host
        self.calls.append((loop.time(), host))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.silent.fullmatch(host):
                await asyncio.sleep(2.0)
                raise httpx.ConnectTimeout("no answer")
            await asyncio.sleep(0.05)
            return httpx.Response(200, stream=httpx.ByteStream(BEFORE if loop.time() < self.turns else AFTER))
        finally:
            self.now -= 1

    def times(self, host: str) -> list[float]:
        return [at for at, called in self.calls if called == host]


class Follower(Reader):
    """Of the pods' own pages."""

    def __init__(self, engines: Engines) -> None:
        super().__init__(httpx.MockTransport(engines.answer))

    def follow(self, of: SpeculativeDeployment, *pods: dict[str, Any], revisions: tuple[str, ...] = ("r1",)) -> NamespacedName:
        name = of.metadata.name
        return self.observe(build_snapshot(of, tuple(deployment(name, revision) for revision in revisions), pods=pods))


def test_figures_come_with_the_second_reading_after_traffic_and_are_told_once_shown(run: Run) -> None:
    async def story() -> None:
        engines = Engines(turns=200)
        follower = Follower(engines)
        key = follower.follow(resource(), pod(), pod(1, address="10.0.0.2"))
        await follower.for_(199)
        assert set(follower.scraper.metrics_by_deployment(key)) == {"chat-r1"}
        assert (
            follower.scraper.metrics_by_deployment(key)["chat-r1"] == ArmMetrics()
        )  # no traffic: nothing is known, and nothing told
        assert follower.told == []
        await follower.for_(61)
        assert follower.scraper.metrics_by_deployment(key) == {"chat-r1": FIGURES}
        assert {told for _, told in follower.told} == {key}
        shown: dict[str, Any] = {"acceptanceLength": 2.27, "timePerOutputToken": 0.00356, "timeToFirstToken": 0.0237}
        follower.follow(resource(**shown), pod(), pod(1, address="10.0.0.2"))
        follower.told.clear()
        await follower.for_(3600)
        assert follower.told == []
        assert follower.scraper.metrics_by_deployment(key) == {"chat-r1": FIGURES}  # idle for an hour: they stay
        assert set(follower.ends) == {"done"}

    run(story())


def test_stable_pods_are_read_slowly_and_those_of_a_rollout_each_interval(run: Run) -> None:
    async def story() -> None:
        engines = Engines()
        follower = Follower(engines)
        follower.follow(resource(), pod())
        await follower.for_(600)
        calm = engines.times("10.0.0.1")
        assert 9 <= len(calm) <= 10
        assert calm[0] <= 60
        engines.calls.clear()
        follower.follow(resource(rolling=True), pod())
        await follower.for_(600)
        assert 39 <= len(engines.times("10.0.0.1")) <= 41
        engines.calls.clear()
        follower.follow(resource(interval="1s"), pod())
        await follower.for_(600)
        assert 140 <= len(engines.times("10.0.0.1")) <= 150

    run(story())


def test_an_engine_that_began_anew_starts_over(run: Run) -> None:
    async def story() -> None:
        engines = Engines(turns=100)
        follower = Follower(engines)
        key = follower.follow(resource(), pod())
        await follower.for_(200)
        assert follower.scraper.metrics_by_deployment(key) == {"chat-r1": FIGURES}
        statuses = [{"name": "engine", "started": True, "containerID": "c2", "restartCount": 1}]
        follower.follow(resource(), pod(status__containerStatuses=statuses))
        await follower.for_(61)
        assert follower.scraper.metrics_by_deployment(key) == {}

    run(story())


@pytest.mark.parametrize("says", [True, False])
def test_where_the_page_does_not_say_when_it_began_the_container_does(run: Run, says: bool) -> None:
    """vLLM's front end in Rust, and several API servers."""
    page = BEFORE if says else re.sub(rb"(?m)^process_start_time_seconds .*\n", b"", BEFORE)

    class Listener:
        def __init__(self) -> None:
            self.heard: list[float | None] = []

        def record_sample(
            self, _: NamespacedName, __: str, ___: EngineEndpoint, ____: float, sample: Sample, _____: float
        ) -> None:
            self.heard.append(sample.process_start_time)

    async def story() -> None:
        transport, listener = httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(page))), Listener()
        reader = Reader(transport)
        reader.scraper = Scraper(reader._tell, reader._count, transport, sample_consumer=listener)
        engine = {"name": "engine", "started": True, "containerID": "c1", "restartCount": 0}
        statuses = [engine | {"state": {"running": {"startedAt": "2026-11-01T00:00:00Z"}}}]
        reader.observe(build_snapshot(resource(), (deployment(),), pods=(pod(status__containerStatuses=statuses),)))
        await reader.for_(100)
        assert set(listener.heard) == {1795265017.02 if says else 1793491200.0}

    run(story())


def test_a_pod_that_no_longer_answers_counts_for_nothing_and_comes_back(run: Run) -> None:
    async def story() -> None:
        engines = Engines(turns=100)
        follower = Follower(engines)
        key = follower.follow(resource(), pod())
        await follower.for_(200)
        engines.silent = re.compile(".*")
        await follower.for_(400)
        assert follower.scraper.metrics_by_deployment(key) == {}
        assert follower.ends["timeout"] >= 2
        engines.silent = re.compile("never")
        await follower.for_(MAX_NORMAL_SCRAPE_DELAY_SECONDS + 130)
        assert follower.scraper.metrics_by_deployment(key) == {"chat-r1": ArmMetrics()}  # from there on, without traffic

    run(story())


def test_pods_that_are_gone_are_not_read_any_more(run: Run) -> None:
    async def story() -> None:
        engines = Engines()
        follower = Follower(engines)
        key = follower.follow(resource(), pod(), pod(1, address="10.0.0.2"))
        await follower.for_(120)
        follower.follow(resource(), pod())
        engines.calls.clear()
        await follower.for_(120)
        assert {host for _, host in engines.calls} == {"10.0.0.1"}
        follower.scraper.forget(key)
        engines.calls.clear()
        await follower.for_(120)
        assert engines.calls == []
        assert follower.scraper.metrics_by_deployment(key) == {}

    run(story())


def test_a_hundred_silent_resources_cost_little_and_keep_nobody_waiting(run: Run) -> None:
    async def story() -> None:
        engines = Engines()
        engines.silent = re.compile(r"10\.1\..*")
        follower = Follower(engines)
        for one in range(100):
            name = f"silent-{one}"
            pods = (pod(number, name, address=f"10.1.{one}.{number}") for number in range(4))
            follower.follow(resource(name), *pods)
        follower.follow(resource("rolling", rolling=True), pod(0, "rolling", address="10.0.0.1"))
        follower.follow(resource("stable"), pod(0, "stable", address="10.0.0.2"))
        await follower.for_(1800)
        assert engines.most <= 2 * MAX_CONCURRENT_SCRAPES
        by_second = Counter(int(at) for at, _ in engines.calls)
        assert max(by_second.values()) <= 25  # 400 pods over a minute are 7 a second
        last = sum(number for second, number in by_second.items() if second >= 1200)
        assert last <= 400 * 1.2  # each of them once in ten minutes
        rolling = engines.times("10.0.0.1")
        assert max(after - before for before, after in itertools.pairwise(rolling)) < 16
        assert len(engines.times("10.0.0.2")) >= 15
        assert follower.ends["timeout"] > 400

    run(story())


def test_pages_that_are_none_are_counted_and_end_nothing(run: Run) -> None:
    async def story() -> None:
        async def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=httpx.ByteStream(b"# nothing\n" if request.url.host == "10.0.0.1" else BEFORE))

        follower = Follower(Engines())
        follower.scraper = Scraper(follower._tell, follower._count, httpx.MockTransport(answer))
        key = follower.follow(resource(), pod(), pod(1, address="10.0.0.2"))
        await follower.for_(200)
        assert follower.ends["invalid_exposition"] >= 2
        assert follower.ends["done"] >= 3
        assert follower.scraper.metrics_by_deployment(key) == {"chat-r1": ArmMetrics()}

    run(story())


def test_reading_that_is_cut_short_again_and_again_goes_on_each_time(run: Run) -> None:
    async def story() -> None:
        engines = Engines()
        follower = Follower(engines)
        follower.follow(resource(), pod(), pod(1, address="10.0.0.2"))
        for _ in range(3 * MAX_CONCURRENT_SCRAPES):
            await follower.for_(1.0)
        engines.silent = re.compile(r"10\.0\.0\.1")
        for _ in range(3 * MAX_CONCURRENT_SCRAPES):  # in the middle of a page that does not come
            await follower.for_(1.0)
        engines.silent = re.compile("never")
        engines.calls.clear()
        await follower.for_(150)
        assert len(engines.times("10.0.0.1")) >= 2
        assert len(engines.times("10.0.0.2")) >= 2

    run(story())


def test_who_listens_hears_each_reading_that_is_believed(run: Run) -> None:
    async def story() -> None:
        class Listener:
            heard: list[tuple[NamespacedName, str, str, float, float]] = []  # noqa: RUF012

            def record_sample(
                self,
                owner: NamespacedName,
                pod: str,
                endpoint: EngineEndpoint,
                sampled_at: float,
                sample: Sample,
                interval: float,
            ) -> None:
                assert sample.counters.iterations >= 0
                self.heard.append((owner, pod, endpoint.deployment, sampled_at, interval))

        engines, listener = Engines(), Listener()
        engines.silent = re.compile(r"10\.0\.0\.2")
        follower = Follower(engines)
        follower.scraper = Scraper(follower._tell, follower._count, httpx.MockTransport(engines.answer), sample_consumer=listener)
        key = follower.follow(resource(), pod(), pod(1, address="10.0.0.2"))
        await follower.for_(200)
        assert len(listener.heard) == len(engines.times("10.0.0.1"))
        assert {(owner, name, group, interval) for owner, name, group, _, interval in listener.heard} == {
            (key, "chat-r1-hash-0", "chat-r1", 60.0)
        }
        assert follower.scraper.unavailable_reason(key) == "", "one of them is read"
        engines.silent = re.compile(".*")
        await follower.for_(200)
        assert "did not answer in time" in follower.scraper.unavailable_reason(key)
        follower.scraper.forget(key)
        assert follower.scraper.unavailable_reason(key) == ""

    run(story())
