"""A user's request that a revision is tried again, and the rejection that it ends.

Guarantees: a value of the annotation counts until the status names it as handled. Not guaranteed: that an earlier value is
recognized, because the status has only the last one.
"""

from __future__ import annotations

import hashlib

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.rollout.revision.desired import DesiredRevision

RETRY_ANNOTATION = "aerie.dev/retry"
"""Annotation by which a user has a rejected revision tried again; each new value works once."""
_MAX_RETRY_VALUE_CHARACTERS = 64
"""Length up to which the status stores the annotation's value as it is."""


def read_retry_request(resource: SpeculativeDeployment) -> str | None:
    """Return the value of the annotation by which a user has a revision tried again, as the status stores it.

    Of a long value that is a digest, because it only matters whether the value differs.
    """
    value = resource.metadata.annotations.get(RETRY_ANNOTATION)
    return value if value is None or len(value) <= _MAX_RETRY_VALUE_CHARACTERS else hashlib.sha256(value.encode()).hexdigest()


def read_rejected_revision(resource: SpeculativeDeployment, desired: DesiredRevision) -> str | None:
    """Return the desired revision where it was rejected and nobody has requested a retry; else None."""
    status = resource.status or Status()
    retry_request = read_retry_request(resource)
    if status.rejected_revision != desired.revision or (retry_request is not None and retry_request != status.last_handled_retry):
        return None
    return status.rejected_revision
