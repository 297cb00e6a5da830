"""What is said of a resource that is left as it is, in whole or in part, because not enough of it is known.

    a status that this release cannot read ───────────┬─► held: the condition Degraded is written into the status as it is
    a spec, where nothing is recorded of what serves ─┤
    Deployments, pods, ConfigMaps cannot be listed ───┘
    a spec, where that is recorded (last_spec.py) ────┬─► decide.py: as if paused, but that what is known is repaired
    another kind cannot be listed ────────────────────┘

Guarantees: functions of their arguments; what a status says besides is kept, whoever wrote it; said once, it is not said again.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from aerie.api import ResourceError
from aerie.api.types.base import JsonObject, format_timestamp
from aerie.rollout.conditions import DEGRADED, ConditionUpdate, truncate_message
from aerie.rollout.facts.snapshot import Snapshot

VERSION_SKEW = "VersionSkew"
UNREADABLE_SPEC = "UnreadableSpec"
_FIX_HINT = (
    "correct the field of the spec that is named here, or, where another release has written it, install the operator of that "
    "release or a later one"
)
REQUIRED_KINDS = frozenset({"Deployment", "Pod", "ConfigMap"})
"""Kinds without which nothing can be said of a rollout: of what pods there are, and of what they are to be."""


def build_unreadable_condition(error: ResourceError) -> ConditionUpdate:
    """Another release has written what this one does not know, or an older definition took what no release can read."""
    of_spec = bool(error.paths) and all(place[:1] == ("spec",) for place in error.paths)
    message = (
        f"this operator cannot read the resource and leaves its pods and Services as they are: {_FIX_HINT}. "
        f"{str(error).replace(chr(10), ' ')}"
    )
    return ConditionUpdate(DEGRADED, "True", UNREADABLE_SPEC if of_spec else VERSION_SKEW, message)


def find_hold_condition(snapshot: Snapshot) -> ConditionUpdate | None:
    """Why the rollout of what serves is held; None where it is not."""
    if (found := snapshot.spec_substitution) is not None:
        message = f"{found.error_message} The rollout is held, and what serves is cared for: {found.replacement_message}. To go on, {_FIX_HINT}"
        return ConditionUpdate(DEGRADED, "True", UNREADABLE_SPEC, message)
    return (
        build_list_failure_condition(snapshot.unlisted_kinds, all_forbidden=snapshot.is_listing_forbidden)
        if snapshot.unlisted_kinds
        else None
    )


def build_list_failure_condition(kinds: Mapping[str, str], *, all_forbidden: bool) -> ConditionUpdate:
    """Kinds that cannot be listed, with a sentence on each. `forbidden`: all of them are refused."""
    message = f"{'; '.join(text for _, text in sorted(kinds.items()))}. What depends on them stays as it is"
    return ConditionUpdate(DEGRADED, "True", "ListForbidden" if all_forbidden else "ListFailed", message)


def set_status_condition(
    status: JsonObject | None, condition_update: ConditionUpdate, generation: int | None, now: datetime
) -> JsonObject:
    """The status, whatever it says, with the finding as a condition."""
    before: list[JsonObject] = (status or {}).get("conditions") or []
    last: Mapping[str, Any] = next((one for one in before if one.get("type") == condition_update.type), {})
    same = last.get("status") == condition_update.status
    condition = {
        **last,
        "type": condition_update.type,
        "status": condition_update.status,
        "reason": condition_update.reason,
        "message": truncate_message(condition_update.message),
        "lastTransitionTime": last["lastTransitionTime"] if same else format_timestamp(now),
        **({} if generation is None else {"observedGeneration": generation}),
    }
    conditions = [condition if one is last else one for one in before] if last else [*before, condition]
    return {**(status or {}), "conditions": conditions}
