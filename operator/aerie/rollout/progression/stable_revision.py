"""The stable revision keeps serving: it is the desired one, or the desired one was rejected or waits for resources.

Guarantees: the stable revision has the replicas of the spec and all the traffic; the condition Progressing says why nothing else
is rolled out. Not guaranteed: that a stable revision exists; without one, another policy decides (first_revision.py).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from aerie.api.status import Status
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.conditions import PREFLIGHT_PASSED, PROGRESSING, ConditionUpdate
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.in_place.return_pods import plan_served_drafters
from aerie.rollout.in_place.transition import find_candidate
from aerie.rollout.progression.context import ProgressionContext
from aerie.rollout.progression.progression import Progression
from aerie.rollout.progression.retry_request import RETRY_ANNOTATION, read_rejected_revision
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.preflight_result import PreflightResult


def keep_serving(snapshot: Snapshot, desired: DesiredRevision, preflight_result: PreflightResult, now: datetime) -> Progression:
    """Return the progression that keeps the serving pods and their drafters, and reports the desired revision as rolled out."""
    resource = snapshot.resource
    status = resource.status or Status()
    canary_arm, stable = status.canary, status.stable
    rollout = status.in_place_rollout if stable is not None else None
    in_place = stable.in_place if stable is not None else None
    is_promoting = rollout is not None and rollout.phase == "Promoting"
    served = plan_served_drafters(snapshot, stable, rollout, now)
    serving = Progression(
        stable_revision=stable.revision if stable else None,
        phase="Ready",
        progressing=ConditionUpdate(PROGRESSING, "False", "Complete", f"Revision {desired.revision} is rolled out."),
        preflight_passed=preflight_result.build_condition(desired.revision),
        target_replicas=ArmReplicas(resource.spec.replicas),
        analysis=status.analysis,
        rejected_revision=read_rejected_revision(resource, desired),
        in_place=rollout,
        stable_in_place=in_place,
        expected_drafter=find_candidate(rollout) if rollout is not None and is_promoting else in_place,
        drafters=served.plans,
        drafter_problem=served.problem,
        requeue_after=served.requeue_after,
    )
    if preflight_result.state in ("Passed", "Failed") or desired.revision not in (
        serving.stable_revision,
        serving.served_revision,
        canary_arm.revision if canary_arm else None,
    ):
        return serving
    # It has pods, so it has passed, or preflight was skipped. The later fate of the Job says nothing about it.
    condition = ConditionUpdate(PREFLIGHT_PASSED, "True", "Passed", "Preflight passed before this revision was rolled out.")
    record = preflight_result.record or {}
    if record.get("mode") == "Off" and record.get("passed") is not True:
        condition = ConditionUpdate(
            PREFLIGHT_PASSED,
            "Unknown",
            "Skipped",
            "Preflight was skipped: this revision was rolled out with spec.rollout.preflight.mode: Off.",
        )
    return replace(serving, preflight_passed=condition)


def keep_desired_revision(context: ProgressionContext) -> Progression | None:
    """Keep the stable revision where the desired one is served."""
    return context.serving if context.desired.revision == context.serving.served_revision else None


def keep_stable_revision(serving: Progression, status: Status) -> Progression:
    """Return the progression in which the desired revision was rejected, or waits for resources, and the stable one keeps
    serving."""
    last_outcome = next(
        (outcome for outcome in status.rollout_history if serving.rejected_revision in (None, outcome.revision)), None
    )
    revision = serving.rejected_revision or (last_outcome.revision if last_outcome is not None else "")
    retry_message = (
        f"Revision {revision} is not retried until the spec changes or the annotation {RETRY_ANNOTATION} gets a new value."
    )
    if serving.rejected_revision is None and last_outcome is not None and last_outcome.retry_time is not None:
        retry_message = (
            f"Revision {revision} is retried at {last_outcome.retry_time:%H:%M:%S} UTC, or when the annotation "
            f"{RETRY_ANNOTATION} gets a new value."
        )
    message = f"{last_outcome.message} {retry_message}" if last_outcome else retry_message
    if last_outcome is not None and last_outcome.result == "Failed":
        condition = ConditionUpdate(PROGRESSING, "False", "ProgressDeadlineExceeded", message)
        return replace(serving, phase="Failed", progressing=condition)
    return replace(serving, phase="RolledBack", progressing=ConditionUpdate(PROGRESSING, "False", "RolledBack", message))
