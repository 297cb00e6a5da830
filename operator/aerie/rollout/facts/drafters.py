"""What is observed of the drafters inside the engines of one resource, by its pods' own reports.

Guarantee: an observation belongs to one run of a pod's engine: a container that restarts has none before it is read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from aerie.engine.drafter_endpoint.calls import DrafterCall
from aerie.engine.drafter_endpoint.response import ChangeDurations, EndpointProblem
from aerie.engine.drafter_endpoint.state import DrafterState


@dataclass(frozen=True)
class CallResult:
    """Result of a call that has ended."""

    call: DrafterCall
    outcome: ChangeDurations | EndpointProblem
    ended_at: datetime
    attempts: int
    """Attempts with an equal call, one after the other; 1 for the first."""

    @property
    def problem(self) -> EndpointProblem | None:
        """Why the call failed; None if it succeeded."""
        return self.outcome if isinstance(self.outcome, EndpointProblem) else None


@dataclass(frozen=True)
class DrafterObservation:
    """What is observed of one pod."""

    state: DrafterState | None = None
    """The latest valid state."""
    state_read_at: datetime | None = None
    problem: EndpointProblem | None = None
    """Why the latest read failed; None if it succeeded, and before the first one."""
    failed_reads: int = 0
    """Failed reads since the latest valid state."""
    call: DrafterCall | None = None
    """The call in progress."""
    result: CallResult | None = None
    """Result of the latest call that has ended; of a call that was withdrawn there is none."""
