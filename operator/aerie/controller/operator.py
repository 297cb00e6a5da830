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
from aerie.controller.kubernetes.cache import Mirror
from aerie.controller.kubernetes.client import Cluster
from aerie.controller.kubernetes.listing import Lister
from aerie.controller.leader_election import Elector
from aerie.controller.metrics import Telemetry
from aerie.controller.notifier import Hook, Notifier
from aerie.controller.probes.context_length import Contexts
from aerie.controller.probes.equivalence import Prober
from aerie.controller.reconciler import WORKERS, Reconciler
from aerie.controller.scraping.prometheus import Access
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.tuning.tuner import Tuner
from aerie.controller.work_queue import WorkQueue
from aerie.engine.models.drafter_catalog import Catalog
from aerie.manifests.preflight_job import Runner
from aerie.rollout.facts.concurrency import Limits

_log = logging.getLogger(__name__)
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
COLLECT = (700, 10, 1_000_000)
"""Thresholds of the garbage collector: young objects as ever. The oldest generation, which with thousands of pods takes it a
tenth of a second, is collected each `COLLECT_ALL_S` and not whenever many objects were made: of what is dropped, only exceptions
are in cycles, and they are few."""
COLLECT_ALL_S = 600.0
_FIRST_PASSES = 10.0
"""Seconds that watching waits at most for the first passes: what Kopf does with each object costs as much as a pass."""
_LAST_PASSES = 15.0
"""Seconds for passes that are under way when the operator ends."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    runner: Runner
    """Of preflight Jobs."""
    identity: str
    catalog: Catalog
    """For resources that name no drafter."""
    namespaces: tuple[str, ...] = ()
    """Empty: all."""
    lease_namespace: str | None = None
    """None: the pod's own."""
    lease_name: str = "aerie-operator"
    health_port: int = 8081
    metrics_port: int = 8080
    hook: Hook | None = None
    """Who is told of rollouts, besides those who read events."""
    access: Access = field(default_factory=Access)
    """Of Prometheus servers that resources name."""
    limits: Limits = field(default_factory=Limits)
    """Of rollouts and trials that are under way at the same time."""
    dry_run: bool = False


async def run(options: Options) -> int:
    """Until SIGTERM or SIGINT, or until the lease is lost; the exit status."""
    gc.freeze()  # what has been imported stays; a full collection would walk over it and hold up everything for a while
    gc.set_threshold(*COLLECT)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    telemetry = Telemetry()
    cluster = await Cluster.connect(telemetry.called)
    runners = await telemetry.serve(options.health_port, options.metrics_port)
    queue = WorkQueue()
    watching = asyncio.create_task(telemetry.watch(lambda: len(queue)), name="telemetry")
    collecting = asyncio.create_task(_collect(), name="collector")
    try:
        telemetry.ready = True  # standing by is being ready: it is what the second replica is for
        if options.dry_run:
            return await _lead(options, cluster, queue, telemetry, stop, asyncio.Event())
        namespace = options.lease_namespace or _own_namespace()
        elector = Elector(cluster, namespace, options.lease_name, options.identity)
        cluster.may_write = elector.leads
        async with _until(stop, elector) as lost:
            return 0 if lost is None else await _lead(options, cluster, queue, telemetry, stop, lost)
    finally:
        watching.cancel()
        collecting.cancel()
        for runner in runners:
            await runner.cleanup()
        await cluster.close()


async def _collect() -> None:
    while True:
        await asyncio.sleep(COLLECT_ALL_S)
        gc.collect()


@contextlib.asynccontextmanager
async def _until(stop: asyncio.Event, elector: Elector):  # type: ignore[no-untyped-def]
    """Leadership, or None when the operator is stopped before it has it."""
    async with contextlib.AsyncExitStack() as stack:
        leading = asyncio.create_task(stack.enter_async_context(elector.lead()))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if leading.done():
            yield leading.result()
        else:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)
            yield None


async def _lead(
    options: Options, cluster: Cluster, queue: WorkQueue, telemetry: Telemetry, stop: asyncio.Event, lost: asyncio.Event
) -> int:
    clock = Clock()
    if (date := cluster.date()) is not None:  # as of the Lease, which was written a moment ago
        clock.agree(*date)
    tuner = Tuner(queue.add, telemetry.decided, lambda key: scraper.silence(key), clock)
    scraper = Scraper(queue.add, telemetry.scraped, clock=clock, access=options.access, listener=tuner)
    prober, contexts = Prober(queue.add), Contexts(queue.add)
    notifier = Notifier(options.hook, telemetry.noticed)
    mirror = Mirror(queue.add)
    reconciler = Reconciler(
        cluster,
        mirror,
        queue,
        telemetry,
        scraper,
        prober,
        options.runner,
        options.dry_run,
        options.catalog,
        clock,
        # A dry run writes no claims, so that nobody's turn would ever come.
        limits=Limits() if options.dry_run else options.limits,
    )
    lists = Lister(cluster, mirror, queue, options.namespaces, telemetry)
    reconciler.notifier, reconciler.tuner, reconciler.contexts, reconciler.lists = notifier, tuner, contexts, lists
    telemetry.leading(True)
    telemetry.lists = lists
    watch_stop, watching = asyncio.Event(), asyncio.Event()

    async def watch() -> None:
        # The first look at everything comes first. Kopf lists at its start, which makes up for what happened since.
        await lists.filled.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_PASSES):
                await queue.emptied()
        watching.set()
        await watches.watch(mirror, options.namespaces, watch_stop, lists.relisted)

    async def work() -> None:
        await lists.filled.wait()
        await reconciler.work()

    watcher = asyncio.create_task(watch(), name="watch")
    lister = asyncio.create_task(lists.run(), name="lister")
    definition = asyncio.create_task(reconciler.versions.watch(cluster), name="definition")
    teller = asyncio.create_task(notifier.run(), name="notifier")
    reader = asyncio.create_task(scraper.run(), name="scraper")
    asker = asyncio.create_task(prober.run(), name="prober")
    context_asker = asyncio.create_task(contexts.run(), name="contexts")
    decider = asyncio.create_task(tuner.run(), name="tuner")
    workers = [asyncio.create_task(work(), name=f"worker-{number}") for number in range(WORKERS)]
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
        telemetry.leading(False)
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
            await _finish(queue, workers)
        for end in (*ends, teller):  # what was not told yet, the next leader tells
            end.cancel()
        await asyncio.wait({watcher}, timeout=_LAST_PASSES)
        watcher.cancel()
        await asyncio.gather(
            watcher, lister, definition, reader, asker, context_asker, decider, *workers, *ends, return_exceptions=True
        )


async def _finish(queue: WorkQueue, workers: list[asyncio.Task[None]]) -> None:
    """Let passes under way end, and begin no other."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_PASSES):
            await queue.drained()
    for worker in workers:
        worker.cancel()


def _own_namespace() -> str:
    return _OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.exists() else "default"
