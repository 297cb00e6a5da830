"""What the condition Progressing says of a canary under way.

Guarantee: the sentence follows from the state and not from the clock, so that a status is not written because time has passed.
"""

from __future__ import annotations

from aerie.api import SpeculativeDeployment
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, PreviousArm
from aerie.rollout import pods
from aerie.rollout.capacity import Arms, ramp_share
from aerie.rollout.conditions import PROGRESSING, Finding
from aerie.rollout.fleet import Fleet
from aerie.rollout.machine import RECHECK, watched_until

PROMOTE, ROLL_BACK = "aerie.dev/promote", "aerie.dev/rollback"
"""Annotations by which a person decides; the value is the canary's revision, so that a word is not taken for the next one."""


def finding_of(
    resource: SpeculativeDeployment,
    canary: CanaryArm,
    fleet: Fleet,
    arms: Arms,
    analysis: AnalysisStatus | None,
    trouble: pods.Trouble | None,
) -> Finding:
    said = told(resource, canary, fleet, arms, analysis)
    if canary.phase in ("Starting", "Ramping", "Promoting") and trouble is not None:
        reason = canary.phase if trouble.waits else trouble.reason
        return Finding(PROGRESSING, "True", reason, f"{said}: {trouble.message}")
    return Finding(PROGRESSING, "False" if canary.phase == "Held" else "True", canary.phase, said)


def told(
    resource: SpeculativeDeployment,
    canary: CanaryArm,
    fleet: Fleet,
    arms: Arms,
    analysis: AnalysisStatus | None,
) -> str:
    rollout, serving = resource.spec.rollout, fleet.canary.pods.serving
    match canary.phase:
        case "Starting":
            beside = f" and {fleet.control.pods.serving} of {arms.control} control" if arms.control else ""
            return f"{serving} of {arms.canary} canary{beside} pods serve ({canary.change}, revision {canary.revision})"
        case "WarmingUp":
            assert canary.ready_at is not None
            begins = canary.ready_at + rollout.analysis.warmup
            return f"canary and control are warming up; the analysis begins at {begins:%H:%M:%S} UTC"
        case "AwaitingApproval" | "Held":
            where = f"specdep {resource.metadata.name} --namespace {resource.metadata.namespace}"
            words = " or ".join(f"kubectl annotate --overwrite {where} {word}={canary.revision}" for word in (PROMOTE, ROLL_BACK))
            return f"{analysis.reason if analysis else ''} A person decides: {words}"
        case "Ramping":
            share = ramp_share(rollout.canary.ramp, canary.step)
            return f"the canary is accepted and gets {share} % of the traffic; {serving} of its pods serve"
        case "Promoting":
            return f"{serving} of {resource.spec.replicas} pods of revision {canary.revision} serve"
        case _:
            return analysis.reason if analysis else "the analysis has begun"


def stuck(resource: SpeculativeDeployment, stable: Arm, canary: CanaryArm) -> str:
    """What a person can do where pods of the stable revision do not come back."""
    where = f"specdep {resource.metadata.name} --namespace {resource.metadata.namespace}"
    return (
        f"Pods of revision {stable.revision} have not served for spec.rollout.progressDeadline; should they never, write another "
        f"spec, which is taken up, or keep revision {canary.revision}: kubectl annotate --overwrite {where} "
        f"{PROMOTE}={canary.revision}"
    )


def kept(
    resource: SpeculativeDeployment,
    stable: Arm,
    previous: PreviousArm,
    analysis: AnalysisStatus | None,
    needed: int = 0,
    suspicion: str = "",
) -> str:
    """What is going on while pods of the revision before stay. `needed`: so many promoted pods do not serve, and time is over.
    `suspicion`: that engines have ended, as a clause."""
    where = f"specdep {resource.metadata.name} --namespace {resource.metadata.namespace}"
    back = f"to go back to them at once: kubectl annotate --overwrite {where} {ROLL_BACK}={stable.revision}"
    pods = "1 pod" if previous.replicas == 1 else f"{previous.replicas} pods"
    if previous.phase == "Rechecking":
        until = previous.since + RECHECK
        why = analysis.reason if analysis else ""
        return f"{why} So {pods} of revision {previous.revision} get requests until {until:%H:%M:%S} UTC, to compare; {back}"
    if needed:
        return (
            f"{needed} pods of revision {stable.revision}, which is promoted, do not serve, so {pods} of revision "
            f"{previous.revision} stay until they do; {back}"
        )
    until = watched_until(previous.since, resource.spec.rollout.canary, suspicious=bool(suspicion))
    why = f" ({suspicion})" if suspicion else ""
    return (
        f"revision {stable.revision} is promoted and has all requests; {pods} of revision {previous.revision} stay ready until "
        f"{until:%H:%M:%S} UTC{why}; {back}"
    )
