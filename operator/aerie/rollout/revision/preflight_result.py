"""Preflight result of a revision, read from its Job, the Job's pods, and the recorded result.

Guarantees: a result counts as soon as the container `preflight` has ended with one, whatever other containers of its pod do.
Once recorded (`PreflightResult.record`, in the revision's ConfigMap), it stays for as long as its Job does, with or without
the pod. A Job that gets no pod, or whose pod gets no node, image or container, waits, and Kubernetes' own message is shown; it
continues automatically when the cause is resolved. A Job that ends without a result, or runs for longer than
`PREFLIGHT_RUN_TIMEOUT`, is recreated after a delay that doubles each time, up to `PREFLIGHT_MAX_RETRY_DELAY`. Pods of another
Job do not count, whatever their labels. A Hub that denies access is a failure, and is retried after the same delays.

spec.rollout.preflight is applied to the result here, and not in the Job, so that a change of it takes effect immediately:
accepted findings, and modes Warn and Off, let the revision continue. The override is in the message and in the record.

Not guaranteed: the message about a pod that was rejected longer ago than Kubernetes keeps events.
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
from aerie.rollout.facts.snapshot import ClusterState, KubernetesObject, Snapshot, is_owned_by
from aerie.rollout.reasons import PodFailureReason, PreflightReason

PREFLIGHT_INITIAL_RETRY_DELAY = timedelta(minutes=5)
"""Delay after which the Job is recreated when it ended without a result, such as for a Hub that does not answer."""
PREFLIGHT_MAX_RETRY_DELAY = timedelta(hours=1)
PREFLIGHT_RUN_TIMEOUT = timedelta(minutes=30)
"""Time that the container may run: configs and headers are read in seconds, and a volume may hang."""
_INITIAL_POLL_INTERVAL, _POLL_INTERVAL = timedelta(seconds=10), timedelta(minutes=1)
"""Interval between checks why a Job has no pod, in its first minute and later. The first is also how long a missing pod is not
reported."""
_REPORTED_FAILURE_REASONS = frozenset[PodFailureReason]({"Unschedulable", "ImagePullBackOff", "CreateContainerError"})
"""Pod failures that are reported instead of the message that preflight is running."""

PreflightState = Literal["Absent", "Running", "Passed", "Failed", "Error", "Skipped"]


@dataclass(frozen=True)
class PreflightResult:
    """The state of a revision's preflight."""

    state: PreflightState
    message: str
    reason: PreflightReason | PodFailureReason | None = None
    """One word: what it waits for while it runs, or why it has passed in spite of findings."""
    record: Mapping[str, Any] | None = None
    """Record to keep in the revision's ConfigMap."""
    is_expired: bool = False
    """Whether the Job ended without a result long enough ago to be recreated."""
    requeue_after: timedelta | None = None
    """Delay until the next reconcile although no event arrives."""

    @property
    def allows_start(self) -> bool:
        """Whether engines of the revision may be started."""
        return self.state in ("Passed", "Skipped")

    def build_condition(self, revision: str) -> ConditionUpdate:
        """Return the condition PreflightPassed."""
        status: ConditionStatus = {"Passed": "True", "Failed": "False"}.get(self.state, "Unknown")  # type: ignore[assignment]
        message = self.message or f"Preflight is running for revision {revision}."
        return ConditionUpdate(PREFLIGHT_PASSED, status, self.reason or _REASON_BY_STATE[self.state], message)


_OVERRIDE_FIELDS = ("mode", "acceptedChecks")
"""Fields of a record that come from spec.rollout.preflight, and not from the Job."""
_REASON_BY_STATE: dict[PreflightState, PreflightReason] = {
    "Absent": "Preflight",
    "Running": "Preflight",
    "Passed": "Passed",
    "Failed": "PreflightFailed",
    "Error": "PreflightError",
    "Skipped": "Skipped",
}


def read_preflight_result(snapshot: Snapshot, revision: str, now: datetime) -> PreflightResult:
    """Return the result for the revision, as far as there is one, with spec.rollout.preflight applied."""
    result, preflight = _read_job_result(snapshot, revision, now), snapshot.resource.spec.rollout.preflight
    if preflight.mode == "Off" and result.state != "Passed":
        is_unfinished = result.state in ("Running", "Error")
        message = (
            "Preflight was skipped (spec.rollout.preflight.mode: Off): the drafter was not checked against target and engine."
        )
        return PreflightResult(
            "Skipped", message, record={"passed": None, **(result.record or {}), "mode": "Off"}, is_expired=is_unfinished
        )
    checks = [str(check) for check in (result.record or {}).get("failedChecks") or []]
    is_overridable = result.state == "Failed" or (result.state == "Error" and preflight.mode == "Warn")
    return _override_failure(result, preflight, checks) if is_overridable and preflight.allows(checks) else result


def _override_failure(result: PreflightResult, preflight: PreflightSpec, checks: Sequence[str]) -> PreflightResult:
    """Return the result of a failed or unfinished preflight in spite of which the revision continues."""
    reason: PreflightReason
    if preflight.mode == "Warn":
        override_message, reason = "Preflight failures only warn (spec.rollout.preflight.mode: Warn)", "PreflightWarned"
    else:
        override_message, reason = (
            f"Failed checks are accepted by spec.rollout.preflight.acceptedChecks: {', '.join(checks)}",
            "PreflightAccepted",
        )
    override = {"mode": "Warn"} if preflight.mode == "Warn" else {"acceptedChecks": list(checks)}
    return PreflightResult(
        "Passed", f"{override_message}. {result.message}", reason, record={**(result.record or {}), **override}
    )


def _read_job_result(snapshot: Snapshot, revision: str, now: datetime) -> PreflightResult:
    """Return the result of the Job."""
    name = preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision)
    recorded = _read_recorded_result(snapshot.cluster, name)
    job = snapshot.cluster.child("Job", name)
    if job is None:
        return PreflightResult("Absent", "", record=recorded)
    uid = job["metadata"].get("uid")
    job_pods = sorted((pod for pod in snapshot.cluster.preflight_pods if is_owned_by(pod, uid)), key=_created_at, reverse=True)
    job_record = recorded if recorded and recorded.get("job") == uid else {}
    earlier_report = {key: value for key, value in job_record.items() if key not in _OVERRIDE_FIELDS}
    report = next((pod_report for pod in job_pods if (pod_report := _read_termination_message(pod))), {}) or earlier_report
    conditions = {c["type"]: c for c in (job.get("status") or {}).get("conditions") or [] if c["status"] == "True"}
    failed = conditions.get("Failed")
    if report.get("passed") is True or ("Complete" in conditions and report.get("passed") is not False):
        message = " ".join([str(report.get("summary") or "Preflight passed."), *(report.get("warnings") or [])])
        return PreflightResult("Passed", message, record={**report, "job": uid})
    if report.get("passed") is False:
        advice = f"Correct the spec; or, if the files were changed in place, delete Job {name} to repeat preflight."
        message = " ".join([*(report.get("errors") or [str(report.get("summary"))]), advice])
        return PreflightResult("Failed", message, record={**report, "job": uid})
    started_at = _container_started_at(job_pods) if failed is None else None
    if failed is None and (started_at is None or now < started_at + PREFLIGHT_RUN_TIMEOUT):
        return _build_running_result(snapshot.cluster, job, job_pods, report, recorded, started_at, now)
    # One error of the same Job counts once, however often it is read.
    attempts = int(earlier_report.get("attempts") or int((recorded or {}).get("attempts") or 0) + 1)
    end_message, ended_at, retry_delay = _describe_job_end(failed, started_at, attempts)
    message = str(report.get("error") or _last_failure_message(job_pods) or end_message)
    remaining = ended_at + retry_delay - now if ended_at is not None else None
    is_access_denied = bool(report.get("hubRejected")) and ended_at is not None
    result_message = f"Preflight ended without a result and is retried: {message}"
    if is_access_denied and ended_at is not None:
        result_message = (
            f"{message} Preflight is retried at {ended_at + retry_delay:%H:%M:%S} UTC, or as soon as Job {name} is deleted."
        )
    return PreflightResult(
        "Failed" if is_access_denied else "Error",
        result_message,
        record={
            "passed": None,
            "error": message,
            "job": uid,
            "attempts": attempts,
            **({"hubRejected": True} if is_access_denied else {}),
        },
        is_expired=remaining is not None and remaining <= timedelta(0),
        requeue_after=max(remaining, timedelta(0)) if remaining is not None else None,
    )


def _describe_job_end(
    failed: KubernetesObject | None, started_at: datetime | None, attempts: int
) -> tuple[str, datetime | None, timedelta]:
    """Return why a Job has no result, when it ended, and the delay before the next one."""
    retry_delay = min(PREFLIGHT_INITIAL_RETRY_DELAY * 2 ** min(attempts - 1, 10), PREFLIGHT_MAX_RETRY_DELAY)
    if failed is None:
        minutes = int(PREFLIGHT_RUN_TIMEOUT.total_seconds() // 60)
        end_message = (
            f"it ran for more than {minutes} minutes; check for a hanging volume, "
            "or for another container of its pod that does not end"
        )
        return end_message, started_at + PREFLIGHT_RUN_TIMEOUT if started_at is not None else None, retry_delay
    failed_at = failed.get("lastTransitionTime")
    if failed.get("reason") == "DeadlineExceeded":
        retry_delay = timedelta(0)  # it has already waited for hours
    return (
        str(failed.get("message") or "no reason given"),
        datetime.fromisoformat(failed_at) if failed_at else None,
        retry_delay,
    )


def _build_running_result(
    cluster: ClusterState,
    job: KubernetesObject,
    job_pods: Sequence[KubernetesObject],
    report: Mapping[str, Any],
    recorded: Mapping[str, Any] | None,
    started_at: datetime | None,
    now: datetime,
) -> PreflightResult:
    """Return the result of a running Job, with the cause of its delay where that is more than time."""
    name = job["metadata"]["name"]
    if not job_pods:
        created_at = job["metadata"].get("creationTimestamp")
        age = now - datetime.fromisoformat(created_at) if created_at is not None else timedelta(0)
        if age < _INITIAL_POLL_INTERVAL:  # its controller needs a moment
            return PreflightResult("Running", "", record=recorded, requeue_after=_INITIAL_POLL_INTERVAL)
        # Reported without a cause too: only what would be rewritten is read live, and the informer cache has no events.
        cause = cluster.job_creation_errors.get(name) or "its events give no reason"
        message = f"Job {name} has no pod; Kubernetes retries: {cause}"
        return PreflightResult(
            "Running",
            message,
            "FailedCreate",
            recorded,
            requeue_after=_INITIAL_POLL_INTERVAL if age < _POLL_INTERVAL else _POLL_INTERVAL,
        )
    failure = next(
        (
            pod_failure
            for pod in job_pods
            if (pod_failure := pod_failures.read_pod_failure(pod, {})) is not None
            and pod_failure.reason in _REPORTED_FAILURE_REASONS
        ),
        None,
    )
    remaining = max(started_at + PREFLIGHT_RUN_TIMEOUT - now, timedelta(0)) if started_at is not None else None
    if failure is not None:
        return PreflightResult(
            "Running", f"Preflight is waiting: {failure.message}", failure.reason, recorded, requeue_after=remaining
        )
    if error := report.get("error") or _last_failure_message(job_pods):
        message = f"Preflight ended without a result and is retried: {error}"
        return PreflightResult("Running", message, "PreflightError", recorded, requeue_after=remaining)
    return PreflightResult("Running", "", record=recorded, requeue_after=remaining)


def find_jobs_without_pod(cluster: ClusterState) -> list[KubernetesObject]:
    """Return active Jobs that have no pod: their events contain the cause."""
    uids_with_pod = {
        reference.get("uid") for pod in cluster.preflight_pods for reference in pod["metadata"].get("ownerReferences") or []
    }
    return [
        job
        for job in cluster.children_of_kind("Job")
        if job["metadata"].get("uid") not in uids_with_pod
        and not any(condition["status"] == "True" for condition in (job.get("status") or {}).get("conditions") or [])
    ]


def _read_recorded_result(cluster: ClusterState, name: str) -> dict[str, Any] | None:
    """Return the result in the revision's ConfigMap."""
    text = ((cluster.child("ConfigMap", name) or {}).get("data") or {}).get(preflight_job.RESULT_KEY)
    return _parse_json_object(text)


def _read_termination_message(pod: KubernetesObject) -> dict[str, Any] | None:
    """Return the termination message of the pod's own container."""
    termination: Mapping[str, Any] = _container_state(pod).get("terminated") or {}
    return _parse_json_object(termination.get("message"))


def _parse_json_object(text: object) -> dict[str, Any] | None:
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _last_failure_message(job_pods: Sequence[KubernetesObject]) -> str:
    """Return how the latest failed pod has ended, where its container could not report anything itself."""
    for pod in job_pods:
        status, termination = pod.get("status") or {}, _container_state(pod).get("terminated") or {}
        if termination.get("exitCode"):
            return f"its container exited with status {termination['exitCode']}" + (
                f" ({termination['reason']})" if termination.get("reason") else ""
            )
        if status.get("phase") == "Failed":
            return f"its pod failed: {status.get('message') or status.get('reason') or 'no reason given'}"
    return ""


def _container_started_at(job_pods: Sequence[KubernetesObject]) -> datetime | None:
    """Return when the container of a pod that has not ended started."""
    for pod in job_pods:
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        state = _container_state(pod)
        started_at = (state.get("running") or state.get("terminated") or {}).get("startedAt")
        if started_at:
            return datetime.fromisoformat(started_at)
    return None


def _container_state(pod: KubernetesObject) -> Mapping[str, Any]:
    """Return the state of the pod's own container."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return next((status.get("state") or {} for status in statuses if status.get("name") == preflight_job.PREFLIGHT_CONTAINER), {})


def _created_at(pod: KubernetesObject) -> str:
    return str(pod["metadata"].get("creationTimestamp") or "")
