"""The windows of a resource's pods, added up by Deployment: one more page costs as much with a thousand pods as with one.

Guarantees: what is added up is the latest window of each pod, and of no pod that is gone; a pod's window takes the place of its
last one by a subtraction and an addition, and counts until it is stale. Small groups are added up anew each time, large ones each
`ANEW` changes, so that rounding does not pile up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from aerie.engine.samples import Counters

FEW = 8
"""Pods of a group that is added up anew with each change."""
ANEW = 1000
"""Changes of a larger group after which it is added up anew."""


@dataclass
class _Group:
    windows: dict[str, Counters] = field(default_factory=dict)
    """By pod."""
    total: Counters | None = None
    changes: int = 0


@dataclass
class Sums:
    """Of one resource."""

    _groups: dict[str, _Group] = field(default_factory=dict)
    _of: dict[str, str] = field(default_factory=dict)
    """By pod, its group."""
    _until: dict[str, float] = field(default_factory=dict)
    """By pod, when its window is stale."""
    _soonest: float = math.inf
    """No window is stale before."""

    def put(self, pod: str, group: str, window: Counters | None, until: float) -> None:
        """The pod's latest window, and when it is stale, by any one clock; None where it has none. Raises ValueError where it
        cannot be added to the group's others, because it is of another build of the engine; the pod is left out then."""
        if self._of.get(pod, group) != group or window is None:
            self.drop(pod)
        if window is None:
            return
        held = self._groups.setdefault(group, _Group())
        before = held.windows.pop(pod, None)
        self._of.pop(pod, None)
        held.changes += 1
        if len(held.windows) < FEW or held.changes >= ANEW:
            self._anew(group)
        elif before is not None and held.total is not None:
            held.total = held.total - before
        if held.windows and held.total is not None:
            held.total = held.total + window
        else:
            held.total = window
        held.windows[pod], self._of[pod], self._until[pod] = window, group, until
        self._soonest = min(self._soonest, until)

    def drop(self, pod: str) -> None:
        """The pod is gone, or counts for nothing."""
        group = self._of.pop(pod, None)
        self._until.pop(pod, None)
        if group is None:
            return
        held = self._groups[group]
        before = held.windows.pop(pod)
        held.changes += 1
        if not held.windows:
            del self._groups[group]
        elif len(held.windows) <= FEW or held.changes >= ANEW or held.total is None:
            self._anew(group)
        else:
            held.total = held.total - before

    def totals(self, now: float) -> dict[str, Counters]:
        """By group, of all windows that are not stale."""
        if now > self._soonest:
            for pod in [pod for pod, until in self._until.items() if now > until]:
                self.drop(pod)
            self._soonest = min(self._until.values(), default=math.inf)
        return {group: held.total for group, held in self._groups.items() if held.total is not None}

    def _anew(self, group: str) -> None:
        held = self._groups[group]
        held.changes, held.total = 0, None
        for _, window in sorted(held.windows.items()):
            held.total = window if held.total is None else held.total + window
