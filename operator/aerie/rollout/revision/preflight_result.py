"""What preflight says of a revision, told by its Job, the Job's pods, and what was written down of them.

Guarantees: a verdict counts as soon as the container `preflight` has ended with one, whatever other containers of its pod do;
and once it was recorded (`Verdict.record`, kept in the revision's ConfigMap), it stays for as long as its Job does, with or
without the pod. A Job that gets no pod, or whose pod gets no node, image or container, waits, and the cluster's own words are
shown; it goes on by itself when the cause is gone. A Job that ends without a verdict, or runs for longer than `LONGEST`, is made
anew after a pause that doubles with each one, up to `LONGEST_PAUSE`. Pods of another Job say nothing, whatever their labels.
A Hub that says no is a refusal, and asked again after the same pauses.
spec.rollout.preflight is applied to the verdict here, and not in the Job, so that a change of it takes effect at once: findings
that are accepted, and modes Warn and Off, let the revision go on; what was accepted is in the message and in the record.
Not guaranteed: words about a pod that was refused for longer ago than Kubernetes keeps events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from aerie.api.rollout import PreflightSpec
from aerie.manifests import preflight_job
from aerie.rollout.conditions import PREFLIGHT_PASSED, ConditionStatus, ConditionUpdate
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot, is_owned_by

PREFLIGHT_INITIAL_RETRY_DELAY = timedelta(minutes=5)
"""After an error that is no verdict, such as a Hub that does not answer, the Job is made anew."""
PREFLIGHT_MAX_RETRY_DELAY = timedelta(hours=1)
PREFLIGHT_RUN_TIMEOUT = timedelta(minutes=30)
"""Time that the container may run: configs and headers are read in seconds, and a volume may hang."""
_INITIAL_POLL_INTERVAL, _POLL_INTERVAL = timedelta(seconds=10), timedelta(minutes=1)
"""Between two looks at why a Job has no pod: in its first minute, and later; and how long it may have none without a word."""
PREFLIGHT_SKIPPED_REASON = "Skipped"
_REPORTED_FAILURE_REASONS = frozenset({"Unschedulable", "ImagePull", "Config"})
"""Troubles of a pod that are worth more words than that the revision is looked at."""

PreflightState = Literal["Absent", "Running", "Passed", "Refused", "Error", "Skipped"]


@dataclass(frozen=True)
class PreflightResult:
    """The state of a revision's preflight."""

    state: PreflightState
    message: str
    reason: str = ""
    """In one word: what it waits for while it runs, or why it has passed all the same."""
    record: Mapping[str, Any] | None = None
    """What is to be kept in the revision's ConfigMap."""
    is_expired: bool = False
    """Whether the Job has failed to find a verdict long enough ago to be made anew."""
    requeue_after: timedelta | None = None
    """When to look again although nothing is heard."""

    @property
    def allows_start(self) -> bool:
        """Whether engines of the revision may be started."""
        return self.state in ("Passed", "Skipped")

    def build_condition(self, revision: str) -> ConditionUpdate:
        """As the condition PreflightPassed."""
        status: ConditionStatus = {"Passed": "True", "Refused": "False"}.get(self.state, "Unknown")  # type: ignore[assignment]
        message = self.message or f"revision {revision} is looked at"
        return ConditionUpdate(PREFLIGHT_PASSED, status, self.reason or _REASON_BY_STATE[self.state], message)


_OVERRIDE_FIELDS = ("mode", "accepted")
"""Fields of a record that are spec.rollout.preflight's, and not the Job's."""
_REASON_BY_STATE = {
    "Absent": "Preflight",
    "Running": "Preflight",
    "Passed": "Passed",
    "Refused": "PreflightRefused",
    "Error": "PreflightError",
    "Skipped": PREFLIGHT_SKIPPED_REASON,
}


def read_preflight_result(snapshot: Snapshot, revision: str, now: datetime) -> PreflightResult:
    """The verdict on the revision, as far as there is one, and as spec.rollout.preflight has it."""
    found, given = _read_job_result(snapshot, revision, now), snapshot.resource.spec.rollout.preflight
    if given.mode == "Off" and found.state != "Passed":
        looks = found.state in ("Running", "Error")
        words = "spec.rollout.preflight.mode is Off: nobody has looked whether the drafter fits target and engine"
        return PreflightResult("Skipped", words, record={"ok": None, **(found.record or {}), "mode": "Off"}, is_expired=looks)
    checks = [str(check) for check in (found.record or {}).get("checks") or []]
    ended = found.state == "Refused" or (found.state == "Error" and given.mode == "Warn")
    return _override_failure(found, given, checks) if ended and given.allows(checks) else found


def _override_failure(found: PreflightResult, given: PreflightSpec, checks: Sequence[str]) -> PreflightResult:
    """What preflight refuses, or could not find out, and goes on all the same."""
    if given.mode == "Warn":
        how, trouble = "spec.rollout.preflight.mode is Warn, so this is not held back", "Warned"
    else:
        how, trouble = f"accepted by spec.rollout.preflight.accept: {', '.join(checks)}", "Accepted"
    allowance = {"mode": "Warn"} if given.mode == "Warn" else {"accepted": list(checks)}
    return PreflightResult("Passed", f"{how}. {found.message}", trouble, record={**(found.record or {}), **allowance})


def _read_job_result(observed: Snapshot, revision: str, now: datetime) -> PreflightResult:
    """What the Job says."""
    name = preflight_job.preflight_job_name(observed.resource.metadata.name, revision)
    recorded = _read_recorded_result(observed, name)
    job = observed.child("Job", name)
    if job is None:
        return PreflightResult("Absent", "", record=recorded)
    uid = job["metadata"].get("uid")
    mine = sorted((pod for pod in observed.preflight_pods if is_owned_by(pod, uid)), key=_created_at, reverse=True)
    known = recorded if recorded and recorded.get("job") == uid else {}
    known = {key: value for key, value in known.items() if key not in _OVERRIDE_FIELDS}
    said = next((said for pod in mine if (said := _read_termination_message(pod))), {}) or known
    conditions = {c["type"]: c for c in (job.get("status") or {}).get("conditions") or [] if c["status"] == "True"}
    failed = conditions.get("Failed")
    if said.get("ok") is True or ("Complete" in conditions and said.get("ok") is not False):
        message = " ".join([str(said.get("summary") or "passed"), *(said.get("warned") or [])])
        return PreflightResult("Passed", message, record={**said, "job": uid})
    if said.get("ok") is False:
        advice = f"Correct the spec; or, where files have changed in their place, delete Job {name} to have it look again."
        message = " ".join([*(said.get("refused") or [str(said.get("summary"))]), advice])
        return PreflightResult("Refused", message, record={**said, "job": uid})
    hangs = _container_started_at(mine) if failed is None else None
    if failed is None and (hangs is None or now < hangs + PREFLIGHT_RUN_TIMEOUT):
        return _build_running_result(observed, job, mine, said, recorded, hangs, now)
    # One error of the same Job is counted once, however often it is looked at.
    tries = int(known.get("tries") or int((recorded or {}).get("tries") or 0) + 1)
    why, ended, pause = _describe_job_end(failed, hangs, tries)
    message = str(said.get("error") or _last_failure_message(mine) or why)
    left = ended + pause - now if ended is not None else None
    denied = bool(said.get("unavailable")) and ended is not None
    words = f"preflight could not be done, and is tried again: {message}"
    if denied and ended is not None:
        words = f"{message} It is tried again at {ended + pause:%H:%M:%S} UTC, or as soon as Job {name} is deleted."
    return PreflightResult(
        "Refused" if denied else "Error",
        words,
        record={"ok": None, "error": message, "job": uid, "tries": tries, **({"unavailable": True} if denied else {})},
        is_expired=left is not None and left <= timedelta(0),
        requeue_after=max(left, timedelta(0)) if left is not None else None,
    )


def _describe_job_end(
    failed: KubernetesObject | None, began: datetime | None, tries: int
) -> tuple[str, datetime | None, timedelta]:
    """Why a Job has no verdict, when it ended, and the pause before the next one."""
    pause = min(PREFLIGHT_INITIAL_RETRY_DELAY * 2 ** min(tries - 1, 10), PREFLIGHT_MAX_RETRY_DELAY)
    if failed is None:
        minutes = int(PREFLIGHT_RUN_TIMEOUT.total_seconds() // 60)
        why = f"it has run for more than {minutes} minutes: does a volume hang, or has another container of its pod not ended?"
        return why, began + PREFLIGHT_RUN_TIMEOUT if began is not None else None, pause
    moment = failed.get("lastTransitionTime")
    if failed.get("reason") == "DeadlineExceeded":
        pause = timedelta(0)  # it has waited for hours already
    return str(failed.get("message") or "no reason is given"), datetime.fromisoformat(moment) if moment else None, pause


def _build_running_result(
    observed: Snapshot,
    job: KubernetesObject,
    mine: Sequence[KubernetesObject],
    said: Mapping[str, Any],
    recorded: Mapping[str, Any] | None,
    began: datetime | None,
    now: datetime,
) -> PreflightResult:
    """No verdict yet: with what keeps it, where that is more than time."""
    name = job["metadata"]["name"]
    if not mine:
        since = job["metadata"].get("creationTimestamp")
        age = now - datetime.fromisoformat(since) if since is not None else timedelta(0)
        if age < _INITIAL_POLL_INTERVAL:  # its controller needs a moment
            return PreflightResult("Running", "", record=recorded, requeue_after=_INITIAL_POLL_INTERVAL)
        # Said without a reason too: only what would be written anew is read live, and the mirror has no events.
        words = f"Job {name} gets no pod, and Kubernetes tries again: {observed.job_creation_errors.get(name) or 'its events do not say why'}"
        return PreflightResult(
            "Running",
            words,
            "FailedCreate",
            recorded,
            requeue_after=_INITIAL_POLL_INTERVAL if age < _POLL_INTERVAL else _POLL_INTERVAL,
        )
    waits = next(
        (
            found
            for pod in mine
            if (found := pod_failures.read_pod_failure(pod, {})) is not None and found.reason in _REPORTED_FAILURE_REASONS
        ),
        None,
    )
    left = max(began + PREFLIGHT_RUN_TIMEOUT - now, timedelta(0)) if began is not None else None
    if waits is not None:
        return PreflightResult("Running", f"preflight waits: {waits.message}", waits.reason, recorded, requeue_after=left)
    if error := said.get("error") or _last_failure_message(mine):
        words = f"preflight could not be done, and is tried again: {error}"
        return PreflightResult("Running", words, "PreflightError", recorded, requeue_after=left)
    return PreflightResult("Running", "", record=recorded, requeue_after=left)


def find_jobs_without_pod(snapshot: Snapshot) -> list[KubernetesObject]:
    """Jobs under way that have no pod: their events tell why."""
    having = {
        reference.get("uid") for pod in snapshot.preflight_pods for reference in pod["metadata"].get("ownerReferences") or []
    }
    return [
        job
        for job in snapshot.children_of_kind("Job")
        if job["metadata"].get("uid") not in having
        and not any(c["status"] == "True" for c in (job.get("status") or {}).get("conditions") or [])
    ]


def _read_recorded_result(observed: Snapshot, name: str) -> dict[str, Any] | None:
    """What the revision's ConfigMap keeps of a verdict."""
    text = ((observed.child("ConfigMap", name) or {}).get("data") or {}).get(preflight_job.RESULT_KEY)
    return _parse_json_object(text)


def _read_termination_message(pod: KubernetesObject) -> dict[str, Any] | None:
    """The termination message of the pod's own container."""
    ended: Mapping[str, Any] = _container_state(pod).get("terminated") or {}
    return _parse_json_object(ended.get("message"))


def _parse_json_object(text: object) -> dict[str, Any] | None:
    try:
        read = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def _last_failure_message(mine: Sequence[KubernetesObject]) -> str:
    """How the latest pod that failed has ended, where its container could say nothing itself."""
    for pod in mine:
        status, ended = pod.get("status") or {}, _container_state(pod).get("terminated") or {}
        if ended.get("exitCode"):
            return f"its container ended with status {ended['exitCode']}" + (
                f" ({ended['reason']})" if ended.get("reason") else ""
            )
        if status.get("phase") == "Failed":
            return f"its pod failed: {status.get('message') or status.get('reason') or 'no reason is given'}"
    return ""


def _container_started_at(mine: Sequence[KubernetesObject]) -> datetime | None:
    """When the container of a pod that has not ended began to run."""
    for pod in mine:
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        state = _container_state(pod)
        moment = (state.get("running") or state.get("terminated") or {}).get("startedAt")
        if moment:
            return datetime.fromisoformat(moment)
    return None


def _container_state(pod: KubernetesObject) -> Mapping[str, Any]:
    """The state of the pod's own container."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return next((status.get("state") or {} for status in statuses if status.get("name") == preflight_job.PREFLIGHT_CONTAINER), {})


def _created_at(pod: KubernetesObject) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")
