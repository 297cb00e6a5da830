"""The first revision of a resource, and any revision at zero replicas: it becomes stable without a comparison.

    pods start ─┬─ all ready ────────────────────► stable
                ├─ some ready at the deadline ───► stable
                └─ none ready at the deadline ───► Failed; the pods stay

Guarantees: pods of a failed first revision stay, because they show the problem. Not guaranteed: that the revision is any
better than another, because there is none to compare it with.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from aerie.api.status import CanaryArm, Status
from aerie.rollout.canary.transition import build_outcome
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression.context import ProgressionContext
from aerie.rollout.progression.progression import Progression
from aerie.rollout.revision.desired import DesiredRevision


def start_first_revision(context: ProgressionContext) -> Progression | None:
    """Start the pods of the first revision."""
    if context.stable is not None:
        return None
    serving = replace(context.serving, needs_preflight_job=True)
    return _progress_first_revision(context.snapshot, context.desired, serving, context.canary_arm, context.now)


def adopt_without_pods(context: ProgressionContext) -> Progression | None:
    """Make the desired revision stable without a canary where spec.replicas is 0."""
    if context.replicas != 0 or context.canary_arm is not None:
        return None
    return _adopt_as_stable(context.serving, context.desired, None, context.status, "spec.replicas is 0", context.now)


def _progress_first_revision(
    snapshot: Snapshot, desired: DesiredRevision, serving: Progression, canary_arm: CanaryArm | None, now: datetime
) -> Progression:
    """Start pods of the first revision; it is stable when all are ready, or some once its deadline has passed."""
    resource = snapshot.resource
    spec, status = resource.spec, resource.status or Status()
    live_pods = snapshot.cluster.live_pods(desired.revision)
    ready_pods = sum(pod_failures.is_pod_ready(pod) for pod in live_pods)
    if canary_arm is not None and ready_pods >= spec.replicas:
        reason = f"{ready_pods}/{spec.replicas} pods ready" if spec.replicas else "spec.replicas is 0"
        return _adopt_as_stable(serving, desired, canary_arm, status, reason, now)
    arm = canary_arm or CanaryArm(**dict(desired.arm), change=desired.describe_change(status), start_time=now)
    failure = snapshot.cluster.pod_failure(desired.revision)
    message = f"First revision {desired.revision}: {ready_pods}/{spec.replicas} pods ready" + (
        f": {failure.message}" if failure else ""
    )
    target_replicas = ArmReplicas(0, spec.replicas)
    remaining = arm.start_time + spec.rollout.progress_deadline - now
    if remaining > timedelta(0):
        condition = ConditionUpdate(PROGRESSING, "True", failure.reason if failure else "Starting", message)
        return replace(
            serving, phase="Starting", progressing=condition, canary=arm, target_replicas=target_replicas, requeue_after=remaining
        )
    if canary_arm is not None and ready_pods:
        reason = f"{ready_pods}/{spec.replicas} pods ready after spec.rollout.progressDeadline"
        return _adopt_as_stable(serving, desired, canary_arm, status, reason, now)
    # Its pods stay: nothing else serves, and they show the problem.
    late_message = (
        f"{message.rstrip('.')}. spec.rollout.progressDeadline has passed; its pods stay, because they show the problem."
    )
    condition = ConditionUpdate(PROGRESSING, "False", "ProgressDeadlineExceeded", late_message)
    return replace(serving, phase="Failed", progressing=condition, canary=arm, target_replicas=target_replicas)


def _adopt_as_stable(
    serving: Progression, desired: DesiredRevision, canary_arm: CanaryArm | None, status: Status, reason: str, now: datetime
) -> Progression:
    """Return the progression in which the revision is stable without a comparison."""
    arm = canary_arm or CanaryArm(**dict(desired.arm), change=desired.describe_change(status), start_time=now)
    outcome = build_outcome(arm, "Promoted", f"Revision {desired.revision} is stable: {reason}.", status, None, now)
    return replace(
        serving, stable_revision=desired.revision, outcome=outcome, stable_in_place=None, expected_drafter=None, drafters=()
    )
