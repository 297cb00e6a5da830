"""Carries out a plan: applies, deletes, writes the status, tells events.

Guarantees: objects first, deletions after them, then the status, on the version that was read; each part does the same when it
is done twice, so that a crash anywhere is mended by the next pass. What the API server refuses of an object ends up in the
status. Dry, nothing is written and the plan is printed.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime

from aerie.controller.client import BY_KIND, SERVICES, ApiError, Cluster, Object
from aerie.controller.mirror import Mirror
from aerie.resources import names
from aerie.rollout.decide import refused
from aerie.rollout.observed import Observed
from aerie.rollout.plan import Event, Plan

_log = logging.getLogger(__name__)

_REFUSALS = frozenset({400, 403, 422})
"""Answers that mean: not this object, ever. Others may pass, and the whole pass is repeated."""


def to_do(plan: Plan, document: Object) -> bool:
    """Whether carrying the plan out would write anything."""
    return bool(plan.apply or plan.delete or plan.events or plan.status.to_dict() != document.get("status"))


async def act(cluster: Cluster, mirror: Mirror, document: Object, observed: Observed, plan: Plan, now: datetime) -> Plan:
    """Carry the plan out; the plan as it was carried out. The mirror hears the answers, and so what is written is known to the
    next pass, which it causes, before any watch tells. Raises ApiError for what may be tried again."""
    refusals = []
    key = f"{document['metadata']['namespace']}/{document['metadata']['name']}"
    for item in plan.apply:
        what = f"{item['kind']} {item['metadata']['name']}"
        try:
            mirror.put(await _apply(cluster, observed, item))
            _log.info("%s: applied %s", key, what)
        except ApiError as error:
            if error.status not in _REFUSALS:
                raise
            refusals.append(f"{what}: {error}")
    if refusals:
        plan = refused(plan, observed.resource.status, refusals, now)
    else:  # while something could not be made, nothing that it stands for is taken away
        for reference in plan.delete:
            await cluster.delete(BY_KIND[reference.kind], document["metadata"]["namespace"], reference.name, reference.uid)
            _log.info("%s: deleted %s %s", key, reference.kind, reference.name)
    status = plan.status.to_dict()
    if status != document.get("status"):
        mirror.put(await cluster.replace_status(document, status))
    for event in plan.events:
        await _tell(cluster, document, event, now)
    return plan


async def _apply(cluster: Cluster, observed: Observed, item: Object) -> Object:
    """Apply the object, over edits that stand in the way."""
    try:
        return await cluster.apply(item)
    except ApiError as error:
        if error.status != 422 or item["kind"] != SERVICES.kind or observed.child(item["kind"], item["metadata"]["name"]) is None:
            raise
    # Ports are told apart by number: one that somebody has renumbered is theirs beside ours, and two of a name are refused.
    await cluster.merge(item, {"spec": {"ports": item["spec"]["ports"]}})
    return await cluster.apply(item)


async def _tell(cluster: Cluster, document: Object, event: Event, now: datetime) -> None:
    """Post an event; one that cannot be posted is not worth a failure."""
    metadata = document["metadata"]
    moment = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    distinct = hashlib.sha256(f"{metadata['uid']}{event}{moment}".encode()).hexdigest()[:16]
    try:
        await cluster.create(
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"namespace": metadata["namespace"], "name": f"{metadata['name']}.{distinct}"},
                "eventTime": moment,
                "type": event.type,
                "reason": event.reason,
                "note": event.message[:1000],
                "action": "Reconcile",
                "reportingController": "aerie.dev/operator",
                "reportingInstance": names.FIELD_MANAGER,
                "regarding": {
                    "apiVersion": document["apiVersion"],
                    "kind": document["kind"],
                    "namespace": metadata["namespace"],
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                },
            }
        )
    except ApiError as error:
        _log.warning("the event %s could not be posted: %s", event.reason, error)
