"""The page of Kubernetes events and of notifications, generated from the types of their reasons and events.

The meaning of a reason is the first sentence of its paragraph in docs/reference/conditions.md, which a test compares with the
code. Guarantee: a reason or an event without a meaning stops the generation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from aerie.rollout import conditions, reasons
from aerie.rollout.status.notifications import EVENT_TYPE_PREFIX, EVENT_TYPES, NotificationType
from scripts.reference.markdown import GENERATED, join_parts, table

CONDITIONS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "conditions.md"
REASONS_BY_SECTION: dict[str, Any] = {
    conditions.READY: reasons.ReadyReason,
    conditions.PROGRESSING: reasons.ProgressingReason,
    conditions.PREFLIGHT_PASSED: reasons.PreflightReason,
    "Pods": reasons.PodFailureReason,
    conditions.DEGRADED: reasons.DegradedReason,
    conditions.TUNED: reasons.TunedReason,
    conditions.SUBSCRIBED: reasons.SubscribedReason,
    conditions.CAPTURE: reasons.CaptureReason,
    "Events": reasons.OutcomeReason,
}
"""Reasons by the section of docs/reference/conditions.md that explains them."""
WHEN_BY_EVENT: dict[NotificationType, str] = {
    "started": "A rollout starts, or the first revision.",
    "approval-required": "The analysis has passed, and the rollout waits for an approval (AwaitingApproval).",
    "inconclusive": "The analysis has no verdict at its deadline, and the rollout waits for a decision (Held).",
    "promoted": "The rollout has ended, and the new revision or drafter serves.",
    "rolled-back": "The rollout has ended, and the stable revision serves.",
    "superseded": "The spec has changed before the end of the rollout.",
    "failed": "The rollout has failed, preflight has failed, or the first revision does not become ready.",
    "explored": "A trial that only measures has ended.",
    "acceptance-regression": "The drafts of the stable pods are accepted far less often than before, or hardly ever "
    "(condition Degraded, reason AcceptanceRegression or DraftsRejected).",
}

INTRODUCTION = """\
# Events

This page lists the Kubernetes events that Aerie posts, by reason, and the notifications that it sends as CloudEvents."""
KUBERNETES = """\
## Kubernetes events

An event is posted when the status or the reason of a condition changes, with that reason and message.
[conditions.md](conditions.md#events) states when its type is Warning, and what to do about each reason.

```
kubectl events --for specdep/chat
```"""
NOTIFICATIONS = """\
## Notifications

A [receiver](../how-to/notifications.md) gets these events of rollouts. A receiver of type `cloudevents` gets them as
CloudEvents 1.0 with the type in the table. `subject` is `NAMESPACE/NAME` of the resource, and `id` is the same however often an
event is sent."""
DATA = """\
`data` has `namespace`, `name`, `uid`, `phase` (the event) and `clientEffect` (what it means for clients). Where they exist, it
has `revision`, `change`, `drafter`, `replacedDrafter`, `startTime`, `completionTime`, `message`, `requestedBy` and `comparisons`.
The last two are as in `status.rolloutHistory` of the [resource](resource.md). A failed preflight has `generation` in place of
`revision`."""


def page() -> str:
    """Return the page as Markdown."""
    meanings = read_meanings(CONDITIONS_PAGE.read_text(encoding="utf-8"))
    return join_parts(
        GENERATED.format(source="the reasons in the code and docs/reference/conditions.md"),
        INTRODUCTION,
        KUBERNETES,
        *(_render_section(section, get_args(group), meanings) for section, group in REASONS_BY_SECTION.items()),
        NOTIFICATIONS,
        table(
            ["event", "type of the CloudEvent", "when"],
            ((f"`{event}`", f"`{EVENT_TYPE_PREFIX}{event}`", WHEN_BY_EVENT[event]) for event in EVENT_TYPES),
        ),
        DATA,
    )


def read_meanings(text: str) -> dict[tuple[str, str], str]:
    """Return the first sentence about each reason, by section and reason."""
    _, *parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {
        (section, reason): " ".join(sentence.split())
        for section, body in zip(parts[::2], parts[1::2], strict=True)
        for reason, sentence in re.findall(r"^\*\*(\w+)\.\*\* (.+?[.])(?=\s|$)", body, flags=re.MULTILINE | re.DOTALL)
    }


def _render_section(section: str, names: tuple[str, ...], meanings: dict[tuple[str, str], str]) -> str:
    title = {"Pods": "Reasons of pods", "Events": "Reasons of events alone"}.get(section, section)
    rows = ((f"`{name}`", meanings[section, name]) for name in names)
    source = f"[More](conditions.md#{section.lower()})."
    return join_parts(f"### {title}", source, table(["reason", "meaning"], rows))
