"""Result of a decision about one resource. Plain data: controller/kubernetes/apply.py carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from aerie.api.status import Status
from aerie.engine.drafter_endpoint.calls import DrafterCall
from aerie.engine.drafter_endpoint.state import WindowCursor
from aerie.rollout.reasons import EventReason


@dataclass(frozen=True)
class ObjectReference:
    """Reference to an object to delete, with its uid: a later object of the same name is left alone."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True)
class Event:
    """Event that a user who inspects the resource wants to see."""

    type: Literal["Normal", "Warning"]
    reason: EventReason
    message: str


@dataclass(frozen=True)
class ScheduledCall:
    """Change of a pod's drafter that is due later."""

    call: DrafterCall
    due_at: datetime


@dataclass(frozen=True)
class PodDrafterPlan:
    """Observation of the drafter in a pod, and the change that it needs now."""

    pod: str
    """Name of the pod."""
    call: DrafterCall | None = None
    """Change that has not been observed yet. None: none is needed, and one that has not been sent is not sent any more."""
    cursor: WindowCursor | None = None
    """Windows that have been counted, which are not read again."""
    next_call: ScheduledCall | None = None
    """Change that replaces `call` at its time, if there is no other plan until then."""
    is_measured: bool = False
    """Whether its rate of requests is being measured, so that it is read at short intervals."""


@dataclass(frozen=True)
class ReconcilePlan:
    """Changes in the order in which they are carried out; each part is harmless when carried out twice."""

    objects_to_apply: tuple[dict[str, Any], ...]
    """Objects to apply, only those that differ from the desired ones."""
    objects_to_delete: tuple[ObjectReference, ...]
    status: Status
    events: tuple[Event, ...]
    requeue_after: timedelta | None
    """Delay until the next reconcile although nothing has changed; None: not before a change."""
    hardware_nodes: tuple[str, ...] = ()
    """Nodes whose hardware the decision depends on, known or not."""
    drafters: tuple[PodDrafterPlan, ...] = ()
    """Pods whose drafter is observed from now on, and no others; controller/drafters/executor.py carries this part out."""
