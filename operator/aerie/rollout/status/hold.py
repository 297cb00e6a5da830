"""Conditions of a resource that is left unchanged, in whole or in part, because too little of it is known.

    a status that this release cannot read ───────────────┬─► hold: the condition Degraded is added to the existing status
    a spec, where no record of its ready pods exists ─────┤
    Deployments, pods, ConfigMaps cannot be listed ───────┘
    a spec, where that record exists (last_valid_spec.py) ┬─► reconcile.py: as if paused, except that known objects are repaired
    another kind cannot be listed ────────────────────────┘

Guarantees: pure functions. All other content of a status is kept, whoever wrote it. A condition that is already set is not
written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from aerie.api import ResourceError
from aerie.api.types.base import JsonObject, format_timestamp
from aerie.rollout.conditions import DEGRADED, ConditionUpdate, truncate_message
from aerie.rollout.facts.snapshot import Snapshot

VERSION_SKEW: Final = "VersionSkew"
UNREADABLE_SPEC: Final = "UnreadableSpec"
_FIX_HINT = (
    "correct the named field of the spec; or, if another release wrote it, install the operator of that release or a later one"
)
REQUIRED_KINDS = frozenset({"Deployment", "Pod", "ConfigMap"})
"""Kinds without which a rollout cannot be assessed: they show which pods exist, and which should exist."""


def build_unreadable_condition(error: ResourceError) -> ConditionUpdate:
    """Return the condition for a resource that this release cannot read: another release wrote it, or an older definition
    admitted content that no release can read."""
    is_spec_unreadable = bool(error.paths) and all(path[:1] == ("spec",) for path in error.paths)
    message = (
        f"This operator cannot read the resource and leaves its pods and Services unchanged. To fix this, {_FIX_HINT}. "
        f"{str(error).replace(chr(10), ' ')}"
    )
    return ConditionUpdate(DEGRADED, "True", UNREADABLE_SPEC if is_spec_unreadable else VERSION_SKEW, message)


def find_hold_condition(snapshot: Snapshot) -> ConditionUpdate | None:
    """Return why the rollout is held, as a condition; None where it is not held."""
    if (substitution := snapshot.spec_substitution) is not None:
        message = (
            f"{substitution.error_message} The rollout is on hold; its ready pods are maintained: "
            f"{substitution.replacement_message}. To continue, {_FIX_HINT}."
        )
        return ConditionUpdate(DEGRADED, "True", UNREADABLE_SPEC, message)
    return (
        build_list_failure_condition(snapshot.cluster.unlisted_kinds, all_forbidden=snapshot.cluster.is_listing_forbidden)
        if snapshot.cluster.unlisted_kinds
        else None
    )


def build_list_failure_condition(kinds: Mapping[str, str], *, all_forbidden: bool) -> ConditionUpdate:
    """Return the condition for kinds that cannot be listed, with a message on each. `all_forbidden`: all of them are
    forbidden."""
    message = f"{'; '.join(kind_message for _, kind_message in sorted(kinds.items()))}. What depends on them is left unchanged."
    return ConditionUpdate(DEGRADED, "True", "ListForbidden" if all_forbidden else "ListFailed", message)


def set_status_condition(
    status: JsonObject | None, condition_update: ConditionUpdate, generation: int | None, now: datetime
) -> JsonObject:
    """Return the status, whatever it contains, with the condition set."""
    previous_conditions: list[JsonObject] = (status or {}).get("conditions") or []
    previous_condition: Mapping[str, Any] = next(
        (condition_entry for condition_entry in previous_conditions if condition_entry.get("type") == condition_update.type), {}
    )
    is_same_status = previous_condition.get("status") == condition_update.status
    condition = {
        **previous_condition,
        "type": condition_update.type,
        "status": condition_update.status,
        "reason": condition_update.reason,
        "message": truncate_message(condition_update.message),
        "lastTransitionTime": previous_condition["lastTransitionTime"] if is_same_status else format_timestamp(now),
        **({} if generation is None else {"observedGeneration": generation}),
    }
    conditions = (
        [condition if condition_entry is previous_condition else condition_entry for condition_entry in previous_conditions]
        if previous_condition
        else [*previous_conditions, condition]
    )
    return {**(status or {}), "conditions": conditions}
