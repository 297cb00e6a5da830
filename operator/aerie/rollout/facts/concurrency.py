"""Which rollouts and trials may begin, where the operator limits how many are under way in the cluster.

    status of every resource ─► claim_of ─► allot ─► Turn of each resource ─┬─► course (rollouts)
                                                                            └─► tuned (trials)

A change that would begin a canary, or a trial, first claims a slot: it writes `status.queued`, with the time. Who is next follows
from what is written in all resources, so a new leader goes on where the last one ended. Among those that wait, the namespace with
the fewest under way comes first, and in a namespace the claim that has waited for longest.

Guarantees: pure. No canary begins, and no trial, beyond the limits, but those that may not wait: a first revision, one that a
person has asked to promote, and one whose stable revision serves nobody. A rollback waits for nothing. What waits for a person
(Held, AwaitingApproval, paused) holds no slot, so that nobody waits for somebody else's decision; neither does a canary on its
way out, which asks for no further pods. Not guaranteed: the limit itself after a pause, or where a person's word leads on; the
rollouts that go on then are above it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from aerie.api.status import QueueStatus, RolloutPurpose, Status

ACTIVE_CANARY_PHASES = frozenset({"Starting", "WarmingUp", "Analyzing", "Ramping", "Promoting"})
"""Phases of a canary that goes on by itself."""
ResourceName = tuple[str, str]
"""Namespace and name of a resource."""


@dataclass(frozen=True)
class ConcurrencyLimits:
    """How many may be under way at the same time; None: any number."""

    max_rollouts: int | None = None
    max_rollouts_per_namespace: int | None = None
    max_trials: int | None = None

    def is_limited(self, purpose: RolloutPurpose) -> bool:
        """Whether these have to wait for each other at all."""
        return (
            self.max_trials is not None
            if purpose == "Trial"
            else (self.max_rollouts, self.max_rollouts_per_namespace) != (None, None)
        )


@dataclass(frozen=True)
class SlotClaim:
    """One resource's: to a slot that it holds, or waits for."""

    purpose: RolloutPurpose
    since: str
    """RFC 3339 in UTC, as the status has it."""
    holds_slot: bool


@dataclass(frozen=True)
class StartPermission:
    """What one resource may begin."""

    allowed_purposes: frozenset[RolloutPurpose] = frozenset({"Rollout", "Trial"})
    wait_reason: str = ""
    """Why the claim in its status has to wait, as part of a sentence; empty where it has not, or where none is written yet."""


@dataclass(frozen=True)
class SlotAllocation:
    """Who may begin, by what all resources claim."""

    limits: ConcurrencyLimits
    granted_resources: frozenset[ResourceName] = frozenset()
    """Resources that wait and whose turn it is."""
    slots_in_use: Counter[tuple[RolloutPurpose, str]] = field(default_factory=Counter)
    """Slots that are held or granted, by purpose and namespace."""

    def permission_for(self, resource_name: ResourceName, claim: SlotClaim | None) -> StartPermission:
        """That of one resource, which claims this."""
        purposes: tuple[RolloutPurpose, ...] = ("Rollout", "Trial")
        free = frozenset(purpose for purpose in purposes if not self.limits.is_limited(purpose))
        if claim is None or claim.holds_slot or claim.purpose in free:
            return StartPermission(free)
        if resource_name in self.granted_resources:
            return StartPermission(free | {claim.purpose})
        return StartPermission(free, self._limit_message(claim.purpose, resource_name[0]))

    def _limit_message(self, purpose: RolloutPurpose, namespace: str) -> str:
        limits = self.limits
        if purpose == "Trial":
            return f"as many trials of settings are under way as --max-concurrent-trials allows ({limits.max_trials})"
        most = limits.max_rollouts_per_namespace
        if most is not None and self.slots_in_use["Rollout", namespace] >= most:
            option = f"--max-concurrent-rollouts-per-namespace allows ({most})"
            return f"as many rollouts are under way in namespace {namespace} as {option}"
        return f"as many rollouts are under way as --max-concurrent-rollouts allows ({limits.max_rollouts})"


def read_slot_claim(document: Mapping[str, Any]) -> SlotClaim | None:
    """What a resource claims, by its own words; None: nothing. Takes any status, of whatever release."""
    spec, status = document.get("spec") or {}, document.get("status") or {}
    if (spec.get("rollout") or {}).get("paused"):
        return None
    canary, trial = status.get("canary"), (status.get("speculation") or {}).get("trial")
    goes_on = canary is None or canary.get("phase") in ACTIVE_CANARY_PHASES
    if trial is not None:
        return SlotClaim("Trial", str(trial.get("startedAt") or ""), holds_slot=True) if goes_on else None
    if canary is not None:
        first = status.get("stable") is None
        return SlotClaim("Rollout", str(canary.get("startedAt") or ""), holds_slot=True) if goes_on and not first else None
    queued = status.get("queued") or {}
    if queued.get("purpose") not in ("Rollout", "Trial"):
        return None
    return SlotClaim(queued["purpose"], str(queued.get("since") or ""), holds_slot=False)


def allocate_slots(claims: Mapping[ResourceName, SlotClaim], limits: ConcurrencyLimits) -> SlotAllocation:
    """Whose turn it is."""
    under_way: Counter[tuple[RolloutPurpose, str]] = Counter(
        (claim.purpose, namespace) for (namespace, _), claim in claims.items() if claim.holds_slot
    )
    granted: set[ResourceName] = set()
    rules: tuple[tuple[RolloutPurpose, int | None, int | None], ...] = (
        ("Rollout", limits.max_rollouts, limits.max_rollouts_per_namespace),
        ("Trial", limits.max_trials, None),
    )
    for purpose, most, most_of_namespace in rules:
        waiting: dict[str, deque[ResourceName]] = defaultdict(deque)
        since = {place: claim.since for place, claim in claims.items() if not claim.holds_slot and claim.purpose == purpose}
        for place in sorted(since, key=lambda each: (since[each], each)):
            waiting[place[0]].append(place)
        total = sum(count for (of, _), count in under_way.items() if of == purpose)
        while waiting and (most is None or total < most):
            namespace = min(waiting, key=lambda each: (under_way[purpose, each], since[waiting[each][0]], each))
            if most_of_namespace is not None and under_way[purpose, namespace] >= most_of_namespace:
                break  # it has the fewest of all
            granted.add(waiting[namespace].popleft())
            under_way[purpose, namespace] += 1
            total += 1
            if not waiting[namespace]:
                del waiting[namespace]
    return SlotAllocation(limits, frozenset(granted), under_way)


def build_queued_status(purpose: RolloutPurpose | None, previous_status: Status, now: datetime) -> QueueStatus | None:
    """What the status is to say of a claim; it keeps its place for as long as it is the same."""
    if purpose is None:
        return None
    last = previous_status.queued
    return last if last is not None and last.purpose == purpose else QueueStatus(purpose=purpose, since=now)
