"""Which pods are scraped, when, and with which result. Time is virtual; expositions are captured ones of vLLM."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import httpx
import pytest

from aerie.api import SpeculativeDeployment
from aerie.controller.scraping.scrape_pool import MAX_CONCURRENT_SCRAPES, MAX_NORMAL_SCRAPE_DELAY_SECONDS
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.scraping.targets import EngineEndpoint, find_engine_endpoints
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import Sample
from aerie.rollout.facts.arm_metrics import ArmMetrics
from tests.snapshots import build_snapshot
from tests.unit.controller.scraped import AFTER, ARM_METRICS, BEFORE, OLD, ScraperHarness, deployment, pod, resource
from tests.unit.rollout.in_place.fleet import Counts
from tests.unit.rollout.in_place_world import build_in_place_rollout, served_drafter

Run = Callable[[Coroutine[Any, Any, None]], None]


def scraped_pods(*pods: dict[str, Any], **changes: Any) -> list[str]:
    return [name for name, _ in find_engine_endpoints(build_snapshot(resource(), (deployment(**changes),), pods=pods))]


# ------------------------------------------------------------------------------------------------------------------ which pods
def test_owned_pod_is_scraped_on_its_named_port() -> None:
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
def test_other_pods_are_not_scraped(changes: dict[str, Any]) -> None:
    assert scraped_pods(pod()) == ["chat-r1-hash-0"]
    assert scraped_pods(pod(**changes)) == []


def test_pods_of_a_foreign_deployment_are_not_scraped() -> None:
    assert scraped_pods(pod(), uid="another") == []


# ------------------------------------------------------------------------------------------------------------ scraped metrics
class FakeEngines:
    """Engines by address. Each serves one exposition before `changes_at` and another one after; some do not respond."""

    def __init__(self, changes_at: float = 1e9) -> None:
        self.changes_at, self.silent = changes_at, re.compile("never")
        self.calls: list[tuple[float, str]] = []
        self.active = self.max_active = 0

    async def handle(self, request: httpx.Request) -> httpx.Response:
        loop, host = asyncio.get_running_loop(), request.url.host
        self.calls.append((loop.time(), host))
        self.active += 1
        self.max_active = max(self.max_active, self.active)
        try:
            if self.silent.fullmatch(host):
                await asyncio.sleep(2.0)
                raise httpx.ConnectTimeout("no answer")
            await asyncio.sleep(0.05)
            return httpx.Response(200, stream=httpx.ByteStream(BEFORE if loop.time() < self.changes_at else AFTER))
        finally:
            self.active -= 1

    def times(self, host: str) -> list[float]:
        return [at for at, called in self.calls if called == host]


class PodScraperHarness(ScraperHarness):
    """A scraper of the pods' own metrics endpoints."""

    def __init__(self, engines: FakeEngines) -> None:
        super().__init__(httpx.MockTransport(engines.handle))

    def track(
        self, tracked_resource: SpeculativeDeployment, *pods: dict[str, Any], revisions: tuple[str, ...] = ("r1",)
    ) -> NamespacedName:
        name = tracked_resource.metadata.name
        return self.track_pods(
            build_snapshot(tracked_resource, tuple(deployment(name, revision) for revision in revisions), pods=pods)
        )


def test_metrics_follow_traffic_and_notify_until_shown(run: Run) -> None:
    async def scenario() -> None:
        engines = FakeEngines(changes_at=200)
        harness = PodScraperHarness(engines)
        key = harness.track(resource(), pod(), pod(1, address="10.0.0.2"))
        await harness.run_for(199)
        assert set(harness.scraper.metrics_by_deployment(key)) == {"chat-r1"}
        assert harness.scraper.metrics_by_deployment(key)["chat-r1"] == ArmMetrics()  # no traffic: no metrics and no notification
        assert harness.notifications == []
        await harness.run_for(61)
        assert harness.scraper.metrics_by_deployment(key) == {"chat-r1": ARM_METRICS}
        assert {notified_key for _, notified_key in harness.notifications} == {key}
        arm_metrics: dict[str, Any] = {"acceptanceLength": 2.27, "timePerOutputToken": 0.00356, "timeToFirstToken": 0.0237}
        harness.track(resource(**arm_metrics), pod(), pod(1, address="10.0.0.2"))
        harness.notifications.clear()
        await harness.run_for(3600)
        assert harness.notifications == []
        assert harness.scraper.metrics_by_deployment(key) == {"chat-r1": ARM_METRICS}  # idle for an hour: they stay
        assert set(harness.outcomes) == {"done"}

    run(scenario())


def test_stable_pods_are_scraped_less_often_than_those_of_a_rollout(run: Run) -> None:
    async def scenario() -> None:
        engines = FakeEngines()
        harness = PodScraperHarness(engines)
        harness.track(resource(), pod())
        await harness.run_for(600)
        scrape_times = engines.times("10.0.0.1")
        assert 9 <= len(scrape_times) <= 10
        assert scrape_times[0] <= 60
        engines.calls.clear()
        harness.track(resource(rolling=True), pod())
        await harness.run_for(600)
        assert 39 <= len(engines.times("10.0.0.1")) <= 41
        engines.calls.clear()
        harness.track(resource(interval="1s"), pod())
        await harness.run_for(600)
        assert 140 <= len(engines.times("10.0.0.1")) <= 150

    run(scenario())


def test_restarted_engine_starts_a_new_window(run: Run) -> None:
    async def scenario() -> None:
        engines = FakeEngines(changes_at=100)
        harness = PodScraperHarness(engines)
        key = harness.track(resource(), pod())
        await harness.run_for(200)
        assert harness.scraper.metrics_by_deployment(key) == {"chat-r1": ARM_METRICS}
        statuses = [{"name": "engine", "started": True, "containerID": "c2", "restartCount": 1}]
        harness.track(resource(), pod(status__containerStatuses=statuses))
        await harness.run_for(61)
        assert harness.scraper.metrics_by_deployment(key) == {}

    run(scenario())


class SteadyEngine:
    """Samples of one pod, each 30 s, with 600 requests between two of them."""

    def __init__(self, harness: PodScraperHarness, key: NamespacedName) -> None:
        self.metrics, self.key, self.counts = harness.scraper.metrics, key, Counts()

    async def sample(self, seconds: float, length: float = 2.5) -> list[float]:
        """Record samples for these seconds, and return after how many of them there was news."""
        news = []
        for number in range(int(seconds / 30)):
            await asyncio.sleep(30)
            requests, counts = 600, self.counts
            self.counts = Counts(
                counts.tokens + 100 * requests, counts.steps + 100 * requests / length, counts.requests + requests
            )
            sample = dataclasses.replace(parse_exposition(BEFORE), counters=self.counts.since(Counts()))
            ((name, target),) = self.metrics.targets.items()
            self.metrics.record_sample(name, target, target.endpoint, partial(copy.copy, sample), None)
            if self.metrics.has_news(self.key, 1, has_succeeded=True):
                news.append(30.0 * (number + 1))
        return news


STEADY: dict[str, Any] = {"acceptanceLength": 2.5, "timePerOutputToken": 0.008, "timeToFirstToken": 0.1}


@pytest.mark.parametrize(
    ("arm", "news"),
    [
        ({"setting": {"mode": "Static", "numSpeculativeTokens": 3}}, [480.0, 510.0]),
        ({"setting": {"mode": "Static", "numSpeculativeTokens": 3}, "referenceAcceptanceLength": 2.7}, []),
        ({"setting": {"mode": "Adaptive", "numSpeculativeTokens": 3}}, []),
        ({}, []),
    ],
)
def test_the_first_reference_is_news_after_the_warm_up(run: Run, arm: dict[str, Any], news: list[float]) -> None:
    """Metrics that stay as they are shown enqueue nothing, and the reference has to be written all the same."""

    async def scenario() -> None:
        harness = PodScraperHarness(FakeEngines())
        key = harness.track(resource(**STEADY, **arm), pod())
        engine = SteadyEngine(harness, key)
        assert await engine.sample(510) == news
        assert harness.scraper.metrics_by_deployment(key)["chat-r1"].reference_acceptance_length == 2.5
        harness.track(resource(**STEADY, **{**arm, "referenceAcceptanceLength": 2.5}), pod())
        assert await engine.sample(510) == [], "it is written"

    run(scenario())


@pytest.mark.parametrize(("conditions", "has_news"), [([], True), (["AcceptanceRegression"], False), (["PodFailure"], False)])
def test_a_comparison_that_has_become_possible_is_news(run: Run, conditions: list[str], has_news: bool) -> None:
    """The value was shown since a window that was too small to compare it."""

    async def scenario() -> None:
        harness = PodScraperHarness(FakeEngines())
        document = resource(**STEADY, referenceAcceptanceLength=3.5).to_dict()
        document["status"]["conditions"] = [
            {
                "type": "Degraded",
                "status": "True",
                "reason": reason,
                "message": "",
                "lastTransitionTime": "2026-03-01T14:00:00Z",
                "observedGeneration": 1,
            }
            for reason in conditions
        ]
        key = harness.track(SpeculativeDeployment.from_dict(document), pod())
        assert (await SteadyEngine(harness, key).sample(60) != []) is has_news

    run(scenario())


def test_windows_are_of_one_drafter(run: Run) -> None:
    """A promotion in place neither restarts the engine nor its counters."""

    async def scenario() -> None:
        harness = PodScraperHarness(FakeEngines())
        key = harness.track(resource(**STEADY), pod())
        engine = SteadyEngine(harness, key)
        await engine.sample(900)
        drafter = served_drafter("r9").to_dict()
        trial = build_in_place_rollout(revision="r9").to_dict()
        changes: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {"inPlaceRollout": trial}), ({"inPlace": drafter}, {})]
        for arm, status in changes:
            changed = resource(**STEADY, **arm)
            document = changed.to_dict()
            harness.track(SpeculativeDeployment.from_dict({**document, "status": {**document["status"], **status}}), pod())
            assert harness.scraper.metrics_by_deployment(key) == {}
            await engine.sample(900, 3.0)
            assert harness.scraper.metrics_by_deployment(key)["chat-r1"].acceptance_length == 3.0

    run(scenario())


def test_the_windows_of_a_canary_outlive_its_promotion(run: Run) -> None:
    async def scenario() -> None:
        harness = PodScraperHarness(FakeEngines())
        key = harness.track(resource(rolling=True), pod(revision="r2"), revisions=("r1", "r2"))
        engine = SteadyEngine(harness, key)
        await engine.sample(600)
        harness.track(resource(revision="r2"), pod(revision="r2"), revisions=("r2",))
        assert harness.scraper.metrics_by_deployment(key)["chat-r2"].reference_acceptance_length == 2.5

    run(scenario())


@pytest.mark.parametrize("has_start_time", [True, False])
def test_start_time_comes_from_the_container_if_the_metrics_lack_it(run: Run, has_start_time: bool) -> None:
    """Metrics of vLLM's front end in Rust, and of several API servers, lack the start time."""
    exposition = BEFORE if has_start_time else re.sub(rb"(?m)^process_start_time_seconds .*\n", b"", BEFORE)

    class Listener:
        def __init__(self) -> None:
            self.start_times: list[float | None] = []

        def record_sample(
            self, _: NamespacedName, __: str, ___: EngineEndpoint, ____: float, sample: Sample, _____: float
        ) -> None:
            self.start_times.append(sample.process_start_time)

    async def scenario() -> None:
        transport, listener = httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(exposition))), Listener()
        harness = ScraperHarness(transport)
        harness.scraper = Scraper(harness._notify, harness._count_outcome, transport, sample_consumer=listener)
        engine = {"name": "engine", "started": True, "containerID": "c1", "restartCount": 0}
        statuses = [engine | {"state": {"running": {"startedAt": "2026-11-01T00:00:00Z"}}}]
        harness.track_pods(build_snapshot(resource(), (deployment(),), pods=(pod(status__containerStatuses=statuses),)))
        await harness.run_for(100)
        assert set(listener.start_times) == {1795265017.02 if has_start_time else 1793491200.0}

    run(scenario())


def test_unavailable_pod_has_no_metrics_until_it_responds(run: Run) -> None:
    async def scenario() -> None:
        engines = FakeEngines(changes_at=100)
        harness = PodScraperHarness(engines)
        key = harness.track(resource(), pod())
        await harness.run_for(200)
        engines.silent = re.compile(".*")
        await harness.run_for(400)
        assert harness.scraper.metrics_by_deployment(key) == {}
        assert harness.outcomes["timeout"] >= 2
        engines.silent = re.compile("never")
        await harness.run_for(MAX_NORMAL_SCRAPE_DELAY_SECONDS + 130)
        assert harness.scraper.metrics_by_deployment(key) == {"chat-r1": ArmMetrics()}  # from there on, without traffic

    run(scenario())


def test_removed_pods_are_not_scraped(run: Run) -> None:
    async def scenario() -> None:
        engines = FakeEngines()
        harness = PodScraperHarness(engines)
        key = harness.track(resource(), pod(), pod(1, address="10.0.0.2"))
        await harness.run_for(120)
        harness.track(resource(), pod())
        engines.calls.clear()
        await harness.run_for(120)
        assert {host for _, host in engines.calls} == {"10.0.0.1"}
        harness.scraper.forget(key)
        engines.calls.clear()
        await harness.run_for(120)
        assert engines.calls == []
        assert harness.scraper.metrics_by_deployment(key) == {}

    run(scenario())


def test_many_silent_resources_delay_no_other_scrape(run: Run) -> None:
    async def scenario() -> None:
        engines = FakeEngines()
        engines.silent = re.compile(r"10\.1\..*")
        harness = PodScraperHarness(engines)
        for index in range(100):
            name = f"silent-{index}"
            pods = (pod(number, name, address=f"10.1.{index}.{number}") for number in range(4))
            harness.track(resource(name), *pods)
        harness.track(resource("rolling", rolling=True), pod(0, "rolling", address="10.0.0.1"))
        harness.track(resource("stable"), pod(0, "stable", address="10.0.0.2"))
        await harness.run_for(1800)
        assert engines.max_active <= 2 * MAX_CONCURRENT_SCRAPES
        by_second = Counter(int(at) for at, _ in engines.calls)
        assert max(by_second.values()) <= 25  # 400 pods over a minute are 7 a second
        request_count = sum(number for second, number in by_second.items() if second >= 1200)
        assert request_count <= 400 * 1.2  # each of them once in ten minutes
        rolling = engines.times("10.0.0.1")
        assert max(after - before for before, after in itertools.pairwise(rolling)) < 16
        assert len(engines.times("10.0.0.2")) >= 15
        assert harness.outcomes["timeout"] > 400

    run(scenario())


def test_invalid_expositions_are_counted_and_scraping_continues(run: Run) -> None:
    async def scenario() -> None:
        async def handle(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=httpx.ByteStream(b"# nothing\n" if request.url.host == "10.0.0.1" else BEFORE))

        harness = PodScraperHarness(FakeEngines())
        harness.scraper = Scraper(harness._notify, harness._count_outcome, httpx.MockTransport(handle))
        key = harness.track(resource(), pod(), pod(1, address="10.0.0.2"))
        await harness.run_for(200)
        assert harness.outcomes["invalid_exposition"] >= 2
        assert harness.outcomes["done"] >= 3
        assert harness.scraper.metrics_by_deployment(key) == {"chat-r1": ArmMetrics()}

    run(scenario())


def test_scraper_continues_after_each_cancellation(run: Run) -> None:
    async def scenario() -> None:
        engines = FakeEngines()
        harness = PodScraperHarness(engines)
        harness.track(resource(), pod(), pod(1, address="10.0.0.2"))
        for _ in range(3 * MAX_CONCURRENT_SCRAPES):
            await harness.run_for(1.0)
        engines.silent = re.compile(r"10\.0\.0\.1")
        for _ in range(3 * MAX_CONCURRENT_SCRAPES):  # during a response that never arrives
            await harness.run_for(1.0)
        engines.silent = re.compile("never")
        engines.calls.clear()
        await harness.run_for(150)
        assert len(engines.times("10.0.0.1")) >= 2
        assert len(engines.times("10.0.0.2")) >= 2

    run(scenario())


def test_consumer_gets_each_valid_sample(run: Run) -> None:
    async def scenario() -> None:
        class Listener:
            samples: list[tuple[NamespacedName, str, str, float, float]] = []  # noqa: RUF012

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
                self.samples.append((owner, pod, endpoint.deployment, sampled_at, interval))

        engines, listener = FakeEngines(), Listener()
        engines.silent = re.compile(r"10\.0\.0\.2")
        harness = PodScraperHarness(engines)
        harness.scraper = Scraper(
            harness._notify, harness._count_outcome, httpx.MockTransport(engines.handle), sample_consumer=listener
        )
        key = harness.track(resource(), pod(), pod(1, address="10.0.0.2"))
        await harness.run_for(200)
        assert len(listener.samples) == len(engines.times("10.0.0.1"))
        assert {(owner, name, group, interval) for owner, name, group, _, interval in listener.samples} == {
            (key, "chat-r1-hash-0", "chat-r1", 60.0)
        }
        assert harness.scraper.unavailable_reason(key) == "", "one of them is scraped"
        engines.silent = re.compile(".*")
        await harness.run_for(200)
        assert "did not answer in time" in harness.scraper.unavailable_reason(key)
        harness.scraper.forget(key)
        assert harness.scraper.unavailable_reason(key) == ""

    run(scenario())
