"""What the preflight Job of a revision says.

The Job's own conditions tell whether it is over; its pod's termination message tells the verdict (`aerie preflight-job`): JSON
with `ok` (true, false, or null for what could not be checked), `summary`, and sentences under `refused` and `warned`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from aerie.resources import names, preflight
from aerie.rollout import pods
from aerie.rollout.conditions import PREFLIGHT_PASSED, Finding, Truth
from aerie.rollout.observed import Object, Observed, labels

AGAIN_AFTER = timedelta(minutes=5)
"""After an error that is no verdict, such as a Hub that does not answer, the Job is made anew."""

State = Literal["Absent", "Running", "Passed", "Refused", "Error"]


@dataclass(frozen=True)
class Verdict:
    """The state of a revision's preflight."""

    state: State
    message: str
    ended_at: datetime | None = None

    def finding(self, revision: str) -> Finding:
        """As the condition PreflightPassed."""
        status: Truth = {"Passed": "True", "Refused": "False"}.get(self.state, "Unknown")  # type: ignore[assignment]
        return Finding(PREFLIGHT_PASSED, status, _REASONS[self.state], self.message or f"revision {revision} is looked at")

    def over(self, now: datetime) -> bool:
        """Whether the Job has failed to find a verdict long enough ago to be made anew."""
        return self.state == "Error" and self.ended_at is not None and now >= self.ended_at + AGAIN_AFTER


_REASONS = {
    "Absent": "Preflight",
    "Running": "Preflight",
    "Passed": "Passed",
    "Refused": "PreflightRefused",
    "Error": "PreflightError",
}


def verdict_of(observed: Observed, revision: str) -> Verdict:
    """The verdict on the revision, as far as there is one."""
    name = preflight.name(observed.resource.metadata.name, revision)
    job = observed.child("Job", name)
    if job is None:
        return Verdict("Absent", "")
    conditions = {c["type"]: c for c in (job.get("status") or {}).get("conditions") or [] if c["status"] == "True"}
    told = _told(observed, revision)
    if "Complete" in conditions:
        warned = told.get("warned") or []
        return Verdict("Passed", " ".join([str(told.get("summary") or "passed"), *warned]))
    failed = conditions.get("Failed")
    if failed is None:
        return Verdict("Running", _hindrance(observed, revision))
    if told.get("ok") is False:
        advice = f"Correct the spec; or, where files have changed in their place, delete Job {name} to have it look again."
        return Verdict("Refused", " ".join([*(told.get("refused") or [str(told.get("summary"))]), advice]))
    message = str(told.get("error") or failed.get("message") or "no reason is given")
    ended = datetime.fromisoformat(failed["lastTransitionTime"]) if failed.get("lastTransitionTime") else None
    return Verdict("Error", f"preflight could not be done, and is tried again: {message}", ended)


def _hindrance(observed: Observed, revision: str) -> str:
    """What keeps the Job's pod from running, in the cluster's words; empty while nothing does that is known."""
    mine = preflight.labels(observed.resource.metadata.name, revision).items()
    alive = [pod for pod in observed.preflight_pods if mine <= labels(pod).items() and not pods.dead(pod)]
    trouble = pods.worst(alive, {})
    if trouble is None or trouble.waits:
        return ""
    return f"preflight of revision {revision} cannot run: {trouble.message}"


def _told(observed: Observed, revision: str) -> dict[str, Any]:
    """The termination message of the latest pod that left one."""
    mine = preflight.labels(observed.resource.metadata.name, revision)
    own = [pod for pod in observed.preflight_pods if mine[names.REVISION] == labels(pod).get(names.REVISION)]
    for pod in sorted(own, key=_created, reverse=True):
        for container in (pod.get("status") or {}).get("containerStatuses") or []:
            message = ((container.get("state") or {}).get("terminated") or {}).get("message")
            try:
                found = json.loads(message or "")
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return {}


def _created(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")
