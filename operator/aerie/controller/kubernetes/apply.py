"""Carries out a plan: applies objects, deletes objects, writes the status, posts events.

Guarantees: objects are applied first, then deletions follow, then the status is written, on the version that was read. Each part
is idempotent, so the next reconcile repairs a crash at any point. Every object is tried, whatever the API server answers to the
others, and the status and its events are written in any case. A failure that may be temporary then ends the reconcile, which is
repeated.

A rejection by the API server is reported in the status in the API server's own words. While a Deployment, a Service or the route
could not be applied, nothing is deleted, because an old object may still be needed in its place. An object of another owner is
never written to (client.apply) and never deleted (deletion is by uid). In a dry run nothing is written, and the plan is printed.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime

from aerie.api.validation.release_skew import preserve_unknown_fields
from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import RESOURCE_KIND_BY_NAME, SERVICES, ApiError, Cluster, ObjectDict
from aerie.controller.tracing import NO_TRACER, Tracer
from aerie.manifests import naming
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by
from aerie.rollout.plan import Event, ReconcilePlan
from aerie.rollout.reconcile import with_apply_errors

_log = logging.getLogger(__name__)

_REJECTION_STATUS_CODES = frozenset({400, 403, 404, 422})
"""Status codes that reject this object. Other failures may be temporary, and the whole reconcile is repeated."""
_UNKNOWN_FIELD_MESSAGES = ("field not declared in schema", "typed patch object")
"""Messages of server-side apply, with status 500, about a field that does not exist (kubernetes/kubernetes#122480)."""
_TRAFFIC_KINDS = frozenset({"Deployment", "Service", "HTTPRoute"})
"""Kinds that requests depend on."""
_MAX_EVENT_NOTE_BYTES = 1024
"""Size limit of an event's note in bytes."""


def has_changes(plan: ReconcilePlan, document: ObjectDict) -> bool:
    """Return True if carrying the plan out would write anything."""
    return bool(
        plan.objects_to_apply
        or plan.objects_to_delete
        or plan.events
        or build_status_to_write(plan, document) != document.get("status")
    )


def build_status_to_write(plan: ReconcilePlan, document: ObjectDict) -> ObjectDict:
    """Return the status to write: the plan's, with those existing fields that belong to another release."""
    new_status, old_status = plan.status.to_dict(), document.get("status")
    return new_status if old_status is None or new_status == old_status else preserve_unknown_fields(new_status, old_status)


async def apply_plan(
    cluster: Cluster,
    cache: ObjectCache,
    document: ObjectDict,
    snapshot: Snapshot,
    plan: ReconcilePlan,
    now: datetime,
    *,
    is_persistent_failure: bool = False,
    tracer: Tracer = NO_TRACER,
) -> ReconcilePlan:
    """Carry the plan out, and return the plan as it was carried out.

    The answers go into the cache, so the next reconcile, which they cause, knows what was written before any watch event arrives.
    Raises ApiError for a failure that may be temporary, after everything else was done.

    `is_persistent_failure`: earlier reconciles have failed too, so such failures are reported in the status.
    """
    rejections, failures = [], []
    can_delete = True
    key = f"{document['metadata']['namespace']}/{document['metadata']['name']}"
    for desired in plan.objects_to_apply:
        object_name = f"{desired['kind']} {desired['metadata']['name']}"
        try:
            cache.put(await _apply_object(cluster, snapshot, desired))
            _log.info("%s: applied %s", key, object_name)
        except ApiError as error:
            can_delete = can_delete and desired["kind"] not in _TRAFFIC_KINDS
            if _is_rejection(error):
                rejections.append(f"{object_name}: {error}")
            else:
                failures.append((object_name, error))
    errors = [*rejections, *(f"{object_name}: {failure}" for object_name, failure in failures if is_persistent_failure)]
    if errors:
        plan = with_apply_errors(plan, snapshot.resource.status, errors, now)
    for reference in plan.objects_to_delete if can_delete else ():
        try:
            await cluster.delete(
                RESOURCE_KIND_BY_NAME[reference.kind], document["metadata"]["namespace"], reference.name, reference.uid
            )
            _log.info("%s: deleted %s %s", key, reference.kind, reference.name)
        except ApiError as error:
            failures.append((f"{reference.kind} {reference.name}", error))
    status = build_status_to_write(plan, document)
    if status != document.get("status"):
        with tracer.span("status"):
            cache.put(await cluster.replace_status(document, status))
    for event in plan.events:
        await _post_event(cluster, document, event, now)
    for object_name, failure in failures[:1]:
        raise ApiError(failure.status, failure.reason, f"{object_name}: {failure}") from failure
    return plan


def _is_rejection(error: ApiError) -> bool:
    is_unknown_field = error.status == 500 and any(text in str(error) for text in _UNKNOWN_FIELD_MESSAGES)
    return error.status in _REJECTION_STATUS_CODES or is_unknown_field


async def _apply_object(cluster: Cluster, snapshot: Snapshot, desired: ObjectDict) -> ObjectDict:
    """Apply the object, over edits that prevent it."""
    live = snapshot.cluster.child(desired["kind"], desired["metadata"]["name"])
    uid = live["metadata"]["uid"] if live is not None and is_owned_by(live, snapshot.resource.metadata.uid) else None
    try:
        return await cluster.apply(desired, uid=uid)
    except ApiError as error:
        if error.status != 422 or desired["kind"] != SERVICES.kind or uid is None:
            raise
    # Server-side apply identifies ports by number. A port that somebody has renumbered would therefore stay, beside ours. The API
    # server rejects two ports of one name.
    await cluster.merge_patch(desired, {"spec": {"ports": desired["spec"]["ports"]}})
    return await cluster.apply(desired, uid=uid)


async def _post_event(cluster: Cluster, document: ObjectDict, event: Event, now: datetime) -> None:
    """Post an event. A failure is only logged."""
    metadata = document["metadata"]
    event_time = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    suffix = hashlib.sha256(f"{metadata['uid']}{event}{event_time}".encode()).hexdigest()[:16]
    try:
        await cluster.create(
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"namespace": metadata["namespace"], "name": f"{metadata['name']}.{suffix}"},
                "eventTime": event_time,
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
        _log.warning("event %s could not be posted: %s", event.reason, error)
