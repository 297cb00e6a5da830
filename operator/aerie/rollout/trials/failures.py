"""What is remembered of trials that failed, and when their setting may be tried again.

    Worse     the canary was measured, and rolled back: lifted by other traffic ─┐
    Failed    it never served, crashed, was refused by preflight,               ─┴─► a pause that doubles with each time
              or ran on other hardware than its control
    NoRoom    the cluster had no node or no quota for its pods ──────────────────► nothing is tried until there is room

One record per setting, for one spec: with another basis all are forgotten, and a new value of the annotation aerie.dev/retry
forgets them too. There is room again when a trial would need fewer pods than the one that found none, or as many pods serve.

Guarantee: pure. Not guaranteed: that room which appears is noticed where no pod of the resource takes it; the annotation is for
that.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

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
"""Cooldowns after a trial that was taken back or failed."""


def compute_retry_time(failure: TrialFailure, cooldown: timedelta, interval: timedelta) -> datetime:
    """From when on the setting may be tried again."""
    return failure.last_at + COOLDOWNS_AFTER_ROLLBACK * backoff_factor(failure.times) * max(cooldown, interval)


def classify_failure(
    result: TrialResult, outcome: RolloutOutcome | None, analysis: AnalysisStatus | None
) -> TrialFailureReason | None:
    """Why a trial counts as failed; None where it does not."""
    if result == "Undecided" and analysis is not None and analysis.unlike:
        return "Failed"
    if result not in ("RolledBack", "Failed"):
        return None
    if outcome is not None and outcome.retry_at is not None:
        return "NoRoom"
    measured = analysis is not None and analysis.verdict == "Rollback"
    return "Worse" if result == "RolledBack" and measured else "Failed"


def build_failure_update(
    speculation_status: SpeculationStatus,
    trial: Trial,
    reason: TrialFailureReason | None,
    message: str,
    snapshot: Snapshot,
    now: datetime,
) -> dict[str, object]:
    """The fields of the status after this trial has ended: with its failure, or without any of its setting."""
    others = [one for one in speculation_status.failures if one.setting != trial.setting]
    if reason is None:
        return {"failures": others, "failed": None}
    before = next((one for one in speculation_status.failures if one.setting == trial.setting and one.reason == reason), None)
    failure = TrialFailure(
        setting=trial.setting,
        reason=reason,
        message=truncate_message(message),
        times=1 + (before.times if before is not None else 0),
        basis=trial.basis,
        began_at=trial.started_at,
        last_at=now,
        pods=_count_trial_pods(snapshot) if reason == "NoRoom" else None,
    )
    failed = {"Failed": 1 + (speculation_status.failed or 0), "Worse": None, "NoRoom": speculation_status.failed}[reason]
    return {"failures": [failure, *others][:MAX_TRIAL_FAILURES], "failed": failed}


def filter_active_failures(
    failures: Iterable[TrialFailure], snapshot: Snapshot, basis: str, *, retry_requested: bool
) -> list[TrialFailure]:
    """Those that still count. `again`: a person has asked to try again."""
    return [one for one in failures if one.basis == basis and not retry_requested and not _has_capacity_again(snapshot, one)]


def find_capacity_obstacle(speculation_status: SpeculationStatus, snapshot: Snapshot, basis: str) -> str:
    """That the cluster has no room for a trial, with the ways out; empty where nothing says so."""
    found = next(
        (
            one
            for one in filter_active_failures(speculation_status.failures, snapshot, basis, retry_requested=False)
            if one.reason == "NoRoom"
        ),
        None,
    )
    if found is None:
        return ""
    more = _count_trial_pods(snapshot) - snapshot.resource.spec.replicas
    return (
        f"the cluster had no room for the {more} pods on top of spec.replicas that a trial needs; it was of "
        f"{describe_setting(read_status_setting(found.setting))} ({found.message.rstrip('.')}). Nothing is tried until there is room: write "
        "spec.rollout.canary.capacity: Reuse, which needs none; or add nodes or raise the quota, and annotate the resource with "
        "a new value of aerie.dev/retry"
    )


def _count_trial_pods(observed: Snapshot) -> int:
    """Pods of all arms while a trial is under way."""
    spec = observed.resource.spec
    return Capacity.from_spec(spec.replicas, spec.rollout.canary).max_total_pods


def _has_capacity_again(observed: Snapshot, failure: TrialFailure) -> bool:
    if failure.reason != "NoRoom" or failure.pods is None:
        return False
    return _count_trial_pods(observed) < failure.pods or sum(map(pod_failures.is_pod_ready, observed.pods)) >= failure.pods
