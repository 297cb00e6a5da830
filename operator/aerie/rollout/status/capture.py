"""The condition about the capture of prompts: what the live recorder does, and what is missing.

Guarantees: pure. While a change of spec.capture is not applied, or its removal, the condition describes the live objects and not
the spec. Not guaranteed: the recorder's own state. It is known by its readiness alone, which says whether it can store prompts:
it has no rights by which it could report more. Counts of prompts are in its metrics.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from aerie.api.capture import CaptureSpec
from aerie.api.types.duration import format_duration
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.manifests.recorder import recorder_name
from aerie.rollout.children.desired import is_recorder_applied
from aerie.rollout.children.request_copies import (
    FILTER_REJECTED_ADVICE,
    find_filter_rejection,
    find_mirrors,
    find_shadow_service,
)
from aerie.rollout.conditions import CAPTURE, ConditionUpdate
from aerie.rollout.facts.route_status import route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by
from aerie.rollout.progression.progression import Progression
from aerie.rollout.status.hold import find_hold_condition


def build_capture_condition(
    snapshot: Snapshot, progression: Progression, name_conflicts: Sequence[Any], runner: PreflightJobConfig
) -> ConditionUpdate | None:
    """Return the condition; None without a capture, and without a recorder of an earlier one. `name_conflicts`: objects of others
    whose name is needed."""
    resource, cluster = snapshot.resource, snapshot.cluster
    capture, name = resource.spec.capture, recorder_name(resource.metadata.name)
    if capture is None and _find_live_deployment(snapshot) is None and name not in find_mirrors(snapshot):
        return None
    if "HTTPRoute" in cluster.unlisted_kinds:
        message = "HTTPRoutes cannot be listed, so it is unknown whether the route sends copies of requests to the recorder."
        return ConditionUpdate(CAPTURE, "Unknown", "ListFailed", message)
    gets_copies, hold = name in find_mirrors(snapshot), _describe_hold(snapshot)
    if capture is None:
        return _build_removal_condition(snapshot, hold)
    gateway, shadow = resource.spec.rollout.traffic.gateway, find_shadow_service(resource, progression)
    filter_rejection = find_filter_rejection(snapshot) if gateway is not None else ""
    if filter_rejection and not (hold and gets_copies):
        return ConditionUpdate(CAPTURE, "False", "MirrorRejected", f"{filter_rejection}{FILTER_REJECTED_ADVICE}")
    is_applied, needs_copies = is_recorder_applied(snapshot, runner), gateway is not None and shadow is None
    if hold and not (is_applied and gets_copies == needs_copies):
        message = f"spec.capture is not applied, because {hold}. {_describe_live(snapshot)}{_advise(snapshot)}"
        return ConditionUpdate(CAPTURE, "False", "NotApplied", message)
    if gateway is None:
        return ConditionUpdate(
            CAPTURE,
            "False",
            "GatewayRequired",
            "Nothing is recorded, because prompts come from copies of requests that a gateway sends, and "
            "spec.rollout.traffic.mode is Service: write mode: Gateway, or remove spec.capture.",
        )
    if shadow is not None:
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
    if not _is_ready(snapshot):
        return ConditionUpdate(
            CAPTURE,
            "False",
            "RecorderNotReady",
            f"Nothing is recorded, because Deployment {name} has no ready pod. Users are served as before. See "
            f"`kubectl describe pods -l aerie.dev/recorder={resource.metadata.name}` and the log of container recorder, which "
            "names problems of the storage and of the hook.",
        )
    if not gets_copies:
        return ConditionUpdate(CAPTURE, "False", "Starting", "The recorder is ready, and the route sends no copies yet.")
    if not is_applied:
        message = f"spec.capture is being applied; if this stays, the condition Degraded says why. {_describe_live(snapshot)}"
        return ConditionUpdate(CAPTURE, "False", "Starting", message)
    return ConditionUpdate(CAPTURE, "True", "Recording", _describe(capture))


def _build_removal_condition(snapshot: Snapshot, hold: str) -> ConditionUpdate | None:
    """Return the condition without spec.capture: that the recorder is still there. None while it is being removed."""
    resource = snapshot.resource
    is_new = resource.status is None or resource.status.observed_generation != resource.metadata.generation
    if not hold and (is_new or recorder_name(resource.metadata.name) not in find_mirrors(snapshot)):
        return None
    cause = hold or "a change of the route was not applied, as the condition Degraded says"
    effect = f"{_describe_live(snapshot)}{_advise(snapshot)}"
    message = f"The recorder is not removed, although there is no spec.capture, because {cause}. {effect}"
    return ConditionUpdate(CAPTURE, "False", "NotRemoved", message)


def _describe_hold(snapshot: Snapshot) -> str:
    """Return why what follows from the spec may not be applied, as a part of a sentence; empty where it is."""
    if (hold := find_hold_condition(snapshot)) is not None:
        return f"Aerie holds the rollout and deletes nothing ({hold.reason}, see the condition Degraded)"
    return "Aerie changes nothing while spec.rollout.paused is true" if snapshot.resource.spec.rollout.paused else ""


def _find_live_deployment(snapshot: Snapshot) -> Any:
    live = snapshot.cluster.child("Deployment", recorder_name(snapshot.resource.metadata.name))
    is_live = live is not None and is_owned_by(live, snapshot.resource.metadata.uid)
    return live if live is not None and is_live and not live["metadata"].get("deletionTimestamp") else None


def _is_ready(snapshot: Snapshot) -> bool:
    live = _find_live_deployment(snapshot)
    return bool(live is not None and (live.get("status") or {}).get("availableReplicas"))


def _describe_live(snapshot: Snapshot) -> str:
    """Return what the live recorder does, as sentences."""
    name, live = recorder_name(snapshot.resource.metadata.name), _find_live_deployment(snapshot)
    if rejection := route_rejection_message(snapshot):
        return f"Nothing is recorded. {rejection}"
    if live is None or not _is_ready(snapshot):
        return f"Nothing is recorded: Deployment {name} has no ready pod."
    if name not in find_mirrors(snapshot):
        return "Nothing is recorded: the route sends no copies of requests."
    return f"Until then prompts are recorded as before{_read_settings(live)}."


def _advise(snapshot: Snapshot) -> str:
    """Return how to end a recording that Aerie does not end; empty where nothing is recorded."""
    name = recorder_name(snapshot.resource.metadata.name)
    return f" To stop that now, delete Deployment {name}." if _is_ready(snapshot) and name in find_mirrors(snapshot) else ""


def _read_settings(deployment: Any) -> str:
    """Return the settings of a recorder from its arguments; empty if another release wrote them in another form."""
    try:
        containers = {item["name"]: item for item in deployment["spec"]["template"]["spec"]["containers"]}
        arguments = dict(item[2:].split("=", 1) for item in containers["recorder"]["args"] if item.startswith("--"))
        retention = format_duration(timedelta(seconds=float(arguments["retention-seconds"])))
        patterns = len(json.loads(arguments.get("redact", "[]")))
        hook = "a hook" if "hook" in containers else "no hook"
        return (
            f": {100 * float(arguments['rate']):g} % of the requests, at most {arguments['max-per-minute']} a minute, redacted "
            f"by {patterns} patterns and {hook}, deleted after {retention}"
        )
    except (KeyError, ValueError, TypeError):
        return ""


def _describe(capture: CaptureSpec) -> str:
    claim, store = capture.storage.persistent_volume_claim, capture.storage.object_store
    place = f"claim {claim.claim_name}" if claim is not None else f"bucket {store.bucket if store is not None else ''}"
    sampling, retention = capture.sampling, capture.retention
    return (
        f"{100 * sampling.rate:g} % of the requests are recorded, at most {sampling.max_per_minute} a minute, in {place}. Files "
        f"are deleted after {format_duration(retention.duration)}, and beyond {retention.max_size}."
    )
