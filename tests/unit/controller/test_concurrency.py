"""What all resources claim, as passes tell it: who is looked at when a slot is free."""

from __future__ import annotations

from typing import Any

from aerie.controller.concurrency import ConcurrencyLimiter
from aerie.controller.work_queue import NamespacedName
from aerie.rollout.facts.concurrency import ConcurrencyLimits


def document(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "default", "name": name}, "spec": {}, "status": status}


def going(name: str) -> dict[str, Any]:
    return document(name, stable={}, canary={"phase": "Analyzing", "startTime": "2026-01-01T00:00:00Z"})


def waiting(name: str, minute: int) -> dict[str, Any]:
    return document(name, stable={}, queue={"purpose": "Rollout", "queuedTime": f"2026-01-01T00:{minute:02}:00Z"})


class Fleet:
    """An allotter of one slot, and what it has done."""

    def __init__(self, *documents: dict[str, Any]) -> None:
        self.woken: list[str] = []
        self.counts: dict[tuple[str, str], int] = {}
        self.allotter = ConcurrencyLimiter(
            ConcurrencyLimits(max_rollouts=1), lambda key: self.woken.append(key.name), self.counts.update
        )
        self.allotter.load_claims(lambda: documents)

    def note(self, document: dict[str, Any], *, able: bool = True) -> None:
        self.allotter.update_claim(NamespacedName("default", document["metadata"]["name"]), document, can_start=able)

    def may_begin(self, name: str) -> bool:
        return "Rollout" in self.allotter.start_permission(NamespacedName("default", name)).allowed_purposes


def test_a_new_leader_knows_of_all_before_its_first_decision() -> None:
    fleet = Fleet(going("a"), waiting("b", 2), waiting("c", 1))
    assert not any(map(fleet.may_begin, "abc"))
    assert fleet.counts == {
        ("Rollout", "Active"): 1,
        ("Rollout", "Queued"): 2,
        ("Trial", "Active"): 0,
        ("Trial", "Queued"): 0,
    }
    fleet.allotter.load_claims(list)
    assert fleet.counts["Rollout", "Active"] == 1, "once"


def test_who_is_next_is_looked_at_when_a_slot_is_free() -> None:
    fleet = Fleet(going("a"), waiting("b", 2), waiting("c", 1))
    fleet.note(document("a", stable={}))
    assert (fleet.woken, fleet.may_begin("c"), fleet.may_begin("b")) == (["c"], True, False)
    fleet.note(going("c"))
    assert not fleet.may_begin("b")
    fleet.allotter.update_claim(NamespacedName("default", "c"), None)  # deleted
    assert (fleet.woken, fleet.may_begin("b")) == (["c", "b"], True)


def test_two_that_claim_the_last_slot_at_the_same_moment_do_not_both_get_it() -> None:
    fleet = Fleet()
    fleet.note(waiting("a", 5))
    fleet.note(waiting("b", 5))
    assert [fleet.may_begin("a"), fleet.may_begin("b")] == [True, False]


def test_one_whose_passes_fail_keeps_nobody_waiting() -> None:
    fleet = Fleet(waiting("a", 1), waiting("b", 2))
    assert fleet.may_begin("a")
    fleet.note(waiting("a", 1), able=False)
    assert (fleet.may_begin("a"), fleet.may_begin("b")) == (False, True)
    fleet.note(waiting("a", 1))
    assert fleet.may_begin("a"), "it has its place again"
    fleet.note(going("b"), able=False)
    assert not fleet.may_begin("a"), "what has pods has them, whether it can be looked at or not"
