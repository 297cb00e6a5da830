"""Carries out a plan: applies, deletes, writes the status, tells events.

Guarantees: objects first, deletions after them, then the status, on the version that was read; each part does the same when it
is done twice, so that a crash anywhere is mended by the next pass. Every object is tried, whatever the API server answers to the
others, and the status and its events are written in any case; an answer that may be another one next time then ends the pass,
which is repeated. What the API server refuses ends up in the status in its own words. While a Deployment, a Service or the route
could not be applied, nothing is deleted, because something may stand in for what goes. An object of somebody else is never
written to (client.apply) nor deleted (by uid). Dry, nothing is written and the plan is printed.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime

from aerie.api.validation.release_skew import preserve_unknown_fields
from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import RESOURCE_KIND_BY_NAME, SERVICES, ApiError, Cluster, ObjectDict
from aerie.manifests import naming
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by
from aerie.rollout.plan import Event, ReconcilePlan
from aerie.rollout.reconcile import with_apply_errors

_log = logging.getLogger(__name__)

_REJECTION_STATUS_CODES = frozenset({400, 403, 404, 422})
"""Answers that mean: not this object. Others may pass, and the whole pass is repeated."""
_UNKNOWN_FIELD_MESSAGES = ("field not declared in schema", "typed patch object")
"""What server-side apply says, with status 500, of a field that does not exist (kubernetes/kubernetes#122480)."""
_TRAFFIC_KINDS = frozenset({"Deployment", "Service", "HTTPRoute"})
"""Kinds that requests depend on."""
_MAX_EVENT_NOTE_BYTES = 1024
"""Bytes of an event's note."""


def has_changes(plan: ReconcilePlan, document: ObjectDict) -> bool:
    """Whether carrying the plan out would write anything."""
    return bool(
        plan.objects_to_apply
        or plan.objects_to_delete
        or plan.events
        or build_status_to_write(plan, document) != document.get("status")
    )


def build_status_to_write(plan: ReconcilePlan, document: ObjectDict) -> ObjectDict:
    """The status to write: the plan's, with the fields of another release that are there."""
    made, before = plan.status.to_dict(), document.get("status")
    return made if before is None or made == before else preserve_unknown_fields(made, before)


async def apply_plan(
    cluster: Cluster,
    cache: ObjectCache,
    document: ObjectDict,
    snapshot: Snapshot,
    plan: ReconcilePlan,
    now: datetime,
    *,
    is_persistent_failure: bool = False,
) -> ReconcilePlan:
    """Carry the plan out; the plan as it was carried out. The mirror hears the answers, and so what is written is known to the
    next pass, which it causes, before any watch tells. Raises ApiError for what may be tried again, after all the rest was done;
    `lasting`: it was tried several times already, and is told."""
    refusals, failures = [], []
    carried = True
    key = f"{document['metadata']['namespace']}/{document['metadata']['name']}"
    for item in plan.objects_to_apply:
        what = f"{item['kind']} {item['metadata']['name']}"
        try:
            cache.put(await _apply_object(cluster, snapshot, item))
            _log.info("%s: applied %s", key, what)
        except ApiError as error:
            carried = carried and item["kind"] not in _TRAFFIC_KINDS
            if _is_rejection(error):
                refusals.append(f"{what}: {error}")
            else:
                failures.append((what, error))
    told = [*refusals, *(f"{what}: {failure}" for what, failure in failures if is_persistent_failure)]
    if told:
        plan = with_apply_errors(plan, snapshot.resource.status, told, now)
    for reference in plan.objects_to_delete if carried else ():
        try:
            await cluster.delete(
                RESOURCE_KIND_BY_NAME[reference.kind], document["metadata"]["namespace"], reference.name, reference.uid
            )
            _log.info("%s: deleted %s %s", key, reference.kind, reference.name)
        except ApiError as error:
            failures.append((f"{reference.kind} {reference.name}", error))
    status = build_status_to_write(plan, document)
    if status != document.get("status"):
        cache.put(await cluster.replace_status(document, status))
    for event in plan.events:
        await _post_event(cluster, document, event, now)
    for what, failure in failures[:1]:
        raise ApiError(failure.status, failure.reason, f"{what}: {failure}") from failure
    return plan


def _is_rejection(error: ApiError) -> bool:
    unknown = error.status == 500 and any(words in str(error) for words in _UNKNOWN_FIELD_MESSAGES)
    return error.status in _REJECTION_STATUS_CODES or unknown


async def _apply_object(cluster: Cluster, snapshot: Snapshot, item: ObjectDict) -> ObjectDict:
    """Apply the object, over edits that stand in the way."""
    live = snapshot.child(item["kind"], item["metadata"]["name"])
    uid = live["metadata"]["uid"] if live is not None and is_owned_by(live, snapshot.resource.metadata.uid) else None
    try:
        return await cluster.apply(item, uid=uid)
    except ApiError as error:
        if error.status != 422 or item["kind"] != SERVICES.kind or uid is None:
            raise
    # Ports are told apart by number: one that somebody has renumbered is theirs beside ours, and two of a name are refused.
    await cluster.merge_patch(item, {"spec": {"ports": item["spec"]["ports"]}})
    return await cluster.apply(item, uid=uid)


async def _post_event(cluster: Cluster, document: ObjectDict, event: Event, now: datetime) -> None:
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
                "note": event.message.encode()[:_MAX_EVENT_NOTE_BYTES].decode(errors="ignore"),
                "action": "Reconcile",
                "reportingController": "aerie.dev/operator",
                "reportingInstance": naming.FIELD_MANAGER,
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
