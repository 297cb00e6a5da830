"""What a status tells of its rollouts that somebody outside of the cluster wants to hear, as CloudEvents 1.0.

    begun             a canary begins, or the first revision
    approval-wanted   it is accepted, and a person is asked (AwaitingApproval)
    held              it is undecided, and a person decides (Held)
    promoted, rolled-back, superseded, failed, explored
                      how it has ended; failed also: refused by preflight, invalid, a first revision that does not serve

Guarantee: a function of the status alone, with ids that follow from what is told and from nothing else: the same notice has the
same id whoever sends it, how often, and when. So whoever has missed something, an operator that has just begun too, can tell it
again, and receivers drop what they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from aerie.api import SpeculativeDeployment
from aerie.api.status import RolloutOutcome, Status

NotificationType = Literal["begun", "approval-wanted", "held", "promoted", "rolled-back", "superseded", "failed", "explored"]
EVENT_TYPE_PREFIX = "dev.aerie.rollout."
_TYPE_BY_RESULT: dict[str, NotificationType] = {
    "Promoted": "promoted",
    "RolledBack": "rolled-back",
    "Superseded": "superseded",
    "Failed": "failed",
    "Explored": "explored",
}


@dataclass(frozen=True)
class Notification:
    """One thing to be told."""

    id: str
    event_type: NotificationType
    occurred_at: datetime
    """When it happened, as far as the status says; that of what it follows from otherwise."""
    data: dict[str, Any]

    def to_cloud_event(self, source: str) -> dict[str, Any]:
        """In the JSON format of CloudEvents 1.0, structured mode."""
        return {
            "specversion": "1.0",
            "id": self.id,
            "source": source,
            "type": f"{EVENT_TYPE_PREFIX}{self.event_type}",
            "subject": f"{self.data['namespace']}/{self.data['name']}",
            "time": _format_time(self.occurred_at),
            "datacontenttype": "application/json",
            "data": self.data,
        }


def build_notifications(resource: SpeculativeDeployment, status: Status) -> Iterator[Notification]:
    """All that the status tells, the oldest first."""
    for outcome in reversed(status.history):
        yield _build_outcome_notification(resource, outcome)
    canary = status.canary
    said = {condition.type: condition for condition in status.conditions}
    progressing = said.get("Progressing")
    if canary is not None and canary.phase != "RollingBack":
        mine: dict[str, Any] = {"revision": canary.revision, "change": canary.change, "drafter": canary.drafter}
        mine |= {"against": status.stable.drafter if status.stable else None, "startedAt": _format_time(canary.started_at)}
        yield _build_notification(resource, "begun", canary.revision, canary.started_at, canary.started_at, mine)
        open_ends: dict[str, NotificationType] = {"AwaitingApproval": "approval-wanted", "Held": "held"}
        what = open_ends.get(canary.phase, "failed" if status.phase == "Failed" else None)
        if what is not None and progressing is not None:
            told = mine | {"reason": progressing.message}
            yield _build_notification(resource, what, canary.revision, canary.started_at, progressing.last_transition_time, told)
    passed = said.get("PreflightPassed")
    if canary is None and status.phase == "Failed" and passed is not None and passed.status == "False":
        refused = {"generation": status.observed_generation, "reason": passed.message}
        when = passed.last_transition_time
        yield _build_notification(resource, "failed", f"generation-{status.observed_generation}", None, when, refused)


def _build_outcome_notification(resource: SpeculativeDeployment, outcome: RolloutOutcome) -> Notification:
    data = {
        "revision": outcome.revision,
        "change": outcome.change,
        "drafter": outcome.drafter,
        "against": outcome.against,
        "reason": outcome.reason,
        "startedAt": _format_time(outcome.started_at),
        "endedAt": _format_time(outcome.ended_at),
        "comparisons": [one.to_dict() for one in outcome.comparisons],
    }
    return _build_notification(
        resource, _TYPE_BY_RESULT[outcome.result], outcome.revision, outcome.started_at, outcome.ended_at, data
    )


def _build_notification(
    resource: SpeculativeDeployment,
    what: NotificationType,
    revision: str,
    began: datetime | None,
    at: datetime,
    data: dict[str, Any],
) -> Notification:
    metadata = resource.metadata
    whose = {"namespace": metadata.namespace, "name": metadata.name, "uid": metadata.uid, "phase": what}
    given = {key: value for key, value in data.items() if value not in (None, [])}
    parts = [str(metadata.uid), revision, *([f"{began.timestamp():.0f}"] if began else []), what]
    return Notification("/".join(parts), what, at, whose | given)


def _format_time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
