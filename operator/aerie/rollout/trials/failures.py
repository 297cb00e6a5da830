"""Failed trials: which failures are recorded, and when their setting may be tried again.

    Regressed              the canary was measured, and rolled back: lifted when the traffic changes ─┐
    Failed                 it was never ready, crashed, failed its preflight, or ran on other         ─┴─► a pause that doubles
                           hardware than its control                                                       each time
    InsufficientCapacity   the cluster had no node or no quota for its pods ──────────────────────────► no trial until there is
                                                                                                        capacity

There is one record per setting, for one spec. With another spec_revision all records are dropped, and a new value of the
annotation aerie.dev/retry drops them too. Where changes of the drafter may be in place, they drop the records at the end of the
promotion: with another acceptance length and other weights in memory, each setting gets a new chance. Until then pods serve with
the drafter of the records, and a rollback keeps these.

There is capacity again when a trial would need fewer pods than the one that found none, or when that number of pods is ready.

Guarantee: pure. Not guaranteed: that new capacity is noticed where no pod of the resource uses it; the annotation is for that.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from datetime import datetime, timedelta

from aerie.api import SpeculativeDeployment
from aerie.api.status import (
    MAX_TRIAL_FAILURES,
    AnalysisStatus,
    RolloutOutcome,
    SpeculationStatus,
    Trial,
    TrialFailure,
    TrialFailureReason,
    TrialResult,
)
from aerie.engine.speculation import describe_setting
from aerie.rollout.capacity.replica_counts import Capacity
from aerie.rollout.conditions import truncate_message
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import read_status_setting
from aerie.tuning.decision.policy import backoff_factor

COOLDOWNS_AFTER_ROLLBACK = 4
"""Number of cooldowns after a trial that was rolled back or failed."""


def compute_retry_time(failure: TrialFailure, cooldown: timedelta, interval: timedelta) -> datetime:
    """Return when the setting may be tried again."""
    pause = COOLDOWNS_AFTER_ROLLBACK * backoff_factor(failure.failure_count) * max(cooldown, interval)
    return failure.last_completion_time + pause


def classify_failure(
    result: TrialResult, outcome: RolloutOutcome | None, analysis: AnalysisStatus | None
) -> TrialFailureReason | None:
    """Return why a trial counts as failed; None where it does not."""
    if result == "Inconclusive" and analysis is not None and analysis.hardware_mismatch:
        return "Failed"
    if result not in ("RolledBack", "Failed"):
        return None
    if outcome is not None and outcome.retry_time is not None:
        return "InsufficientCapacity"
    measured = analysis is not None and analysis.verdict == "Rollback"
    return "Regressed" if result == "RolledBack" and measured else "Failed"


def build_failure_update(
    speculation_status: SpeculationStatus,
    trial: Trial,
    reason: TrialFailureReason | None,
    message: str,
    resource: SpeculativeDeployment,
    now: datetime,
) -> dict[str, object]:
    """Return the fields of the status after this trial has ended: with its failure, or without any failure of its setting."""
    other_failures = [record for record in speculation_status.failures if record.setting != trial.setting]
    if reason is None:
        return {"failures": other_failures, "consecutive_failures": None}
    previous_failure = next(
        (record for record in speculation_status.failures if record.setting == trial.setting and record.reason == reason), None
    )
    failure = TrialFailure(
        setting=trial.setting,
        reason=reason,
        message=truncate_message(message),
        failure_count=1 + (previous_failure.failure_count if previous_failure is not None else 0),
        spec_revision=trial.spec_revision,
        last_start_time=trial.start_time,
        last_completion_time=now,
        required_pods=_count_trial_pods(resource) if reason == "InsufficientCapacity" else None,
    )
    failed = {
        "Failed": 1 + (speculation_status.consecutive_failures or 0),
        "Regressed": None,
        "InsufficientCapacity": speculation_status.consecutive_failures,
    }[reason]
    return {"failures": [failure, *other_failures][:MAX_TRIAL_FAILURES], "consecutive_failures": failed}


def filter_active_failures(
    failures: Iterable[TrialFailure], snapshot: Snapshot, spec_revisions: Container[str], *, retry_requested: bool
) -> list[TrialFailure]:
    """Return the failures that still count.

    Args:
        spec_revisions: those whose records hold (`EffectiveSetting.specs`).
        retry_requested: a user has requested a retry.
    """
    return [
        failure
        for failure in failures
        if failure.spec_revision in spec_revisions and not retry_requested and not _has_capacity_again(snapshot, failure)
    ]


def find_capacity_obstacle(speculation_status: SpeculationStatus, snapshot: Snapshot, spec_revisions: Container[str]) -> str:
    """Return that the cluster has no capacity for a trial, and how to fix that; empty where no failure shows it."""
    failure = next(
        (
            failure
            for failure in filter_active_failures(speculation_status.failures, snapshot, spec_revisions, retry_requested=False)
            if failure.reason == "InsufficientCapacity"
        ),
        None,
    )
    if failure is None:
        return ""
    extra_pods = _count_trial_pods(snapshot.resource) - snapshot.resource.spec.replicas
    return (
        f"The cluster has no capacity for the {extra_pods} pods on top of spec.replicas that a trial needs. The last one was of "
        f"{describe_setting(read_status_setting(failure.setting))} ({failure.message.rstrip('.')}). "
        "No trial starts until there is capacity. Set spec.rollout.canary.capacity: Reuse, which needs no extra pods; or add "
        "nodes or raise the quota, and set the annotation aerie.dev/retry to a new value."
    )


def _count_trial_pods(resource: SpeculativeDeployment) -> int:
    """Return the number of pods of all arms during a trial."""
    spec = resource.spec
    return Capacity.from_spec(spec.replicas, spec.rollout.canary).max_total_pods


def _has_capacity_again(snapshot: Snapshot, failure: TrialFailure) -> bool:
    if failure.reason != "InsufficientCapacity" or failure.required_pods is None:
        return False
    return (
        _count_trial_pods(snapshot.resource) < failure.required_pods
        or sum(map(pod_failures.is_pod_ready, snapshot.cluster.pods)) >= failure.required_pods
    )
