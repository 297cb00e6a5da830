"""Claims of all resources, as reconciles update them, and which resource is reconciled when a slot is free."""

from __future__ import annotations

from typing import Any

from aerie.controller.concurrency import ConcurrencyLimiter
from aerie.controller.work_queue import NamespacedName
from aerie.rollout.facts.concurrency import ConcurrencyLimits


def document(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "default", "name": name}, "spec": {}, "status": status}


def active_rollout(name: str) -> dict[str, Any]:
    return document(name, stable={}, canary={"phase": "Analyzing", "startTime": "2026-01-01T00:00:00Z"})


def queued_rollout(name: str, minute: int) -> dict[str, Any]:
    return document(name, stable={}, queue={"purpose": "Rollout", "queuedTime": f"2026-01-01T00:{minute:02}:00Z"})


class LimiterHarness:
    """A limiter with one slot; records reconciled resources and counts."""

    def __init__(self, *documents: dict[str, Any]) -> None:
        self.reconciled_names: list[str] = []
        self.counts: dict[tuple[str, str], int] = {}
        self.limiter = ConcurrencyLimiter(
            ConcurrencyLimits(max_rollouts=1), lambda key: self.reconciled_names.append(key.name), self.counts.update
        )
        self.limiter.load_claims(lambda: documents)

    def update_claim(self, document: dict[str, Any], *, can_start: bool = True) -> None:
        self.limiter.update_claim(NamespacedName("default", document["metadata"]["name"]), document, can_start=can_start)

    def may_start(self, name: str) -> bool:
        return "Rollout" in self.limiter.start_permission(NamespacedName("default", name)).allowed_purposes


def test_new_leader_loads_all_claims_before_its_first_decision() -> None:
    harness = LimiterHarness(active_rollout("a"), queued_rollout("b", 2), queued_rollout("c", 1))
    assert not any(map(harness.may_start, "abc"))
    assert harness.counts == {
        ("Rollout", "Active"): 1,
        ("Rollout", "Queued"): 2,
        ("Trial", "Active"): 0,
        ("Trial", "Queued"): 0,
    }
    harness.limiter.load_claims(list)
    assert harness.counts["Rollout", "Active"] == 1, "once"


def test_next_resource_is_reconciled_when_a_slot_is_free() -> None:
    harness = LimiterHarness(active_rollout("a"), queued_rollout("b", 2), queued_rollout("c", 1))
    harness.update_claim(document("a", stable={}))
    assert (harness.reconciled_names, harness.may_start("c"), harness.may_start("b")) == (["c"], True, False)
    harness.update_claim(active_rollout("c"))
    assert not harness.may_start("b")
    harness.limiter.update_claim(NamespacedName("default", "c"), None)  # deleted
    assert (harness.reconciled_names, harness.may_start("b")) == (["c", "b"], True)


def test_last_slot_goes_to_one_of_two_concurrent_claims() -> None:
    harness = LimiterHarness()
    harness.update_claim(queued_rollout("a", 5))
    harness.update_claim(queued_rollout("b", 5))
    assert [harness.may_start("a"), harness.may_start("b")] == [True, False]


def test_resource_whose_reconciles_fail_blocks_no_other() -> None:
    harness = LimiterHarness(queued_rollout("a", 1), queued_rollout("b", 2))
    assert harness.may_start("a")
    harness.update_claim(queued_rollout("a", 1), can_start=False)
    assert (harness.may_start("a"), harness.may_start("b")) == (False, True)
    harness.update_claim(queued_rollout("a", 1))
    assert harness.may_start("a"), "it has its place again"
    harness.update_claim(active_rollout("b"), can_start=False)
    assert not harness.may_start("a"), "a rollout with pods keeps its slot, even if its reconciles fail"
