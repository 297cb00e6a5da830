"""Reconciles of a resource: reads and writes, and that no stale cache causes a write."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from aerie.api.crd import build_custom_resource_definition
from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import ApiError, Cluster, ObjectDict, PageErrorHandler, ResourceKind
from aerie.controller.kubernetes.listing import CacheGaps, Lister
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.probes.equivalence import EquivalenceProber
from aerie.controller.reconciler import Reconciler
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.work_queue import NamespacedName, WorkQueue
from aerie.manifests import naming
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.facts.concurrency import ConcurrencyLimits

Run = Callable[[Coroutine[Any, Any, None]], None]
ObjectKey = tuple[str, str]
CHAT = NamespacedName("default", "chat")


class PlainNodeLabels(dict[str, dict[str, str]]):
    """Labels of any node, without its hardware."""

    def __missing__(self, name: str) -> dict[str, str]:
        return {"kubernetes.io/hostname": name}


class Server(Cluster):
    """An API server with the controllers that Aerie needs. `calls` are those of Aerie, `watch_events` those of a watch."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, ObjectDict] = {}
        self.versions, self.uids = itertools.count(1), itertools.count(1)
        self.calls: list[str] = []
        self.watch_events: list[tuple[str, ObjectDict]] = []
        self.events: list[ObjectDict] = []
        """Events of Jobs without pods."""
        self.node_labels = PlainNodeLabels()
        self.apply_errors: dict[str, ApiError] = {}
        """Error of an apply, by kind."""
        self.history: list[list[ObjectDict]] = []
        """All objects before each change."""

    @property
    def writes(self) -> list[str]:
        return [call for call in self.calls if not call.startswith("GET")]

    def _store(self, item: ObjectDict) -> ObjectDict:
        self.history.append(copy.deepcopy(list(self.objects.values())))
        object_key = (item["kind"], item["metadata"]["name"])
        uid = self.objects[object_key]["metadata"]["uid"] if object_key in self.objects else f"u{next(self.uids)}"
        metadata = {"namespace": "default", **item["metadata"], "uid": uid, "resourceVersion": str(next(self.versions))}
        self.objects[object_key] = copy.deepcopy({**item, "metadata": metadata})
        self.watch_events.append(("MODIFIED", self.objects[object_key]))
        return copy.deepcopy(self.objects[object_key])

    def remove(self, kind: str, name: str) -> None:
        self.history.append(copy.deepcopy(list(self.objects.values())))
        item = self.objects.pop((kind, name))
        deleted = {**item, "metadata": {**item["metadata"], "resourceVersion": str(next(self.versions))}}
        self.watch_events.append(("DELETED", deleted))

    # -- requests
    async def get(self, kind: ResourceKind, namespace: str, name: str) -> ObjectDict | None:  # noqa: ARG002
        self.calls.append(f"GET {kind.kind} {name}")
        return copy.deepcopy(self.objects.get((kind.kind, name)))

    async def get_metadata(self, kind: ResourceKind, namespace: str | None, name: str) -> ObjectDict | None:
        assert (kind.kind, namespace) == ("Node", None)
        self.calls.append(f"GET {kind.kind} {name}")
        return {"name": name, "labels": self.node_labels[name]}

    async def list_pages(
        self,
        kind: ResourceKind,
        namespace: str | None,  # noqa: ARG002
        selector: str = "",
        on_page_error: PageErrorHandler | None = None,  # noqa: ARG002
    ) -> AsyncIterator[tuple[list[ObjectDict], str | None]]:
        self.calls.append(f"GET {kind.kind} {selector}")
        if kind.kind == "HTTPRoute":  # no Gateway API here
            yield [], None
            return
        label, _, value = selector.partition("=")
        objects = []
        for (object_kind, _), item in self.objects.items():
            label_value = (item["metadata"].get("labels") or {}).get(label)
            if object_kind == kind.kind and (not label or (label_value is not None and value in ("", label_value))):
                objects.append(copy.deepcopy(item))
        version = str(next(self.versions))
        for start in range(0, max(len(objects), 1), 2):
            yield objects[start : start + 2], version

    async def apply(self, desired: ObjectDict, *, uid: str | None) -> ObjectDict:
        self.calls.append(f"APPLY {desired['kind']} {desired['metadata']['name']}")
        if (error := self.apply_errors.get(desired["kind"])) is not None:
            raise error
        existing = self.objects.get((desired["kind"], desired["metadata"]["name"]), {})
        if existing and existing["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "another field manager owns its fields")
        return self._store({**existing, **desired})

    async def request(self, verb: str, path: str, *_: Any, **__: Any) -> Any:
        self.calls.append(f"{verb} {path}")
        assert path.endswith("/events"), "the only call that has no method of its own"
        return {"items": self.events}

    async def merge_patch(self, target: ObjectDict, changes: ObjectDict) -> None:  # noqa: ARG002
        self.calls.append(f"MERGE {target['kind']} {target['metadata']['name']}")
        if (error := self.apply_errors.get(target["kind"])) is not None:
            raise error

    async def replace_status(self, resource: ObjectDict, status: ObjectDict) -> ObjectDict:
        self.calls.append("STATUS")
        existing = self.objects[resource["kind"], resource["metadata"]["name"]]
        if existing["metadata"]["resourceVersion"] != resource["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "it has changed")
        return self._store({**existing, "status": status})

    async def create(self, desired: ObjectDict) -> ObjectDict:
        self.calls.append(f"EVENT {desired['reason']}")
        return desired

    async def delete(self, kind: ResourceKind, namespace: str, name: str, uid: str) -> None:  # noqa: ARG002
        self.calls.append(f"DELETE {kind.kind} {name}")
        if (kind.kind, name) in self.objects and self.objects[kind.kind, name]["metadata"]["uid"] == uid:
            self.remove(kind.kind, name)

    # -- the user and the controllers
    def edit(self, **spec: Any) -> None:
        default_spec = {
            "replicas": 2,
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "target"}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0"},
            "drafter": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "eagle3"}}},
        }
        existing = self.objects.get(
            ("SpeculativeDeployment", "chat"), {"spec": default_spec, "metadata": {"name": "chat", "generation": 0}}
        )
        metadata = {**existing["metadata"], "generation": existing["metadata"]["generation"] + 1}
        type_and_metadata = {"apiVersion": "aerie.dev/v1alpha1", "kind": "SpeculativeDeployment", "metadata": metadata}
        self._store({**existing, **type_and_metadata, "spec": {**existing["spec"], **spec}})

    def run_controllers(self) -> None:
        """Complete Jobs, create ready pods of Deployments, delete pods without a Deployment."""
        for (kind, name), item in list(self.objects.items()):
            if kind == "Job" and not item.get("status"):
                self._store({**item, "status": {"conditions": [{"type": "Complete", "status": "True"}]}})
                message = json.dumps({"passed": True, "summary": "checked."})
                container = {"name": "preflight", "state": {"terminated": {"exitCode": 0, "message": message}}}
                self._pod(f"{name}-x", item, {"phase": "Succeeded", "containerStatuses": [container]})
            if kind == "Deployment":
                for number in range(item["spec"]["replicas"]):
                    if ("Pod", f"{name}-{number}") not in self.objects:
                        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
                        self._pod(f"{name}-{number}", item, ready)
            if kind == "Pod" and naming.NAME_LABEL in item["metadata"]["labels"]:
                owner = self.objects.get(("Deployment", name.rpartition("-")[0]))
                if owner is None or int(name.rpartition("-")[2]) >= owner["spec"]["replicas"]:
                    self.remove("Pod", name)

    def _pod(self, name: str, owner: ObjectDict, status: ObjectDict) -> None:
        metadata = {"name": name, "labels": owner["spec"]["template"]["metadata"]["labels"]}
        spec = {"nodeName": f"node-of-{owner['metadata']['name']}", "containers": []}
        self._store({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status})


class Operator:
    """A reconciler and its cache, which gets the watch events that the test delivers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.queue = WorkQueue()
        self.cache = ObjectCache(self.queue.add)
        scraper = Scraper(self.queue.add, lambda *_: None)
        prober = EquivalenceProber(self.queue.add)
        self.reconciler = Reconciler(
            server, self.cache, self.queue, OperatorMetrics(), scraper, prober, PreflightJobConfig("aerie.dev/aerie:test")
        )
        self.delivered_count = 0

    def deliver_events(self) -> None:
        for kind, item in self.server.watch_events[self.delivered_count :]:
            if kind == "DELETED":
                self.cache.handle_deletion(item)
            else:
                self.cache.put(item)
        self.delivered_count = len(self.server.watch_events)

    async def list(self) -> None:
        await Lister(self.server, self.cache, self.queue, (), OperatorMetrics()).run_due_lists()

    async def settle(self) -> None:
        """Run reconciles and controllers until a reconcile changes nothing."""
        for _ in range(30):
            self.deliver_events()
            before = len(self.server.writes)
            await self.reconciler.reconcile(CHAT)
            self.server.run_controllers()
            if len(self.server.writes) == before and self.delivered_count == len(self.server.watch_events):
                return
        raise AssertionError("it never settles")


async def start_settled_operator() -> Operator:
    server = Server()
    server.edit()
    operator = Operator(server)
    await operator.settle()
    assert server.objects["SpeculativeDeployment", "chat"]["status"]["phase"] == "Ready"
    return operator


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


class ListerWithGaps(Lister):
    """A lister with gaps that a test sets."""

    def __init__(self) -> None:
        self.gaps = CacheGaps()

    def find_gaps(self, document: ObjectDict) -> CacheGaps:  # noqa: ARG002
        return self.gaps


def get_condition(server: Server, kind: str) -> tuple[str, str, str]:
    conditions = server.objects["SpeculativeDeployment", "chat"]["status"]["conditions"]
    return next(
        (condition["status"], condition["reason"], condition["message"]) for condition in conditions if condition["type"] == kind
    )


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


NEWER_STATUS_FIELDS = [
    ("phase", "Charming"),
    ("canary", {"revision": "x", "change": "y", "phase": "Charming", "startTime": "2026-11-21T12:00:00Z"}),
    (
        "rolloutHistory",
        [{"revision": "x", "change": "y", "result": "Adopted", "message": "z", "startTime": 1, "completionTime": 2}],
    ),
    ("replicas", "many"),
]


@pytest.mark.parametrize(("field", "value"), NEWER_STATUS_FIELDS)
def test_unreadable_status_of_another_release_is_preserved(run: Run, field: str, value: Any) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server = operator.server
        item = server.objects["SpeculativeDeployment", "chat"]
        newer_status = {**item["status"], field: value, "novel": {"of": ["another", "release"]}}
        server._store({**item, "status": newer_status})
        server.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        server.remove("Service", "chat")
        server.calls.clear()
        for _ in range(4):
            operator.deliver_events()
            await operator.reconciler.reconcile(CHAT)
        assert server.writes == ["STATUS"]
        status, reason, message = get_condition(server, "Degraded")
        assert (status, reason) == ("True", "VersionSkew")
        assert f"status.{field}" in message
        assert "install the operator" in message
        stored_status = server.objects["SpeculativeDeployment", "chat"]["status"]
        assert {name for name in newer_status if stored_status[name] != newer_status[name]} == {"conditions"}

    run(work())


UNREADABLE_SPEC = {"engine": {"image": "vllm/vllm-openai:v0.33.0", "resources": {"limits": {"nvidia.com/gpu": "-x"}}}}


def test_serving_pods_with_an_unreadable_spec_are_maintained(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server, gauge = operator.server, operator.reconciler.metrics.registry.get_sample_value
        before = {key: item["spec"] for key, item in server.objects.items() if key[0] in ("Deployment", "Service")}
        server.edit(**UNREADABLE_SPEC, replicas=3)
        for kind, name in before:
            server.remove(kind, name)
        await operator.settle()
        after = {key: server.objects[key]["spec"] for key in before}
        assert after == {key: {**spec, **({"replicas": 3} if key[0] == "Deployment" else {})} for key, spec in before.items()}
        status, reason, message = get_condition(server, "Degraded")
        assert (status, reason) == ("True", "UnreadableSpec")
        assert "spec.engine.resources.limits.nvidia.com/gpu is '-x'" in message
        assert gauge("aerie_resources_held", {"reason": "UnreadableSpec"}) == 1
        server.calls.clear()
        for _ in range(3):
            operator.deliver_events()
            await operator.reconciler.reconcile(CHAT)
        assert server.calls == [], "and nothing is written twice"
        server.edit(engine={"image": "vllm/vllm-openai:v0.33.0"})
        await operator.settle()
        assert get_condition(server, "Degraded")[0] == "False"
        assert gauge("aerie_resources_held", {"reason": "UnreadableSpec"}) == 0
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["phase"] == "Ready"

    run(work())


def test_unreadable_spec_without_stable_pods_is_only_reported(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.edit(**UNREADABLE_SPEC)
        operator = Operator(server)
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        assert server.writes == ["STATUS"]
        status, reason, message = get_condition(server, "Degraded")
        assert (status, reason) == ("True", "UnreadableSpec")
        assert "spec.engine.resources.limits" in message

    run(work())


def test_events_explain_a_job_without_pods(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.edit()
        operator = Operator(server)
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        ((_, name),) = (object_key for object_key in server.objects if object_key[0] == "Job")
        job = server.objects["Job", name]
        server._store({**job, "metadata": {**job["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}})
        notes = {"00:01": f'pods "{name}-bcdfg" is forbidden: exceeded', "00:00": "older"}
        server.events = [{"metadata": {}, "note": note, "deprecatedLastTimestamp": at} for at, note in notes.items()]
        operator.deliver_events()
        requeue_after = await operator.reconciler.reconcile(CHAT)
        status = server.objects["SpeculativeDeployment", "chat"]["status"]
        (preflight_condition,) = (condition for condition in status["conditions"] if condition["type"] == "PreflightPassed")
        assert (preflight_condition["status"], preflight_condition["reason"]) == ("Unknown", "FailedCreate")
        assert preflight_condition["message"].endswith(f'pods "{name}-..." is forbidden: exceeded')
        assert requeue_after is not None
        server.calls.clear()
        server.events[0]["note"] = f'pods "{name}-hjklm" is forbidden: exceeded'
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        assert server.writes == [], "another attempt causes no write"

    run(work())


# ------------------------------------------------------------------------------------------------- errors of one object
KINDS = ("Service", "PodDisruptionBudget", "ConfigMap", "Job", "Deployment")
ERROR_MESSAGES = {
    404: "the server could not find the requested resource",
    409: "Apply failed with 1 conflict",
    422: "spec: Invalid value",
    429: "too many requests, please try again later",
    500: "failed calling webhook",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", ERROR_MESSAGES)
def test_apply_error_of_one_object_blocks_no_other(run: Run, kind: str, status: int) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server = operator.server
        for item in [item for (object_kind, _), item in server.objects.items() if object_kind in KINDS and object_kind != "Job"]:
            # Without the annotation by which Aerie knows what it has applied.
            server._store({**item, "metadata": {**item["metadata"], "annotations": {}}})
        server.edit(replicas=3, rollout={"progressDeadline": "40m"})
        server.apply_errors[kind] = ApiError(status, "Reason", ERROR_MESSAGES[status])
        server.calls.clear()
        operator.deliver_events()
        await operator.list()
        is_temporary = status not in (404, 422)
        for _ in range(5):
            if is_temporary and kind != "Job":
                with pytest.raises(ApiError, match=ERROR_MESSAGES[status]):
                    await operator.reconciler.reconcile(CHAT)
                operator.reconciler.queue.add_rate_limited(CHAT)
            else:
                await operator.reconciler.reconcile(CHAT)
        applied = {call.split()[1] for call in server.writes if call.startswith("APPLY")}
        assert applied >= {"Service", "PodDisruptionBudget", "ConfigMap", "Deployment"}
        document = server.objects["SpeculativeDeployment", "chat"]
        degraded = next(condition for condition in document["status"]["conditions"] if condition["type"] == "Degraded")
        assert document["status"]["observedGeneration"] == document["metadata"]["generation"]
        if kind != "Job":  # no Job has to be created
            assert degraded["reason"] == "ApplyFailed"
            assert ERROR_MESSAGES[status] in degraded["message"]
        server.apply_errors.clear()
        await operator.settle()
        degraded = next(
            condition
            for condition in server.objects["SpeculativeDeployment", "chat"]["status"]["conditions"]
            if condition["type"] == "Degraded"
        )
        assert degraded["reason"] == "AsExpected"

    run(work())


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_object_is_unchanged_and_reported(run: Run, kind: str) -> None:
    async def work() -> None:
        owner = await start_settled_operator()
        owned_object = next(item for (object_kind, _), item in owner.server.objects.items() if object_kind == kind)
        name = owned_object["metadata"]["name"]
        server = Server()
        server.edit()
        server._store({**owned_object, "metadata": {"name": name, "labels": {"team": "other"}}, "status": {}})
        before = copy.deepcopy({key: server.objects[kind, name][key] for key in ("spec", "data") if key in owned_object})
        operator = Operator(server)
        await operator.settle()
        foreign_object = server.objects[kind, name]
        assert foreign_object["metadata"]["labels"] == {"team": "other"}
        assert {key: foreign_object[key] for key in before} == before
        document = server.objects["SpeculativeDeployment", "chat"]
        degraded = next(condition for condition in document["status"]["conditions"] if condition["type"] == "Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "NameTaken")
        assert degraded["message"].startswith(f"{kind} {name} ")
        assert not [call for call in server.writes if call in (f"APPLY {kind} {name}", f"DELETE {kind} {name}")]

    run(work())


def test_status_fields_of_a_newer_release_are_preserved(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server = operator.server
        item = copy.deepcopy(server.objects["SpeculativeDeployment", "chat"])
        for part in (item["status"], item["status"]["stable"], item["status"]["rolloutHistory"][0]):
            part["novel"] = {"of": "another release"}
        server._store(item)
        operator.deliver_events()
        server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert server.calls == []
        server.edit(replicas=3)
        await operator.settle()
        stored_status = server.objects["SpeculativeDeployment", "chat"]["status"]
        assert stored_status["stable"]["replicas"] == 3
        for part in (stored_status, stored_status["stable"], stored_status["rolloutHistory"][0]):
            assert part["novel"] == {"of": "another release"}

    run(work())


class ServerWithOldDefinition(Server):
    """An API server whose definition lacks status fields."""

    missing_fields: tuple[str, ...] = ("rolloutHistory", "selector")

    async def replace_status(self, resource: ObjectDict, status: ObjectDict) -> ObjectDict:
        return await super().replace_status(
            resource, {key: value for key, value in status.items() if key not in self.missing_fields}
        )

    async def request(self, verb: str, path: str, *_: Any, **__: Any) -> Any:
        assert (verb, path.rpartition("/")[2]) == ("GET", "speculativedeployments.aerie.dev")
        definition = build_custom_resource_definition()
        properties = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
        for field in self.missing_fields:
            del properties[field]
        return definition


def test_older_definition_is_logged_once_and_causes_no_repeated_writes(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        server = ServerWithOldDefinition()
        server.edit()
        operator = Operator(server)
        await operator.settle()
        status, reason, message = get_condition(server, "Degraded")
        assert (status, reason) == ("True", "VersionSkew")
        assert "status.rolloutHistory, status.selector: apply the definition of this release" in message
        metric = operator.reconciler.metrics.registry.get_sample_value
        assert metric("aerie_status_fields_dropped") == 2
        operator.deliver_events()
        server.calls.clear()
        for _ in range(3):
            await operator.reconciler.reconcile(CHAT)
        assert server.calls == []
        server.edit(replicas=3)
        await operator.settle()
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["readyReplicas"] == 3, "reconciles continue"
        server.missing_fields = ()
        monitoring = asyncio.create_task(operator.reconciler.crd_monitor.run(server))
        await asyncio.sleep(1)
        await operator.settle()
        assert get_condition(server, "Degraded")[0] == "False"
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["selector"]
        assert metric("aerie_status_fields_dropped") == 0
        monitoring.cancel()
        await asyncio.gather(monitoring, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        run(work())
    logged_levels = [record.levelname for record in caplog.records if "CustomResourceDefinition" in record.message]
    assert logged_levels == ["ERROR", "ERROR", "WARNING"], "the second field is written after the first one"


def test_older_definition_is_reported_before_the_first_write(run: Run) -> None:
    async def work() -> None:
        server = ServerWithOldDefinition()
        server.edit()
        operator = Operator(server)
        monitoring = asyncio.create_task(operator.reconciler.crd_monitor.run(server))
        await asyncio.sleep(1)
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        assert get_condition(server, "Degraded")[:2] == ("True", "VersionSkew")
        monitoring.cancel()
        await asyncio.gather(monitoring, return_exceptions=True)

    run(work())
