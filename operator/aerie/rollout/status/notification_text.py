"""Notifications as messages for people: first what the event means for clients, then the measured values, then what users can do.

Guarantees: pure text without markup; the formats of the receivers add theirs, and escape the rest. No message is longer than
`MAX_DETAIL_CHARACTERS` plus a few lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aerie.rollout.status.notifications import Notification, NotificationType

MAX_DETAIL_CHARACTERS = 2000
"""Length to which the detail is truncated. Slack truncates a message at 40,000 characters, and Teams rejects 28 KB."""
_TITLE_BY_TYPE: dict[NotificationType, str] = {
    "started": "rollout started",
    "approval-required": "approval required",
    "inconclusive": "inconclusive, waits for a decision",
    "promoted": "promoted",
    "rolled-back": "rolled back",
    "superseded": "superseded",
    "failed": "failed",
    "explored": "explored",
    "acceptance-regression": "drafts are accepted less often",
}


@dataclass(frozen=True)
class NotificationText:
    """One notification as text. Each part is one paragraph."""

    title: str
    """Cluster, resource and event."""
    client_effect: str
    """What the event means for clients."""
    detail: str
    """What has changed, and the measured values that the decision follows from. Empty: none."""
    command: str
    """Command that shows the state and what users can do."""

    @property
    def plain_text(self) -> str:
        """All parts, a line each."""
        return "\n".join(filter(None, (self.title, self.client_effect, self.detail, f"What you can do: {self.command}")))


def build_notification_text(notification: Notification, source: str) -> NotificationText:
    """Return the notification as text. `source`: name of the cluster."""
    data = notification.data
    detail = " ".join(filter(None, (_describe_change(data), data.get("message", ""))))
    return NotificationText(
        title=f"[{source}] {data['namespace']}/{data['name']}: {_TITLE_BY_TYPE[notification.event_type]}",
        client_effect=data["clientEffect"],
        detail=detail if len(detail) <= MAX_DETAIL_CHARACTERS else detail[: MAX_DETAIL_CHARACTERS - 1] + "…",
        command=f"kubectl aerie status {data['name']} -n {data['namespace']}",
    )


def _describe_change(data: dict[str, Any]) -> str:
    """Return the change of the rollout and its revision as sentences; empty for events without a rollout."""
    if not data.get("change"):
        return ""
    replaced = f", instead of drafter {data['replacedDrafter']}" if data.get("replacedDrafter") else ""
    return f"Change: {data['change']}{replaced} (revision {data['revision']})."
