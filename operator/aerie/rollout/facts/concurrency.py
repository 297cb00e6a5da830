"""Start permissions of rollouts and trials, where the operator limits how many are in progress in the cluster.

    status of each resource ─► read_slot_claim ─► allocate_slots ─► StartPermission of each resource ─┬─► progression (rollouts)
                                                                                                      └─► trials

A change that would start a canary, or a trial, first claims a slot: it writes `status.queue` with the time. The order follows
from the status of all resources, so a new leader continues where the last one stopped. Among waiting claims, the namespace with
the fewest slots in use comes first; within a namespace, the oldest claim.

Guarantees: pure. No canary, no rollout in place and no trial starts beyond the limits, except those that may not wait: a first
revision, a canary that is promoted manually, and one whose stable revision has no ready pod. A rollback never waits. A rollout
that waits for a user (Held, AwaitingApproval, paused) holds no slot, so that nobody waits for somebody else's decision. One that
is rolled back holds none either: it requests no further pods. Not guaranteed: the limit itself after a pause, or where a manual
action continues a canary. The rollouts that continue then exceed it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from aerie.api.status import QueueStatus, RolloutPurpose, Status

ACTIVE_CANARY_PHASES = frozenset({"Starting", "Evaluating", "WarmingUp", "Analyzing", "Ramping", "Promoting"})
"""Phases of a canary that advances automatically."""
ACTIVE_IN_PLACE_PHASES = frozenset({"Staging", "Evaluating", "Analyzing", "Promoting"})
"""Phases of a rollout in place that advances automatically."""
ResourceName = tuple[str, str]
"""Namespace and name of a resource."""


@dataclass(frozen=True)
class ConcurrencyLimits:
    """Limits on what is in progress at the same time; None: no limit."""

    max_rollouts: int | None = None
    max_rollouts_per_namespace: int | None = None
    max_trials: int | None = None

    def is_limited(self, purpose: RolloutPurpose) -> bool:
        """Return whether changes of this purpose have to wait for each other at all."""
        return (
            self.max_trials is not None
            if purpose == "Trial"
            else (self.max_rollouts, self.max_rollouts_per_namespace) != (None, None)
        )


@dataclass(frozen=True)
class SlotClaim:
    """Claim of one resource to a slot that it holds or waits for."""

    purpose: RolloutPurpose
    since: str
    """RFC 3339 in UTC, as in the status."""
    holds_slot: bool


@dataclass(frozen=True)
class StartPermission:
    """Purposes for which one resource may start a change."""

    allowed_purposes: frozenset[RolloutPurpose] = frozenset({"Rollout", "Trial"})
    wait_reason: str = ""
    """Why the claim in the status has to wait, as part of a sentence. Empty where it need not wait, or is not written yet."""


@dataclass(frozen=True)
class SlotAllocation:
    """Slots as granted to the claims of all resources."""

    limits: ConcurrencyLimits
    granted_resources: frozenset[ResourceName] = frozenset()
    """Waiting resources that may start now."""
    slots_in_use: Counter[tuple[RolloutPurpose, str]] = field(default_factory=Counter)
    """Slots that are held or granted, by purpose and namespace."""

    def permission_for(self, resource_name: ResourceName, claim: SlotClaim | None) -> StartPermission:
        """Return the permission of one resource with this claim."""
        purposes: tuple[RolloutPurpose, ...] = ("Rollout", "Trial")
        unlimited_purposes = frozenset(purpose for purpose in purposes if not self.limits.is_limited(purpose))
        if claim is None or claim.holds_slot or claim.purpose in unlimited_purposes:
            return StartPermission(unlimited_purposes)
        if resource_name in self.granted_resources:
            return StartPermission(unlimited_purposes | {claim.purpose})
        return StartPermission(unlimited_purposes, self._limit_message(claim.purpose, resource_name[0]))

    def _limit_message(self, purpose: RolloutPurpose, namespace: str) -> str:
        limits = self.limits
        if purpose == "Trial":
            return f"the limit of --max-concurrent-trials ({limits.max_trials}) is reached"
        limit = limits.max_rollouts_per_namespace
        if limit is not None and self.slots_in_use["Rollout", namespace] >= limit:
            return f"the limit of --max-concurrent-rollouts-per-namespace ({limit}) is reached in namespace {namespace}"
        return f"the limit of --max-concurrent-rollouts ({limits.max_rollouts}) is reached"


def read_slot_claim(document: Mapping[str, Any]) -> SlotClaim | None:
    """Return the claim in a resource's own status; None: no claim. Takes any status, of whatever release."""
    spec, status = document.get("spec") or {}, document.get("status") or {}
    if (spec.get("rollout") or {}).get("paused"):
        return None
    canary, trial = status.get("canary"), (status.get("speculation") or {}).get("trial")
    is_active = canary is None or canary.get("phase") in ACTIVE_CANARY_PHASES
    if trial is not None:
        return SlotClaim("Trial", str(trial.get("startTime") or ""), holds_slot=True) if is_active else None
    if canary is not None:
        is_first_revision = status.get("stable") is None
        return (
            SlotClaim("Rollout", str(canary.get("startTime") or ""), holds_slot=True)
            if is_active and not is_first_revision
            else None
        )
    if (rollout := status.get("inPlaceRollout")) is not None:
        is_active = rollout.get("phase") in ACTIVE_IN_PLACE_PHASES
        return SlotClaim("Rollout", str(rollout.get("startTime") or ""), holds_slot=True) if is_active else None
    queued = status.get("queue") or {}
    if queued.get("purpose") not in ("Rollout", "Trial"):
        return None
    return SlotClaim(queued["purpose"], str(queued.get("queuedTime") or ""), holds_slot=False)


def allocate_slots(claims: Mapping[ResourceName, SlotClaim], limits: ConcurrencyLimits) -> SlotAllocation:
    """Return the slots granted to the claims within the limits."""
    slots_in_use: Counter[tuple[RolloutPurpose, str]] = Counter(
        (claim.purpose, namespace) for (namespace, _), claim in claims.items() if claim.holds_slot
    )
    granted: set[ResourceName] = set()
    limits_by_purpose: tuple[tuple[RolloutPurpose, int | None, int | None], ...] = (
        ("Rollout", limits.max_rollouts, limits.max_rollouts_per_namespace),
        ("Trial", limits.max_trials, None),
    )
    for purpose, limit, namespace_limit in limits_by_purpose:
        waiting: dict[str, deque[ResourceName]] = defaultdict(deque)
        since_by_resource = {
            resource: claim.since for resource, claim in claims.items() if not claim.holds_slot and claim.purpose == purpose
        }
        for resource in sorted(since_by_resource, key=lambda name: (since_by_resource[name], name)):
            waiting[resource[0]].append(resource)
        total = sum(count for (slot_purpose, _), count in slots_in_use.items() if slot_purpose == purpose)
        while waiting and (limit is None or total < limit):
            namespace = min(waiting, key=lambda name: (slots_in_use[purpose, name], since_by_resource[waiting[name][0]], name))
            if namespace_limit is not None and slots_in_use[purpose, namespace] >= namespace_limit:
                break  # this namespace has the fewest slots in use of all
            granted.add(waiting[namespace].popleft())
            slots_in_use[purpose, namespace] += 1
            total += 1
            if not waiting[namespace]:
                del waiting[namespace]
    return SlotAllocation(limits, frozenset(granted), slots_in_use)


def build_queued_status(purpose: RolloutPurpose | None, previous_status: Status, now: datetime) -> QueueStatus | None:
    """Return `status.queue` of a claim. A claim keeps its time while its purpose stays."""
    if purpose is None:
        return None
    last = previous_status.queue
    return last if last is not None and last.purpose == purpose else QueueStatus(purpose=purpose, queued_time=now)
