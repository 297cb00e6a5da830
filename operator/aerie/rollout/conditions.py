"""Conditions of the status: content, transition times, and the events of their changes.

The time of a condition is that of its last change of status, so it stays while only the message changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, cast

from aerie.api.status import Condition, Status
from aerie.rollout.plan import Event
from aerie.rollout.reasons import ConditionReason

ConditionStatus = Literal["True", "False", "Unknown"]
_MAX_MESSAGE_CHARACTERS = 2000

READY, PROGRESSING, PREFLIGHT_PASSED, DEGRADED = "Ready", "Progressing", "PreflightPassed", "Degraded"
TUNED, SUBSCRIBED, CAPTURE = "SpeculationTuned", "NotificationsSubscribed", "CaptureReady"
HEALTHY_STATUS_BY_TYPE = {
    READY: "True",
    PROGRESSING: "True",
    PREFLIGHT_PASSED: "True",
    DEGRADED: "False",
    TUNED: "True",
    SUBSCRIBED: "True",
    CAPTURE: "True",
}
"""Status of each condition that is no reason to worry."""


@dataclass(frozen=True)
class ConditionUpdate:
    """Desired content of one condition."""

    type: str
    status: ConditionStatus
    reason: ConditionReason
    message: str


def build_conditions(
    updates: Sequence[ConditionUpdate], previous_status: Status | None, generation: int | None, now: datetime
) -> list[Condition]:
    """Return the conditions in the order of `updates`, with the times of the previous ones whose status is unchanged."""
    previous_by_type = {condition.type: condition for condition in (previous_status.conditions if previous_status else [])}
    conditions = []
    for update in updates:
        previous = previous_by_type.get(update.type)
        transition_time = previous.last_transition_time if previous is not None and previous.status == update.status else now
        conditions.append(
            Condition(
                type=update.type,
                status=update.status,
                reason=update.reason,
                message=truncate_message(update.message),
                last_transition_time=transition_time,
                observed_generation=generation,
            )
        )
    return conditions


def truncate_message(text: str) -> str:
    """Return the text, truncated to the maximum length of a message."""
    return text if len(text) <= _MAX_MESSAGE_CHARACTERS else text[: _MAX_MESSAGE_CHARACTERS - 1] + "…"


def append_sentence(text: str, sentence: str) -> str:
    """Return the text with one more sentence. The text is truncated so that both fit the maximum length of a message."""
    max_characters = _MAX_MESSAGE_CHARACTERS - len(sentence) - len(". ")
    text = text if len(text) <= max_characters else text[: max_characters - 1] + "…"
    return f"{text}{' ' if text.endswith(('.', '…')) else '. '}{sentence}"


def build_condition_events(previous_status: Status | None, current_status: Status) -> Iterator[Event]:
    """Yield one event for each condition whose status or reason has changed; none for a repeated status."""
    previous_by_type = {condition.type: condition for condition in (previous_status.conditions if previous_status else [])}
    for condition in current_status.conditions:
        previous = previous_by_type.get(condition.type)
        if previous is not None and (previous.status, previous.reason) == (condition.status, condition.reason):
            continue
        is_healthy = condition.status == HEALTHY_STATUS_BY_TYPE[condition.type] or condition.status == "Unknown"
        is_normal = (
            is_healthy
            or condition.type == TUNED
            or (condition.type in (READY, PROGRESSING, CAPTURE) and condition.reason in _EXPECTED_REASONS)
        )
        if previous is None and is_normal:
            continue  # the usual start is no event
        reason = cast(ConditionReason, condition.reason)  # `current_status` is this release's own
        yield Event("Normal" if is_normal else "Warning", reason, condition.message)


_EXPECTED_REASONS = frozenset({"Complete", "Starting", "Preflight", "Queued", "Paused", "ScaledToZero", "ShadowEvaluation"})
"""Reasons of a condition that is not healthy and needs no action."""
