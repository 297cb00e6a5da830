"""Reconciles read the cache: they make no needless request, and no stale cache causes a write."""

from __future__ import annotations

from dataclasses import replace

from aerie.controller.work_queue import NamespacedName
from aerie.rollout.facts.concurrency import ConcurrencyLimits
from tests.unit.controller.conftest import Run
from tests.unit.controller.operator_harness import CHAT, Operator, Server, start_settled_operator


def test_reconcile_without_changes_makes_no_request(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        operator.server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.calls == []

    run(work())


def test_written_objects_are_cached_before_their_watch_events(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.edit()
        operator = Operator(server)
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        assert [call.split()[0] for call in server.writes] == ["APPLY"] * 3 + ["STATUS"]
        assert len(operator.queue) == 1, "another pass follows"
        server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert server.calls == []

    run(work())


def test_nodes_of_canary_and_control_are_read_once(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server = operator.server
        assert not [call for call in server.calls if call.startswith("GET Node")], "no rollout is in progress"
        before = {f"node-of-{name}" for kind, name in server.objects if kind == "Deployment"}
        server.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        await operator.settle()
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["phase"] == "WarmingUp"
        arms = {f"node-of-{name}" for kind, name in server.objects if kind == "Deployment"} - before
        assert len(arms) == 2
        requested_nodes = [call.removeprefix("GET Node ") for call in server.calls if call.startswith("GET Node")]
        assert sorted(requested_nodes) == sorted(arms)
        assert operator.reconciler.node_labels.labels_by_node.keys() == arms

    run(work())


def test_rollout_waits_for_the_rollout_of_another_resource(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        operator.reconciler = replace(operator.reconciler, concurrency_limits=ConcurrencyLimits(max_rollouts=1))
        status = {"stable": {"revision": "a"}, "canary": {"phase": "Analyzing", "startTime": "2026-01-01T00:00:00Z"}}
        metadata = {"namespace": "default", "name": "other", "uid": "o", "generation": 1}
        other = {"kind": "SpeculativeDeployment", "apiVersion": "aerie.dev/v1alpha1", "metadata": metadata, "spec": {}}
        operator.cache.put({**other, "metadata": {**metadata, "resourceVersion": "1000000"}, "status": status})
        operator.server.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        await operator.settle()
        queued_status = operator.server.objects["SpeculativeDeployment", "chat"]["status"]
        assert (queued_status["phase"], queued_status["queue"]["purpose"]) == ("Queued", "Rollout")
        while len(operator.queue):
            operator.queue.done((await operator.queue.get())[0])
        deleted = {**other, "metadata": {**metadata, "resourceVersion": "1000001"}}
        operator.cache.handle_deletion(deleted)
        await operator.reconciler.reconcile(NamespacedName("default", "other"))
        reconciled_names = [(await operator.queue.get())[0].name for _ in range(len(operator.queue))]
        assert "chat" in reconciled_names
        await operator.settle()
        status = operator.server.objects["SpeculativeDeployment", "chat"]["status"]
        assert ("queue" in status, status["phase"]) == (False, "WarmingUp")

    run(work())


# ------------------------------------------------------------------------------------------------------------------ stale caches
def test_stale_cache_causes_no_write(run: Run) -> None:
    """Reconcile with a stale cache, for every past state of two rollouts."""

    async def work() -> None:
        operator = await start_settled_operator()
        operator.server.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        await operator.settle()
        operator.server.edit(replicas=3)
        await operator.settle()
        server = operator.server
        history, server.history = server.history, []
        assert len(history) > 20
        live_read_count = 0
        for state in history:
            stale_operator = Operator(server)
            for item in state:
                stale_operator.cache.put(item)
            server.calls.clear()
            await stale_operator.reconciler.reconcile(CHAT)
            live_read_count += bool(server.calls)
            assert server.writes == []
            server.calls.clear()
            await stale_operator.reconciler.reconcile(CHAT)
            assert server.calls == [], "the live read has updated the cache"
        assert live_read_count > 10

    run(work())


def test_deletion_without_an_event_is_repaired_after_the_next_list(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        operator.server.remove("Service", "chat")
        operator.server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.calls == [], "the cache still has the Service"
        await operator.list()
        assert len(operator.queue) == 1
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.writes == ["APPLY Service chat"]

    run(work())


def test_resource_deleted_without_an_event_is_not_reconciled(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        operator.server.remove("SpeculativeDeployment", "chat")
        operator.server.remove("Service", "chat")
        operator.cache.handle_deletion(operator.server.watch_events[-1][1])
        operator.server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.calls == ["GET SpeculativeDeployment chat"]
        assert operator.cache.get_resource(CHAT) is None
        await operator.reconciler.reconcile(CHAT)
        assert len(operator.server.calls) == 1

    run(work())


def test_recreated_resource_ignores_events_of_the_deleted_one(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server = operator.server
        for kind, name in list(server.objects):
            server.remove(kind, name)
        late_events = server.watch_events[operator.delivered_count :]
        server.edit()
        operator.cache.put(server.objects["SpeculativeDeployment", "chat"])
        for _, item in late_events:  # of the deleted resource, after the event of the new one
            operator.cache.handle_deletion(item)
        operator.delivered_count = len(server.watch_events)
        await operator.settle()
        resource = server.objects["SpeculativeDeployment", "chat"]
        assert resource["status"]["phase"] == "Ready"
        owners = {
            item["metadata"]["ownerReferences"][0]["uid"] for (kind, _), item in server.objects.items() if kind == "Service"
        }
        assert owners == {resource["metadata"]["uid"]}

    run(work())
