"""Who requested a promotion, a rollback, a retry or an extension, and why.

Guarantee: texts are one line of printable characters. Not guaranteed: that they are true, because everyone who may edit the
resource may write the annotation that they come from.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from aerie.api.status.types import ShortText
from aerie.api.types.base import ResourceModel, Timestamp

MAX_USER_CHARACTERS, MAX_REASON_CHARACTERS = 128, 256


class RequestedBy(ResourceModel):
    """The user who requested an action, as the annotation aerie.dev/requested-by states it."""

    action: Literal["promote", "rollback", "retry", "extend"]
    """Requested action."""
    user: Annotated[str, Field(min_length=1, max_length=MAX_USER_CHARACTERS)]
    """Name of the user."""
    reason: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] | None = None
    """Reason that the user gave."""
    time: Timestamp
    """Time of the request, by the user's clock."""


class UserRequest(RequestedBy):
    """The last request that names its user, with what it applies to."""

    revision: ShortText | None = None
    """Revision that it applies to. Absent for a request that has no effect, or no more."""
    seen_time: Timestamp
    """Time at which the operator first read it. It applies to no rollout that began later, and a retry only to the next one."""
    digest: ShortText
    """SHA-256 of the annotation, by which the request is recognized."""
