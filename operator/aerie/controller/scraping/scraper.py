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

The interval of a resource with more than `MAX_SCRAPES_PER_SECOND` scrapes per second is doubled until it has fewer
(`scrape_pool.limit_scrape_rate`).

A failure is counted by reason, and never fails a reconcile: unknown values are missing in the metrics. A resource is enqueued
only when its metrics have changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import httpx

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.controller.clock import Clock
from aerie.controller.scraping.engine_metrics import EngineMetrics, SampleConsumer
from aerie.controller.scraping.pod_scraper import PodScraper
from aerie.controller.scraping.prometheus import PrometheusAccess
from aerie.controller.scraping.prometheus_poller import PrometheusPoller
from aerie.controller.scraping.scrape_pool import (
    MAX_NORMAL_INTERVAL_SECONDS,
    NORMAL_INTERVAL_FACTOR,
    PrometheusPoll,
    limit_scrape_rate,
)
from aerie.controller.work_queue import NamespacedName
from aerie.rollout.facts.arm_metrics import ArmMetrics
from aerie.rollout.facts.snapshot import Snapshot


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
        self.metrics = EngineMetrics(clock or Clock(), sample_consumer)
        self._pod_scraper = PodScraper(self.metrics, enqueue, record_scrape, transport)
        self._prometheus_poller = PrometheusPoller(self.metrics, enqueue, record_scrape, transport, access or PrometheusAccess())

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status) -> None:
        """Scrape the resource's pods from now on, and enqueue it when their metrics differ from those in its status."""
        is_rolling_out, source = status.canary is not None or status.previous is not None, snapshot.resource.spec.metrics.source
        interval, rollout_interval = _find_scrape_intervals(snapshot.resource, is_rolling_out=is_rolling_out)
        if source is None:
            self._prometheus_poller.forget(key)
            pool = self._pod_scraper.select_pool(is_rolling_out=is_rolling_out)
        else:
            pool = self._prometheus_poller.select_pool(is_rolling_out=is_rolling_out)
            self._prometheus_poller.start(key, PrometheusPoll(source.prometheus, pool, interval, rollout_interval))
        changed_pods = self.metrics.track(key, snapshot, status, pool, interval, rollout_interval)
        if source is None:
            self._pod_scraper.schedule(changed_pods)

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""
        self._prometheus_poller.forget(key)
        self.metrics.forget(key)

    def baseline_calibration(self, key: NamespacedName, uid: str | None) -> BaselineCalibration | None:
        """Return the baseline calibration of the resource with this uid."""
        return self.metrics.baseline_calibration(key, uid)

    def blocks(self, key: NamespacedName) -> tuple[ClosedBlock, ...]:
        """Return the latest closed blocks of the resource's analysis."""
        return self.metrics.blocks(key)

    def invalid_metrics(self, key: NamespacedName) -> Mapping[str, str]:
        """Return the reason by name of each pod whose metrics have been invalid for a while."""
        return self.metrics.invalid_metrics(key)

    def metrics_by_deployment(self, key: NamespacedName) -> Mapping[str, ArmMetrics]:
        """Return the metrics of the resource's arms, by the name of their Deployment."""
        return self.metrics.metrics_by_deployment(key)

    def metrics_source_error(self, key: NamespacedName) -> str | None:
        """Return the problem with the resource's Prometheus server; empty when there is none, None while that is unknown."""
        return self._prometheus_poller.source_error(key) if self.metrics.is_tracked(key) else None

    def unavailable_reason(self, key: NamespacedName) -> str:
        """Return why none of the resource's pods has metrics; empty where one has, or no failure is known."""
        if source_error := self._prometheus_poller.source_error(key):
            return source_error
        targets = self.metrics.targets_of(key)
        if not targets or any(not target.last_error for target in targets.values()):
            return ""
        name, target = next(iter(targets.items()))
        return f"pod {name}: {target.last_error}"

    async def run(self) -> None:
        """Scrape until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pod_scraper.run())
            group.create_task(self._prometheus_poller.run())


def _find_scrape_intervals(resource: SpeculativeDeployment, *, is_rolling_out: bool) -> tuple[float, float]:
    """Return the resource's current scrape interval, and the one of a rollout, in seconds."""
    interval = rollout_interval = resource.spec.metrics.scrape_interval.total_seconds()
    if not is_rolling_out:
        half_block = resource.spec.rollout.analysis.block_duration.total_seconds() / 2
        interval = max(interval, min(MAX_NORMAL_INTERVAL_SECONDS, NORMAL_INTERVAL_FACTOR * interval, half_block))
    if resource.spec.metrics.source is not None:
        return interval, rollout_interval
    return limit_scrape_rate(interval, resource.spec.replicas), limit_scrape_rate(rollout_interval, resource.spec.replicas)
