"""Tracks the slot claims of all resources (rollout/facts/concurrency.py), and enqueues the resources that are granted a slot.

Guarantees: claims follow the resources as reconciles read them, all of them from the first reconcile on. A resource that is
granted a slot, but whose reconciles fail or that is on hold, passes it on to the next one. Not guaranteed: that a slot is used
immediately. A slot that a resource no longer needs is available again with its next status.
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
"""Number of rollouts and trials, by purpose and by state: Active or Queued."""


class ConcurrencyLimiter:
    """Slots for rollouts and trials.

    `enqueue` is called with a resource that may start. `record_counts` is called with the number of rollouts and trials by
    purpose and state.
    """

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
        """Read the claims of all resources. Only the first call has an effect."""
        if self._is_loaded:
            return
        self._is_loaded = True
        for document in list_resources():
            claim = read_slot_claim(document)
            if claim is not None:
                self._claims[document["metadata"]["namespace"], document["metadata"]["name"]] = claim
        self._reallocate()

    def update_claim(self, key: NamespacedName, document: Mapping[str, Any] | None, *, can_start: bool = True) -> None:
        """Update the claim from the resource's document, or remove it when that is None because the resource was deleted.

        `can_start`: False when the resource could not start what it waits for.
        """
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
        """Return what the resource may start."""
        return self._slot_allocation.permission_for(key, self._claims.get(key))

    def _reallocate(self) -> None:
        previous = self._slot_allocation
        self._slot_allocation = allocate_slots(self._claims, previous.limits)
        for resource_name in sorted(self._slot_allocation.granted_resources - previous.granted_resources):
            self._enqueue(NamespacedName(*resource_name))
        counts = {(purpose, state): 0 for purpose in ("Rollout", "Trial") for state in ("Active", "Queued")}
        for claim in self._claims.values():
            counts[claim.purpose, "Active" if claim.holds_slot else "Queued"] += 1
        self._record_counts(counts)
