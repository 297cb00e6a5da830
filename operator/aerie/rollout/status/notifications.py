"""What a status tells of its rollouts that somebody outside of the cluster wants to hear, as CloudEvents 1.0.

    begun             a canary begins, or the first revision
    approval-wanted   it is accepted, and a person is asked (AwaitingApproval)
    held              it is undecided, and a person decides (Held)
    promoted, rolled-back, superseded, failed, explored
                      how it has ended; failed also: refused by preflight, invalid, a first revision that does not serve

Guarantee: a function of the status alone, with ids that follow from what is told and from nothing else: the same notice has the
same id whoever sends it, how often, and when. So whoever has missed something, an operator that has just begun too, can tell it
again, and receivers drop what they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from aerie.api import SpeculativeDeployment
from aerie.api.status import Outcome, Status

What = Literal["begun", "approval-wanted", "held", "promoted", "rolled-back", "superseded", "failed", "explored"]
PREFIX = "dev.aerie.rollout."
_ENDS: dict[str, What] = {
    "Promoted": "promoted",
    "RolledBack": "rolled-back",
    "Superseded": "superseded",
    "Failed": "failed",
    "Explored": "explored",
}


@dataclass(frozen=True)
class Notice:
    """One thing to be told."""

    id: str
    what: What
    at: datetime
    """When it happened, as far as the status says; that of what it follows from otherwise."""
    data: dict[str, Any]

    def event(self, source: str) -> dict[str, Any]:
        """In the JSON format of CloudEvents 1.0, structured mode."""
        return {
            "specversion": "1.0",
            "id": self.id,
            "source": source,
            "type": f"{PREFIX}{self.what}",
            "subject": f"{self.data['namespace']}/{self.data['name']}",
            "time": _moment(self.at),
            "datacontenttype": "application/json",
            "data": self.data,
        }


def notices(resource: SpeculativeDeployment, status: Status) -> Iterator[Notice]:
    """All that the status tells, the oldest first."""
    for outcome in reversed(status.history):
        yield _ended(resource, outcome)
    canary = status.canary
    said = {condition.type: condition for condition in status.conditions}
    progressing = said.get("Progressing")
    if canary is not None and canary.phase != "RollingBack":
        mine: dict[str, Any] = {"revision": canary.revision, "change": canary.change, "drafter": canary.drafter}
        mine |= {"against": status.stable.drafter if status.stable else None, "startedAt": _moment(canary.started_at)}
        yield _notice(resource, "begun", canary.revision, canary.started_at, canary.started_at, mine)
        open_ends: dict[str, What] = {"AwaitingApproval": "approval-wanted", "Held": "held"}
        what = open_ends.get(canary.phase, "failed" if status.phase == "Failed" else None)
        if what is not None and progressing is not None:
            told = mine | {"reason": progressing.message}
            yield _notice(resource, what, canary.revision, canary.started_at, progressing.last_transition_time, told)
    passed = said.get("PreflightPassed")
    if canary is None and status.phase == "Failed" and passed is not None and passed.status == "False":
        refused = {"generation": status.observed_generation, "reason": passed.message}
        when = passed.last_transition_time
        yield _notice(resource, "failed", f"generation-{status.observed_generation}", None, when, refused)


def _ended(resource: SpeculativeDeployment, outcome: Outcome) -> Notice:
    data = {
        "revision": outcome.revision,
        "change": outcome.change,
        "drafter": outcome.drafter,
        "against": outcome.against,
        "reason": outcome.reason,
        "startedAt": _moment(outcome.started_at),
        "endedAt": _moment(outcome.ended_at),
        "comparisons": [one.to_dict() for one in outcome.comparisons],
    }
    return _notice(resource, _ENDS[outcome.result], outcome.revision, outcome.started_at, outcome.ended_at, data)


def _notice(
    resource: SpeculativeDeployment, what: What, revision: str, began: datetime | None, at: datetime, data: dict[str, Any]
) -> Notice:
    metadata = resource.metadata
    whose = {"namespace": metadata.namespace, "name": metadata.name, "uid": metadata.uid, "phase": what}
    given = {key: value for key, value in data.items() if value not in (None, [])}
    parts = [str(metadata.uid), revision, *([f"{began.timestamp():.0f}"] if began else []), what]
    return Notice("/".join(parts), what, at, whose | given)


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
