"""Events of rollouts that recipients outside of the cluster subscribe to, derived from the status, as CloudEvents 1.0.

    started           a canary or a rollout in place starts, or the first revision
    approval-required it has passed, and needs a user's approval (AwaitingApproval)
    inconclusive      its analysis is inconclusive, and a user decides (Held)
    promoted, rolled-back, superseded, failed, explored
                      how it has ended; failed also: preflight failed, invalid, a first revision that does not become ready
    acceptance-regression
                      the stable pods' drafts are accepted less often than at the promotion, or hardly ever

Guarantee: a function of the status alone, with ids that follow from the content and from nothing else. The same notification has
the same id whoever sends it, how often, and when. So any sender can send a missed notification again, an operator that has just
started too, and receivers drop duplicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from aerie.api import SpeculativeDeployment
from aerie.api.status import CanaryArm, Condition, RolloutOutcome, Status
from aerie.rollout.conditions import DEGRADED

NotificationType = Literal[
    "started",
    "approval-required",
    "inconclusive",
    "promoted",
    "rolled-back",
    "superseded",
    "failed",
    "explored",
    "acceptance-regression",
]
EVENT_TYPES: tuple[NotificationType, ...] = get_args(NotificationType)
EVENT_TYPE_PREFIX = "dev.aerie.rollout."
_TYPE_BY_RESULT: dict[str, NotificationType] = {
    "Promoted": "promoted",
    "RolledBack": "rolled-back",
    "Superseded": "superseded",
    "Failed": "failed",
    "Explored": "explored",
}
_REGRESSION_REASONS = frozenset({"AcceptanceRegression", "DraftsRejected"})
"""Reasons of the condition Degraded with which stable pods' drafts are accepted too rarely."""


@dataclass(frozen=True)
class Notification:
    """One notification."""

    id: str
    event_type: NotificationType
    occurred_at: datetime
    """Time of the event, as far as the status contains it; otherwise the time of the condition that it follows from."""
    data: dict[str, Any]

    def to_cloud_event(self, source: str) -> dict[str, Any]:
        """Return the notification in the JSON format of CloudEvents 1.0, structured mode."""
        return {
            "specversion": "1.0",
            "id": self.id,
            "source": source,
            "type": f"{EVENT_TYPE_PREFIX}{self.event_type}",
            "subject": f"{self.data['namespace']}/{self.data['name']}",
            "time": format_time(self.occurred_at),
            "datacontenttype": "application/json",
            "data": self.data,
        }


def build_notifications(resource: SpeculativeDeployment, status: Status) -> Iterator[Notification]:
    """Yield all notifications of the status: those of rollouts, the oldest first, and then that of an acceptance regression."""
    for outcome in reversed(status.rollout_history):
        yield _build_outcome_notification(resource, outcome, status)
    rollout = status.in_place_rollout or status.canary
    conditions = {condition.type: condition for condition in status.conditions}
    progressing = conditions.get("Progressing")
    if rollout is not None and rollout.phase != "RollingBack":
        rollout_data: dict[str, Any] = {"revision": rollout.revision, "change": rollout.change, "drafter": rollout.drafter}
        rollout_data |= {
            "replacedDrafter": status.stable.drafter if status.stable else None,
            "startTime": format_time(rollout.start_time),
        }
        started_data = rollout_data | {"clientEffect": describe_client_effect("started", status)}
        yield _build_notification(resource, "started", rollout.revision, rollout.start_time, rollout.start_time, started_data)
        type_by_phase: dict[str, NotificationType] = {"AwaitingApproval": "approval-required", "Held": "inconclusive"}
        event_type = type_by_phase.get(rollout.phase, "failed" if status.phase == "Failed" else None)
        if event_type is not None and progressing is not None:
            data = rollout_data | {"message": progressing.message, "clientEffect": describe_client_effect(event_type, status)}
            notification = _build_notification(
                resource, event_type, rollout.revision, rollout.start_time, progressing.last_transition_time, data
            )
            extension_end_time = rollout.extension_end_time if isinstance(rollout, CanaryArm) else None
            if event_type == "inconclusive" and extension_end_time is not None:  # inconclusive once more
                notification = replace(notification, id=f"{notification.id}/{extension_end_time.timestamp():.0f}")
            yield notification
    preflight_passed = conditions.get("PreflightPassed")
    if rollout is None and status.phase == "Failed" and preflight_passed is not None and preflight_passed.status == "False":
        failure_data = {"generation": status.observed_generation, "message": preflight_passed.message}
        failure_data |= {"clientEffect": describe_client_effect("failed", status)}
        failed_at = preflight_passed.last_transition_time
        yield _build_notification(resource, "failed", f"generation-{status.observed_generation}", None, failed_at, failure_data)
    regression = find_acceptance_regression(status)
    if regression is not None and status.stable is not None:
        event_type = "acceptance-regression"
        revision, began_at = status.stable.served_revision, regression.last_transition_time
        regression_data = {"revision": revision, "drafter": status.stable.drafter, "message": regression.message}
        regression_data |= {"clientEffect": describe_client_effect(event_type, status)}
        yield _build_notification(resource, event_type, revision, began_at, began_at, regression_data)


def find_acceptance_regression(status: Status) -> Condition | None:
    """Return the condition that stable pods' drafts are accepted too rarely; None where it is not so."""
    return next(
        (
            item
            for item in status.conditions
            if (item.type, item.status) == (DEGRADED, "True") and item.reason in _REGRESSION_REASONS
        ),
        None,
    )


def describe_client_effect(event_type: NotificationType, status: Status) -> str:
    """Return what an event means for clients, as sentences."""
    if status.stable is None and event_type == "started":
        return "Clients are not served yet: the first revision is starting."
    if status.stable is None and event_type == "failed":
        return "Clients may get no answers: the first revision has failed."
    return _CLIENT_EFFECT_BY_TYPE[event_type]


_CLIENT_EFFECT_BY_TYPE: dict[NotificationType, str] = {
    "started": "Clients are served by the stable revision. The new one is compared with it before it serves all of them.",
    "approval-required": "Nothing changes for clients until you decide: the new revision has passed its analysis.",
    "inconclusive": "Nothing changes for clients until you decide: the analysis could not show that the new revision is better.",
    "promoted": "Clients are served by the new revision.",
    "rolled-back": "Clients are served by the stable revision, as before the rollout.",
    "superseded": "Clients are served by the stable revision. The spec changed before this rollout ended.",
    "failed": "Nothing changes for clients: the stable revision serves them, and the new one has failed.",
    "explored": "Nothing changes for clients: the trial has measured its speculation setting and ended.",
    "acceptance-regression": "Clients get the same answers, but may wait longer for them: fewer drafts are accepted.",
}


def _build_outcome_notification(resource: SpeculativeDeployment, outcome: RolloutOutcome, status: Status) -> Notification:
    event_type = _TYPE_BY_RESULT[outcome.result]
    data = {
        "clientEffect": describe_client_effect(event_type, status),
        "revision": outcome.revision,
        "change": outcome.change,
        "drafter": outcome.drafter,
        "replacedDrafter": outcome.replaced_drafter,
        "message": outcome.message,
        "requestedBy": outcome.requested_by.to_dict() if outcome.requested_by is not None else None,
        "startTime": format_time(outcome.start_time),
        "completionTime": format_time(outcome.completion_time),
        "comparisons": [comparison.to_dict() for comparison in outcome.comparisons],
    }
    return _build_notification(resource, event_type, outcome.revision, outcome.start_time, outcome.completion_time, data)


def _build_notification(
    resource: SpeculativeDeployment,
    event_type: NotificationType,
    revision: str,
    started_at: datetime | None,
    occurred_at: datetime,
    data: dict[str, Any],
) -> Notification:
    metadata = resource.metadata
    common_data = {"namespace": metadata.namespace, "name": metadata.name, "uid": metadata.uid, "phase": event_type}
    present_data = {key: value for key, value in data.items() if value not in (None, [])}
    id_parts = [str(metadata.uid), revision, *([f"{started_at.timestamp():.0f}"] if started_at else []), event_type]
    return Notification("/".join(id_parts), event_type, occurred_at, common_data | present_data)


def format_time(moment: datetime) -> str:
    """Return a time in RFC 3339, in UTC and whole seconds."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
