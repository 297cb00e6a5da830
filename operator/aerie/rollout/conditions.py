"""The conditions of the status: what they say, since when, and what a change of them is worth telling.

A condition's time is that of its last change of status, so that it stays while only the sentence changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from aerie.api.status import Condition, Status
from aerie.rollout.plan import Event

ConditionStatus = Literal["True", "False", "Unknown"]
_MAX_MESSAGE_CHARACTERS = 2000

READY, PROGRESSING, PREFLIGHT_PASSED, DEGRADED = "Ready", "Progressing", "PreflightPassed", "Degraded"
TUNED = "Tuned"
_HEALTHY_STATUS_BY_TYPE = {READY: "True", PROGRESSING: "True", PREFLIGHT_PASSED: "True", DEGRADED: "False", TUNED: "True"}
"""The status that is no reason to worry."""


@dataclass(frozen=True)
class ConditionUpdate:
    """What one condition is to say."""

    type: str
    status: ConditionStatus
    reason: str
    message: str


def build_conditions(
    updates: Sequence[ConditionUpdate], previous_status: Status | None, generation: int | None, now: datetime
) -> list[Condition]:
    """The findings as conditions, in their order, with the times of those in `before` that still hold."""
    old = {condition.type: condition for condition in (previous_status.conditions if previous_status else [])}
    made = []
    for finding in updates:
        last = old.get(finding.type)
        since = last.last_transition_time if last is not None and last.status == finding.status else now
        made.append(
            Condition(
                type=finding.type,
                status=finding.status,
                reason=finding.reason,
                message=truncate_message(finding.message),
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return made


def truncate_message(text: str) -> str:
    """The text, cut where it is longer than anybody would read."""
    return text if len(text) <= _MAX_MESSAGE_CHARACTERS else text[: _MAX_MESSAGE_CHARACTERS - 1] + "…"


def build_condition_events(previous_status: Status | None, current_status: Status) -> Iterator[Event]:
    """One event for each condition whose status or reason has changed; none for a status that is repeated."""
    old = {condition.type: condition for condition in (previous_status.conditions if previous_status else [])}
    for condition in current_status.conditions:
        last = old.get(condition.type)
        if last is not None and (last.status, last.reason) == (condition.status, condition.reason):
            continue
        good = condition.status == _HEALTHY_STATUS_BY_TYPE[condition.type] or condition.status == "Unknown"
        normal = (
            good or condition.type == TUNED or (condition.type in (READY, PROGRESSING) and condition.reason in _EXPECTED_REASONS)
        )
        if last is None and normal:
            continue  # the usual beginning is no news
        yield Event("Normal" if normal else "Warning", condition.reason, condition.message)


_EXPECTED_REASONS = frozenset({"Complete", "Starting", "Preflight", "Queued", "Paused", "ScaledToZero"})
"""Reasons for a condition that is not good and needs nobody."""
