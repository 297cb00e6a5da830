"""Reconciles without a list of some kind: they wait, or report it, and change only what needs no such list."""

from __future__ import annotations

import copy

import pytest

from aerie.controller.kubernetes.client import ObjectDict
from aerie.controller.kubernetes.listing import CacheGaps, Lister
from tests.unit.controller.conftest import Run
from tests.unit.controller.operator_harness import CHAT, get_condition, start_settled_operator


class ListerWithGaps(Lister):
    """A lister with gaps that a test sets."""

    def __init__(self) -> None:
        self.gaps = CacheGaps()

    def find_gaps(self, document: ObjectDict) -> CacheGaps:  # noqa: ARG002
        return self.gaps


def test_pending_lists_delay_the_reconcile(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        operator.reconciler.lister = lists = ListerWithGaps()
        lists.gaps = CacheGaps(is_pending=True, errors_by_kind={"Pod": "pods cannot be listed"})
        operator.server.edit(replicas=3)
        operator.deliver_events()
        operator.server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.calls == []
        lists.gaps = CacheGaps()
        await operator.settle()
        assert operator.server.objects["SpeculativeDeployment", "chat"]["status"]["readyReplicas"] == 3

    run(work())


@pytest.mark.parametrize("forbidden", [True, False])
def test_resource_without_listed_pods_is_only_reported_as_degraded(run: Run, forbidden: bool) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server = operator.server
        before = copy.deepcopy(server.objects["SpeculativeDeployment", "chat"]["status"])
        operator.reconciler.lister = lists = ListerWithGaps()
        lists.gaps = CacheGaps(errors_by_kind={"Pod": "Pods of namespace b cannot be listed: no"}, is_forbidden=forbidden)
        server.edit(replicas=3, drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        server.calls.clear()
        for _ in range(4):
            operator.deliver_events()
            await operator.reconciler.reconcile(CHAT)
        assert server.writes == ["STATUS"]
        status, reason, message = get_condition(server, "Degraded")
        assert (status, reason) == ("True", "ListForbidden" if forbidden else "ListFailed")
        assert "Pods of namespace b cannot be listed: no" in message
        after = copy.deepcopy(server.objects["SpeculativeDeployment", "chat"]["status"])
        for status_document in (before, after):
            status_document["conditions"] = [
                condition for condition in status_document["conditions"] if condition["type"] != "Degraded"
            ]
        assert after == before
        metric = operator.reconciler.metrics.registry.get_sample_value
        assert metric("aerie_resources_held", {"reason": reason}) == 1
        lists.gaps = CacheGaps()
        await operator.settle()
        assert get_condition(server, "Degraded")[0] == "False"
        assert metric("aerie_resources_held", {"reason": reason}) == 0

    run(work())


def test_unlistable_kind_does_not_block_repairs_of_other_kinds(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server = operator.server
        operator.reconciler.lister = lists = ListerWithGaps()
        errors_by_kind = {"Service": "Services of namespace b cannot be listed: no"}
        lists.gaps = CacheGaps(errors_by_kind=errors_by_kind, skipped_kinds=frozenset(errors_by_kind), is_forbidden=True)
        server.remove("Service", "chat")
        budget = next(name for (kind, name) in server.objects if kind == "PodDisruptionBudget")
        server.remove("PodDisruptionBudget", budget)
        server.edit(replicas=3, drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        server.calls.clear()
        await operator.settle()
        assert {call for call in server.writes if call != "STATUS"} >= {f"APPLY PodDisruptionBudget {budget}"}
        assert not [call for call in server.writes if call.startswith(("DELETE", "APPLY Service", "APPLY Job"))]
        (deployment,) = (item for (kind, _), item in server.objects.items() if kind == "Deployment")
        assert deployment["spec"]["replicas"] == 3, "it is scaled, and no other revision begins"
        assert get_condition(server, "Degraded")[:2] == ("True", "ListForbidden")
        assert not [call for call in server.calls if call.startswith("GET Service ")], "which is rejected too"
        lists.gaps = CacheGaps()
        await operator.settle()
        assert ("Service", "chat") in server.objects
        assert get_condition(server, "Degraded")[0] == "False"

    run(work())
