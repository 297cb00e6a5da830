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
from aerie.api.types.base import Json, write_time
from aerie.rollout.conditions import DEGRADED, Finding, shortened
from aerie.rollout.facts.snapshot import Observed

VERSION_SKEW = "VersionSkew"
UNREADABLE_SPEC = "UnreadableSpec"
_WAY_OUT = (
    "correct the field of the spec that is named here, or, where another release has written it, install the operator of that "
    "release or a later one"
)
CRUCIAL = frozenset({"Deployment", "Pod", "ConfigMap"})
"""Kinds without which nothing can be said of a rollout: of what pods there are, and of what they are to be."""


def unreadable(error: ResourceError) -> Finding:
    """Another release has written what this one does not know, or an older definition took what no release can read."""
    of_spec = bool(error.places) and all(place[:1] == ("spec",) for place in error.places)
    message = (
        f"this operator cannot read the resource and leaves its pods and Services as they are: {_WAY_OUT}. "
        f"{str(error).replace(chr(10), ' ')}"
    )
    return Finding(DEGRADED, "True", UNREADABLE_SPEC if of_spec else VERSION_SKEW, message)


def resting(observed: Observed) -> Finding | None:
    """Why the rollout of what serves is held; None where it is not."""
    if (found := observed.substitute) is not None:
        message = f"{found.fault} The rollout is held, and what serves is cared for: {found.instead}. To go on, {_WAY_OUT}"
        return Finding(DEGRADED, "True", UNREADABLE_SPEC, message)
    return unlisted(observed.unlisted, forbidden=observed.forbidden) if observed.unlisted else None


def unlisted(kinds: Mapping[str, str], *, forbidden: bool) -> Finding:
    """Kinds that cannot be listed, with a sentence on each. `forbidden`: all of them are refused."""
    message = f"{'; '.join(text for _, text in sorted(kinds.items()))}. What depends on them stays as it is"
    return Finding(DEGRADED, "True", "ListForbidden" if forbidden else "ListFailed", message)


def held(status: Json | None, finding: Finding, generation: int | None, now: datetime) -> Json:
    """The status, whatever it says, with the finding as a condition."""
    before: list[Json] = (status or {}).get("conditions") or []
    last: Mapping[str, Any] = next((one for one in before if one.get("type") == finding.type), {})
    same = last.get("status") == finding.status
    condition = {
        **last,
        "type": finding.type,
        "status": finding.status,
        "reason": finding.reason,
        "message": shortened(finding.message),
        "lastTransitionTime": last["lastTransitionTime"] if same else write_time(now),
        **({} if generation is None else {"observedGeneration": generation}),
    }
    conditions = [condition if one is last else one for one in before] if last else [*before, condition]
    return {**(status or {}), "conditions": conditions}
