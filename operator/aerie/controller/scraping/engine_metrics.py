"""Metrics of all resources' engines, from the samples of their pods.

    sample of a pod ─► SlidingWindow ─► metrics of the arms ─► next reconcile
                    ├─► BlockCollector ─► blocks of an analysis, or of the calibration
                    └─► sample consumer (the tuner)

A scrape costs the same with one pod of a resource as with a thousand: work over all pods (metrics, scrape cycles of a comparison)
is done some eight times in an interval. Whether a resource has news, and has to be enqueued, depends on the metrics in its status
(aerie.rollout.facts.arm_metrics).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.analysis.reference import has_regressed
from aerie.api.status import Arm, Status
from aerie.controller.clock import Clock
from aerie.controller.collection.blocks import BlockCollector, build_comparison_config
from aerie.controller.collection.calibration import CalibrationCollector
from aerie.controller.scraping.scrape_pool import INVALID_SAMPLE_LIMIT, ScrapePool, ScrapeTarget
from aerie.controller.scraping.targets import EngineEndpoint, find_engine_endpoints
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.exposition import ExpositionError
from aerie.engine.metrics.sample import Sample
from aerie.manifests import naming
from aerie.rollout.conditions import DEGRADED
from aerie.rollout.facts.arm_metrics import (
    OWN_DRAFTER,
    ArmMetrics,
    CountedDrafter,
    MetricSums,
    awaits_reference,
    debounce_metrics,
    identify_counted_drafter,
    read_status_metrics,
)
from aerie.rollout.facts.snapshot import Snapshot


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


class EngineMetrics:
    """Metrics of all resources' engines. `sample_consumer` gets each valid sample."""

    def __init__(self, clock: Clock, sample_consumer: SampleConsumer | None = None) -> None:
        self._clock, self._sample_consumer = clock, sample_consumer or _NullSampleConsumer()
        self.targets: dict[NamespacedName, ScrapeTarget] = {}
        """Pods by namespace and name."""
        self._pods_by_resource: dict[NamespacedName, frozenset[NamespacedName]] = {}
        self._reported: dict[NamespacedName, _ReportedMetrics] = {}
        self._block_collectors: dict[NamespacedName, BlockCollector] = {}
        self._calibration_collector = CalibrationCollector()

    def track(
        self,
        key: NamespacedName,
        snapshot: Snapshot,
        status: Status,
        pool: ScrapePool,
        interval: float,
        rollout_interval: float,
    ) -> list[NamespacedName]:
        """Follow the resource's pods and its comparison. Return the pods that are new, or have another pool or interval.

        `interval` is the current scrape interval in seconds, and `rollout_interval` that of a rollout.
        """
        stable, rollout = status.stable, status.in_place_rollout
        drafters: dict[str, CountedDrafter] = {}
        stable_deployment = awaiting_deployment = ""
        if stable is not None:
            stable_deployment = naming.deployment_name(key.name, stable.revision, control=False)
            drafters[stable_deployment] = identify_counted_drafter(stable.revision, stable, rollout)
            awaiting_deployment = stable_deployment if awaits_reference(stable, rollout) else ""
        changed_pods = self._track_pods(key, snapshot, pool, interval, drafters)
        config = build_comparison_config(key.name, status, rollout_interval) or self._calibration_collector.track(
            key, snapshot, status, interval
        )
        if config is None:
            self._block_collectors.pop(key, None)
        elif key not in self._block_collectors or self._block_collectors[key].config != config:
            self._block_collectors[key] = BlockCollector(config)
        reported = self._reported.setdefault(key, _ReportedMetrics())
        reported.awaiting_deployment = awaiting_deployment
        reported.warmup_seconds = snapshot.resource.spec.rollout.analysis.warmup_duration.total_seconds()
        reported.watched_deployment, reported.reference_acceptance_length = "", None
        degraded = next((item for item in status.conditions if (item.type, item.status) == (DEGRADED, "True")), None)
        reported.has_regressed = degraded is not None and degraded.reason == "AcceptanceRegression"
        if stable is not None and rollout is None and (degraded is None or reported.has_regressed):
            reported.watched_deployment = stable_deployment
            reported.reference_acceptance_length = stable.reference_acceptance_length
        reported.metrics = {
            naming.deployment_name(key.name, arm.revision, control=control): read_status_metrics(arm)
            for arm, control in _iter_reported_arms(status)
        }
        return changed_pods

    def _track_pods(
        self,
        key: NamespacedName,
        snapshot: Snapshot,
        pool: ScrapePool,
        interval: float,
        drafters: Mapping[str, CountedDrafter],
    ) -> list[NamespacedName]:
        endpoints = {NamespacedName(key.namespace, name): endpoint for name, endpoint in find_engine_endpoints(snapshot)}
        for removed in self._pods_by_resource.get(key, frozenset()) - endpoints.keys():
            del self.targets[removed]
        changed_pods = []
        for name, endpoint in endpoints.items():
            target = self.targets.get(name)
            if target is None or (target.pool, target.interval) != (pool, interval):
                changed_pods.append(name)
            target = self.targets.setdefault(name, target or ScrapeTarget(key, endpoint, pool, interval))
            target.endpoint, target.pool, target.interval = endpoint, pool, interval
            target.follow_drafter(drafters.get(endpoint.deployment, OWN_DRAFTER))
        self._pods_by_resource[key] = frozenset(endpoints)
        return changed_pods

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""
        for name in self._pods_by_resource.pop(key, frozenset()):
            del self.targets[name]
        self._reported.pop(key, None)
        self._block_collectors.pop(key, None)
        self._calibration_collector.forget(key)

    def is_tracked(self, key: NamespacedName) -> bool:
        """Return True when the resource's pods are followed."""
        return key in self._pods_by_resource

    def find_owner(self, name: NamespacedName) -> NamespacedName:
        """Return the resource that owns the pod, or the name itself when the pod is unknown."""
        target = self.targets.get(name)
        return name if target is None else target.owner

    def targets_of(self, key: NamespacedName) -> dict[str, ScrapeTarget]:
        """Return the resource's pods by name, in order."""
        return {name.name: self.targets[name] for name in sorted(self._pods_by_resource.get(key, frozenset()))}

    def baseline_calibration(self, key: NamespacedName, uid: str | None) -> BaselineCalibration | None:
        """Return the baseline calibration of the resource with this uid."""
        return self._calibration_collector.baseline_calibration(key, uid)

    def blocks(self, key: NamespacedName) -> tuple[ClosedBlock, ...]:
        """Return the latest closed blocks of the resource's analysis."""
        collector = self._block_collectors.get(key)
        return () if collector is None else tuple(collector.blocks)

    def invalid_metrics(self, key: NamespacedName) -> Mapping[str, str]:
        """Return the reason by name of each pod whose metrics have been invalid for a while."""
        targets = self.targets_of(key)
        return {name: target.invalid_reason for name, target in targets.items() if target.invalid_samples >= INVALID_SAMPLE_LIMIT}

    def metrics_by_deployment(self, key: NamespacedName) -> Mapping[str, ArmMetrics]:
        """Return the metrics of the resource's arms, by the name of their Deployment."""
        now = asyncio.get_running_loop().time()
        warmup_seconds = self._reported.get(key, _ReportedMetrics()).warmup_seconds
        sums: dict[str, MetricSums] = {}
        for target in self.targets_of(key).values():
            pod_sums = target.window.sums(now, target.stale_after_seconds, warmup_seconds)
            if pod_sums is not None:
                previous_sums = sums.get(target.endpoint.deployment)
                total = pod_sums if previous_sums is None else previous_sums.add(pod_sums)
                # Pods that draft differently cannot be added up; the first ones then represent the Deployment.
                sums[target.endpoint.deployment] = total or previous_sums or pod_sums
        return {deployment: deployment_sums.arm_metrics for deployment, deployment_sums in sums.items()}

    def record_sample(
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

    def has_news(self, key: NamespacedName, scrape_count: int, *, has_succeeded: bool) -> bool:
        """Return True when the resource has a new block or changed metrics, after `scrape_count` more scrapes of its pods."""
        return self.collect_block(key) or (has_succeeded and self._has_metrics_change(key, scrape_count))

    def collect_block(self, key: NamespacedName) -> bool:
        """Run a scrape cycle of the resource's comparison if one is due.

        Return True if it closed a block that is worth a reconcile.
        """
        collector, now = self._block_collectors.get(key), self._clock.now().timestamp()
        if collector is None or not collector.is_due(now):
            return False
        targets = self.targets_of(key)
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
            now + min((self.targets[name].interval for name in pod_names), default=0.0),
        )
        metrics = self.metrics_by_deployment(key)
        awaiting = metrics.get(reported.awaiting_deployment)
        if awaiting is not None and awaiting.reference_acceptance_length is not None:
            return True
        watched = metrics.get(reported.watched_deployment)
        if watched is not None and reported.has_regressed != has_regressed(
            debounce_metrics(reported.metrics[reported.watched_deployment], watched).acceptance_length,
            reported.reference_acceptance_length,
            watched.standard_error,
            before=reported.has_regressed,
        ):
            return True  # the value may be shown since a window that was too small for a comparison
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
    awaiting_deployment: str = ""
    """Deployment of the stable arm while it awaits a reference; else empty."""
    watched_deployment: str = ""
    """Deployment of the stable arm while its acceptance length is compared with its reference; else empty."""
    reference_acceptance_length: float | None = None
    has_regressed: bool = False
    """Whether the condition Degraded says that it has regressed."""
    warmup_seconds: float = 0.0
    scrapes_since_check: int = 0
    """Scrapes since the last check."""
    next_check: float = 0.0


def _iter_reported_arms(status: Status) -> Iterator[tuple[Arm, bool]]:
    """Yield the arms in the status, and whether each is control."""
    if status.stable is not None:
        yield status.stable, False
    if status.canary is not None:
        yield status.canary, False
        if status.canary.control is not None:
            yield status.canary.control, True
