"""Messages of the condition Progressing for a canary in progress and for post-promotion monitoring.

Guarantee: a message follows from the state and not from the clock, so that no status is written only because time has passed.
"""

from __future__ import annotations

from aerie.api import SpeculativeDeployment
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, PreviousArm
from aerie.rollout.canary.extension_request import EXTEND_ANNOTATION, read_extension_request
from aerie.rollout.canary.state_machine import VERIFICATION_DURATION, compute_retention_end
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.capacity.replica_counts import ArmReplicas, ramp_step_percent
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts.pod_failures import PodFailure

PROMOTE_ANNOTATION, ROLLBACK_ANNOTATION = "aerie.dev/promote", "aerie.dev/rollback"
"""Annotations by which a user decides. The value is the canary's revision, so that a request does not apply to the next
canary."""


def build_progressing_condition(
    resource: SpeculativeDeployment,
    canary: CanaryArm,
    fleet: RolloutPods,
    arms: ArmReplicas,
    analysis: AnalysisStatus | None,
    pod_failure: PodFailure | None,
) -> ConditionUpdate:
    message = build_progress_message(resource, canary, fleet, arms, analysis)
    if canary.phase in ("Starting", "Ramping", "Promoting") and pod_failure is not None:
        reason = canary.phase if pod_failure.is_transient else pod_failure.reason
        return ConditionUpdate(PROGRESSING, "True", reason, f"{message}: {pod_failure.message}")
    if canary.phase == "Held":
        return ConditionUpdate(PROGRESSING, "False", "InconclusiveAnalysis", message)
    return ConditionUpdate(PROGRESSING, "True", canary.phase, message)


def build_progress_message(
    resource: SpeculativeDeployment,
    canary: CanaryArm,
    fleet: RolloutPods,
    arms: ArmReplicas,
    analysis: AnalysisStatus | None,
) -> str:
    rollout, ready_pods = resource.spec.rollout, fleet.canary.counts.ready
    evaluation = describe_evaluation(canary)
    match canary.phase:
        case "Starting":
            control_part = f" and {fleet.control.counts.ready}/{arms.control} control" if arms.control else ""
            pods_text = f"{ready_pods}/{arms.canary} canary{control_part} pods ready"
            return f"{evaluation}Canary starting: {pods_text} ({canary.change}, revision {canary.revision})"
        case "Evaluating":
            explanation = analysis.message if analysis else "No pairs of answers have been counted yet."
            return f"Canary and control answer the same requests, and users are served by neither. {explanation}"
        case "WarmingUp":
            assert canary.ready_time is not None
            analysis_start = canary.ready_time + rollout.analysis.warmup_duration
            return f"{evaluation}Canary and control are warming up; the analysis starts at {analysis_start:%H:%M:%S} UTC."
        case "AwaitingApproval":
            return _build_decision_message(resource, canary, analysis)
        case "Held":
            return f"{_build_decision_message(resource, canary, analysis)}. {_build_extension_hint(resource, canary.revision)}"
        case "Analyzing" if canary.is_extended:
            explanation = f"{analysis.message} " if analysis else ""
            return (
                f"{explanation}The analysis is extended until {canary.extension_end_time:%Y-%m-%d %H:%M:%S} UTC, then it is Held."
            )
        case "Ramping":
            percent = ramp_step_percent(rollout.canary.step_weights, canary.step_index)
            step_count = max(1, len(rollout.canary.step_weights))
            step = f"ramp step {min((canary.step_index or 0) + 1, step_count)}/{step_count}"
            return (
                f"{evaluation}Canary approved; {step} at {percent} % of the traffic; {ready_pods}/{arms.canary} canary pods ready"
            )
        case "Promoting":
            return f"Promoting revision {canary.revision}: {ready_pods}/{resource.spec.replicas} pods ready"
        case _:
            return f"{evaluation}{analysis.message if analysis else 'Analysis started.'}"


def _build_decision_message(resource: SpeculativeDeployment, canary: CanaryArm, analysis: AnalysisStatus | None) -> str:
    explanation = f"{analysis.message} " if analysis else ""
    return f"{explanation}Clients are served by both arms. {build_waiting_message(resource, canary.revision)}"


def _build_extension_hint(resource: SpeculativeDeployment, revision: str) -> str:
    """Return how a user gets more evidence on a canary that is Held, or why the request is ignored, as a sentence."""
    if problem := read_extension_request(resource, revision).problem:
        return f"{problem}."
    return f"For more evidence: {build_command(resource, 'resume')} --for 30m (or the annotation {EXTEND_ANNOTATION})."


def build_waiting_message(resource: SpeculativeDeployment, revision: str) -> str:
    """Return how a user decides about a revision, as a sentence without a period."""
    annotations = f"{PROMOTE_ANNOTATION}={revision} or {ROLLBACK_ANNOTATION}={revision}"
    command = build_command(resource, "promote|rollback")
    return f"Waiting for manual promotion or rollback: {command} (or the annotation {annotations})"


def build_command(resource: SpeculativeDeployment, verb: str) -> str:
    """Return the command line of a user's decision."""
    return f"kubectl aerie {verb} {resource.metadata.name} -n {resource.metadata.namespace}"


def describe_evaluation(canary: CanaryArm) -> str:
    """Return the result of the canary's shadow evaluation as a sentence and a blank; empty without one."""
    evaluation = canary.evaluation
    if evaluation is None or evaluation.result is None:
        return ""
    if evaluation.result == "Accepted":
        return "Shadow evaluation: Accepted. "
    return f"Shadow evaluation: {evaluation.result} ({evaluation.message.rstrip('.')}). "


def build_blocked_rollback_message(resource: SpeculativeDeployment, stable: Arm, canary: CanaryArm) -> str:
    """Return what a user can do where pods of the stable revision do not become ready again."""
    return (
        f"Rollback blocked: pods of revision {stable.revision} have not been ready for spec.rollout.progressDeadline. "
        f"If they cannot become ready, change the spec, or keep revision {canary.revision}: "
        f"{build_command(resource, 'promote')} (or the annotation {PROMOTE_ANNOTATION}={canary.revision})"
    )


def build_retention_message(
    resource: SpeculativeDeployment,
    stable: Arm,
    previous: PreviousArm,
    analysis: AnalysisStatus | None,
    unready_pods: int = 0,
    crash_message: str = "",
) -> str:
    """Return the status of the post-promotion monitoring, while pods of the previous revision are retained.

    `unready_pods`: number of promoted pods that are not ready although the time is over. `crash_message`: that engines have
    ended, as a clause.
    """
    rollback_hint = (
        f"to roll back immediately: {build_command(resource, 'rollback')} (or the annotation "
        f"{ROLLBACK_ANNOTATION}={stable.revision})"
    )
    retained_pods = "1 pod" if previous.replicas == 1 else f"{previous.replicas} pods"
    if previous.phase == "Verifying":
        retention_end = previous.phase_start_time + VERIFICATION_DURATION
        explanation = analysis.message if analysis else ""
        return (
            f"{explanation} For comparison, {retained_pods} of previous revision {previous.revision} get requests until "
            f"{retention_end:%H:%M:%S} UTC; {rollback_hint}"
        )
    if unready_pods:
        return (
            f"Promoted revision {stable.revision} lacks {unready_pods} ready pods; {retained_pods} of previous revision "
            f"{previous.revision} retained until they are ready; {rollback_hint}"
        )
    retention_end = compute_retention_end(
        previous.phase_start_time, resource.spec.rollout.canary, has_suspicious_crashes=bool(crash_message)
    )
    explanation = f" ({crash_message})" if crash_message else ""
    return (
        f"Revision {stable.revision} is promoted and gets all requests; {retained_pods} of previous revision "
        f"{previous.revision} retained until {retention_end:%H:%M:%S} UTC{explanation}; {rollback_hint}"
    )
