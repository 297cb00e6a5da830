"""Who requested a decision and why: an annotation, attributed to the rollout that the request decided.

    aerie.dev/requested-by ─► status.lastRequest, with the time at which it was first read ─┬─► outcome: requestedBy, message
                                                                                            └─► condition and its event

Annotations stay on the resource. So a promotion or rollback is attributed only to the rollout in which its annotation was first
read, and only to the revision that the request names. A retry is attributed only to the next rollout of the rejected revision.
An extension decides nothing: only the condition names its user, while it lasts.

Guarantees: pure. The texts are cleaned and bounded. An annotation that is invalid, or that belongs to another rollout, changes
nothing: neither the decision nor its message. Not guaranteed: that the user is the one who decided; the audit log of the API
server has the proof.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from aerie.api import SpeculativeDeployment
from aerie.api.status import RequestedBy, RolloutOutcome, Status, UserRequest
from aerie.api.status.user_request import MAX_REASON_CHARACTERS, MAX_USER_CHARACTERS
from aerie.rollout.canary.extension_request import EXTEND_ANNOTATION
from aerie.rollout.canary.messages import PROMOTE_ANNOTATION, ROLLBACK_ANNOTATION
from aerie.rollout.conditions import append_sentence
from aerie.rollout.progression.progression import Progression
from aerie.rollout.progression.retry_request import read_retry_request

REQUESTED_BY_ANNOTATION = "aerie.dev/requested-by"
"""Annotation with action, user, time and reason of a request as JSON; it is set together with that of the action."""
MAX_CLOCK_DIFFERENCE = timedelta(minutes=1)
"""Difference between the clocks of user and operator that is tolerated."""
_MAX_ANNOTATION_CHARACTERS = 4096
_MAX_REVISION_CHARACTERS = 128
_ANNOTATION_BY_ACTION = {"promote": PROMOTE_ANNOTATION, "rollback": ROLLBACK_ANNOTATION, "extend": EXTEND_ANNOTATION}
_PHASES_BY_ACTION = {
    "promote": ("Ramping", "Promoting"),
    "rollback": ("RollingBack",),
    "retry": ("Starting", "Staging"),
    "extend": ("Analyzing",),
}
"""Phases that an action leads to, whose condition names the user."""


def read_user_request(resource: SpeculativeDeployment, desired_revision: str, now: datetime) -> UserRequest | None:
    """Return the last request that names its user: that of the annotation, or else that of the status; None without one."""
    status = resource.status or Status()
    recorded = status.last_request
    if recorded is not None and recorded.action == "retry" and recorded.revision != desired_revision:
        recorded = recorded.model_copy(update={"revision": None})  # the spec has changed, so a later rollout has another cause
    value = resource.metadata.annotations.get(REQUESTED_BY_ANNOTATION)
    if value is None or len(value) > _MAX_ANNOTATION_CHARACTERS:
        return recorded
    digest = hashlib.sha256(value.encode(errors="backslashreplace")).hexdigest()
    if recorded is not None and recorded.digest == digest:
        return recorded
    requested_by = _parse_requested_by(value)
    if requested_by is None:
        return recorded
    # A time that is still to come is recorded, too: else it would count once it has come, in whatever rollout.
    is_possible = requested_by.time <= now + MAX_CLOCK_DIFFERENCE
    revision = _find_requested_revision(requested_by.action, resource, status, desired_revision) if is_possible else None
    return UserRequest(**dict(requested_by), revision=revision, seen_time=now, digest=digest)


def attribute_decision(progression: Progression, request: UserRequest | None, status: Status, now: datetime) -> Progression:
    """Return the progression whose outcome and condition name the user who requested them, where one did.

    `status`: the previous one.
    """
    if request is None:
        return progression
    outcome = progression.outcome
    # The condition of a canary that is rolled back has the outcome's message, and names the user by that.
    rollout = progression.in_place or (progression.canary if request.action != "rollback" else None)
    earlier_outcome = status.rollout_history[0] if status.rollout_history else None
    if outcome is not None and _has_led_to(request, outcome, earlier_outcome, _decision_time(status, now)):
        requested_by = RequestedBy(**{name: getattr(request, name) for name in RequestedBy.model_fields})
        message = append_sentence(outcome.message, describe_request(request, is_done=True))
        outcome = outcome.model_copy(update={"requested_by": requested_by, "message": message})
        return replace(progression, outcome=outcome)
    if (
        rollout is None
        or progression.phase not in _PHASES_BY_ACTION[request.action]
        or (request.action == "rollback" and request.seen_time > _decision_time(status, now))
        or (request.action == "extend" and (progression.canary is None or not progression.canary.is_extended))
        or not _belongs_to(request, rollout.revision, rollout.start_time, earlier_outcome)
    ):
        return progression
    condition = progression.progressing
    message = append_sentence(condition.message, describe_request(request, is_done=False))
    return replace(progression, progressing=replace(condition, message=message))


def describe_request(request: RequestedBy, *, is_done: bool) -> str:
    """Return who requested the action and why, as a sentence. `is_done`: whether it has had its effect."""
    verb = {
        "promote": "Promoted" if is_done else "Promotion requested",
        "rollback": "Rolled back" if is_done else "Rollback requested",
        "retry": "Retried",
        "extend": "Extended",
    }[request.action]
    return f"{verb} by {request.user}{': ' + request.reason.rstrip('.') if request.reason else ''}."


def _decision_time(status: Status, now: datetime) -> datetime:
    """Return when the rollout in progress was decided: pods of a rollout in place return before its outcome is recorded."""
    rollout = status.in_place_rollout
    return rollout.phase_start_time if rollout is not None and rollout.phase == "RollingBack" else now


def _has_led_to(
    request: UserRequest, outcome: RolloutOutcome, earlier_outcome: RolloutOutcome | None, decided_at: datetime
) -> bool:
    """Return whether the request has led to the outcome: it ended the rollout so, or began it."""
    if not _belongs_to(request, outcome.revision, outcome.start_time, earlier_outcome):
        return False
    match request.action:
        case "promote":
            return outcome.result == "Promoted"
        case "rollback":  # it takes precedence over all evidence in the reconcile that first reads it
            return outcome.result == "RolledBack" and request.seen_time <= decided_at
        case "retry":
            return True
        case "extend":
            return False


def _belongs_to(request: UserRequest, revision: str, rollout_start: datetime, earlier_outcome: RolloutOutcome | None) -> bool:
    """Return whether the request was first read in this rollout; a retry between the earlier outcome and this rollout."""
    if request.revision != revision:
        return False
    if request.action != "retry":
        return rollout_start < request.seen_time and rollout_start - MAX_CLOCK_DIFFERENCE <= request.time
    if earlier_outcome is None:
        return False
    completion = earlier_outcome.completion_time
    return completion < request.seen_time <= rollout_start and completion - MAX_CLOCK_DIFFERENCE <= request.time


def _find_requested_revision(
    action: Literal["promote", "rollback", "retry", "extend"],
    resource: SpeculativeDeployment,
    status: Status,
    desired_revision: str,
) -> str | None:
    """Return the revision that a request applies to, by the annotation of its action; None for a request without effect."""
    if action != "retry":
        revision = resource.metadata.annotations.get(_ANNOTATION_BY_ACTION[action], "")
        if action == "extend":  # the end follows
            revision = revision.partition("/")[0]
        return revision if 0 < len(revision) <= _MAX_REVISION_CHARACTERS else None
    last_outcome = status.rollout_history[0] if status.rollout_history else None
    waits_for_capacity = (
        last_outcome is not None and last_outcome.revision == desired_revision and last_outcome.retry_time is not None
    )
    is_new = read_retry_request(resource) not in (None, status.last_handled_retry)
    return desired_revision if is_new and (status.rejected_revision == desired_revision or waits_for_capacity) else None


def _parse_requested_by(value: str) -> RequestedBy | None:
    """Return the content of the annotation, cleaned; None where it is invalid."""
    try:
        document: Any = json.loads(value)
        time = datetime.fromisoformat(document["time"]).astimezone(UTC)
        action, user, reason = document["action"], document["user"], document.get("reason")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    user = _clean_text(user, MAX_USER_CHARACTERS)
    if not user or action not in ("promote", "rollback", "retry", "extend"):
        return None
    return RequestedBy(action=action, user=user, reason=_clean_text(reason, MAX_REASON_CHARACTERS) or None, time=time)


def _clean_text(value: object, max_characters: int) -> str:
    """Return a text as one line of printable characters; empty where it is no text."""
    if not isinstance(value, str):
        return ""
    printable = "".join(character if character.isprintable() else " " for character in value)
    return " ".join(printable.split())[:max_characters].rstrip()
