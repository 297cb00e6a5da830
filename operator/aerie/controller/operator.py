"""Assembles the operator: waits for leadership, runs all parts, and stops them in order.

    SIGTERM or a lost lease ─► watches stop ─► workers finish their reconcile ─► the lease is released ─► exit

A leader that loses the lease ends the process with status 1, as controller-runtime does. A new process has no half-finished
reconcile and no stale queue, and its pod starts immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aerie.controller.clock import Clock
from aerie.controller.kubernetes import watches
from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import Cluster
from aerie.controller.kubernetes.listing import Lister
from aerie.controller.leader_election import LeaderElector
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.notifications.config import NotificationsConfig
from aerie.controller.notifications.notifier import Notifier
from aerie.controller.probes.context_length import ContextLengthProber
from aerie.controller.probes.equivalence import EquivalenceProber
from aerie.controller.reconciler import WORKER_COUNT, Reconciler
from aerie.controller.scraping.prometheus import PrometheusAccess
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.tracing import Tracer, create_tracer
from aerie.controller.tuning.tuner import Tuner
from aerie.controller.work_queue import NamespacedName, WorkQueue
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.facts.concurrency import ConcurrencyLimits

_log = logging.getLogger(__name__)
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
GC_THRESHOLDS = (700, 10, 1_000_000)
"""Thresholds of the garbage collector: the default for young objects, and none that is ever reached for the oldest generation.

With thousands of pods, collecting the oldest generation takes a tenth of a second. It is collected each
`FULL_GC_INTERVAL_SECONDS` instead of whenever many objects were created. Of the objects that are dropped, only exceptions are in
cycles, and they are few.
"""
FULL_GC_INTERVAL_SECONDS = 600.0
_INITIAL_RECONCILE_TIMEOUT_SECONDS = 10.0
"""Maximum seconds that the watches wait for the first reconciles: Kopf's work per object costs as much as a reconcile."""
_SHUTDOWN_TIMEOUT_SECONDS = 15.0
"""Maximum seconds that the shutdown waits for reconciles in progress, and then for the watches."""


@dataclass(frozen=True)
class OperatorOptions:
    """Options of the command line."""

    preflight_job_config: PreflightJobConfig
    """Configuration of preflight Jobs."""
    identity: str
    drafter_catalog: DrafterCatalog
    """Catalog for resources that name no drafter."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch. Empty: all."""
    lease_namespace: str | None = None
    """Namespace of the Lease and of `drafter_key_secret`. None: the pod's own."""
    lease_name: str = "aerie-operator"
    drafter_key_secret: str = "aerie-drafter-key"
    """Secret with the key of all tokens of drafter endpoints."""
    health_port: int = 8081
    metrics_port: int = 8080
    notifications: NotificationsConfig = field(default_factory=NotificationsConfig)
    """Receivers of notifications of rollouts."""
    prometheus_access: PrometheusAccess = field(default_factory=PrometheusAccess)
    """Access to Prometheus servers that resources name."""
    concurrency_limits: ConcurrencyLimits = field(default_factory=ConcurrencyLimits)
    """Limits on rollouts and trials in progress at the same time."""
    dry_run: bool = False


async def run_operator(options: OperatorOptions) -> int:
    """Run until SIGTERM or SIGINT, or until the lease is lost, and return the exit status."""
    gc.freeze()  # imported objects stay; a full collection would traverse them and block everything for a while
    gc.set_threshold(*GC_THRESHOLDS)
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    metrics = OperatorMetrics()
    tracer = create_tracer()

    def record_api_call(verb: str, code: str, seconds: float) -> None:
        metrics.record_api_call(verb, code, seconds)
        tracer.add_event("API call", {"aerie.verb": verb, "aerie.code": code, "aerie.seconds": seconds})

    cluster = await Cluster.connect(record_api_call)
    runners = await metrics.serve(options.health_port, options.metrics_port)
    queue = WorkQueue()
    monitor_task = asyncio.create_task(metrics.monitor_event_loop(lambda: len(queue)), name="event-loop-monitor")
    gc_task = asyncio.create_task(_collect_garbage(), name="garbage-collector")
    try:
        metrics.ready = True  # standby counts as ready: it is the purpose of the second replica
        if options.dry_run:
            return await _run_as_leader(options, cluster, queue, metrics, tracer, stop, asyncio.Event())
        elector = LeaderElector(cluster, _find_own_namespace(options), options.lease_name, options.identity)
        cluster.may_write = elector.is_leader
        async with _wait_for_leadership(stop, elector) as lost:
            return 0 if lost is None else await _run_as_leader(options, cluster, queue, metrics, tracer, stop, lost)
    finally:
        monitor_task.cancel()
        gc_task.cancel()
        for runner in runners:
            await runner.cleanup()
        await cluster.close()
        await tracer.shut_down()


async def _collect_garbage() -> None:
    while True:
        await asyncio.sleep(FULL_GC_INTERVAL_SECONDS)
        gc.collect()


@contextlib.asynccontextmanager
async def _wait_for_leadership(stop: asyncio.Event, elector: LeaderElector):  # type: ignore[no-untyped-def]
    """Yield the event that is set when leadership is lost, or None when the operator is stopped before it is the leader."""
    async with contextlib.AsyncExitStack() as stack:
        acquisition = asyncio.create_task(stack.enter_async_context(elector.hold_leadership()))
        stop_task = asyncio.create_task(stop.wait())
        await asyncio.wait({acquisition, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
        if acquisition.done():
            yield acquisition.result()
        else:
            acquisition.cancel()
            await asyncio.gather(acquisition, return_exceptions=True)
            yield None


async def _run_as_leader(
    options: OperatorOptions,
    cluster: Cluster,
    queue: WorkQueue,
    metrics: OperatorMetrics,
    tracer: Tracer,
    stop: asyncio.Event,
    lost: asyncio.Event,
) -> int:
    """Run all parts until `stop` or `lost` is set, and return the exit status. Raises the error of a part that has failed."""
    cache = ObjectCache(queue.add)
    lister = Lister(cluster, cache, queue, options.namespaces, metrics)
    reconciler = _build_reconciler(options, cluster, cache, queue, metrics, tracer, lister)
    metrics.set_leader(True)
    metrics.cache_sync = lister
    watches_stop, watches_started = asyncio.Event(), asyncio.Event()

    async def run_watches() -> None:
        # The first reconciles come first. Kopf lists at its start, which makes up for changes of the meantime.
        await lister.synced.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_INITIAL_RECONCILE_TIMEOUT_SECONDS):
                await queue.wait_until_empty()
        watches_started.set()
        await watches.run_watches(cache, options.namespaces, watches_stop, lister.relist_requested)

    async def run_worker() -> None:
        await lister.synced.wait()
        await reconciler.run_worker()

    watches_task = asyncio.create_task(run_watches(), name="watches")
    background_tasks = _create_tasks(
        {
            "lister": lister.run(),
            "crd-version-monitor": reconciler.crd_monitor.run(cluster),
            "scraper": reconciler.scraper.run(),
            "equivalence-prober": reconciler.equivalence_prober.run(),
            "context-length-prober": reconciler.context_length_prober.run(),
            "pair-reader": reconciler.pair_reader.run(),
            "tuner": reconciler.tuner.run(),
            "drafter-executor": reconciler.drafter_executor.run(),
        }
    )
    workers = _create_tasks({f"worker-{number}": run_worker() for number in range(WORKER_COUNT)})
    required_tasks = [watches_task, *background_tasks, *workers]
    # The next leader sends the pending notifications, so the notifier is cancelled at the end like the events.
    other_tasks = _create_tasks({"stop": stop.wait(), "lost": lost.wait(), "notifier": reconciler.notifier.run()})
    try:
        await asyncio.wait({*required_tasks, *other_tasks[:2]}, return_when=asyncio.FIRST_COMPLETED)
        for task in required_tasks:
            if task.done():
                task.result()  # raises the error that ended it
                if task is not watches_task:  # Kopf handles the signals itself, and ends without an error only on them
                    raise RuntimeError(f"the task {task.get_name()} has ended unexpectedly")
        return 1 if lost.is_set() else 0
    finally:
        metrics.set_leader(False)
        watches_stop.set()
        if not watches_started.is_set():
            watches_task.cancel()
        for task in background_tasks:
            task.cancel()
        if lost.is_set():  # no further call is allowed
            for worker in workers:
                worker.cancel()
        else:
            await _drain_workers(queue, workers)
        for task in other_tasks:
            task.cancel()
        await asyncio.wait({watches_task}, timeout=_SHUTDOWN_TIMEOUT_SECONDS)
        watches_task.cancel()
        await asyncio.gather(*required_tasks, *other_tasks, return_exceptions=True)


def _create_tasks(coroutines_by_name: Mapping[str, Coroutine[Any, Any, Any]]) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(coroutine, name=name) for name, coroutine in coroutines_by_name.items()]


def _build_reconciler(
    options: OperatorOptions,
    cluster: Cluster,
    cache: ObjectCache,
    queue: WorkQueue,
    metrics: OperatorMetrics,
    tracer: Tracer,
    lister: Lister,
) -> Reconciler:
    clock = Clock()
    if (date := cluster.server_time()) is not None:  # the date of the latest answer, to the write of the Lease
        clock.synchronize(*date)
    tuner = Tuner(queue.add, metrics.record_tuning_decision, lambda key: scraper.unavailable_reason(key), clock)
    scraper = Scraper(queue.add, metrics.record_scrape, clock=clock, access=options.prometheus_access, sample_consumer=tuner)
    return Reconciler(
        cluster,
        cache,
        queue,
        metrics,
        scraper,
        EquivalenceProber(queue.add),
        options.preflight_job_config,
        options.dry_run,
        options.drafter_catalog,
        clock,
        notifier=Notifier(options.notifications, metrics.record_notification),
        tuner=tuner,
        context_length_prober=ContextLengthProber(queue.add),
        lister=lister,
        # A dry run writes no claims, so that no queued resource would ever be granted a slot.
        concurrency_limits=ConcurrencyLimits() if options.dry_run else options.concurrency_limits,
        tracer=tracer,
        drafter_key_secret=NamespacedName(_find_own_namespace(options), options.drafter_key_secret),
    )


async def _drain_workers(queue: WorkQueue, workers: list[asyncio.Task[Any]]) -> None:
    """Let reconciles in progress finish, and start no other."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SHUTDOWN_TIMEOUT_SECONDS):
            await queue.drain()
    for worker in workers:
        worker.cancel()


def _find_own_namespace(options: OperatorOptions) -> str:
    pod_namespace = _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"
    return options.lease_namespace or pod_namespace
