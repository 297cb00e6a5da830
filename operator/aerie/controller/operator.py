"""Puts the operator together: leads, watches, works, and takes it all down in order.

    SIGTERM or a lost lease ─► watching stops ─► workers end their pass ─► the lease is given back ─► exit

A leader that loses the lease ends the process with status 1, as controller-runtime does: a fresh one has no half-done pass and
no stale queue, and its pod starts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from dataclasses import dataclass, field
from pathlib import Path

from aerie.controller.clock import Clock
from aerie.controller.kubernetes import watches
from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import Cluster
from aerie.controller.kubernetes.listing import Lister
from aerie.controller.leader_election import LeaderElector
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.notifier import Notifier, Webhook
from aerie.controller.probes.context_length import ContextLengthProber
from aerie.controller.probes.equivalence import EquivalenceProber
from aerie.controller.reconciler import WORKER_COUNT, Reconciler
from aerie.controller.scraping.prometheus import PrometheusAccess
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.tuning.tuner import Tuner
from aerie.controller.work_queue import WorkQueue
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.facts.concurrency import ConcurrencyLimits

_log = logging.getLogger(__name__)
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
GC_THRESHOLDS = (700, 10, 1_000_000)
"""Thresholds of the garbage collector: young objects as ever. The oldest generation, which with thousands of pods takes it a
tenth of a second, is collected each `COLLECT_ALL_S` and not whenever many objects were made: of what is dropped, only exceptions
are in cycles, and they are few."""
FULL_GC_INTERVAL_SECONDS = 600.0
_INITIAL_RECONCILE_TIMEOUT_SECONDS = 10.0
"""Seconds that watching waits at most for the first passes: what Kopf does with each object costs as much as a pass."""
_SHUTDOWN_TIMEOUT_SECONDS = 15.0
"""Seconds for passes that are under way when the operator ends."""


@dataclass(frozen=True)
class OperatorOptions:
    """What the command line says."""

    preflight_job_config: PreflightJobConfig
    """Of preflight Jobs."""
    identity: str
    drafter_catalog: DrafterCatalog
    """For resources that name no drafter."""
    namespaces: tuple[str, ...] = ()
    """Empty: all."""
    lease_namespace: str | None = None
    """None: the pod's own."""
    lease_name: str = "aerie-operator"
    health_port: int = 8081
    metrics_port: int = 8080
    webhook: Webhook | None = None
    """Who is told of rollouts, besides those who read events."""
    prometheus_access: PrometheusAccess = field(default_factory=PrometheusAccess)
    """Of Prometheus servers that resources name."""
    concurrency_limits: ConcurrencyLimits = field(default_factory=ConcurrencyLimits)
    """Of rollouts and trials that are under way at the same time."""
    dry_run: bool = False


async def run_operator(options: OperatorOptions) -> int:
    """Until SIGTERM or SIGINT, or until the lease is lost; the exit status."""
    gc.freeze()  # what has been imported stays; a full collection would walk over it and hold up everything for a while
    gc.set_threshold(*GC_THRESHOLDS)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    telemetry = OperatorMetrics()
    cluster = await Cluster.connect(telemetry.record_api_call)
    runners = await telemetry.serve(options.health_port, options.metrics_port)
    queue = WorkQueue()
    watching = asyncio.create_task(telemetry.monitor_event_loop(lambda: len(queue)), name="telemetry")
    collecting = asyncio.create_task(_collect_garbage(), name="collector")
    try:
        telemetry.ready = True  # standing by is being ready: it is what the second replica is for
        if options.dry_run:
            return await _run_as_leader(options, cluster, queue, telemetry, stop, asyncio.Event())
        namespace = options.lease_namespace or _read_own_namespace()
        elector = LeaderElector(cluster, namespace, options.lease_name, options.identity)
        cluster.may_write = elector.is_leader
        async with _wait_for_leadership(stop, elector) as lost:
            return 0 if lost is None else await _run_as_leader(options, cluster, queue, telemetry, stop, lost)
    finally:
        watching.cancel()
        collecting.cancel()
        for runner in runners:
            await runner.cleanup()
        await cluster.close()


async def _collect_garbage() -> None:
    while True:
        await asyncio.sleep(FULL_GC_INTERVAL_SECONDS)
        gc.collect()


@contextlib.asynccontextmanager
async def _wait_for_leadership(stop: asyncio.Event, elector: LeaderElector):  # type: ignore[no-untyped-def]
    """Leadership, or None when the operator is stopped before it has it."""
    async with contextlib.AsyncExitStack() as stack:
        leading = asyncio.create_task(stack.enter_async_context(elector.hold_leadership()))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if leading.done():
            yield leading.result()
        else:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
            yield None


async def _run_as_leader(
    options: OperatorOptions,
    cluster: Cluster,
    queue: WorkQueue,
    metrics: OperatorMetrics,
    stop: asyncio.Event,
    lost: asyncio.Event,
) -> int:
    clock = Clock()
    if (date := cluster.server_time()) is not None:  # as of the Lease, which was written a moment ago
        clock.synchronize(*date)
    tuner = Tuner(queue.add, metrics.record_tuning_decision, lambda key: scraper.unavailable_reason(key), clock)
    scraper = Scraper(queue.add, metrics.record_scrape, clock=clock, access=options.prometheus_access, sample_consumer=tuner)
    prober, contexts = EquivalenceProber(queue.add), ContextLengthProber(queue.add)
    notifier = Notifier(options.webhook, metrics.record_notification)
    mirror = ObjectCache(queue.add)
    reconciler = Reconciler(
        cluster,
        mirror,
        queue,
        metrics,
        scraper,
        prober,
        options.preflight_job_config,
        options.dry_run,
        options.drafter_catalog,
        clock,
        # A dry run writes no claims, so that nobody's turn would ever come.
        concurrency_limits=ConcurrencyLimits() if options.dry_run else options.concurrency_limits,
    )
    lists = Lister(cluster, mirror, queue, options.namespaces, metrics)
    reconciler.notifier, reconciler.tuner, reconciler.context_length_prober, reconciler.lister = notifier, tuner, contexts, lists
    metrics.set_leader(True)
    metrics.cache_sync = lists
    watch_stop, watching = asyncio.Event(), asyncio.Event()

    async def watch() -> None:
        # The first look at everything comes first. Kopf lists at its start, which makes up for what happened since.
        await lists.synced.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_INITIAL_RECONCILE_TIMEOUT_SECONDS):
                await queue.wait_until_empty()
        watching.set()
        await watches.run_watches(mirror, options.namespaces, watch_stop, lists.relist_requested)

    async def work() -> None:
        await lists.synced.wait()
        await reconciler.run_worker()

    watcher = asyncio.create_task(watch(), name="watch")
    lister = asyncio.create_task(lists.run(), name="lister")
    definition = asyncio.create_task(reconciler.crd_monitor.run(cluster), name="definition")
    teller = asyncio.create_task(notifier.run(), name="notifier")
    reader = asyncio.create_task(scraper.run(), name="scraper")
    asker = asyncio.create_task(prober.run(), name="prober")
    context_asker = asyncio.create_task(contexts.run(), name="contexts")
    decider = asyncio.create_task(tuner.run(), name="tuner")
    workers = [asyncio.create_task(work(), name=f"worker-{number}") for number in range(WORKER_COUNT)]
    ends = [asyncio.create_task(stop.wait()), asyncio.create_task(lost.wait())]
    try:
        await asyncio.wait(
            {watcher, lister, definition, reader, asker, context_asker, decider, *workers, *ends},
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in (watcher, lister, definition, reader, asker, context_asker, decider, *workers):
            if task.done():
                task.result()  # raises what ended it
                if task is not watcher:  # Kopf takes the signals to itself, and ends well on them alone
                    raise RuntimeError(f"{task.get_name()} has ended by itself")
        return 1 if lost.is_set() else 0
    finally:
        metrics.set_leader(False)
        watch_stop.set()
        if not watching.is_set():
            watcher.cancel()
        lister.cancel()
        definition.cancel()
        reader.cancel()
        asker.cancel()
        context_asker.cancel()
        decider.cancel()
        if lost.is_set():  # not one call more
            for worker in workers:
                worker.cancel()
        else:
            await _drain_workers(queue, workers)
        for end in (*ends, teller):  # what was not told yet, the next leader tells
            end.cancel()
        await asyncio.wait({watcher}, timeout=_SHUTDOWN_TIMEOUT_SECONDS)
        watcher.cancel()
        await asyncio.gather(
            watcher, lister, definition, reader, asker, context_asker, decider, *workers, *ends, return_exceptions=True
        )


async def _drain_workers(queue: WorkQueue, workers: list[asyncio.Task[None]]) -> None:
    """Let passes under way end, and begin no other."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SHUTDOWN_TIMEOUT_SECONDS):
            await queue.drain()
    for worker in workers:
        worker.cancel()


def _read_own_namespace() -> str:
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"
