"""Reads the engines' metrics, in the background of the passes: from their pages, or where a resource says so from Prometheus.

    pass ─ follow(what was observed) ─► pods to read ─► two lanes ─► fetch ─► Readings ─► figures ─► next pass
                                        or resources ─► two lanes ─► ask ──┘
                                                  urgent: of resources with a rollout under way, each spec.metrics.interval
                                                  calm:   of all others, four times slower, up to a minute
                                                           and often enough for two readings in a block

Guarantees: only pods that the resource owns are read, on the port that their engine names; a page has limits in time and size,
a lane one in pages at once; first readings are spread over an interval, so that a thousand resources make no burst; a pod that
does not answer is asked less and less often. Turns are shared among namespaces and resources (fair.py), so that slow or hostile
pods keep no canary of somebody else waiting. One page at a time is parsed, with a pause after it that grows with the page, so
that the event loop is held up by one page and no more, and by all pages for half of the time at most. A page costs the same with
one pod of a resource as with a thousand: what goes over all of them (figures, rounds of a comparison) is done some eight times in
an interval, and the interval of a resource with more than `PER_SECOND` pages a second is doubled until it has fewer
(lanes.paced). A failure is counted by reason, and never reaches a pass: what is not known is missing in the figures. A resource
is looked at again only when its figures have moved (aerie.rollout.facts.arm_metrics). Prometheus is asked for all pods of a resource at
once, for one resource of a namespace at a time; what it has of a pod is a reading only when it is of a scrape that was not seen
before, and has failed otherwise.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import httpx

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.api.status import Arm, Status
from aerie.controller.clock import Clock
from aerie.controller.collection.blocks import BlockCollector, build_comparison_config
from aerie.controller.collection.calibration import CalibrationCollector
from aerie.controller.fair_queue import FairQueue
from aerie.controller.scraping.http_fetch import ScrapeError, create_http_client, fetch_metrics
from aerie.controller.scraping.prometheus import PrometheusAccess, PrometheusClient
from aerie.controller.scraping.scrape_pool import (
    INVALID_SAMPLE_LIMIT,
    MAX_CONCURRENT_POLLS,
    MAX_CONCURRENT_SCRAPES,
    MAX_CONCURRENT_SCRAPES_PER_NAMESPACE,
    MAX_NORMAL_INTERVAL_SECONDS,
    MAX_NORMAL_SCRAPE_DELAY_SECONDS,
    MAX_ROLLOUT_SCRAPE_DELAY_SECONDS,
    NORMAL_INTERVAL_FACTOR,
    PARSE_BYTES_PER_SECOND,
    PrometheusPoll,
    ScrapePool,
    ScrapeTarget,
    find_metrics_source_error,
    hash_fraction,
    limit_scrape_rate,
    record_scrape_outcome,
)
from aerie.controller.scraping.targets import EngineEndpoint, find_engine_endpoints
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.exposition import ExpositionError, parse_exposition
from aerie.engine.metrics.promql import PrometheusScrape
from aerie.engine.metrics.sample import Sample
from aerie.manifests import naming
from aerie.rollout.facts.arm_metrics import ArmMetrics, MetricSums, debounce_metrics, read_status_metrics
from aerie.rollout.facts.snapshot import Snapshot

_log = logging.getLogger(__name__)

ScrapeHandler = Callable[[ScrapePool, NamespacedName], Coroutine[None, None, None]]


class SampleConsumer(Protocol):
    """Who hears of each reading that is believed."""

    def record_sample(
        self, owner: NamespacedName, pod: str, endpoint: EngineEndpoint, sampled_at: float, sample: Sample, interval: float
    ) -> None:
        """`sample` was read at `at`, seconds since the epoch; the pod is read each `interval` seconds."""


class _NullSampleConsumer:
    def record_sample(
        self, owner: NamespacedName, pod: str, endpoint: EngineEndpoint, sampled_at: float, sample: Sample, interval: float
    ) -> None:
        pass


class Scraper:
    """See the module. `tell` is called with a resource whose figures have moved, `count` with how each reading ended, and
    `listener` with each one that is believed."""

    def __init__(
        self,
        enqueue: Callable[[NamespacedName], None],
        record_scrape: Callable[[str, float], None],
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
        access: PrometheusAccess | None = None,
        sample_consumer: SampleConsumer | None = None,
    ) -> None:
        self._enqueue, self._record_scrape, self._transport = enqueue, record_scrape, transport
        self._clock = clock or Clock()
        self._access = access or PrometheusAccess()
        self._sample_consumer = sample_consumer or _NullSampleConsumer()
        self._rollout_pool, self._normal_pool = (
            ScrapePool(longest, FairQueue(self._find_owner, MAX_CONCURRENT_SCRAPES_PER_NAMESPACE), MAX_CONCURRENT_SCRAPES)
            for longest in (MAX_ROLLOUT_SCRAPE_DELAY_SECONDS, MAX_NORMAL_SCRAPE_DELAY_SECONDS)
        )
        self._rollout_poll_pool, self._normal_poll_pool = (
            ScrapePool(longest, FairQueue(lambda key: key, 1), MAX_CONCURRENT_POLLS)
            for longest in (MAX_ROLLOUT_SCRAPE_DELAY_SECONDS, MAX_NORMAL_SCRAPE_DELAY_SECONDS)
        )
        self._parse_lock = asyncio.Lock()
        self._polls: dict[NamespacedName, PrometheusPoll] = {}
        self._scrape_targets: dict[NamespacedName, ScrapeTarget] = {}
        self._pods_by_resource: dict[NamespacedName, frozenset[NamespacedName]] = {}
        self._reported: dict[NamespacedName, _ReportedMetrics] = {}
        self._block_collectors: dict[NamespacedName, BlockCollector] = {}
        self._calibration_collector = CalibrationCollector()

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status) -> None:
        """Read the resource's pods from now on, as was observed, and tell when their figures leave those of its status."""
        resource = snapshot.resource
        metrics, rolling = resource.spec.metrics, status.canary is not None or status.previous is not None
        interval = shortest = metrics.interval.total_seconds()
        if not rolling:
            half = resource.spec.rollout.analysis.block.total_seconds() / 2
            interval = max(interval, min(MAX_NORMAL_INTERVAL_SECONDS, NORMAL_INTERVAL_FACTOR * interval, half))
        if metrics.source is None:
            interval, shortest = (limit_scrape_rate(one, resource.spec.replicas) for one in (interval, shortest))
            self._polls.pop(key, None)
            lane = self._rollout_pool if rolling else self._normal_pool
        else:
            lane = self._rollout_poll_pool if rolling else self._normal_poll_pool
            self._start_poll(key, PrometheusPoll(metrics.source.prometheus, lane, interval, shortest))
        found = {NamespacedName(key.namespace, name): target for name, target in find_engine_endpoints(snapshot)}
        for gone in self._pods_by_resource.get(key, frozenset()) - found.keys():
            del self._scrape_targets[gone]
        for name, target in found.items():
            pod = self._scrape_targets.get(name)
            if pod is None:
                pod = self._scrape_targets[name] = ScrapeTarget(key, target, lane, interval)
            elif (pod.pool, pod.interval) == (lane, interval):
                pod.endpoint = target
                continue
            pod.endpoint, pod.pool, pod.interval = target, lane, interval
            if metrics.source is None:
                lane.queue.add_after(name, interval * hash_fraction(name))
        self._pods_by_resource[key] = frozenset(found)
        compared = build_comparison_config(key.name, status, shortest) or self._calibration_collector.track(
            key, snapshot, status, interval
        )
        if compared is None:
            self._block_collectors.pop(key, None)
        elif key not in self._block_collectors or self._block_collectors[key].config != compared:
            self._block_collectors[key] = BlockCollector(compared)
        self._reported.setdefault(key, _ReportedMetrics()).metrics = {
            naming.deployment_name(key.name, arm.revision, control=control): read_status_metrics(arm)
            for arm, control in _iter_reported_arms(status)
        }

    def _find_owner(self, name: NamespacedName) -> NamespacedName:
        pod = self._scrape_targets.get(name)
        return name if pod is None else pod.owner

    def _start_poll(self, key: NamespacedName, poll: PrometheusPoll) -> None:
        known = self._polls.get(key)
        if known is not None and known.server == poll.server:
            if (known.pool, known.interval, known.rollout_interval) == (poll.pool, poll.interval, poll.rollout_interval):
                return
            poll.health = known.health
        self._polls[key] = poll
        poll.pool.queue.add_after(key, poll.interval * hash_fraction(key))

    def forget(self, key: NamespacedName) -> None:
        """The resource is gone."""
        self._polls.pop(key, None)
        for name in self._pods_by_resource.pop(key, frozenset()):
            del self._scrape_targets[name]
        self._reported.pop(key, None)
        self._block_collectors.pop(key, None)
        self._calibration_collector.forget(key)

    def baseline_calibration(self, key: NamespacedName, uid: str | None) -> BaselineCalibration | None:
        """What is held of the stable pods of the resource with this uid."""
        return self._calibration_collector.baseline_calibration(key, uid)

    def blocks(self, key: NamespacedName) -> tuple[ClosedBlock, ...]:
        """The latest closed blocks of the resource's analysis."""
        comparison = self._block_collectors.get(key)
        return () if comparison is None else tuple(comparison.blocks)

    def invalid_metrics(self, key: NamespacedName) -> Mapping[str, str]:
        """Pods whose pages could not be believed for a while, by name, and why."""
        pods = {name.name: self._scrape_targets[name] for name in self._pods_by_resource.get(key, frozenset())}
        return {name: pod.invalid_reason for name, pod in pods.items() if pod.invalid_samples >= INVALID_SAMPLE_LIMIT}

    def metrics_source_error(self, key: NamespacedName) -> str | None:
        """What keeps the resource's Prometheus from being of use; empty when nothing does, None while that is not known."""
        if key not in self._pods_by_resource:
            return None
        asked = self._polls.get(key)
        return "" if asked is None else asked.health.message

    def unavailable_reason(self, key: NamespacedName) -> str:
        """Why nothing is read of the resource's pods; empty where something is, or nothing is known against it."""
        asked = self._polls.get(key)
        if asked is not None and asked.health.message:
            return asked.health.message
        pods = [(name, self._scrape_targets[name]) for name in sorted(self._pods_by_resource.get(key, frozenset()))]
        if not pods or any(not pod.last_error for _, pod in pods):
            return ""
        name, pod = pods[0]
        return f"pod {name.name}: {pod.last_error}"

    def metrics_by_deployment(self, key: NamespacedName) -> Mapping[str, ArmMetrics]:
        """What is known of the resource's arms, by the name of their Deployment."""
        now = asyncio.get_running_loop().time()
        sums: dict[str, MetricSums] = {}
        for name in sorted(self._pods_by_resource.get(key, frozenset())):
            pod = self._scrape_targets[name]
            found = pod.window.sums(now, pod.stale_after_seconds)
            if found is not None:
                known = sums.get(pod.endpoint.deployment)
                together = found if known is None else known.add(found)
                sums[pod.endpoint.deployment] = (
                    together or known or found
                )  # one that drafts otherwise: the first stand for the group
        return {group: found.arm_metrics for group, found in sums.items()}

    async def run(self) -> None:
        """Read until cancelled."""
        servers = PrometheusClient(self._access, self._transport)
        try:
            async with create_http_client(self._transport) as through, asyncio.TaskGroup() as group:
                for lane in (self._rollout_pool, self._normal_pool):
                    group.create_task(self._run_pool(lane, functools.partial(self._scrape_and_reschedule, through), group))
                for lane in (self._rollout_poll_pool, self._normal_poll_pool):
                    group.create_task(self._run_pool(lane, functools.partial(self._poll_and_reschedule, servers), group))
        finally:
            await servers.close()

    async def _run_pool(self, pool: ScrapePool, handler: ScrapeHandler, group: asyncio.TaskGroup) -> None:
        while True:
            await pool.slots.acquire()
            try:
                key, _ = await pool.queue.get()
            except asyncio.CancelledError:
                pool.slots.release()
                raise
            # A task that is cancelled before it begins runs none of its own clean-up.
            group.create_task(handler(pool, key)).add_done_callback(functools.partial(_finish_scrape, pool, key))

    async def _scrape_and_reschedule(self, http_client: httpx.AsyncClient, pool: ScrapePool, name: NamespacedName) -> None:
        pod = self._scrape_targets.get(name)
        if pod is None or pod.pool is not pool:
            return
        await self._scrape_pod(name, pod, http_client)
        if self._scrape_targets.get(name) is pod and pod.pool is pool:
            pool.queue.add_after(name, pod.next_delay())

    async def _poll_and_reschedule(self, prometheus_client: PrometheusClient, pool: ScrapePool, key: NamespacedName) -> None:
        asked = self._polls.get(key)
        if asked is None or asked.pool is not pool:
            return
        await self._poll_source(key, asked, prometheus_client)
        if self._polls.get(key) is asked:
            pool.queue.add_after(key, asked.next_delay())

    async def _scrape_pod(self, name: NamespacedName, scrape_target: ScrapeTarget, http_client: httpx.AsyncClient) -> None:
        loop, target = asyncio.get_running_loop(), scrape_target.endpoint
        began, outcome, told = loop.time(), "done", ""
        try:
            page = await fetch_metrics(http_client, target.url)
            scrape_target.last_response_bytes = len(page)
            async with self._parse_lock:
                outcome, told = self._record_sample(name, scrape_target, target, functools.partial(parse_exposition, page), None)
                await asyncio.sleep(len(page) / PARSE_BYTES_PER_SECOND)
        except ScrapeError as error:
            outcome, told = error.reason, str(error)
        except Exception:  # noqa: BLE001 - one pod's page must not end the reading of the others
            outcome = "error"
            _log.exception("pod %s: its page ended the reading with an error of Aerie's own", name)
        scrape_target.last_duration_seconds = loop.time() - began
        self._record_scrape(outcome, scrape_target.last_duration_seconds)
        record_scrape_outcome(name, scrape_target, outcome, told)
        if self._scrape_targets.get(name) is not scrape_target:
            return
        closed = self._collect_block(scrape_target.owner)
        if (
            closed
            or scrape_target.invalid_samples == INVALID_SAMPLE_LIMIT
            or (outcome == "done" and self._has_metrics_change(scrape_target.owner, 1))
        ):
            self._enqueue(scrape_target.owner)

    def _record_sample(
        self,
        name: NamespacedName,
        scrape_target: ScrapeTarget,
        endpoint: EngineEndpoint,
        parse_sample: Callable[[], Sample],
        sampled_at: float | None,
    ) -> tuple[str, str]:
        """What was read of the pod, as it was then; how that went, and why."""
        try:
            sample = parse_sample()
        except ExpositionError as error:
            scrape_target.invalid_samples, scrape_target.invalid_reason = scrape_target.invalid_samples + 1, str(error)
            return "unreadable", str(error)
        if (
            sample.process_start_time is None
        ):  # several API servers, or the front end in Rust: the container's own start stands for it
            sample = replace(sample, process_start_time=endpoint.started_at)
        scrape_target.window.add(endpoint.run_id, sample, asyncio.get_running_loop().time(), scrape_target.stale_after_seconds)
        scrape_target.last_sample, scrape_target.last_sample_at = sample, self._clock.now().timestamp()
        scrape_target.invalid_samples = 0
        self._sample_consumer.record_sample(
            scrape_target.owner,
            name.name,
            endpoint,
            scrape_target.last_sample_at if sampled_at is None else sampled_at,
            sample,
            scrape_target.interval,
        )
        return "done", ""

    async def _poll_source(self, key: NamespacedName, poll: PrometheusPoll, prometheus_client: PrometheusClient) -> None:
        """All pods of the resource, from its server."""
        loop = asyncio.get_running_loop()
        began, outcome = loop.time(), "done"
        pods = {name.name: self._scrape_targets[name] for name in sorted(self._pods_by_resource.get(key, frozenset()))}
        runs = {name: pod.endpoint for name, pod in pods.items()}
        trouble: tuple[str, str] | None = None
        news = False
        try:
            gaps: list[float] = []
            missing: dict[str, str] = {}
            async for some in prometheus_client.poll(poll.server, key.namespace, list(pods), poll.rollout_interval):
                for name, found in some.items():
                    before = pods[name].invalid_samples
                    gap = self._record_poll_result(NamespacedName(key.namespace, name), pods[name], runs[name], found)
                    gaps += [gap] if gap else []
                    missing |= {name: found} if isinstance(found, str) else {}
                    news = news or before < pods[name].invalid_samples == INVALID_SAMPLE_LIMIT
            poll.min_scrape_gap_seconds = min(gaps, default=poll.min_scrape_gap_seconds)
            trouble = find_metrics_source_error(poll, pods, missing)
            poll.failures = 0
        except ScrapeError as error:
            outcome, trouble = error.reason, (error.reason, str(error))
            poll.failures += 1
        except Exception:  # noqa: BLE001 - one resource's server must not end the reading of the others
            outcome = "error"
            poll.failures += 1
            _log.exception("%s: an answer of %s ended the reading with an error of Aerie's own", key, poll.server.address)
        poll.last_duration_seconds = loop.time() - began
        self._record_scrape(outcome, poll.last_duration_seconds)
        if self._polls.get(key) is not poll:
            return
        if trouble is not None:
            news = poll.health.record_failure(*trouble, loop.time()) or news
        elif outcome == "done":
            news = poll.health.record_success() or news
        if self._collect_block(key) or news or (outcome == "done" and self._has_metrics_change(key, len(pods))):
            self._enqueue(key)

    def _record_poll_result(
        self, name: NamespacedName, scrape_target: ScrapeTarget, endpoint: EngineEndpoint, result: PrometheusScrape | str
    ) -> float:
        """What the server has of the pod; the seconds between its last two scrapes, where there was a new one."""
        if isinstance(result, str):
            record_scrape_outcome(name, scrape_target, "absent", result)
            return 0.0
        if result.timestamp <= scrape_target.prometheus_scraped_at:  # the scrape of before: no other reading
            return 0.0
        gap, scrape_target.prometheus_scraped_at = (
            result.timestamp - scrape_target.prometheus_scraped_at if scrape_target.prometheus_scraped_at else 0.0,
            result.timestamp,
        )
        record_scrape_outcome(
            name, scrape_target, *self._record_sample(name, scrape_target, endpoint, result.to_sample, result.timestamp)
        )
        return gap

    def _collect_block(self, key: NamespacedName) -> bool:
        """A round of the resource's comparison, if one is due; whether it has closed a block that is worth a pass."""
        comparison, now = self._block_collectors.get(key), self._clock.now().timestamp()
        if comparison is None or not comparison.is_due(now):
            return False
        pods = {name.name: self._scrape_targets[name] for name in self._pods_by_resource.get(key, frozenset())}
        alone = comparison.config.is_stable_only
        if alone and all(pod.last_sample is None for pod in pods.values()):
            return False  # nothing to remember, and it would take memory
        if not comparison.collect(
            now, ((name, pod.endpoint.deployment, pod.last_sample_at, pod.last_sample) for name, pod in pods.items())
        ):
            return False
        return not alone or self._calibration_collector.add_block(key, comparison.blocks.pop(), comparison.config)

    def _has_metrics_change(self, key: NamespacedName, scrape_count: int) -> bool:
        """Whether the figures have left those that are shown, looked at after so many more pages of the resource.

        All of its pods are in a look, so that it is made after an eighth of them were read, or an interval.
        """
        now, shown, pods = asyncio.get_running_loop().time(), self._reported[key], self._pods_by_resource.get(key, frozenset())
        shown.scrapes_since_check += scrape_count
        if shown.scrapes_since_check < len(pods) / 8 and now < shown.next_check:
            return False
        shown.scrapes_since_check, shown.next_check = (
            0,
            now + min((self._scrape_targets[name].interval for name in pods), default=0.0),
        )
        found = self.metrics_by_deployment(key)
        return any(debounce_metrics(known, found[group]) != known for group, known in shown.metrics.items() if group in found)


@dataclass(eq=False)
class _ReportedMetrics:
    """The figures in a resource's status, and when they were last held against those that are read."""

    metrics: Mapping[str, ArmMetrics] = field(default_factory=dict)
    """By Deployment."""
    scrapes_since_check: int = 0
    """That were read since."""
    next_check: float = 0.0


def _finish_scrape(pool: ScrapePool, key: NamespacedName, task: asyncio.Task[None]) -> None:
    """A turn has ended. One that was cut short is due again, for whoever reads after this."""
    pool.queue.done(key)
    pool.slots.release()
    if task.cancelled():
        pool.queue.add(key)


def _iter_reported_arms(status: Status) -> Iterator[tuple[Arm, bool]]:
    """The arms that the status shows, and whether each is control."""
    if status.stable is not None:
        yield status.stable, False
    if status.canary is not None:
        yield status.canary, False
        if status.canary.control is not None:
            yield status.canary.control, True
