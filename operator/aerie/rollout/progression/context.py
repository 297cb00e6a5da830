"""Input of the policies: the facts and the desired revision, with what several policies need of the status.

Guarantees: frozen; a policy that changes it for the policies after it returns a changed copy. Not guaranteed: that stable
arm or canary exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from aerie.api.status import Arm, CanaryArm, Status
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression.progression import Progression
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.preflight_result import PreflightResult


@dataclass(frozen=True)
class ProgressionContext:
    """Input of the policies, prepared once."""

    snapshot: Snapshot
    desired: DesiredRevision
    preflight_result: PreflightResult
    now: datetime
    status: Status
    stable: Arm | None
    canary_arm: CanaryArm | None
    """The canary of the status, or an unrecorded revision that is rolled back like one; None for a superseded first revision."""
    serving: Progression
    """The progression that keeps the serving pods; each policy changes it."""

    @property
    def replicas(self) -> int:
        """Replicas of the spec."""
        return self.snapshot.resource.spec.replicas
