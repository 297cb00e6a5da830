"""Reasons of the conditions and of the events: the words by which users and their programs tell them apart.

Guarantee: no other reason reaches a condition or an event, because mypy checks each of them against these types. A test checks
that docs/reference/conditions.md explains every one, and that the operator uses every one.

A status that was read may have a reason of another release, so `aerie.api.status.Condition.reason` is a string.
"""

from __future__ import annotations

from typing import Literal

PodFailureReason = Literal[
    "CrashLoopBackOff",
    "ImagePullBackOff",
    "CreateContainerError",
    "PodFailed",
    "FailedCreate",
    "QuotaExceeded",
    "Unschedulable",
    "NotReady",
    "Starting",
]
"""Why a pod is not ready, or was never created."""
PreflightReason = Literal[
    "Preflight", "Passed", "PreflightAccepted", "PreflightWarned", "PreflightFailed", "PreflightError", "Skipped", "InvalidSpec"
]
"""State of preflight. While its Job has no pod, the condition has a `PodFailureReason` instead."""
ProgressingReason = Literal[
    "Analyzing",
    "AwaitingApproval",
    "Complete",
    "Evaluating",
    "InconclusiveAnalysis",
    "InPlaceImpossible",
    "Monitoring",
    "Paused",
    "ProgressDeadlineExceeded",
    "Promoting",
    "Queued",
    "Ramping",
    "RolledBack",
    "RollingBack",
    "ScaledToZero",
    "Staging",
    "Starting",
    "Verifying",
    "WarmingUp",
]
"""State of the rollout: the phase while it is in progress, and how it ended. While pods fail, the condition has a
`PodFailureReason` instead, and before the start a `PreflightReason`."""
ReadyReason = Literal["AllPodsReady", "PodIsolated", "ScaledToZero"]
"""Why the pods serve as the spec requests. Otherwise the condition has the reason why they do not."""
DegradedReason = Literal[
    "AcceptanceRegression",
    "ApplyFailed",
    "AsExpected",
    "DraftsRejected",
    "GatewayNotResponding",
    "ListFailed",
    "ListForbidden",
    "MetricsUnavailable",
    "NameTaken",
    "RouteNotAccepted",
    "UnreadableSpec",
    "VersionSkew",
    "WrongDrafter",
]
"""Problem that needs action, or that there is none."""
TrialObstacle = Literal["Cooldown", "InsufficientCapacity", "Queued", "RolloutInProgress", "SettingRejected"]
"""Why a recommended trial does not begin."""
TunedReason = Literal[
    TrialObstacle,
    "CannotProbe",
    "ExplorationRecommended",
    "InsufficientData",
    "NoDrafts",
    "Off",
    "Optimal",
    "Recommended",
    "SettingVoid",
    "Trial",
]
"""State of tuning."""
SubscribedReason = Literal["Subscribed", "InvalidSubscription"]
"""State of the subscriptions to notifications by annotations."""
CaptureReason = Literal[
    "GatewayRequired",
    "ListFailed",
    "MirrorRejected",
    "NameTaken",
    "NotApplied",
    "NotRemoved",
    "RecorderNotReady",
    "Recording",
    "RouteNotAccepted",
    "ShadowEvaluation",
    "Starting",
]
"""Whether prompts are recorded, or why not."""
ConditionReason = Literal[
    PodFailureReason,
    PreflightReason,
    ProgressingReason,
    ReadyReason,
    DegradedReason,
    TunedReason,
    SubscribedReason,
    CaptureReason,
]
"""Reason of a condition, of whichever type."""
OutcomeReason = Literal["Promoted", "Superseded", "Failed", "Explored", "DrafterSelected"]
"""Result of a rollout, or the drafter that was selected: reasons of events alone."""
EventReason = Literal[ConditionReason, OutcomeReason]
"""Reason of an event: that of a condition that has changed, or an `OutcomeReason`."""
