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

from aerie.api.status import Purpose, Queued, Status

UNDER_WAY = frozenset({"Starting", "WarmingUp", "Analyzing", "Ramping", "Promoting"})
"""Phases of a canary that goes on by itself."""
Place = tuple[str, str]
"""Namespace and name of a resource."""


@dataclass(frozen=True)
class Limits:
    """How many may be under way at the same time; None: any number."""

    rollouts: int | None = None
    rollouts_per_namespace: int | None = None
    trials: int | None = None

    def limited(self, purpose: Purpose) -> bool:
        """Whether these have to wait for each other at all."""
        return self.trials is not None if purpose == "Trial" else (self.rollouts, self.rollouts_per_namespace) != (None, None)


@dataclass(frozen=True)
class Claim:
    """One resource's: to a slot that it holds, or waits for."""

    purpose: Purpose
    since: str
    """RFC 3339 in UTC, as the status has it."""
    holds: bool


@dataclass(frozen=True)
class Turn:
    """What one resource may begin."""

    may_begin: frozenset[Purpose] = frozenset({"Rollout", "Trial"})
    waits_for: str = ""
    """Why the claim in its status has to wait, as part of a sentence; empty where it has not, or where none is written yet."""


@dataclass(frozen=True)
class Allotment:
    """Who may begin, by what all resources claim."""

    limits: Limits
    granted: frozenset[Place] = frozenset()
    """Resources that wait and whose turn it is."""
    under_way: Counter[tuple[Purpose, str]] = field(default_factory=Counter)
    """Slots that are held or granted, by purpose and namespace."""

    def turn(self, place: Place, claim: Claim | None) -> Turn:
        """That of one resource, which claims this."""
        purposes: tuple[Purpose, ...] = ("Rollout", "Trial")
        free = frozenset(purpose for purpose in purposes if not self.limits.limited(purpose))
        if claim is None or claim.holds or claim.purpose in free:
            return Turn(free)
        if place in self.granted:
            return Turn(free | {claim.purpose})
        return Turn(free, self._full(claim.purpose, place[0]))

    def _full(self, purpose: Purpose, namespace: str) -> str:
        limits = self.limits
        if purpose == "Trial":
            return f"as many trials of settings are under way as --max-concurrent-trials allows ({limits.trials})"
        most = limits.rollouts_per_namespace
        if most is not None and self.under_way["Rollout", namespace] >= most:
            option = f"--max-concurrent-rollouts-per-namespace allows ({most})"
            return f"as many rollouts are under way in namespace {namespace} as {option}"
        return f"as many rollouts are under way as --max-concurrent-rollouts allows ({limits.rollouts})"


def claim_of(document: Mapping[str, Any]) -> Claim | None:
    """What a resource claims, by its own words; None: nothing. Takes any status, of whatever release."""
    spec, status = document.get("spec") or {}, document.get("status") or {}
    if (spec.get("rollout") or {}).get("paused"):
        return None
    canary, trial = status.get("canary"), (status.get("speculation") or {}).get("trial")
    goes_on = canary is None or canary.get("phase") in UNDER_WAY
    if trial is not None:
        return Claim("Trial", str(trial.get("startedAt") or ""), holds=True) if goes_on else None
    if canary is not None:
        first = status.get("stable") is None
        return Claim("Rollout", str(canary.get("startedAt") or ""), holds=True) if goes_on and not first else None
    queued = status.get("queued") or {}
    if queued.get("purpose") not in ("Rollout", "Trial"):
        return None
    return Claim(queued["purpose"], str(queued.get("since") or ""), holds=False)


def allot(claims: Mapping[Place, Claim], limits: Limits) -> Allotment:
    """Whose turn it is."""
    under_way: Counter[tuple[Purpose, str]] = Counter(
        (claim.purpose, namespace) for (namespace, _), claim in claims.items() if claim.holds
    )
    granted: set[Place] = set()
    rules: tuple[tuple[Purpose, int | None, int | None], ...] = (
        ("Rollout", limits.rollouts, limits.rollouts_per_namespace),
        ("Trial", limits.trials, None),
    )
    for purpose, most, most_of_namespace in rules:
        waiting: dict[str, deque[Place]] = defaultdict(deque)
        since = {place: claim.since for place, claim in claims.items() if not claim.holds and claim.purpose == purpose}
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
    return Allotment(limits, frozenset(granted), under_way)


def queued(purpose: Purpose | None, before: Status, now: datetime) -> Queued | None:
    """What the status is to say of a claim; it keeps its place for as long as it is the same."""
    if purpose is None:
        return None
    last = before.queued
    return last if last is not None and last.purpose == purpose else Queued(purpose=purpose, since=now)
