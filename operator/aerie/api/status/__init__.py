"""The status of a resource: the state from which any replica of the operator continues, and what users read.

    in_place      a rollout in place, and the drafter that pods serve with after it
    arms          the pods of each revision, and the phases of a rollout
    user_request  who requested a promotion, a rollback or a retry
    analysis      how a canary compares with its control, and the outcomes of rollouts
    tuning        the speculation setting, its trials, and their savings
    status        conditions, and the status as a whole

The writers round metrics, so that a status changes when something happened and not because time passed.
"""

from aerie.api.status.analysis import AnalysisStatus, BlockedRollbackCause, MetricComparison, RolloutOutcome
from aerie.api.status.arms import (
    TRAFFIC_SHIFT_PHASES,
    Arm,
    CanaryArm,
    CanaryEvaluation,
    CanaryPhase,
    Phase,
    PreviousArm,
    QueueStatus,
    ReadinessProgress,
    RolloutPurpose,
    SettingStatus,
    TierStatus,
)
from aerie.api.status.in_place import (
    MAX_DRAFTER_FILES,
    DrafterLocation,
    EvaluationResult,
    InPlaceDrafter,
    InPlacePhase,
    InPlaceRollout,
    PendingOutcome,
    ShadowEvaluation,
    TrialPod,
)
from aerie.api.status.status import MAX_SELECTED_DRAFTERS, Condition, SelectedDrafter, Status
from aerie.api.status.tuning import (
    MAX_EXPLORATION_TIMES,
    MAX_TRIAL_FAILURES,
    MAX_TRIAL_RECORDS,
    AppliedSetting,
    PerformanceGain,
    SpeculationStatus,
    Trial,
    TrialFailure,
    TrialFailureReason,
    TrialRecord,
    TrialResult,
    TuningSavings,
)
from aerie.api.status.user_request import RequestedBy, UserRequest

__all__ = [
    "MAX_DRAFTER_FILES",
    "MAX_EXPLORATION_TIMES",
    "MAX_SELECTED_DRAFTERS",
    "MAX_TRIAL_FAILURES",
    "MAX_TRIAL_RECORDS",
    "TRAFFIC_SHIFT_PHASES",
    "AnalysisStatus",
    "AppliedSetting",
    "Arm",
    "BlockedRollbackCause",
    "CanaryArm",
    "CanaryEvaluation",
    "CanaryPhase",
    "Condition",
    "DrafterLocation",
    "EvaluationResult",
    "InPlaceDrafter",
    "InPlacePhase",
    "InPlaceRollout",
    "MetricComparison",
    "PendingOutcome",
    "PerformanceGain",
    "Phase",
    "PreviousArm",
    "QueueStatus",
    "ReadinessProgress",
    "RequestedBy",
    "RolloutOutcome",
    "RolloutPurpose",
    "SelectedDrafter",
    "SettingStatus",
    "ShadowEvaluation",
    "SpeculationStatus",
    "Status",
    "TierStatus",
    "Trial",
    "TrialFailure",
    "TrialFailureReason",
    "TrialPod",
    "TrialRecord",
    "TrialResult",
    "TuningSavings",
    "UserRequest",
]
