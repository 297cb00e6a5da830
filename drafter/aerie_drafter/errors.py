"""The errors of the drafter's package; every message is one sentence that names the place, what was found and the way out.

EagleError
 ├─ ConfigError       a drafter's configuration contradicts itself or names what does not exist
 ├─ CheckpointError   files or tensors are missing, cut off, of a wrong shape, or not numbers
 ├─ TargetError       the drafter does not fit the target, or the target cannot be used
 ├─ DataError         training or evaluation data cannot be used
 └─ TrainingError     a training cannot start, go on, or save
"""

from __future__ import annotations


class EagleError(Exception):
    """Base of all; the command line prints the message and ends with status 2."""


class ConfigError(EagleError):
    """The configuration contradicts itself, or names what does not exist."""


class CheckpointError(EagleError):
    """Files or tensors are missing, cut off, of a wrong shape, or not numbers."""


class TargetError(EagleError):
    """The drafter does not fit the target, or the target cannot be used."""


class DataError(EagleError):
    """Training or evaluation data cannot be used."""


class TrainingError(EagleError):
    """A training cannot start, go on, or save."""
