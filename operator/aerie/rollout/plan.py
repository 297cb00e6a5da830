"""What is to be done about one resource. Plain data: another part carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from aerie.api.status import Status


@dataclass(frozen=True)
class ObjectReference:
    """An object to delete, by the uid that was seen: a namesake that came since is left alone."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True)
class Event:
    """Something that a person looking at the resource wants to know happened."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class ReconcilePlan:
    """In the order in which it is carried out; each part is harmless when carried out twice."""

    objects_to_apply: tuple[dict[str, Any], ...]
    """Objects to apply, those only that are not as wanted."""
    objects_to_delete: tuple[ObjectReference, ...]
    status: Status
    events: tuple[Event, ...]
    requeue_after: timedelta | None
    """When to look again although nothing has changed; None: not before something does."""
    hardware_nodes: tuple[str, ...] = ()
    """Nodes whose hardware the decision depends on, known or not."""
