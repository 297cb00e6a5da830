"""Scrapes the engines' metrics in the background: from the pods, or from Prometheus where a resource names a server.

    reconcile ─ track(snapshot) ─► pods to scrape ─► two pools ─► fetch ─► SlidingWindow ─► metrics ─► next reconcile
                                   or resources   ─► two pools ─► poll ──┘
                                            rollout: of resources with a rollout in progress, each spec.metrics.scrapeInterval
                                            normal:  of all others, four times slower, up to a minute
                                                     and often enough for two samples in a block

Guarantees: only pods that the resource owns are scraped, on the port that their engine container names. A scrape has limits in
time and size, and a pool limits its scrapes in progress. First scrapes are spread over an interval, so that a thousand resources
cause no burst. A pod that does not answer is scraped less and less often. Turns are shared among namespaces and resources
(fair_queue.py), so that slow or hostile pods do not delay the canary of another user.

One scrape at a time is parsed, with a pause after it that grows with its size. So the event loop is blocked by one scrape at
most, and by all scrapes for half of the time at most. A scrape costs the same with one pod of a resource as with a thousand. Work
over all pods (metrics, scrape cycles of a comparison) is done some eight times in an interval. The interval of a resource with
more than `MAX_SCRAPES_PER_SECOND` scrapes per second is doubled until it has fewer (`scrape_pool.limit_scrape_rate`).

A failure is counted by reason, and never fails a reconcile: unknown values are missing in the metrics. A resource is enqueued
only when its metrics have changed (aerie.rollout.facts.arm_metrics). Prometheus is polled for all pods of a resource at once, and
for one resource of a namespace at a time. Its sample of a pod counts only if it is of a new scrape; otherwise the pod's scrape
has failed.
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
from aerie.api import SpeculativeDeployment
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
    """Consumer of valid samples."""

    def record_sample(
        self, owner: NamespacedName, pod: str, endpoint: EngineEndpoint, sampled_at: float, sample: Sample, interval: float
    ) -> None:
        """Record a sample that was taken at `sampled_at`, seconds since the epoch, of a pod that is scraped each
        `interval` seconds.
        """


class _NullSampleConsumer:
    def record_sample(
        self, owner: NamespacedName, pod: str, endpoint: EngineEndpoint, sampled_at: float, sample: Sample, interval: float
    ) -> None:
        pass


class Scraper:
    """Scraper of all resources.

    `enqueue` is called with a resource whose metrics have changed, `record_scrape` with the outcome and the duration of each
    scrape, and `sample_consumer` with each valid sample.
    """

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
            ScrapePool(max_delay, FairQueue(self._find_owner, MAX_CONCURRENT_SCRAPES_PER_NAMESPACE), MAX_CONCURRENT_SCRAPES)
            for max_delay in (MAX_ROLLOUT_SCRAPE_DELAY_SECONDS, MAX_NORMAL_SCRAPE_DELAY_SECONDS)
        )
        self._rollout_poll_pool, self._normal_poll_pool = (
            ScrapePool(max_delay, FairQueue(lambda key: key, 1), MAX_CONCURRENT_POLLS)
            for max_delay in (MAX_ROLLOUT_SCRAPE_DELAY_SECONDS, MAX_NORMAL_SCRAPE_DELAY_SECONDS)
        )
        self._parse_lock = asyncio.Lock()
        self._polls: dict[NamespacedName, PrometheusPoll] = {}
        self._scrape_targets: dict[NamespacedName, ScrapeTarget] = {}
        self._pods_by_resource: dict[NamespacedName, frozenset[NamespacedName]] = {}
        self._reported: dict[NamespacedName, _ReportedMetrics] = {}
        self._block_collectors: dict[NamespacedName, BlockCollector] = {}
        self._calibration_collector = CalibrationCollector()

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status) -> None:
        """Scrape the resource's pods from now on, and enqueue it when their metrics differ from those in its status."""
        is_rolling_out, source = status.canary is not None or status.previous is not None, snapshot.resource.spec.metrics.source
        interval, rollout_interval = _find_scrape_intervals(snapshot.resource, is_rolling_out=is_rolling_out)
        if source is None:
            self._polls.pop(key, None)
            pool = self._rollout_pool if is_rolling_out else self._normal_pool
        else:
            pool = self._rollout_poll_pool if is_rolling_out else self._normal_poll_pool
            self._start_poll(key, PrometheusPoll(source.prometheus, pool, interval, rollout_interval))
        self._track_pods(key, snapshot, pool, interval)
        config = build_comparison_config(key.name, status, rollout_interval) or self._calibration_collector.track(
            key, snapshot, status, interval
        )
        if config is None:
            self._block_collectors.pop(key, None)
        elif key not in self._block_collectors or self._block_collectors[key].config != config:
            self._block_collectors[key] = BlockCollector(config)
        self._reported.setdefault(key, _ReportedMetrics()).metrics = {
            naming.deployment_name(key.name, arm.revision, control=control): read_status_metrics(arm)
            for arm, control in _iter_reported_arms(status)
        }

    def _track_pods(self, key: NamespacedName, snapshot: Snapshot, pool: ScrapePool, interval: float) -> None:
        """Update the targets of the resource's pods, and schedule those with a new pool or interval unless they are polled."""
        endpoints = {NamespacedName(key.namespace, name): endpoint for name, endpoint in find_engine_endpoints(snapshot)}
        for removed in self._pods_by_resource.get(key, frozenset()) - endpoints.keys():
            del self._scrape_targets[removed]
        for name, endpoint in endpoints.items():
            target = self._scrape_targets.get(name)
            if target is None:
                target = self._scrape_targets[name] = ScrapeTarget(key, endpoint, pool, interval)
            elif (target.pool, target.interval) == (pool, interval):
                target.endpoint = endpoint
                continue
            target.endpoint, target.pool, target.interval = endpoint, pool, interval
            if snapshot.resource.spec.metrics.source is None:
                pool.queue.add_after(name, interval * hash_fraction(name))
        self._pods_by_resource[key] = frozenset(endpoints)

    def _find_owner(self, name: NamespacedName) -> NamespacedName:
        target = self._scrape_targets.get(name)
        return name if target is None else target.owner

    def _start_poll(self, key: NamespacedName, poll: PrometheusPoll) -> None:
        previous = self._polls.get(key)
        if previous is not None and previous.server == poll.server:
            if (previous.pool, previous.interval, previous.rollout_interval) == (poll.pool, poll.interval, poll.rollout_interval):
                return
            poll.health = previous.health
        self._polls[key] = poll
        poll.pool.queue.add_after(key, poll.interval * hash_fraction(key))

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""
        self._polls.pop(key, None)
        for name in self._pods_by_resource.pop(key, frozenset()):
            del self._scrape_targets[name]
        self._reported.pop(key, None)
        self._block_collectors.pop(key, None)
        self._calibration_collector.forget(key)

    def baseline_calibration(self, key: NamespacedName, uid: str | None) -> BaselineCalibration | None:
        """Return the baseline calibration of the resource with this uid."""
        return self._calibration_collector.baseline_calibration(key, uid)

    def blocks(self, key: NamespacedName) -> tuple[ClosedBlock, ...]:
        """Return the latest closed blocks of the resource's analysis."""
        collector = self._block_collectors.get(key)
        return () if collector is None else tuple(collector.blocks)

    def invalid_metrics(self, key: NamespacedName) -> Mapping[str, str]:
        """Return the reason by name of each pod whose metrics have been invalid for a while."""
        targets = {name.name: self._scrape_targets[name] for name in self._pods_by_resource.get(key, frozenset())}
        return {name: target.invalid_reason for name, target in targets.items() if target.invalid_samples >= INVALID_SAMPLE_LIMIT}

    def metrics_source_error(self, key: NamespacedName) -> str | None:
        """Return the problem with the resource's Prometheus server; empty when there is none, None while that is unknown."""
        if key not in self._pods_by_resource:
            return None
        poll = self._polls.get(key)
        return "" if poll is None else poll.health.message

    def unavailable_reason(self, key: NamespacedName) -> str:
        """Return why none of the resource's pods has metrics; empty where one has, or no failure is known."""
        poll = self._polls.get(key)
        if poll is not None and poll.health.message:
            return poll.health.message
        targets = [(name, self._scrape_targets[name]) for name in sorted(self._pods_by_resource.get(key, frozenset()))]
        if not targets or any(not target.last_error for _, target in targets):
            return ""
        name, target = targets[0]
        return f"pod {name.name}: {target.last_error}"

    def metrics_by_deployment(self, key: NamespacedName) -> Mapping[str, ArmMetrics]:
        """Return the metrics of the resource's arms, by the name of their Deployment."""
        now = asyncio.get_running_loop().time()
        sums: dict[str, MetricSums] = {}
        for name in sorted(self._pods_by_resource.get(key, frozenset())):
            target = self._scrape_targets[name]
            pod_sums = target.window.sums(now, target.stale_after_seconds)
            if pod_sums is not None:
                previous_sums = sums.get(target.endpoint.deployment)
                total = pod_sums if previous_sums is None else previous_sums.add(pod_sums)
                # Pods that draft differently cannot be added up; the first ones then represent the Deployment.
                sums[target.endpoint.deployment] = total or previous_sums or pod_sums
        return {deployment: deployment_sums.arm_metrics for deployment, deployment_sums in sums.items()}

    async def run(self) -> None:
        """Scrape until cancelled."""
        prometheus_client = PrometheusClient(self._access, self._transport)
        try:
            async with create_http_client(self._transport) as http_client, asyncio.TaskGroup() as group:
                for pool in (self._rollout_pool, self._normal_pool):
                    group.create_task(self._run_pool(pool, functools.partial(self._scrape_and_reschedule, http_client), group))
                for pool in (self._rollout_poll_pool, self._normal_poll_pool):
                    group.create_task(
                        self._run_pool(pool, functools.partial(self._poll_and_reschedule, prometheus_client), group)
                    )
        finally:
            await prometheus_client.close()

    async def _run_pool(self, pool: ScrapePool, handler: ScrapeHandler, task_group: asyncio.TaskGroup) -> None:
        while True:
            await pool.slots.acquire()
            try:
                key, _ = await pool.queue.get()
            except asyncio.CancelledError:
                pool.slots.release()
                raise
            # A task that is cancelled before it begins runs none of its own clean-up.
            task_group.create_task(handler(pool, key)).add_done_callback(functools.partial(_finish_scrape, pool, key))

    async def _scrape_and_reschedule(self, http_client: httpx.AsyncClient, pool: ScrapePool, name: NamespacedName) -> None:
        target = self._scrape_targets.get(name)
        if target is None or target.pool is not pool:
            return
        await self._scrape_pod(name, target, http_client)
        if self._scrape_targets.get(name) is target and target.pool is pool:
            pool.queue.add_after(name, target.next_delay())

    async def _poll_and_reschedule(self, prometheus_client: PrometheusClient, pool: ScrapePool, key: NamespacedName) -> None:
        poll = self._polls.get(key)
        if poll is None or poll.pool is not pool:
            return
        await self._poll_source(key, poll, prometheus_client)
        if self._polls.get(key) is poll:
            pool.queue.add_after(key, poll.next_delay())

    async def _scrape_pod(self, name: NamespacedName, scrape_target: ScrapeTarget, http_client: httpx.AsyncClient) -> None:
        loop, endpoint = asyncio.get_running_loop(), scrape_target.endpoint
        started, outcome, message = loop.time(), "done", ""
        try:
            exposition = await fetch_metrics(http_client, endpoint.url)
            scrape_target.last_response_bytes = len(exposition)
            async with self._parse_lock:
                outcome, message = self._record_sample(
                    name, scrape_target, endpoint, functools.partial(parse_exposition, exposition), None
                )
                await asyncio.sleep(len(exposition) / PARSE_BYTES_PER_SECOND)
        except ScrapeError as error:
            outcome, message = error.reason, str(error)
        except Exception:  # noqa: BLE001 - one pod's metrics must not stop the scrapes of the others
            outcome = "error"
            _log.exception("pod %s: the scrape failed with an internal error", name)
        scrape_target.last_duration_seconds = loop.time() - started
        self._record_scrape(outcome, scrape_target.last_duration_seconds)
        record_scrape_outcome(name, scrape_target, outcome, message)
        if self._scrape_targets.get(name) is not scrape_target:
            return
        has_closed_block = self._collect_block(scrape_target.owner)
        if (
            has_closed_block
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
        """Record a sample of the pod, parsed by `parse_sample`, and return the outcome and its reason.

        `endpoint` is the pod's endpoint when it was scraped. `sampled_at` is the time of the sample in seconds since the epoch;
        None: now.
        """
        try:
            sample = parse_sample()
        except ExpositionError as error:
            scrape_target.invalid_samples, scrape_target.invalid_reason = scrape_target.invalid_samples + 1, str(error)
            return "invalid_exposition", str(error)
        if sample.process_start_time is None:
            # With several API servers, or the front end in Rust, it is missing. The container's start time replaces it.
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
        """Poll the metrics of all pods of the resource from its server."""
        loop = asyncio.get_running_loop()
        started, outcome = loop.time(), "done"
        targets = {name.name: self._scrape_targets[name] for name in sorted(self._pods_by_resource.get(key, frozenset()))}
        endpoints = {name: target.endpoint for name, target in targets.items()}
        source_error: tuple[str, str] | None = None
        has_news = False
        try:
            gaps: list[float] = []
            missing: dict[str, str] = {}
            async for results in prometheus_client.poll(poll.server, key.namespace, list(targets), poll.rollout_interval):
                for name, result in results.items():
                    previous_invalid_samples = targets[name].invalid_samples
                    gap = self._record_poll_result(NamespacedName(key.namespace, name), targets[name], endpoints[name], result)
                    gaps += [gap] if gap else []
                    missing |= {name: result} if isinstance(result, str) else {}
                    has_news = has_news or previous_invalid_samples < targets[name].invalid_samples == INVALID_SAMPLE_LIMIT
            poll.min_scrape_gap_seconds = min(gaps, default=poll.min_scrape_gap_seconds)
            source_error = find_metrics_source_error(poll, targets, missing)
            poll.failures = 0
        except ScrapeError as error:
            outcome, source_error = error.reason, (error.reason, str(error))
            poll.failures += 1
        except Exception:  # noqa: BLE001 - one resource's server must not stop the polls of the others
            outcome = "error"
            poll.failures += 1
            _log.exception("%s: the poll of %s failed with an internal error", key, poll.server.address)
        poll.last_duration_seconds = loop.time() - started
        self._record_scrape(outcome, poll.last_duration_seconds)
        if self._polls.get(key) is not poll:
            return
        if source_error is not None:
            has_news = poll.health.record_failure(*source_error, loop.time()) or has_news
        elif outcome == "done":
            has_news = poll.health.record_success() or has_news
        if self._collect_block(key) or has_news or (outcome == "done" and self._has_metrics_change(key, len(targets))):
            self._enqueue(key)

    def _record_poll_result(
        self, name: NamespacedName, scrape_target: ScrapeTarget, endpoint: EngineEndpoint, result: PrometheusScrape | str
    ) -> float:
        """Record the server's result for the pod. Return the seconds between its last two scrapes, or 0 without a new one."""
        if isinstance(result, str):
            record_scrape_outcome(name, scrape_target, "no_sample", result)
            return 0.0
        if result.timestamp <= scrape_target.prometheus_scraped_at:  # the same scrape as before: no new sample
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
        """Run a scrape cycle of the resource's comparison if one is due.

        Return True if it closed a block that is worth a reconcile.
        """
        collector, now = self._block_collectors.get(key), self._clock.now().timestamp()
        if collector is None or not collector.is_due(now):
            return False
        targets = {name.name: self._scrape_targets[name] for name in self._pods_by_resource.get(key, frozenset())}
        is_stable_only = collector.config.is_stable_only
        if is_stable_only and all(target.last_sample is None for target in targets.values()):
            return False  # there is nothing to collect, and a block would take memory
        if not collector.collect(
            now,
            ((name, target.endpoint.deployment, target.last_sample_at, target.last_sample) for name, target in targets.items()),
        ):
            return False
        return not is_stable_only or self._calibration_collector.add_block(key, collector.blocks.pop(), collector.config)

    def _has_metrics_change(self, key: NamespacedName, scrape_count: int) -> bool:
        """Return True when the metrics differ from the reported ones, after `scrape_count` more scrapes of the resource.

        A check covers all pods of the resource, so it is made after an eighth of them were scraped, or after an interval.
        """
        now, reported, pod_names = (
            asyncio.get_running_loop().time(),
            self._reported[key],
            self._pods_by_resource.get(key, frozenset()),
        )
        reported.scrapes_since_check += scrape_count
        if reported.scrapes_since_check < len(pod_names) / 8 and now < reported.next_check:
            return False
        reported.scrapes_since_check, reported.next_check = (
            0,
            now + min((self._scrape_targets[name].interval for name in pod_names), default=0.0),
        )
        metrics = self.metrics_by_deployment(key)
        return any(
            debounce_metrics(reported_metrics, metrics[deployment]) != reported_metrics
            for deployment, reported_metrics in reported.metrics.items()
            if deployment in metrics
        )


@dataclass(eq=False)
class _ReportedMetrics:
    """Metrics in a resource's status, and when they were last compared with the scraped ones."""

    metrics: Mapping[str, ArmMetrics] = field(default_factory=dict)
    """Metrics by Deployment."""
    scrapes_since_check: int = 0
    """Scrapes since the last check."""
    next_check: float = 0.0


def _finish_scrape(pool: ScrapePool, key: NamespacedName, task: asyncio.Task[None]) -> None:
    """End the turn of a scrape. One that was cancelled is due again, for the next run."""
    pool.queue.done(key)
    pool.slots.release()
    if task.cancelled():
        pool.queue.add(key)


def _find_scrape_intervals(resource: SpeculativeDeployment, *, is_rolling_out: bool) -> tuple[float, float]:
    """Return the resource's current scrape interval, and the one of a rollout, in seconds."""
    interval = rollout_interval = resource.spec.metrics.scrape_interval.total_seconds()
    if not is_rolling_out:
        half_block = resource.spec.rollout.analysis.block_duration.total_seconds() / 2
        interval = max(interval, min(MAX_NORMAL_INTERVAL_SECONDS, NORMAL_INTERVAL_FACTOR * interval, half_block))
    if resource.spec.metrics.source is not None:
        return interval, rollout_interval
    return limit_scrape_rate(interval, resource.spec.replicas), limit_scrape_rate(rollout_interval, resource.spec.replicas)


def _iter_reported_arms(status: Status) -> Iterator[tuple[Arm, bool]]:
    """Yield the arms in the status, and whether each is control."""
    if status.stable is not None:
        yield status.stable, False
    if status.canary is not None:
        yield status.canary, False
        if status.canary.control is not None:
            yield status.canary.control, True
