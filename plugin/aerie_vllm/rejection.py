"""The errors that a caller of the endpoint gets: a status, one CamelCase reason, and a sentence.

Guarantees: a `RejectionError` is raised before anything has changed, and has a status below 500, except 503 for what passes by
waiting. A `ChangeFailedError` is raised after an attempt; its message names the drafter that is loaded then. Not guaranteed: that
a later call fails with the same reason.
"""

from __future__ import annotations

from aerie_vllm.worker_protocol import Problem


class EndpointError(Exception):
    """An error with its HTTP status."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message

    @property
    def problem(self) -> Problem:
        """The reason and the message."""
        return {"reason": self.reason, "message": self.message}


class RejectionError(EndpointError):
    """A call that is rejected; nothing has changed."""


class ChangeFailedError(EndpointError):
    """A change that was tried and failed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(500, reason, message)


class EngineDeadError(ChangeFailedError):
    """The engine's processes have ended: nothing can be called any more."""

    def __init__(self) -> None:
        message = "the engine has ended, so its drafter cannot change; vLLM ends this server, and the kubelet restarts it."
        super().__init__("EngineDead", message)
