"""What the condition Progressing says of a canary under way.

Guarantee: the sentence follows from the state and not from the clock, so that a status is not written because time has passed.
"""

from __future__ import annotations

from aerie.api import SpeculativeDeployment
from aerie.api.status import AnalysisStatus, CanaryArm
from aerie.rollout import pods
from aerie.rollout.capacity import Arms
from aerie.rollout.conditions import PROGRESSING, Finding
from aerie.rollout.fleet import Fleet

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
            share = rollout.canary.ramp[min(canary.step or 0, len(rollout.canary.ramp) - 1)]
            return f"the canary is accepted and gets {share} % of the traffic; {serving} of its pods serve"
        case "Promoting":
            return f"{serving} of {resource.spec.replicas} pods of revision {canary.revision} serve"
        case _:
            return analysis.reason if analysis else "the analysis has begun"
