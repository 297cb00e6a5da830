"""The condition about the capture of prompts: whether prompts are recorded, and what is missing.

Guarantee: pure. The recorder's own state is known by its readiness alone, which says whether it can store prompts: it has no
rights by which it could report more. Counts of prompts are in its metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aerie.api.capture import CaptureSpec
from aerie.api.types.duration import format_duration
from aerie.manifests.recorder import recorder_name
from aerie.rollout.children.request_copies import find_shadow_service
from aerie.rollout.conditions import CAPTURE, ConditionUpdate
from aerie.rollout.facts.route_status import route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression.progression import Progression


def build_capture_condition(
    snapshot: Snapshot, progression: Progression, name_conflicts: Sequence[Any]
) -> ConditionUpdate | None:
    """Return the condition; None for a resource without a capture. `name_conflicts`: objects of others whose name is needed."""
    resource, cluster = snapshot.resource, snapshot.cluster
    capture, name = resource.spec.capture, recorder_name(resource.metadata.name)
    if capture is None:
        return None
    if resource.spec.rollout.traffic.gateway is None:
        return ConditionUpdate(
            CAPTURE,
            "False",
            "GatewayRequired",
            "Nothing is recorded, because prompts come from copies of requests that a gateway sends, and "
            "spec.rollout.traffic.mode is Service: write mode: Gateway, or remove spec.capture.",
        )
    if find_shadow_service(resource, progression) is not None:
        return ConditionUpdate(
            CAPTURE,
            "False",
            "ShadowEvaluation",
            "Nothing is recorded until the shadow evaluation ends, because it gets the copies of requests.",
        )
    if conflict := next((item["kind"] for item in name_conflicts if item["metadata"]["name"] == name), None):
        return ConditionUpdate(
            CAPTURE, "False", "NameTaken", f"Nothing is recorded, because {conflict} {name} belongs to another owner."
        )
    if rejection := route_rejection_message(snapshot):
        return ConditionUpdate(CAPTURE, "False", "RouteNotAccepted", f"Nothing is recorded. {rejection}")
    deployment = cluster.child("Deployment", name)
    if not ((deployment or {}).get("status") or {}).get("availableReplicas"):
        return ConditionUpdate(
            CAPTURE,
            "False",
            "RecorderNotReady",
            f"Nothing is recorded, because Deployment {name} has no ready pod. Users are served as before. See "
            f"`kubectl describe pods -l aerie.dev/recorder={resource.metadata.name}` and the log of container recorder, which "
            "names problems of the storage.",
        )
    if not _gets_copies(snapshot, name):
        return ConditionUpdate(CAPTURE, "False", "Starting", "The recorder is ready, and the route sends no copies yet.")
    return ConditionUpdate(CAPTURE, "True", "Recording", _describe(capture))


def _gets_copies(snapshot: Snapshot, service: str) -> bool:
    """Return whether the live route sends copies to the Service."""
    route = snapshot.cluster.child("HTTPRoute", snapshot.resource.metadata.name)
    filters = [entry for rule in (route or {}).get("spec", {}).get("rules", []) for entry in rule.get("filters") or []]
    return any((entry.get("requestMirror") or {}).get("backendRef", {}).get("name") == service for entry in filters)


def _describe(capture: CaptureSpec) -> str:
    claim, store = capture.storage.persistent_volume_claim, capture.storage.object_store
    place = f"claim {claim.claim_name}" if claim is not None else f"bucket {store.bucket if store is not None else ''}"
    sampling, retention = capture.sampling, capture.retention
    return (
        f"{100 * sampling.rate:g} % of the requests are recorded, at most {sampling.max_per_minute} a minute, in {place}. Files "
        f"are deleted after {format_duration(retention.duration)}, and beyond {retention.max_size}."
    )
