"""The Service that gets copies of users' requests: that of a shadow evaluation, else that of the recorder.

A route mirrors to one Service at most. Gateways need not support several mirrors in a rule, and one that does not may reject the
whole route. So a capture pauses while a shadow evaluation gets the copies.

Guarantees: copies go to the recorder only after its Service exists and belongs to the resource. A gateway may reject a route
whose mirror it does not find, and users would notice. If it rejects the route with the mirror of the recorder, the mirror is
removed. It returns after the capture was removed, or if the route is rejected without it too. The condition CaptureReady stores
that. Not guaranteed: that users are served between the rejection and the next reconcile.
"""

from __future__ import annotations

from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.manifests import evaluator, recorder
from aerie.rollout.conditions import CAPTURE
from aerie.rollout.facts.route_status import is_route_status_current, route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by
from aerie.rollout.progression.progression import Progression

FILTER_REJECTED_ADVICE = (
    " So Aerie has removed the filter RequestMirror from the route, and nothing is recorded. Use a gateway that supports the "
    "filter; then remove spec.capture, and write it again."
)


def find_copy_service(snapshot: Snapshot, progression: Progression) -> str | None:
    """Return the Service that gets copies of users' requests; None for none."""
    return find_shadow_service(snapshot.resource, progression) or _find_recorder_service(snapshot)


def find_shadow_service(resource: SpeculativeDeployment, progression: Progression) -> str | None:
    """Return the Service of the shadow evaluation in progress; None without copies for it."""
    is_evaluating = (
        progression.in_place is not None and progression.in_place.phase == "Evaluating"
    ) or progression.evaluates_canary
    is_mirrored = resource.spec.rollout.shadow_source == "Mirror"
    return evaluator.evaluator_name(resource.metadata.name) if is_evaluating and is_mirrored else None


def find_mirrors(snapshot: Snapshot) -> set[str]:
    """Return the Services to which the live route sends copies of requests."""
    route: Any = snapshot.cluster.child("HTTPRoute", snapshot.resource.metadata.name) or {}
    filters = [entry for rule in route.get("spec", {}).get("rules", []) for entry in rule.get("filters") or []]
    return {entry["requestMirror"]["backendRef"]["name"] for entry in filters if entry.get("requestMirror")}


def find_filter_rejection(snapshot: Snapshot) -> str:
    """Return why the gateway has rejected the route with the mirror of the recorder, as a sentence; empty if it has not.

    The route without the mirror may be rejected too. Then the mirror was not the cause.
    """
    resource, mirrors = snapshot.resource, find_mirrors(snapshot)
    conditions = resource.status.conditions if resource.status is not None else []
    previous = next(
        (item.message for item in conditions if (item.type, item.reason) == (CAPTURE, "MirrorRejected")), ""
    ).partition(FILTER_REJECTED_ADVICE)[0]
    rejection = route_rejection_message(snapshot)
    if recorder.recorder_name(resource.metadata.name) in mirrors:
        return rejection if rejection and is_route_status_current(snapshot, unknown=True) else previous
    return "" if rejection and not mirrors and is_route_status_current(snapshot, unknown=False) else previous


def _find_recorder_service(snapshot: Snapshot) -> str | None:
    resource = snapshot.resource
    name = recorder.recorder_name(resource.metadata.name)
    if resource.spec.capture is None or find_filter_rejection(snapshot):
        return None
    if name not in find_mirrors(snapshot) and route_rejection_message(snapshot):
        return None  # else nobody could tell whether the mirror is the cause
    live = snapshot.cluster.child("Service", name)
    is_usable = live is not None and is_owned_by(live, resource.metadata.uid) and not live["metadata"].get("deletionTimestamp")
    return name if is_usable else None
