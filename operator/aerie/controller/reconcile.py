"""One pass over one resource, and the workers that make passes.

Guarantee: one resource is in at most one pass at a time; a pass that fails is repeated later and later, and does not keep
others waiting. A resource that is gone needs nothing: its children are garbage-collected by their owner references.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from aerie.api import ResourceError
from aerie.controller.act import act
from aerie.controller.client import RESOURCES, ApiError, Cluster
from aerie.controller.observe import observe
from aerie.controller.queue import Key, WorkQueue
from aerie.controller.scrape import Scraper
from aerie.controller.telemetry import Telemetry
from aerie.engine.catalog import Catalog
from aerie.rollout.decide import NO_CATALOG, decide
from aerie.rollout.plan import Plan

_log = logging.getLogger(__name__)
WORKERS = 8


@dataclass
class Reconciler:
    """Makes passes over what is in the queue."""

    cluster: Cluster
    queue: WorkQueue
    telemetry: Telemetry
    scraper: Scraper
    preflight_image: str
    dry_run: bool = False
    catalog: Catalog = NO_CATALOG

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
                _log.error("%s cannot be read: %s", key, error)
            except Exception:  # noqa: BLE001 - one resource's fault must not end the others' worker
                self.queue.failed(key)
                _log.exception("%s: the pass ended with an error of Aerie's own", key)
            finally:
                self.telemetry.passed(outcome, asyncio.get_running_loop().time() - began)
                self.queue.done(key)

    async def reconcile(self, key: Key) -> timedelta | None:
        """One pass. When to make the next although nothing has changed. Raises ApiError, ResourceError."""
        document = await self.cluster.get(RESOURCES, key.namespace, key.name)
        if document is None or document["metadata"].get("deletionTimestamp"):
            self.scraper.forget(key)
            return None
        observed = replace(await observe(self.cluster, document), figures=self.scraper.figures(key))
        now = datetime.now(UTC)
        plan = decide(observed, self.preflight_image, now, self.catalog)
        if self.dry_run:
            print(json.dumps(described(key, plan), indent=2), flush=True)  # noqa: T201 - what a dry run is for
            return None
        self.scraper.follow(key, observed, plan.status)
        plan = await act(self.cluster, document, observed, plan, now)
        return plan.again


def described(key: Key, plan: Plan) -> dict[str, object]:
    """The plan as a person reads it."""
    return {
        "resource": str(key),
        "apply": [f"{item['kind']} {item['metadata']['name']}" for item in plan.apply],
        "delete": [f"{one.kind} {one.name}" for one in plan.delete],
        "events": [f"{event.type} {event.reason}: {event.message}" for event in plan.events],
        "status": plan.status.to_dict(),
    }
