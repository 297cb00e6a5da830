"""What Aerie writes about a resource: the state from which any replica of the operator goes on, and what a person reads.

    arms       the pods of each revision, and the phases of a rollout
    analysis   how a canary compares with its control, and how rollouts have ended
    tuning     the speculation setting, its trials, and what they have brought
    whole      conditions, and the status of all these

Figures are rounded by whoever writes them, so that a status changes when something happened and not because time passed.
"""

from aerie.api.status.analysis import AnalysisStatus, Cause, Comparison, Outcome
from aerie.api.status.arms import (
    GROWING_PHASES,
    Arm,
    CanaryArm,
    CanaryPhase,
    Phase,
    PreviousArm,
    Purpose,
    Queued,
    Setting,
    Tier,
    Waiting,
)
from aerie.api.status.status import MOST_CHOICES, ChosenDrafter, Condition, Status
from aerie.api.status.tuning import (
    MOST_EXPLORED,
    MOST_FAILURES,
    MOST_TRIED,
    Balance,
    Chosen,
    Ended,
    Failure,
    FailureReason,
    Gain,
    SpeculationStatus,
    Trial,
    Tried,
)

__all__ = [
    "MOST_CHOICES",
    "MOST_EXPLORED",
    "MOST_FAILURES",
    "MOST_TRIED",
    "AnalysisStatus",
    "Arm",
    "Balance",
    "CanaryArm",
    "Cause",
    "Chosen",
    "ChosenDrafter",
    "Comparison",
    "Condition",
    "Ended",
    "Failure",
    "FailureReason",
    "Gain",
    "Outcome",
    "CanaryPhase",
    "GROWING_PHASES",
    "Phase",
    "PreviousArm",
    "Purpose",
    "Queued",
    "Setting",
    "SpeculationStatus",
    "Status",
    "Tier",
    "Trial",
    "Tried",
    "Waiting",
]
