"""Gates before the first pod of the desired revision: spec, rejection, capacity, preflight and a slot.

Guarantees: a closed gate starts no pod, and the condition Progressing names the reason. A canary that already has pods passes the
gates of capacity, preflight and slot. Not guaranteed: that an open gate stays open until the pods exist.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from aerie.api.status import Arm, Status
from aerie.rollout.canary.observation import read_manual_action
from aerie.rollout.conditions import PREFLIGHT_PASSED, PROGRESSING, ConditionUpdate
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression.context import ProgressionContext
from aerie.rollout.progression.progression import Progression
from aerie.rollout.progression.retry_request import read_retry_request
from aerie.rollout.progression.stable_revision import keep_stable_revision
from aerie.rollout.revision.desired import DesiredRevision


def report_invalid_spec(context: ProgressionContext) -> Progression | None:
    """Report a spec whose pods could not run."""
    problem = context.desired.problem
    if not problem:
        return None
    return replace(
        context.serving,
        phase="Failed",
        progressing=ConditionUpdate(PROGRESSING, "False", "InvalidSpec", problem),
        preflight_passed=ConditionUpdate(PREFLIGHT_PASSED, "False", "InvalidSpec", problem),
    )


def keep_stable_after_rejection(context: ProgressionContext) -> Progression | None:
    """Keep the stable revision while the desired one is rejected."""
    if context.serving.rejected_revision is None:
        return None
    return keep_stable_revision(context.serving, context.status)


def wait_for_capacity(context: ProgressionContext) -> Progression | None:
    """Keep the stable revision until the desired one, which the cluster had no resources for, is retried."""
    if context.canary_arm is not None:
        return None
    delay = _capacity_retry_delay(context.snapshot, context.desired, context.status, context.now)
    if delay is None:
        return None
    return replace(keep_stable_revision(context.serving, context.status), requeue_after=delay)


def wait_for_preflight(context: ProgressionContext) -> Progression | None:
    """Start no pods before preflight has passed."""
    if context.canary_arm is not None or context.preflight_result.allows_start:  # the record of a running canary may be lost
        return None
    has_failed = context.preflight_result.state == "Failed"
    preflight_condition = context.serving.preflight_passed
    condition = ConditionUpdate(
        PROGRESSING, "False" if has_failed else "True", preflight_condition.reason, preflight_condition.message
    )
    return replace(
        context.serving,
        phase="Failed" if has_failed else "Preflight",
        progressing=condition,
        needs_preflight_job=True,
        requeue_after=context.preflight_result.requeue_after,
    )


def wait_for_start_permission(context: ProgressionContext) -> Progression | None:
    """Start no canary while the concurrency limits are reached."""
    stable = context.stable
    if context.canary_arm is not None or stable is None or _may_start_canary(context.snapshot, context.desired, stable):
        return None
    return _wait_for_slot(context.serving, context.desired, context.snapshot.operator.start_permission.wait_reason)


def _capacity_retry_delay(snapshot: Snapshot, desired: DesiredRevision, status: Status, now: datetime) -> timedelta | None:
    """Return the time until the revision, for which the cluster had no resources, is retried; None when it may be."""
    last_outcome = status.rollout_history[0] if status.rollout_history else None
    if (
        last_outcome is None
        or last_outcome.revision != desired.revision
        or last_outcome.retry_time is None
        or now >= last_outcome.retry_time
    ):
        return None
    retry_request = read_retry_request(snapshot.resource)
    return None if retry_request is not None and retry_request != status.last_handled_retry else last_outcome.retry_time - now


def _may_start_canary(snapshot: Snapshot, desired: DesiredRevision, stable: Arm) -> bool:
    """Return whether the canary may start, however many others are in progress."""
    if (
        "Rollout" in snapshot.operator.start_permission.allowed_purposes or desired.trial is not None
    ):  # a trial already holds its slot
        return True
    is_promotion_requested = read_manual_action(snapshot.resource, desired.revision) == "promote"
    return is_promotion_requested or not snapshot.cluster.ready_pod_count(stable.revision)


def _wait_for_slot(serving: Progression, desired: DesiredRevision, wait_reason: str) -> Progression:
    """Return the progression in which preflight has passed and the canary has to wait."""
    message = f"Revision {desired.revision} passed preflight"
    if not wait_reason:  # the claim is not written yet, so its rank is unknown
        condition = ConditionUpdate(PROGRESSING, "True", "Preflight", f"{message}.")
        return replace(serving, phase="Preflight", progressing=condition, needs_preflight_job=True, claims_slot=True)
    condition = ConditionUpdate(PROGRESSING, "True", "Queued", f"{message} and is queued: {wait_reason}.")
    return replace(serving, phase="Queued", progressing=condition, needs_preflight_job=True, claims_slot=True)
