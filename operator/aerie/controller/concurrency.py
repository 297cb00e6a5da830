"""Keeps what all resources claim (rollout/facts/concurrency.py), and has those looked at whose turn has come.

Guarantees: claims follow the resources as passes read them, all of them from the first pass on; a resource whose turn it is, and
whose passes fail, or that is left as it is, gives its turn to the next one. Not guaranteed: that a slot is taken at once; a turn
that is not taken up, because the resource needs it no longer, is free again with its next status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aerie.controller.work_queue import Key
from aerie.rollout.facts.concurrency import Allotment, Claim, Limits, Place, Turn, allot, claim_of

Counts = Mapping[tuple[str, str], int]
"""Rollouts and trials, by purpose, and by state: UnderWay or Queued."""


class Allotter:
    """See the module. `wake` has a resource looked at; `counted` is told how many there are of each kind."""

    def __init__(self, limits: Limits, wake: Callable[[Key], None], counted: Callable[[Counts], None] = lambda _: None) -> None:
        self._wake, self._counted = wake, counted
        self._claims: dict[Place, Claim] = {}
        self._allotment = Allotment(limits)
        self._begun = False

    def begin(self, resources: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Take all resources in, the first time only."""
        if self._begun:
            return
        self._begun = True
        for document in resources():
            claim = claim_of(document)
            if claim is not None:
                self._claims[document["metadata"]["namespace"], document["metadata"]["name"]] = claim
        self._allot()

    def note(self, key: Key, document: Mapping[str, Any] | None, *, able: bool = True) -> None:
        """The resource is this now, or gone. `able`: it could begin what it waits for."""
        claim = claim_of(document) if document is not None else None
        if claim is not None and not (claim.holds or able):
            claim = None
        if claim == self._claims.get(key):
            return
        if claim is None:
            del self._claims[key]
        else:
            self._claims[key] = claim
        self._allot()

    def turn(self, key: Key) -> Turn:
        """What the resource may begin."""
        return self._allotment.turn(key, self._claims.get(key))

    def _allot(self) -> None:
        before = self._allotment
        self._allotment = allot(self._claims, before.limits)
        for place in sorted(self._allotment.granted - before.granted):
            self._wake(Key(*place))
        counts = {(purpose, state): 0 for purpose in ("Rollout", "Trial") for state in ("UnderWay", "Queued")}
        for claim in self._claims.values():
            counts[claim.purpose, "UnderWay" if claim.holds else "Queued"] += 1
        self._counted(counts)
