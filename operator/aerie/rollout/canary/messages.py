"""What the condition Progressing says of a canary under way.

Guarantee: the sentence follows from the state and not from the clock, so that a status is not written because time has passed.
"""

from __future__ import annotations

from aerie.api import SpeculativeDeployment
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, PreviousArm
from aerie.rollout.canary.state_machine import RECHECK_DURATION, compute_retention_end
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.capacity.replica_counts import ArmReplicas, ramp_step_percent
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts import pod_failures as pods

PROMOTE_ANNOTATION, ROLLBACK_ANNOTATION = "aerie.dev/promote", "aerie.dev/rollback"
"""Annotations by which a person decides; the value is the canary's revision, so that a word is not taken for the next one."""


def build_progressing_condition(
    resource: SpeculativeDeployment,
    canary: CanaryArm,
    fleet: RolloutPods,
    arms: ArmReplicas,
    analysis: AnalysisStatus | None,
    pod_failure: pods.PodFailure | None,
) -> ConditionUpdate:
    said = build_progress_message(resource, canary, fleet, arms, analysis)
    if canary.phase in ("Starting", "Ramping", "Promoting") and pod_failure is not None:
        reason = canary.phase if pod_failure.is_transient else pod_failure.reason
        return ConditionUpdate(PROGRESSING, "True", reason, f"{said}: {pod_failure.message}")
    return ConditionUpdate(PROGRESSING, "False" if canary.phase == "Held" else "True", canary.phase, said)


def build_progress_message(
    resource: SpeculativeDeployment,
    canary: CanaryArm,
    fleet: RolloutPods,
    arms: ArmReplicas,
    analysis: AnalysisStatus | None,
) -> str:
    rollout, serving = resource.spec.rollout, fleet.canary.counts.ready
    match canary.phase:
        case "Starting":
            beside = f" and {fleet.control.counts.ready} of {arms.control} control" if arms.control else ""
            return f"{serving} of {arms.canary} canary{beside} pods serve ({canary.change}, revision {canary.revision})"
        case "WarmingUp":
            assert canary.ready_at is not None
            begins = canary.ready_at + rollout.analysis.warmup
            return f"canary and control are warming up; the analysis begins at {begins:%H:%M:%S} UTC"
        case "AwaitingApproval" | "Held":
            where = f"specdep {resource.metadata.name} --namespace {resource.metadata.namespace}"
            words = " or ".join(
                f"kubectl annotate --overwrite {where} {word}={canary.revision}"
                for word in (PROMOTE_ANNOTATION, ROLLBACK_ANNOTATION)
            )
            return f"{analysis.reason if analysis else ''} A person decides: {words}"
        case "Ramping":
            share = ramp_step_percent(rollout.canary.ramp, canary.step)
            return f"the canary is accepted and gets {share} % of the traffic; {serving} of its pods serve"
        case "Promoting":
            return f"{serving} of {resource.spec.replicas} pods of revision {canary.revision} serve"
        case _:
            return analysis.reason if analysis else "the analysis has begun"


def build_blocked_rollback_message(resource: SpeculativeDeployment, stable: Arm, canary: CanaryArm) -> str:
    """What a person can do where pods of the stable revision do not come back."""
    where = f"specdep {resource.metadata.name} --namespace {resource.metadata.namespace}"
    return (
        f"Pods of revision {stable.revision} have not served for spec.rollout.progressDeadline; should they never, write another "
        f"spec, which is taken up, or keep revision {canary.revision}: kubectl annotate --overwrite {where} "
        f"{PROMOTE_ANNOTATION}={canary.revision}"
    )


def build_retention_message(
    resource: SpeculativeDeployment,
    stable: Arm,
    previous: PreviousArm,
    analysis: AnalysisStatus | None,
    unready_pods: int = 0,
    crash_message: str = "",
) -> str:
    """What is going on while pods of the revision before stay. `needed`: so many promoted pods do not serve, and time is over.
    `suspicion`: that engines have ended, as a clause."""
    where = f"specdep {resource.metadata.name} --namespace {resource.metadata.namespace}"
    back = f"to go back to them at once: kubectl annotate --overwrite {where} {ROLLBACK_ANNOTATION}={stable.revision}"
    pods = "1 pod" if previous.replicas == 1 else f"{previous.replicas} pods"
    if previous.phase == "Rechecking":
        until = previous.since + RECHECK_DURATION
        why = analysis.reason if analysis else ""
        return f"{why} So {pods} of revision {previous.revision} get requests until {until:%H:%M:%S} UTC, to compare; {back}"
    if unready_pods:
        return (
            f"{unready_pods} pods of revision {stable.revision}, which is promoted, do not serve, so {pods} of revision "
            f"{previous.revision} stay until they do; {back}"
        )
    until = compute_retention_end(previous.since, resource.spec.rollout.canary, has_suspicious_crashes=bool(crash_message))
    why = f" ({crash_message})" if crash_message else ""
    return (
        f"revision {stable.revision} is promoted and has all requests; {pods} of revision {previous.revision} stay ready until "
        f"{until:%H:%M:%S} UTC{why}; {back}"
    )
