"""The errors of the drafter's package; every message is one sentence that names the place, what was found and the way out.

EagleError
 ├─ ConfigError       a drafter's configuration contradicts itself or names what does not exist
 ├─ CheckpointError   files or tensors are missing, cut off, of a wrong shape, or not numbers
 ├─ TargetError       the drafter does not fit the target, or the target cannot be used
 ├─ DataError         training or evaluation data cannot be used
 └─ TrainingError     a training cannot start, go on, or save
"""

from __future__ import annotations


class DrafterError(Exception):
    """Base of all; the command line prints the message and ends with status 2."""


class ConfigError(DrafterError):
    """The configuration contradicts itself, or names what does not exist."""


class CheckpointError(DrafterError):
    """Files or tensors are missing, cut off, of a wrong shape, or not numbers."""


class TargetError(DrafterError):
    """The drafter does not fit the target, or the target cannot be used."""


class DataError(DrafterError):
    """Training or evaluation data cannot be used."""


class TrainingError(DrafterError):
    """A training cannot start, go on, or save."""
