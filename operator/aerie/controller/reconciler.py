"""Reconciles one resource at a time, and runs the workers that do so.

    cache ─► decide ─┬─ nothing to write ─────────────────────────────────► calls to pods ─► requeue after an event, or after...
                     └─ something ─► read everything live ─► decide ─► apply ─► calls to pods

Guarantees: a resource is in at most one reconcile at a time. A reconcile that fails is repeated with growing delays, and does not
delay other resources. The cache may be stale, so it decides only that there is nothing to do. Nothing is ever written but what
was decided on a live snapshot. Each write also has its own precondition: uid, resourceVersion, or being idempotent. A reconcile
that writes causes another one, which ends on the cache if the first one was right.

A pod's drafter is changed only after the status with that decision was written. Calls that follow from a stored status are sent
without a live read: the windows of a trial follow from its seed and its start. The cache holds the latest status, because only
this leader writes it, and the cache takes over its own writes. A leader's first calls are decided live, because its first list
may be older than the last write of the leader before.

After a reconcile a resource rests for `REST_SECONDS_PER_OBJECT` per object, however many events arrive, because a reconcile costs
more the more pods there are. A large fleet that changes all the time thus leaves most of the event loop to others: with 1,000
pods, its reconciles are three seconds apart.

A deleted resource needs no work: its children are garbage-collected by their owner references.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Protocol

from aerie.api import ResourceError
from aerie.api.status import Status
from aerie.controller.clock import Clock
from aerie.controller.concurrency import ConcurrencyLimiter
from aerie.controller.drafters.executor import DrafterExecutor
from aerie.controller.kubernetes.apply import apply_plan, build_status_to_write, has_changes
from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import SPECULATIVE_DEPLOYMENTS, ApiError, Cluster, ObjectDict
from aerie.controller.kubernetes.crd_version import CrdVersionMonitor
from aerie.controller.kubernetes.listing import NO_CACHE_GAPS, CacheGaps, Lister
from aerie.controller.kubernetes.nodes import NodeLabelCache
from aerie.controller.kubernetes.observe import find_name_conflicts, read_cached_snapshot, read_live_snapshot
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.notifications.notifier import Notifier
from aerie.controller.probes.context_length import ContextLengthProber
from aerie.controller.probes.equivalence import EquivalenceProber
from aerie.controller.probes.pairs import PairReader
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.tokens import EVALUATOR_TOKEN, ResourceTokens, needs_token
from aerie.controller.tracing import NO_TRACER, Tracer
from aerie.controller.tuning.tuner import Tuner
from aerie.controller.work_queue import NamespacedName, WorkQueue
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.conditions import ConditionUpdate
from aerie.rollout.facts.concurrency import ConcurrencyLimits
from aerie.rollout.facts.snapshot import EngineState, OperatorState, Snapshot
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reconcile import EMPTY_CATALOG, build_reconcile_plan
from aerie.rollout.status.hold import (
    REQUIRED_KINDS,
    UNREADABLE_SPEC,
    build_list_failure_condition,
    build_unreadable_condition,
    set_status_condition,
)

_log = logging.getLogger(__name__)
WORKER_COUNT = 8
REST_SECONDS_PER_OBJECT = 0.003
"""Seconds between two reconciles, per object of the resource.

A reconcile that writes occupies the event loop for 0.5 ms per object, any other for 0.1 ms.
"""
MIN_REPORTED_RECONCILE_FAILURES = 3
"""Failed reconciles in a row after which the status reports the API server's answer."""


class ResourceTracker(Protocol):
    """Part of the operator that measures resources in the background, between their reconciles."""

    def track(self, key: NamespacedName, snapshot: Snapshot, status: Status) -> None:
        """Measure the resource from now on, according to its snapshot and status."""

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted."""


@dataclass
class Reconciler:
    """Reconciler of the resources in the queue."""

    cluster: Cluster
    cache: ObjectCache
    queue: WorkQueue
    metrics: OperatorMetrics
    scraper: Scraper
    equivalence_prober: EquivalenceProber
    preflight_job_config: PreflightJobConfig
    dry_run: bool = False
    drafter_catalog: DrafterCatalog = EMPTY_CATALOG
    clock: Clock = field(default_factory=Clock)
    notifier: Notifier = field(default_factory=Notifier)
    tuner: Tuner = field(default_factory=lambda: Tuner(lambda _: None))
    context_length_prober: ContextLengthProber = field(default_factory=lambda: ContextLengthProber(lambda _: None))
    lister: Lister | None = None
    """Source of the kinds that cannot be listed; None: all can."""
    concurrency_limits: ConcurrencyLimits = field(default_factory=ConcurrencyLimits)
    """Limits on rollouts and trials in progress at the same time."""
    drafter_key_secret: NamespacedName = field(default_factory=lambda: NamespacedName("default", "aerie-drafter-key"))
    """The operator's own Secret, with the key of all tokens of drafter endpoints."""
    tracer: Tracer = NO_TRACER

    def __post_init__(self) -> None:
        self.concurrency_limiter = ConcurrencyLimiter(self.concurrency_limits, self.queue.add, self.metrics.set_rollout_counts)
        self.crd_monitor = CrdVersionMonitor(self.metrics)
        self.node_labels = NodeLabelCache(self.cluster)
        self.drafter_tokens = ResourceTokens(self.cluster, self.drafter_key_secret)
        evaluator_tokens = ResourceTokens(self.cluster, self.drafter_key_secret, EVALUATOR_TOKEN)
        self.pair_reader = PairReader(evaluator_tokens, self.queue.add, self.clock)
        self.drafter_executor = DrafterExecutor(
            self.drafter_tokens,
            self.queue.add,
            lambda: self.cluster.may_write(),
            self.clock,
            record_call=self.metrics.record_drafter_call,
        )
        self._keys_read_live: set[NamespacedName] = set()
        """Resources that this leader has read live."""

    async def run_worker(self) -> None:
        """Reconcile resources from the queue until cancelled."""
        while True:
            key, wait_seconds = await self.queue.get()
            self.metrics.record_queue_wait(wait_seconds)
            with self.tracer.span("reconcile", {"k8s.namespace.name": key.namespace, "aerie.name": key.name}):
                await self._reconcile_queued(key)
            await asyncio.sleep(0)  # a reconcile without a call never yields, and watches and the lease need their turn

    async def _reconcile_queued(self, key: NamespacedName) -> None:
        """Reconcile the resource once, and requeue it."""
        started = asyncio.get_running_loop().time()
        outcome = "failed"
        try:
            requeue_after = await self.reconcile(key)
            self.queue.forget(key)
            outcome = "done"
            if requeue_after is not None:
                self.queue.add_after(key, requeue_after.total_seconds())
        except ApiError as error:
            # A conflict means that somebody else wrote in between. The next reconcile reads that change.
            outcome = "conflict" if error.status == 409 else "failed"
            seconds = self.queue.add_rate_limited(key)
            level = logging.INFO if outcome == "conflict" else logging.WARNING
            _log.log(level, "%s: %s; retrying in %.1f s", key, error, seconds)
        except ResourceError as error:
            self.queue.add_rate_limited(key)
            _log.error("%s cannot be read: %s", key, error)
        except Exception:  # noqa: BLE001 - a fault with one resource must not end the worker
            self.queue.add_rate_limited(key)
            _log.exception("%s: the reconcile failed with an internal error", key)
        finally:
            self.metrics.record_reconcile(outcome, asyncio.get_running_loop().time() - started)
            self.tracer.set_attributes({"aerie.outcome": outcome})
            self.queue.done(key, REST_SECONDS_PER_OBJECT * self.cache.count_objects(key))

    async def reconcile(self, key: NamespacedName) -> timedelta | None:
        """Reconcile the resource once, and return when to requeue it although nothing has changed.

        Raises ApiError, ResourceError.
        """
        document = self.cache.get_resource(key)
        self.concurrency_limiter.load_claims(self._iter_resources)
        if document is None or document["metadata"].get("deletionTimestamp"):
            self._forget_resource(key)
            return None
        self.concurrency_limiter.update_claim(
            key, document, can_start=self.queue.count_failures(key) < MIN_REPORTED_RECONCILE_FAILURES
        )
        gaps = self.lister.find_gaps(document) if self.lister is not None else NO_CACHE_GAPS
        if gaps.is_pending:
            return None  # it is enqueued when that has changed
        try:
            with self.tracer.span("read", {"aerie.source": "cache"}):
                snapshot = self._add_measurements(key, read_cached_snapshot(self.cache, document), gaps)
        except ResourceError as error:
            await self._hold_resource(key, document, build_unreadable_condition(error))
            return None
        if REQUIRED_KINDS & gaps.errors_by_kind.keys():
            await self._hold_resource(
                key, document, build_list_failure_condition(gaps.errors_by_kind, all_forbidden=gaps.is_forbidden)
            )
            return None
        self.metrics.set_hold_reason(str(key), UNREADABLE_SPEC if snapshot.spec_substitution is not None else "")
        if snapshot.spec_substitution is not None:
            self.concurrency_limiter.update_claim(key, document, can_start=False)
        plan = await self._decide_plan(snapshot)
        needs_write = has_changes(plan, document) and not self._is_partial_write(key, plan, document)
        # Calls that follow from the stored status need no live read. Only the first list may lack what an earlier leader wrote.
        is_unconfirmed = key not in self._keys_read_live and any(pod.call is not None for pod in plan.drafters)
        if not (self.dry_run or needs_write or is_unconfirmed):
            self._track(key, snapshot, plan)
            self.drafter_executor.follow(key, snapshot, plan.drafters)
            self.notifier.enqueue_new(key, snapshot.resource, plan.status, self.clock.now())
            return plan.requeue_after
        return await self._reconcile_live(key, document["metadata"]["resourceVersion"], gaps)

    async def _reconcile_live(self, key: NamespacedName, cached_version: str, gaps: CacheGaps) -> timedelta | None:
        """Decide on a live snapshot, carry the plan out, and return when to requeue the resource. Raises ApiError, ResourceError.

        `cached_version`: resourceVersion of the resource in the cache.
        """
        document = await self.cluster.get(SPECULATIVE_DEPLOYMENTS, key.namespace, key.name)
        if document is None:
            self.cache.handle_not_found(key, cached_version)
            return None  # that call enqueues it once more
        self.cache.put(document)
        if document["metadata"].get("deletionTimestamp"):
            return None
        with self.tracer.span("read", {"aerie.source": "live"}):
            snapshot = self._add_measurements(
                key, await read_live_snapshot(self.cluster, self.cache, document, gaps.skipped_kinds), gaps
            )
        self._keys_read_live.add(key)
        await asyncio.sleep(0)  # with many pods, building the snapshot and deciding block the loop for 50 ms each
        plan = await self._decide_plan(snapshot)
        now = self.clock.now()
        if self.dry_run:
            print(json.dumps(describe_plan(key, plan), indent=2), flush=True)  # noqa: T201 - the purpose of a dry run
            return None
        name_conflicts = await find_name_conflicts(self.cluster, snapshot, plan.objects_to_apply)
        if name_conflicts:
            snapshot = replace(snapshot, cluster=replace(snapshot.cluster, name_conflicts=name_conflicts))
            plan = build_reconcile_plan(snapshot, self.preflight_job_config, now, self.drafter_catalog)
        self._track(key, snapshot, plan)
        is_persistent_failure = self.queue.count_failures(key) >= MIN_REPORTED_RECONCILE_FAILURES
        if needs_token(plan.objects_to_apply):
            # Without the Secret, pods start all the same, and their observation has the reason.
            await self.drafter_tokens.ensure(key, snapshot.resource.metadata.uid or "")
        with self.tracer.span("apply"):
            plan = await apply_plan(
                self.cluster,
                self.cache,
                document,
                snapshot,
                plan,
                now,
                is_persistent_failure=is_persistent_failure,
                tracer=self.tracer,
            )
        # Only now: the next operator has to know the decision that a pod was changed by.
        self.drafter_executor.follow(key, snapshot, plan.drafters)
        stored = (self.cache.get_resource(key) or {}).get("status") or {}
        self.crd_monitor.record_write(key, build_status_to_write(plan, document), stored)
        self.notifier.enqueue_new(key, snapshot.resource, plan.status, now)
        return plan.requeue_after

    def _forget_resource(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was or is being deleted."""
        for tracker in self._trackers():
            tracker.forget(key)
        self.drafter_executor.forget(key)
        self._keys_read_live.discard(key)
        self.notifier.forget(key)
        self.crd_monitor.forget(key)
        self.metrics.set_hold_reason(str(key), "")
        self.concurrency_limiter.update_claim(key, None)

    async def _decide_plan(self, snapshot: Snapshot) -> ReconcilePlan:
        """Return the plan for the snapshot. It is built again if the first one needs labels of nodes that have just been read."""
        with self.tracer.span("decide"):
            plan = build_reconcile_plan(snapshot, self.preflight_job_config, self.clock.now(), self.drafter_catalog)
            if await self.node_labels.refresh(plan.hardware_nodes):
                plan = build_reconcile_plan(snapshot, self.preflight_job_config, self.clock.now(), self.drafter_catalog)
        self.tracer.set_attributes({"aerie.phase": plan.status.phase or ""})
        return plan

    def _iter_resources(self) -> Iterator[ObjectDict]:
        """Return the cached documents of all resources."""
        return filter(None, map(self.cache.get_resource, self.cache.list_resources()))

    def _is_partial_write(self, key: NamespacedName, plan: ReconcilePlan, document: ObjectDict) -> bool:
        """Return True when the only change is a status that was written before and that the API server stores in part."""
        is_status_written = self.crd_monitor.is_partial_write(
            key, build_status_to_write(plan, document), document.get("status") or {}
        )
        return is_status_written and not (plan.objects_to_apply or plan.objects_to_delete)

    async def _hold_resource(self, key: NamespacedName, document: ObjectDict, condition: ConditionUpdate) -> None:
        """Leave everything as it is, and report the condition in the status."""
        self.metrics.set_hold_reason(str(key), condition.reason)
        self.concurrency_limiter.update_claim(key, document, can_start=False)

        def build_status(item: ObjectDict) -> ObjectDict:
            return set_status_condition(item.get("status"), condition, item["metadata"].get("generation"), self.clock.now())

        if self.dry_run or build_status(document) == document.get("status"):
            return
        live = await self.cluster.get(SPECULATIVE_DEPLOYMENTS, key.namespace, key.name)
        if live is None:
            self.cache.handle_not_found(key, document["metadata"]["resourceVersion"])
            return
        self.cache.put(live)
        if live["metadata"]["resourceVersion"] == document["metadata"]["resourceVersion"]:  # else the put has enqueued it
            _log.error("%s: %s", key, condition.message)
            self.cache.put(await self.cluster.replace_status(live, build_status(live)))

    def _trackers(self) -> tuple[ResourceTracker, ...]:
        return self.scraper, self.equivalence_prober, self.context_length_prober, self.pair_reader, self.tuner

    def _track(self, key: NamespacedName, snapshot: Snapshot, plan: ReconcilePlan) -> None:
        for tracker in self._trackers():
            tracker.track(key, snapshot, plan.status)

    def _add_measurements(self, key: NamespacedName, snapshot: Snapshot, gaps: CacheGaps) -> Snapshot:
        scraper, uid = self.scraper, snapshot.resource.metadata.uid
        cluster = replace(
            snapshot.cluster,
            node_labels=self.node_labels.labels_by_node,
            unlisted_kinds=gaps.errors_by_kind,
            is_listing_forbidden=gaps.is_forbidden,
            crd_problem=self.crd_monitor.problem,
        )
        engines = EngineState(
            metrics_by_deployment=scraper.metrics_by_deployment(key),
            blocks=scraper.blocks(key),
            equivalence_result=self.equivalence_prober.equivalence_result(key),
            context_lengths=self.context_length_prober.lengths(key),
            pairs=self.pair_reader.observation(key),
            invalid_metrics=scraper.invalid_metrics(key),
            metrics_source_error=scraper.metrics_source_error(key),
            drafters=self.drafter_executor.observations(key),
        )
        operator = OperatorState(
            baseline_calibration=scraper.baseline_calibration(key, uid),
            recommendation=self.tuner.recommendation(key, uid),
            tuning_record=self.tuner.tuning_record(key, uid),
            start_permission=self.concurrency_limiter.start_permission(key),
            notification_receivers=self.notifier.receiver_facts,
        )
        return replace(snapshot, cluster=cluster, engines=engines, operator=operator)


def describe_plan(key: NamespacedName, plan: ReconcilePlan) -> dict[str, object]:
    """Return the plan in the form that a dry run prints."""
    return {
        "resource": str(key),
        "apply": [f"{item['kind']} {item['metadata']['name']}" for item in plan.objects_to_apply],
        "delete": [f"{reference.kind} {reference.name}" for reference in plan.objects_to_delete],
        "drafters": [f"{pod.pod}: {type(pod.call).__name__}" for pod in plan.drafters if pod.call is not None],
        "events": [f"{event.type} {event.reason}: {event.message}" for event in plan.events],
        "status": plan.status.to_dict(),
    }
