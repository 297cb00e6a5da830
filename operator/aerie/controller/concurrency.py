"""Keeps what all resources claim (rollout/facts/concurrency.py), and has those looked at whose turn has come.

Guarantees: claims follow the resources as passes read them, all of them from the first pass on; a resource whose turn it is, and
whose passes fail, or that is left as it is, gives its turn to the next one. Not guaranteed: that a slot is taken at once; a turn
that is not taken up, because the resource needs it no longer, is free again with its next status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aerie.controller.work_queue import NamespacedName
from aerie.rollout.facts.concurrency import (
    ConcurrencyLimits,
    ResourceName,
    SlotAllocation,
    SlotClaim,
    StartPermission,
    allocate_slots,
    read_slot_claim,
)

RolloutCounts = Mapping[tuple[str, str], int]
"""Rollouts and trials, by purpose, and by state: UnderWay or Queued."""


class ConcurrencyLimiter:
    """See the module. `wake` has a resource looked at; `counted` is told how many there are of each kind."""

    def __init__(
        self,
        limits: ConcurrencyLimits,
        enqueue: Callable[[NamespacedName], None],
        record_counts: Callable[[RolloutCounts], None] = lambda _: None,
    ) -> None:
        self._enqueue, self._record_counts = enqueue, record_counts
        self._claims: dict[ResourceName, SlotClaim] = {}
        self._slot_allocation = SlotAllocation(limits)
        self._is_loaded = False

    def load_claims(self, list_resources: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Take all resources in, the first time only."""
        if self._is_loaded:
            return
        self._is_loaded = True
        for document in list_resources():
            claim = read_slot_claim(document)
            if claim is not None:
                self._claims[document["metadata"]["namespace"], document["metadata"]["name"]] = claim
        self._reallocate()

    def update_claim(self, key: NamespacedName, document: Mapping[str, Any] | None, *, can_start: bool = True) -> None:
        """The resource is this now, or gone. `able`: it could begin what it waits for."""
        claim = read_slot_claim(document) if document is not None else None
        if claim is not None and not (claim.holds_slot or can_start):
            claim = None
        if claim == self._claims.get(key):
            return
        if claim is None:
            del self._claims[key]
        else:
            self._claims[key] = claim
        self._reallocate()

    def start_permission(self, key: NamespacedName) -> StartPermission:
        """What the resource may begin."""
        return self._slot_allocation.permission_for(key, self._claims.get(key))

    def _reallocate(self) -> None:
        before = self._slot_allocation
        self._slot_allocation = allocate_slots(self._claims, before.limits)
        for place in sorted(self._slot_allocation.granted_resources - before.granted_resources):
            self._enqueue(NamespacedName(*place))
        counts = {(purpose, state): 0 for purpose in ("Rollout", "Trial") for state in ("UnderWay", "Queued")}
        for claim in self._claims.values():
            counts[claim.purpose, "UnderWay" if claim.holds_slot else "Queued"] += 1
        self._record_counts(counts)
