"""What is observed of the drafters inside the engines of one resource, by its pods' own reports.

Guarantee: an observation belongs to one run of a pod's engine: a container that restarts has none before it is read again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.engine.drafter_endpoint.calls import DrafterCall
from aerie.engine.drafter_endpoint.response import ChangeDurations, EndpointProblem
from aerie.engine.drafter_endpoint.state import DrafterState, DrafterWindow

MAX_FAILED_READS = 3
"""Failed reads of a pod in a row after which a rollout does not wait for it, if the cause needs a user."""

MAX_EARLIER_READ_AGE = timedelta(minutes=1)
"""Age from which on an earlier read is replaced by the latest one before the next."""


@dataclass(frozen=True)
class WindowRead:
    """A read of a pod's open window."""

    process_id: str
    window: DrafterWindow
    read_at: datetime
    """Time by the operator's clock."""


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
    """Time of that read by the operator's clock."""
    earlier_read: WindowRead | None = None
    """An earlier read of the window that is open now: of the last minute, or the read before the latest."""
    prepared_at: datetime | None = None
    """Time of the first read with the present prepared drafter; None while none is ready."""
    problem: EndpointProblem | None = None
    """Why the latest read failed; None if it succeeded, and before the first one."""
    failed_reads: int = 0
    """Failed reads since the latest valid state."""
    call: DrafterCall | None = None
    """The call in progress, until the state is read after it: a plan that repeats it meanwhile asks for nothing new."""
    call_started_at: datetime | None = None
    """Time at which that call was sent."""
    result: CallResult | None = None
    """Result of the latest call that has ended; of a call that was withdrawn there is none."""

    def read_open_window(self) -> WindowRead | None:
        """Return the latest read of the window that is open; None where none is, and during its wash-out."""
        window = self.state.windows[-1] if self.state is not None and self.state.windows else None
        if (
            self.state is None
            or self.state_read_at is None
            or window is None
            or window.ended is not None
            or window.settled is None
        ):
            return None
        return WindowRead(self.state.process_id, window, self.state_read_at)


def with_state(observation: DrafterObservation, state: DrafterState, now: datetime) -> DrafterObservation:
    """Return the observation after a read that succeeded."""
    earlier, latest = observation.earlier_read, observation.read_open_window()
    if earlier is None or now - earlier.read_at > MAX_EARLIER_READ_AGE:
        earlier = latest
    observation = replace(observation, state_read_at=now, problem=None, failed_reads=0)
    is_prepared = state.prepared is not None and state.prepared.phase == "Ready"
    was_prepared = observation.state is not None and observation.state.prepared == state.prepared
    return replace(
        observation,
        state=state,
        earlier_read=earlier if earlier is not None and _is_open(earlier, state) else None,
        prepared_at=(observation.prepared_at if was_prepared else now) if is_prepared else None,
    )


def _is_open(read: WindowRead, state: DrafterState) -> bool:
    """Return whether the window of a read is still open."""
    window = state.windows[-1] if state.windows else None
    number = window.number if window is not None and window.ended is None else None
    return (read.process_id, read.window.number) == (state.process_id, number)
