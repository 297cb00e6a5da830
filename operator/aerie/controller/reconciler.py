"""One pass over one resource, and the workers that make passes.

    mirror ─► decide ─┬─ nothing to write ────────────────────────────────► come back when something is heard, or after...
                      └─ something ─► read everything live ─► decide ─► act

Guarantees: one resource is in at most one pass at a time; a pass that fails is repeated later and later, and does not keep
others waiting. What the mirror holds may be old; so it decides only that there is nothing to do, and nothing is ever written but
what was decided on a live reading (each write has its own precondition besides: uid, resourceVersion, or being idempotent). A
pass that writes makes another one follow, which ends on the mirror when the first one was right. After a pass a resource rests
for `REST` for each of its objects, however much is heard of it, because a pass costs the more the more pods there are: so a large
fleet that changes all the time leaves most of the event loop to others; with 1,000 pods its passes are three seconds apart.
A resource that is gone needs nothing: its children are garbage-collected by their owner references.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta

from aerie.api import ResourceError
from aerie.controller.clock import Clock
from aerie.controller.concurrency import Allotter
from aerie.controller.kubernetes.apply import act, status_of, to_do
from aerie.controller.kubernetes.cache import Mirror
from aerie.controller.kubernetes.client import RESOURCES, ApiError, Cluster, Object
from aerie.controller.kubernetes.crd_version import Versions
from aerie.controller.kubernetes.listing import NO_GAPS, Gaps, Lister
from aerie.controller.kubernetes.nodes import NodeLabels
from aerie.controller.kubernetes.observe import observe, recall, strangers
from aerie.controller.metrics import Telemetry
from aerie.controller.notifier import Notifier
from aerie.controller.probes.context_length import Contexts
from aerie.controller.probes.equivalence import Prober
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.tuning.tuner import Tuner
from aerie.controller.work_queue import Key, WorkQueue
from aerie.engine.models.drafter_catalog import Catalog
from aerie.manifests.preflight_job import Runner
from aerie.rollout.conditions import Finding
from aerie.rollout.facts.concurrency import Limits
from aerie.rollout.facts.snapshot import Observed
from aerie.rollout.plan import Plan
from aerie.rollout.reconcile import NO_CATALOG, decide
from aerie.rollout.status.hold import CRUCIAL, UNREADABLE_SPEC, held, unlisted, unreadable

_log = logging.getLogger(__name__)
WORKERS = 8
REST = 0.003
"""Seconds between two passes for each object; a pass that writes takes the event loop for 0.5 ms for each, others for 0.1 ms."""
LASTING = 3
"""Passes in a row that failed, after which what the API server answers is told in the status."""


@dataclass
class Reconciler:
    """Makes passes over what is in the queue."""

    cluster: Cluster
    mirror: Mirror
    queue: WorkQueue
    telemetry: Telemetry
    scraper: Scraper
    prober: Prober
    runner: Runner
    dry_run: bool = False
    catalog: Catalog = NO_CATALOG
    clock: Clock = field(default_factory=Clock)
    notifier: Notifier = field(default_factory=Notifier)
    tuner: Tuner = field(default_factory=lambda: Tuner(lambda _: None))
    contexts: Contexts = field(default_factory=lambda: Contexts(lambda _: None))
    lists: Lister | None = None
    """What knows of kinds that cannot be listed; None: all can."""
    limits: Limits = field(default_factory=Limits)
    """Of rollouts and trials that are under way at the same time."""

    def __post_init__(self) -> None:
        self.allotter = Allotter(self.limits, self.queue.add, self.telemetry.slots)
        self.versions = Versions(self.telemetry)
        self.nodes = NodeLabels(self.cluster)

    async def work(self) -> None:
        """Take keys from the queue until cancelled."""
        while True:
            key, waited = await self.queue.get()
            self.telemetry.waited(waited)
            began = asyncio.get_running_loop().time()
            outcome = "failed"
            try:
                again = await self.reconcile(key)
                self.queue.forget(key)
                outcome = "done"
                if again is not None:
                    self.queue.add_after(key, again.total_seconds())
            except ApiError as error:
                # A conflict says that somebody else wrote in between: the next look will see it.
                outcome = "conflict" if error.status == 409 else "failed"
                seconds = self.queue.failed(key)
                level = logging.INFO if outcome == "conflict" else logging.WARNING
                _log.log(level, "%s: %s; again in %.1f s", key, error, seconds)
            except ResourceError as error:
                self.queue.failed(key)
                _log.error("%s has come to be what cannot be read: %s", key, error)
            except Exception:  # noqa: BLE001 - one resource's fault must not end the others' worker
                self.queue.failed(key)
                _log.exception("%s: the pass ended with an error of Aerie's own", key)
            finally:
                self.telemetry.passed(outcome, asyncio.get_running_loop().time() - began)
                self.queue.done(key, REST * self.mirror.count(key))
                await asyncio.sleep(0)  # a pass without a call never waits, and watches and the lease need their turn

    async def reconcile(self, key: Key) -> timedelta | None:
        """One pass. When to make the next although nothing has changed. Raises ApiError, ResourceError."""
        document = self.mirror.resource(key)
        self.allotter.begin(self._all)
        if document is None or document["metadata"].get("deletionTimestamp"):
            self.scraper.forget(key)
            self.notifier.forget(key)
            self.prober.forget(key)
            self.contexts.forget(key)
            self.tuner.forget(key)
            self.telemetry.held(str(key), "")
            self.versions.forget(key)
            self.allotter.note(key, None)
            return None
        self.allotter.note(key, document, able=self.queue.failures(key) < LASTING)
        gaps = self.lists.gaps(document) if self.lists is not None else NO_GAPS
        if gaps.waiting:
            return None  # it is queued when that has changed
        try:
            observed = self._with_readings(key, recall(self.mirror, document), gaps)
        except ResourceError as error:
            await self._hold(key, document, unreadable(error))
            return None
        if CRUCIAL & gaps.kinds.keys():
            await self._hold(key, document, unlisted(gaps.kinds, forbidden=gaps.forbidden))
            return None
        self.telemetry.held(str(key), UNREADABLE_SPEC if observed.substitute is not None else "")
        if observed.substitute is not None:
            self.allotter.note(key, document, able=False)
        plan = await self._decided(observed)
        if (not to_do(plan, document) or self._in_vain(key, plan, document)) and not self.dry_run:
            self._follow(key, observed, plan)
            self.notifier.look(key, observed.resource, plan.status, self.clock.now())
            return plan.again
        version = document["metadata"]["resourceVersion"]
        document = await self.cluster.get(RESOURCES, key.namespace, key.name)
        if document is None:
            self.mirror.missed(key, version)
            return None  # it is queued once more by that
        self.mirror.put(document)
        if document["metadata"].get("deletionTimestamp"):
            return None
        observed = self._with_readings(key, await observe(self.cluster, self.mirror, document, gaps.skipped), gaps)
        await asyncio.sleep(0)  # with many pods, to gather them and to decide take the loop for 50 ms each
        plan = await self._decided(observed)
        now = self.clock.now()
        if self.dry_run:
            print(json.dumps(described(key, plan), indent=2), flush=True)  # noqa: T201 - what a dry run is for
            return None
        taken = await strangers(self.cluster, observed, plan.apply)
        if taken:
            observed = replace(observed, namesakes=taken)
            plan = decide(observed, self.runner, now, self.catalog)
        self._follow(key, observed, plan)
        lasting = self.queue.failures(key) >= LASTING
        plan = await act(self.cluster, self.mirror, document, observed, plan, now, lasting=lasting)
        stored = (self.mirror.resource(key) or {}).get("status") or {}
        self.versions.answered(key, status_of(plan, document), stored)
        self.notifier.look(key, observed.resource, plan.status, now)
        return plan.again

    async def _decided(self, observed: Observed) -> Plan:
        """What is to be done; decided again where it depends on nodes of which nothing was known, and now is in `observed`."""
        plan = decide(observed, self.runner, self.clock.now(), self.catalog)
        if await self.nodes.learn(plan.nodes):
            plan = decide(observed, self.runner, self.clock.now(), self.catalog)
        return plan

    def _all(self) -> Iterator[Object]:
        """What the mirror holds of all resources."""
        return filter(None, map(self.mirror.resource, self.mirror.resources()))

    def _in_vain(self, key: Key, plan: Plan, document: Object) -> bool:
        """Whether all there is to write is a status that has been written already, and of which the API server drops a part."""
        known = self.versions.written(key, status_of(plan, document), document.get("status") or {})
        return known and not (plan.apply or plan.delete)

    async def _hold(self, key: Key, document: Object, finding: Finding) -> None:
        """Leave everything as it is, and say why."""
        self.telemetry.held(str(key), finding.reason)
        self.allotter.note(key, document, able=False)

        def status(item: Object) -> Object:
            return held(item.get("status"), finding, item["metadata"].get("generation"), self.clock.now())

        if self.dry_run or status(document) == document.get("status"):
            return
        live = await self.cluster.get(RESOURCES, key.namespace, key.name)
        if live is None:
            self.mirror.missed(key, document["metadata"]["resourceVersion"])
            return
        self.mirror.put(live)
        if live["metadata"]["resourceVersion"] == document["metadata"]["resourceVersion"]:  # else it is queued once more by that
            _log.error("%s: %s", key, finding.message)
            self.mirror.put(await self.cluster.replace_status(live, status(live)))

    def _follow(self, key: Key, observed: Observed, plan: Plan) -> None:
        self.scraper.follow(key, observed, plan.status)
        self.prober.follow(key, observed, plan.status)
        self.contexts.follow(key, observed, plan.status)
        self.tuner.follow(key, observed, plan.status)

    def _with_readings(self, key: Key, observed: Observed, gaps: Gaps) -> Observed:
        scraper, uid = self.scraper, observed.resource.metadata.uid
        return replace(
            observed,
            figures=scraper.figures(key),
            blocks=scraper.blocks(key),
            answers=self.prober.answers(key),
            contexts=self.contexts.lengths(key),
            unreadable=scraper.unreadable(key),
            source_trouble=scraper.trouble(key),
            memory=scraper.memory(key, uid),
            advice=self.tuner.advice(key, uid),
            kept=self.tuner.kept(key, uid),
            turn=self.allotter.turn(key),
            nodes=self.nodes.known,
            unlisted=gaps.kinds,
            forbidden=gaps.forbidden,
            outdated=self.versions.trouble,
        )


def described(key: Key, plan: Plan) -> dict[str, object]:
    """The plan as a person reads it."""
    return {
        "resource": str(key),
        "apply": [f"{item['kind']} {item['metadata']['name']}" for item in plan.apply],
        "delete": [f"{one.kind} {one.name}" for one in plan.delete],
        "events": [f"{event.type} {event.reason}: {event.message}" for event in plan.events],
        "status": plan.status.to_dict(),
    }
