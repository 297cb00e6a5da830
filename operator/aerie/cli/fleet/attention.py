"""What waits for a user, and what a user can do now.

Guarantee: pure; each phase has an answer, also one of a later release.
"""

from __future__ import annotations

from collections.abc import Iterator

from aerie.cli.fleet.resource_view import ResourceView

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
    if view.status and not view.is_serving:
        ready = view.condition("Ready")
        first_rollout = not view.status.get("stable")
        if not (first_rollout and view.phase in ("Preflight", "Queued", "Starting", "Unknown")):
            return f"not all clients are served: {ready.get('message') or 'no pod is ready'}"
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
