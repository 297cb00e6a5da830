"""The result of a call to a pod's endpoint, as a value: what the pod did, or a problem with its reason.

Guarantees: whatever a pod answers is a result or has a reason: its own if the body has one, else one of Aerie's. Not guaranteed:
that nothing has changed where the status is 500 and above, or none; the pod's state shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from aerie.engine.drafter_endpoint.fields import FieldError, parse_object
from aerie.engine.drafter_endpoint.state import DrafterState, parse_problem, parse_state

MAX_SECONDS = 1e6


@dataclass(frozen=True)
class EndpointProblem:
    """Why a call has no result."""

    reason: str
    """The pod's own reason, such as LoadedChanged; or Timeout, Unreachable, InvalidResponse, TooLarge, NoEndpoint or NoToken."""
    message: str
    status: int | None = None
    """HTTP status of the pod's answer; None without an answer, or with an invalid one."""

    @property
    def is_rejection(self) -> bool:
        """Whether the pod states that it has rejected the call, so that nothing has changed."""
        return self.status is not None and self.status < 500


@dataclass(frozen=True)
class ChangeDurations:
    """How long the parts of a change took, in seconds; all 0 if nothing had to change, or a preparation was begun."""

    staging: float
    """Seconds to read and check the files."""
    pause: float
    """Seconds in which no request advanced."""
    swap: float


def read_state_response(status: int, body: bytes) -> DrafterState | EndpointProblem:
    """Return the state in a response."""
    if status != 200:
        return _read_problem(status, body)
    try:
        return parse_state(body)
    except FieldError as error:
        return _invalid_response(error)


def read_change_response(status: int, body: bytes) -> ChangeDurations | EndpointProblem:
    """Return the durations of a change that succeeded, or of a preparation that was begun."""
    if status not in (200, 202):
        return _read_problem(status, body)
    try:
        fields = parse_object(body)
        durations = fields.read_optional(
            "durations",
            lambda name: fields.read_object(
                name,
                lambda parts: ChangeDurations(*(parts.read_number(part, MAX_SECONDS) for part in ("staging", "pause", "swap"))),
            ),
        )
    except FieldError as error:
        return _invalid_response(error)
    return durations or ChangeDurations(0.0, 0.0, 0.0)


def _read_problem(status: int, body: bytes) -> EndpointProblem:
    try:
        problem = parse_problem(body)
    except FieldError:
        if status == 404:
            message = "the pod has no drafter endpoint: its engine was started without the plugin or without the token."
            return EndpointProblem("NoEndpoint", message, status)
        message = f"the pod answered with status {status} and no reason: check what answers on the engine's port."
        return EndpointProblem("InvalidResponse", message)
    return EndpointProblem(problem.reason, problem.message, status)


def _invalid_response(error: FieldError) -> EndpointProblem:
    message = f"the pod's response is not that of Aerie's plugin ({error}): check its image and the plugin's version."
    return EndpointProblem("InvalidResponse", message)
