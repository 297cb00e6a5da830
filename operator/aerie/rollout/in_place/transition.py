"""Result of one reconcile of a rollout in place: its state, the calls of its pods, status and outcome.

Guarantees: pure. The rollout and `AnalysisStatus` of a transition contain all that must survive a crash. Not guaranteed: that a
call is carried out; every reconcile repeats what pods have not reported yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from aerie.api.status import AnalysisStatus, Arm, DrafterLocation, InPlaceDrafter, InPlaceRollout, RolloutOutcome
from aerie.rollout.conditions import ConditionUpdate, truncate_message
from aerie.rollout.plan import PodDrafterPlan


@dataclass(frozen=True)
class InPlaceTransition:
    """State of the rollout after this reconcile."""

    rollout: InPlaceRollout | None
    """The rollout; None: it has ended."""
    progressing: ConditionUpdate
    analysis: AnalysisStatus | None
    stable_in_place: InPlaceDrafter | None
    """The drafter that the stable pods serve with, where it may not be that of their revision."""
    expected_drafter: InPlaceDrafter | None
    """The drafter that new pods come to, where it may not be that of their revision."""
    drafters: tuple[PodDrafterPlan, ...] = ()
    outcome: RolloutOutcome | None = None
    reference_acceptance_length: float | None = None
    """Acceptance length that the drafter had in its trial, where it is promoted and enough was counted."""
    obstacle: str = ""
    """Why the rollout cannot be in place, found before anything has changed; empty if it can."""
    requeue_after: timedelta | None = None


def build_in_place_outcome(
    rollout: InPlaceRollout,
    result: Literal["Promoted", "RolledBack", "Superseded", "Failed"],
    message: str,
    stable: Arm,
    analysis: AnalysisStatus | None,
    now: datetime,
) -> RolloutOutcome:
    """Return how a rollout has ended, with its comparisons. `stable`: the arm as it was before."""
    return RolloutOutcome(
        revision=rollout.revision,
        change=rollout.change,
        result=result,
        message=truncate_message(message),
        start_time=rollout.start_time,
        completion_time=now,
        drafter=rollout.drafter,
        replaced_drafter=stable.drafter,
        comparisons=analysis.comparisons if analysis is not None and rollout.trial_start_time is not None else [],
    )


def find_candidate(rollout: InPlaceRollout) -> InPlaceDrafter | None:
    """Return the drafter that is rolled out; None while its files are unknown."""
    if rollout.files is None or rollout.digest is None:
        return None
    return InPlaceDrafter(
        revision=rollout.revision,
        drafter=rollout.drafter,
        digest=rollout.digest,
        files=rollout.files,
        location=rollout.location,
    )


def build_replaced_drafter(stable: Arm, location: DrafterLocation, digest: str, files: dict[str, str]) -> InPlaceDrafter:
    """Return the drafter that pods serve with, where none was promoted in place."""
    return InPlaceDrafter(revision=stable.revision, drafter=stable.drafter or "", digest=digest, files=files, location=location)
