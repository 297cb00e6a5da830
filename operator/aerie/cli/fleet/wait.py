"""When a wait for the end of a rollout is over.

Guarantee: pure; a result counts only once the operator has seen the present spec.
"""

from __future__ import annotations

import re
from enum import StrEnum

from aerie.cli.console import CommandError
from aerie.cli.fleet.actions import RETRY, ROLLBACK
from aerie.cli.fleet.attention import REJECTED_PHASES, RETAINED_PHASES, find_attention_reason
from aerie.cli.fleet.durations import parse_duration
from aerie.cli.fleet.resource_view import SERVED_PHASES, ResourceView

MAX_RECORDED_RETRY_CHARACTERS = 64
"""Length up to which the status has a retry as it is; of a longer one it has a digest. A test compares it with the operator's."""


class Goal(StrEnum):
    """What can be waited for."""

    READY = "ready"
    """All clients are served."""
    PROMOTED = "promoted"
    """The revision of the spec serves."""
    ROLLED_BACK = "rolledback"
    """The revision of the spec was rolled back, or did not start."""
    DECIDED = "decided"
    """One of both."""
    ATTENTION = "attention"
    """A user has to do something."""


def parse_timeout(text: str) -> float:
    """Return the seconds of a time limit: 10m, 90s, 1h30m as in kubectl, or seconds alone. Raises CommandError.

    >>> parse_timeout("1h30m"), parse_timeout("2.5")
    (5400.0, 2.5)
    """
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII):
        return float(text)
    duration = parse_duration(text)
    if duration is None:
        raise CommandError(f"--timeout is {text!r}: use a time such as 10m, 90s or 1h30m.")
    return duration.total_seconds()


def is_reached(view: ResourceView, goal: Goal) -> bool | None:
    """Return whether the goal is reached; False if it cannot be any more without another spec, None while it is open."""
    if not view.is_observed or has_open_request(view):
        return None
    # A canary that is superseded leaves phase Ready, with the revision that served before, until the next one begins.
    is_complete = view.condition("Progressing").get("reason") != "RolledBack" and not view.candidate
    is_promoted, is_rejected = view.phase in SERVED_PHASES and is_complete, view.phase in REJECTED_PHASES
    match goal:
        case Goal.READY:
            return True if view.is_serving else None
        case Goal.PROMOTED:
            return True if is_promoted else False if is_rejected else None
        case Goal.ROLLED_BACK:
            return True if is_rejected else False if is_promoted else None
        case Goal.DECIDED:
            return True if is_promoted or is_rejected else None
        case Goal.ATTENTION:
            return True if find_attention_reason(view) else None


def has_open_request(view: ResourceView) -> bool:
    """Return whether the operator has not seen a user's retry or rollback yet: they change no generation."""
    annotations = view.metadata.get("annotations") or {}
    retry = annotations.get(RETRY)
    is_handled = retry in (None, "") or len(retry) > MAX_RECORDED_RETRY_CHARACTERS or view.status.get("lastHandledRetry") == retry
    is_reverting = view.phase in RETAINED_PHASES and annotations.get(ROLLBACK) == view.served_revision
    return not is_handled or is_reverting


def describe_outcome(view: ResourceView) -> str:
    """Return the state in a line."""
    message = view.condition("Progressing").get("message") or view.condition("Ready").get("message") or ""
    return f"{view.namespace}/{view.name}: {view.phase}. {message}".strip()
