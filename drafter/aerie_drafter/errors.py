"""Exceptions of the package. Every message contains the location, the actual value and the fix.

DrafterError
 ├─ ConfigError       a drafter's configuration contradicts itself or names what does not exist
 ├─ CheckpointError   files or tensors are missing, truncated, of a wrong shape, or not numbers
 ├─ TargetError       the drafter does not fit the target, or the target cannot be used
 ├─ DataError         training or evaluation data cannot be used
 └─ TrainingError     a training cannot start, resume, or save
"""

from __future__ import annotations


class DrafterError(Exception):
    """Base class; the command line prints the message and exits with status 2."""


class ConfigError(DrafterError):
    """The configuration contradicts itself, or names what does not exist."""


class CheckpointError(DrafterError):
    """Files or tensors are missing, truncated, of a wrong shape, or not numbers."""


class TargetError(DrafterError):
    """The drafter does not fit the target, or the target cannot be used."""


class DataError(DrafterError):
    """Training or evaluation data cannot be used."""


class TrainingError(DrafterError):
    """A training cannot start, resume, or save."""
