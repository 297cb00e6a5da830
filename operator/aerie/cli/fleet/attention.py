"""The state in a word, what waits for a user, and what a user can do now.

Guarantee: pure; each phase has an answer, also one of a later release. A resource has the state WAITING or FAILED exactly where
`find_attention_reason` has a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from aerie.cli.fleet.resource_view import SERVED_PHASES, ResourceView


class State(StrEnum):
    """The state of a resource in a word, for those who do not know the phases. The value is what `list` shows."""

    SERVING = "serving"
    """The revision of the spec serves."""
    IN_PROGRESS = "in progress"
    """Aerie is starting, testing, promoting or rolling back a revision."""
    WAITING = "waits for you"
    """Nothing continues until a user decides."""
    FAILED = "failed"
    """The revision of the spec did not start, or not all clients are served."""


DECIDABLE_PHASES = frozenset({"Evaluating", "WarmingUp", "Analyzing", "AwaitingApproval", "Held"})
"""Phases in which a user may promote the candidate."""
ABORTABLE_PHASES = DECIDABLE_PHASES | {"Starting", "Staging", "Ramping", "Promoting"}
"""Phases in which a user may roll back the candidate."""
REJECTED_PHASES = frozenset({"RolledBack", "Failed"})
"""Phases in which a user may request a retry."""
RETAINED_PHASES = frozenset({"Monitoring", "Verifying"})
"""Phases in which the previous revision is retained, so that a promotion can be reverted."""


def find_attention_reason(view: ResourceView) -> str:
    """Return why the resource waits for a user; empty if it does not."""
    if _lacks_pods(view):
        return f"not all clients are served: {view.condition('Ready').get('message') or 'no pod is ready'}"
    match view.phase:
        case "Held":
            return "inconclusive: promote or roll back"
        case "AwaitingApproval":
            return "accepted: promote or roll back"
        case "RolledBack":
            return "rolled back: change the spec, or retry"
        case "Failed":
            return "failed: see status"
        case "Paused":
            return "paused: resume"
    return ""


def find_state(view: ResourceView) -> State:
    """Return the state of the resource in a word."""
    if find_attention_reason(view):
        return State.FAILED if view.phase == "Failed" or _lacks_pods(view) else State.WAITING
    return State.SERVING if view.phase in SERVED_PHASES else State.IN_PROGRESS


def _lacks_pods(view: ResourceView) -> bool:
    """Return whether clients are not served though they should be: not so before the first revision has started."""
    first_rollout = not view.status.get("stable")
    is_starting = first_rollout and view.phase in ("Preflight", "Queued", "Starting", "Unknown")
    return bool(view.status) and not view.is_serving and not is_starting


def is_extensible(view: ResourceView) -> bool:
    """Return whether a user may extend the analysis now: only that of a canary, because by turns the windows have ended."""
    return view.candidate_phase == "Held" and not view.is_in_place and not view.is_paused


def list_possible_actions(view: ResourceView) -> Iterator[str]:
    """Yield the verbs that the state allows."""
    if view.is_paused:  # Aerie changes nothing until then
        yield "resume"
        return
    if view.candidate_phase in DECIDABLE_PHASES:
        yield "promote"
    if view.candidate_phase in ABORTABLE_PHASES or view.phase in RETAINED_PHASES:
        yield "rollback"
    if view.phase in REJECTED_PHASES:
        yield "retry"
    yield "pause"
