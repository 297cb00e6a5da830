"""Runs pip once to install a lock's packages by hash, and classifies failures.

Guarantees: nothing is installed whose hash the lock does not have, and nothing is compiled. Where pip gets packages from
stays the user's choice (PIP_INDEX_URL, pip.conf); settings that would put them elsewhere do not count.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aerie_lab.binaries import commands

_REDIRECTING_VARIABLES = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIREMENT", "PYTHONHOME", "PYTHONPATH")
_UNREACHABLE_ERRORS = ("NewConnectionError", "NameResolutionError", "Max retries", "ReadTimeout", "ConnectTimeout", "ProxyError")


class FailureCause(enum.Enum):
    """Why pip failed, as far as it changes what the user has to do."""

    DISK = enum.auto()
    NO_PIP = enum.auto()
    UNREACHABLE = enum.auto()
    WRONG_HASH = enum.auto()
    OTHER = enum.auto()


@dataclass(frozen=True)
class PipFailure:
    """A failed installation."""

    cause: FailureCause
    message: str
    """pip's own first error."""


def install_lock(
    python: Path,
    lock: Path,
    options: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    log_file: Path,
    on_heartbeat: Callable[[float], None],
) -> PipFailure | None:
    """Install all of `lock` with the pip of `python`; return None on success. `log_file` is overwritten."""
    log_file.unlink(missing_ok=True)
    command = [str(python), "-m", "pip", "install", "--requirement", str(lock), *options]
    command += ["--require-hashes", "--no-deps", "--only-binary=:all:", "--no-input", "--retries=2"]
    command += ["--progress-bar=off", "--disable-pip-version-check"]
    settled = {key: value for key, value in environment.items() if key not in _REDIRECTING_VARIABLES}
    status = commands.run_command(command, folder=folder, environment=settled, log_file=log_file, on_heartbeat=on_heartbeat)
    return None if status == 0 else classify_failure(log_file.read_text(errors="replace"), status)


def classify_failure(output: str, status: int) -> PipFailure:
    """Return the failure that pip's output describes."""
    errors = [line.strip().removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR")]
    message = errors[0] if errors else f"pip ended with status {status} and gave no reason"
    if "No space left on device" in output:
        return PipFailure(FailureCause.DISK, message)
    if "No module named pip" in output:
        return PipFailure(FailureCause.NO_PIP, message)
    if any(error in output for error in _UNREACHABLE_ERRORS):
        return PipFailure(FailureCause.UNREACHABLE, message)
    if "DO NOT MATCH THE HASHES" in output:
        return PipFailure(FailureCause.WRONG_HASH, message)
    return PipFailure(FailureCause.OTHER, message)
