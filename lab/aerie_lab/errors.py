"""Every error that the lab raises on purpose, so that a command can print one sentence instead of a traceback.

    LabError
    ├── BuildError          a binary cannot be had: no Go, no registry, a failed or unusable build
    ├── IsolationError      the kernel refuses a namespace or a mount that the lab stands on
    ├── StateError          the lab's folder contradicts its state: half-started, not running, other version
    ├── StartError          a part of the lab did not come up, or went away: port taken, disk full, component exited
    └── KubeError           the API server refused a request (status, reason and message kept)

Guarantee: `str(error)` is a message for the user that names the fix. Any other exception that escapes is a defect.
"""

from __future__ import annotations


class LabError(Exception):
    """Base of all errors that the lab raises on purpose."""


class BuildError(LabError):
    """A binary of the lab cannot be had."""


class IsolationError(LabError):
    """The kernel, or the permissions of this user, refuse the isolation that the lab needs."""


class StateError(LabError):
    """A request that the lab's present state does not allow."""


class StartError(LabError):
    """A part of the lab did not come up, or went away while it was needed."""


class KubeError(LabError):
    """The API server refused a request."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
