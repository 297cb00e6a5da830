"""One notification of each event, with the fewest data that a notification of it has.

They check templates at the start, and `aerie notifications test` sends them. Their resource does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from aerie.rollout.status.notifications import EVENT_TYPES, Notification, NotificationType

SAMPLE_NAMESPACE, SAMPLE_NAME = "default", "notification-test"
_WITHOUT_MESSAGE = frozenset({"started"})


def build_sample_notification(event_type: NotificationType, occurred_at: datetime) -> Notification:
    """Return a notification of the event that says that it is a test."""
    data: dict[str, Any] = {
        "namespace": SAMPLE_NAMESPACE,
        "name": SAMPLE_NAME,
        "uid": "00000000-0000-0000-0000-000000000000",
        "phase": event_type,
        "clientEffect": "This is a test: nothing changes for clients.",
    }
    if event_type != "failed":  # a failed preflight has no revision
        data["revision"] = "test"
    if event_type not in _WITHOUT_MESSAGE:
        data["message"] = 'A message may contain "quotation marks", <angle brackets> & line\nbreaks.'
    identifier = f"test/{occurred_at.timestamp():.0f}/{event_type}"
    return Notification(identifier, event_type, occurred_at, data)


def build_sample_notifications() -> Iterator[Notification]:
    """Yield a notification of each event."""
    for event_type in EVENT_TYPES:
        yield build_sample_notification(event_type, datetime(2026, 1, 1, tzinfo=UTC))
