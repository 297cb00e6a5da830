"""Passes over a resource: what they read and write, and that no old news of the world makes them write anything."""

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
Place = tuple[str, str]
CHAT = NamespacedName("default", "chat")


class Nowhere(dict[str, dict[str, str]]):
    """Labels of any node, none of which tells its hardware."""

    def __missing__(self, name: str) -> dict[str, str]:
        return {"kubernetes.io/hostname": name}


class Server(Cluster):
    """An API server with the controllers that Aerie relies on. `calls` are those of Aerie, `told` what a watch would tell."""

    def __init__(self) -> None:
        self.objects: dict[Place, ObjectDict] = {}
        self.versions, self.uids = itertools.count(1), itertools.count(1)
        self.calls: list[str] = []
        self.told: list[tuple[str, ObjectDict]] = []
        self.events: list[ObjectDict] = []
        """Events of Jobs that get no pods."""
        self.node_labels = Nowhere()
        self.refuses: dict[str, ApiError] = {}
        """What is answered to an apply, by kind."""
        self.history: list[list[ObjectDict]] = []
        """What there was before each change."""

    @property
    def writes(self) -> list[str]:
        return [call for call in self.calls if not call.startswith("GET")]

    def _store(self, item: ObjectDict) -> ObjectDict:
        self.history.append(copy.deepcopy(list(self.objects.values())))
        place = (item["kind"], item["metadata"]["name"])
        uid = self.objects[place]["metadata"]["uid"] if place in self.objects else f"u{next(self.uids)}"
        metadata = {"namespace": "default", **item["metadata"], "uid": uid, "resourceVersion": str(next(self.versions))}
        self.objects[place] = copy.deepcopy({**item, "metadata": metadata})
        self.told.append(("MODIFIED", self.objects[place]))
        return copy.deepcopy(self.objects[place])

    def remove(self, kind: str, name: str) -> None:
        self.history.append(copy.deepcopy(list(self.objects.values())))
        item = self.objects.pop((kind, name))
        gone = {**item, "metadata": {**item["metadata"], "resourceVersion": str(next(self.versions))}}
        self.told.append(("DELETED", gone))

    # -- the calls
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
        patience: PageErrorHandler | None = None,  # noqa: ARG002
    ) -> AsyncIterator[tuple[list[ObjectDict], str | None]]:
        self.calls.append(f"GET {kind.kind} {selector}")
        if kind.kind == "HTTPRoute":  # no Gateway API here
            yield [], None
            return
        label, _, value = selector.partition("=")
        found = []
        for (of, _), item in self.objects.items():
            has = (item["metadata"].get("labels") or {}).get(label)
            if of == kind.kind and (not label or (has is not None and value in ("", has))):
                found.append(copy.deepcopy(item))
        version = str(next(self.versions))
        for start in range(0, max(len(found), 1), 2):
            yield found[start : start + 2], version

    async def apply(self, wanted: ObjectDict, *, uid: str | None) -> ObjectDict:
        self.calls.append(f"APPLY {wanted['kind']} {wanted['metadata']['name']}")
        if (error := self.refuses.get(wanted["kind"])) is not None:
            raise error
        known = self.objects.get((wanted["kind"], wanted["metadata"]["name"]), {})
        if known and known["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "another field manager owns its fields")
        return self._store({**known, **wanted})

    async def request(self, verb: str, path: str, *_: Any, **__: Any) -> Any:
        self.calls.append(f"{verb} {path}")
        assert path.endswith("/events"), "the only call that has no method of its own"
        return {"items": self.events}

    async def merge_patch(self, wanted: ObjectDict, changes: ObjectDict) -> None:  # noqa: ARG002
        self.calls.append(f"MERGE {wanted['kind']} {wanted['metadata']['name']}")
        if (error := self.refuses.get(wanted["kind"])) is not None:
            raise error

    async def replace_status(self, resource: ObjectDict, status: ObjectDict) -> ObjectDict:
        self.calls.append("STATUS")
        known = self.objects[resource["kind"], resource["metadata"]["name"]]
        if known["metadata"]["resourceVersion"] != resource["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "it has changed")
        return self._store({**known, "status": status})

    async def create(self, wanted: ObjectDict) -> ObjectDict:
        self.calls.append(f"TELL {wanted['reason']}")
        return wanted

    async def delete(self, kind: ResourceKind, namespace: str, name: str, uid: str) -> None:  # noqa: ARG002
        self.calls.append(f"DELETE {kind.kind} {name}")
        if (kind.kind, name) in self.objects and self.objects[kind.kind, name]["metadata"]["uid"] == uid:
            self.remove(kind.kind, name)

    # -- the user and the controllers
    def edit(self, **spec: Any) -> None:
        whole = {
            "replicas": 2,
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "target"}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0"},
            "drafter": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "eagle3"}}},
        }
        known = self.objects.get(
            ("SpeculativeDeployment", "chat"), {"spec": whole, "metadata": {"name": "chat", "generation": 0}}
        )
        metadata = {**known["metadata"], "generation": known["metadata"]["generation"] + 1}
        about = {"apiVersion": "aerie.dev/v1alpha1", "kind": "SpeculativeDeployment", "metadata": metadata}
        self._store({**known, **about, "spec": {**known["spec"], **spec}})

    def controllers(self) -> None:
        """Jobs pass, Deployments have ready pods, pods without a Deployment go."""
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
    """A reconciler and its mirror, which hears of the server what the test lets it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.queue = WorkQueue()
        self.mirror = ObjectCache(self.queue.add)
        scraper = Scraper(self.queue.add, lambda *_: None)
        prober = EquivalenceProber(self.queue.add)
        self.reconciler = Reconciler(
            server, self.mirror, self.queue, OperatorMetrics(), scraper, prober, PreflightJobConfig("aerie.dev/aerie:test")
        )
        self.heard = 0

    def hear(self) -> None:
        for kind, item in self.server.told[self.heard :]:
            if kind == "DELETED":
                self.mirror.handle_deletion(item)
            else:
                self.mirror.put(item)
        self.heard = len(self.server.told)

    async def list(self) -> None:
        await Lister(self.server, self.mirror, self.queue, (), OperatorMetrics()).run_due_lists()

    async def settle(self) -> None:
        """Passes and controllers until no pass has anything to do."""
        for _ in range(30):
            self.hear()
            before = len(self.server.writes)
            await self.reconciler.reconcile(CHAT)
            self.server.controllers()
            if len(self.server.writes) == before and self.heard == len(self.server.told):
                return
        raise AssertionError("it never settles")


async def settled() -> Operator:
    server = Server()
    server.edit()
    operator = Operator(server)
    await operator.settle()
    assert server.objects["SpeculativeDeployment", "chat"]["status"]["phase"] == "Ready"
    return operator


def test_a_pass_with_nothing_to_do_makes_no_call(run: Run) -> None:
    async def work() -> None:
        operator = await settled()
        operator.server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.calls == []

    run(work())


def test_what_a_pass_has_written_is_known_to_the_next_one_before_any_watch_tells(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.edit()
        operator = Operator(server)
        operator.hear()
        await operator.reconciler.reconcile(CHAT)
        assert [call.split()[0] for call in server.writes] == ["APPLY"] * 3 + ["STATUS"]
        assert len(operator.queue) == 1, "another pass follows"
        server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert server.calls == []

    run(work())


def test_only_nodes_of_canary_and_control_are_asked_for_and_each_once(run: Run) -> None:
    async def work() -> None:
        operator = await settled()
        server = operator.server
        assert not [call for call in server.calls if call.startswith("GET Node")], "no rollout is under way"
        before = {f"node-of-{name}" for kind, name in server.objects if kind == "Deployment"}
        server.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        await operator.settle()
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["phase"] == "WarmingUp"
        arms = {f"node-of-{name}" for kind, name in server.objects if kind == "Deployment"} - before
        assert len(arms) == 2
        asked = [call.removeprefix("GET Node ") for call in server.calls if call.startswith("GET Node")]
        assert sorted(asked) == sorted(arms)
        assert operator.reconciler.node_labels.labels_by_node.keys() == arms

    run(work())


def test_a_rollout_waits_until_another_resources_is_over(run: Run) -> None:
    async def work() -> None:
        operator = await settled()
        operator.reconciler = replace(operator.reconciler, concurrency_limits=ConcurrencyLimits(max_rollouts=1))
        status = {"stable": {"revision": "a"}, "canary": {"phase": "Analyzing", "startTime": "2026-01-01T00:00:00Z"}}
        about = {"namespace": "default", "name": "other", "uid": "o", "generation": 1}
        other = {"kind": "SpeculativeDeployment", "apiVersion": "aerie.dev/v1alpha1", "metadata": about, "spec": {}}
        operator.mirror.put({**other, "metadata": {**about, "resourceVersion": "1000000"}, "status": status})
        operator.server.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        await operator.settle()
        waiting = operator.server.objects["SpeculativeDeployment", "chat"]["status"]
        assert (waiting["phase"], waiting["queue"]["purpose"]) == ("Queued", "Rollout")
        while len(operator.queue):
            operator.queue.done((await operator.queue.get())[0])
        gone = {**other, "metadata": {**about, "resourceVersion": "1000001"}}
        operator.mirror.handle_deletion(gone)
        await operator.reconciler.reconcile(NamespacedName("default", "other"))
        woken = [(await operator.queue.get())[0].name for _ in range(len(operator.queue))]
        assert "chat" in woken
        await operator.settle()
        status = operator.server.objects["SpeculativeDeployment", "chat"]["status"]
        assert ("queue" in status, status["phase"]) == (False, "WarmingUp")

    run(work())


def test_no_old_news_of_the_world_causes_a_write(run: Run) -> None:
    """From every state that there ever was of two rollouts, with the mirror left behind there."""

    async def work() -> None:
        operator = await settled()
        operator.server.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        await operator.settle()
        operator.server.edit(replicas=3)
        await operator.settle()
        server = operator.server
        history, server.history = server.history, []
        assert len(history) > 20
        looks = 0
        for state in history:
            behind = Operator(server)
            for item in state:
                behind.mirror.put(item)
            server.calls.clear()
            await behind.reconciler.reconcile(CHAT)
            looks += bool(server.calls)
            assert server.writes == []
            server.calls.clear()
            await behind.reconciler.reconcile(CHAT)
            assert server.calls == [], "the live look has told the mirror"
        assert looks > 10

    run(work())


def test_a_deletion_that_no_watch_told_of_is_made_good_after_the_next_list(run: Run) -> None:
    async def work() -> None:
        operator = await settled()
        operator.server.remove("Service", "chat")
        operator.server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.calls == [], "a ghost"
        await operator.list()
        assert len(operator.queue) == 1
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.writes == ["APPLY Service chat"]

    run(work())


def test_a_resource_whose_deletion_no_watch_told_of_is_left_alone(run: Run) -> None:
    async def work() -> None:
        operator = await settled()
        operator.server.remove("SpeculativeDeployment", "chat")
        operator.server.remove("Service", "chat")
        operator.mirror.handle_deletion(operator.server.told[-1][1])
        operator.server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.calls == ["GET SpeculativeDeployment chat"]
        assert operator.mirror.get_resource(CHAT) is None
        await operator.reconciler.reconcile(CHAT)
        assert len(operator.server.calls) == 1

    run(work())


def test_a_resource_made_anew_under_its_name_is_another_one(run: Run) -> None:
    async def work() -> None:
        operator = await settled()
        server = operator.server
        for kind, name in list(server.objects):
            server.remove(kind, name)
        late = server.told[operator.heard :]
        server.edit()
        operator.mirror.put(server.objects["SpeculativeDeployment", "chat"])
        for _, item in late:  # of the one that is gone, after the new one has been heard of
            operator.mirror.handle_deletion(item)
        operator.heard = len(server.told)
        await operator.settle()
        resource = server.objects["SpeculativeDeployment", "chat"]
        assert resource["status"]["phase"] == "Ready"
        owners = {
            item["metadata"]["ownerReferences"][0]["uid"] for (kind, _), item in server.objects.items() if kind == "Service"
        }
        assert owners == {resource["metadata"]["uid"]}

    run(work())


class Gapped(Lister):
    """Lists with gaps that a test names."""

    def __init__(self) -> None:
        self.known = CacheGaps()

    def find_gaps(self, document: ObjectDict) -> CacheGaps:  # noqa: ARG002
        return self.known


def condition(server: Server, kind: str) -> tuple[str, str, str]:
    found = server.objects["SpeculativeDeployment", "chat"]["status"]["conditions"]
    return next((one["status"], one["reason"], one["message"]) for one in found if one["type"] == kind)


def test_nothing_is_done_before_enough_is_known(run: Run) -> None:
    async def work() -> None:
        operator = await settled()
        operator.reconciler.lister = lists = Gapped()
        lists.known = CacheGaps(is_pending=True, errors_by_kind={"Pod": "pods cannot be listed"})
        operator.server.edit(replicas=3)
        operator.hear()
        operator.server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.calls == []
        lists.known = CacheGaps()
        await operator.settle()
        assert operator.server.objects["SpeculativeDeployment", "chat"]["status"]["readyReplicas"] == 3

    run(work())


@pytest.mark.parametrize("forbidden", [True, False])
def test_without_the_pods_a_resource_is_left_as_it_is_and_says_so_once(run: Run, forbidden: bool) -> None:
    async def work() -> None:
        operator = await settled()
        server = operator.server
        before = copy.deepcopy(server.objects["SpeculativeDeployment", "chat"]["status"])
        operator.reconciler.lister = lists = Gapped()
        lists.known = CacheGaps(errors_by_kind={"Pod": "Pods of namespace b cannot be listed: no"}, is_forbidden=forbidden)
        server.edit(replicas=3, drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        server.calls.clear()
        for _ in range(4):
            operator.hear()
            await operator.reconciler.reconcile(CHAT)
        assert server.writes == ["STATUS"]
        status, reason, message = condition(server, "Degraded")
        assert (status, reason) == ("True", "ListForbidden" if forbidden else "ListFailed")
        assert "Pods of namespace b cannot be listed: no" in message
        after = copy.deepcopy(server.objects["SpeculativeDeployment", "chat"]["status"])
        for one in (before, after):
            one["conditions"] = [each for each in one["conditions"] if each["type"] != "Degraded"]
        assert after == before
        metric = operator.reconciler.metrics.registry.get_sample_value
        assert metric("aerie_resources_held", {"reason": reason}) == 1
        lists.known = CacheGaps()
        await operator.settle()
        assert condition(server, "Degraded")[0] == "False"
        assert metric("aerie_resources_held", {"reason": reason}) == 0

    run(work())


def test_a_kind_that_cannot_be_listed_keeps_no_other_one_from_its_repair(run: Run) -> None:
    async def work() -> None:
        operator = await settled()
        server = operator.server
        operator.reconciler.lister = lists = Gapped()
        why = {"Service": "Services of namespace b cannot be listed: no"}
        lists.known = CacheGaps(errors_by_kind=why, skipped_kinds=frozenset(why), is_forbidden=True)
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
        assert condition(server, "Degraded")[:2] == ("True", "ListForbidden")
        assert not [call for call in server.calls if call.startswith("GET Service ")], "which is refused likewise"
        lists.known = CacheGaps()
        await operator.settle()
        assert ("Service", "chat") in server.objects
        assert condition(server, "Degraded")[0] == "False"

    run(work())


NEWER = [
    ("phase", "Charming"),
    ("canary", {"revision": "x", "change": "y", "phase": "Charming", "startTime": "2026-11-21T12:00:00Z"}),
    (
        "rolloutHistory",
        [{"revision": "x", "change": "y", "result": "Adopted", "message": "z", "startTime": 1, "completionTime": 2}],
    ),
    ("replicas", "many"),
]


@pytest.mark.parametrize(("field", "value"), NEWER)
def test_a_status_of_another_release_is_kept_and_nothing_is_done_by_it(run: Run, field: str, value: Any) -> None:
    async def work() -> None:
        operator = await settled()
        server = operator.server
        item = server.objects["SpeculativeDeployment", "chat"]
        whole = {**item["status"], field: value, "novel": {"of": ["another", "release"]}}
        server._store({**item, "status": whole})
        server.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        server.remove("Service", "chat")
        server.calls.clear()
        for _ in range(4):
            operator.hear()
            await operator.reconciler.reconcile(CHAT)
        assert server.writes == ["STATUS"]
        status, reason, message = condition(server, "Degraded")
        assert (status, reason) == ("True", "VersionSkew")
        assert f"status.{field}" in message
        assert "install the operator" in message
        found = server.objects["SpeculativeDeployment", "chat"]["status"]
        assert {name for name in whole if found[name] != whole[name]} == {"conditions"}

    run(work())


UNREADABLE = {"engine": {"image": "vllm/vllm-openai:v0.33.0", "resources": {"limits": {"nvidia.com/gpu": "-x"}}}}


def test_a_fleet_whose_spec_cannot_be_read_is_cared_for(run: Run) -> None:
    async def work() -> None:
        operator = await settled()
        server, gauge = operator.server, operator.reconciler.metrics.registry.get_sample_value
        before = {key: item["spec"] for key, item in server.objects.items() if key[0] in ("Deployment", "Service")}
        server.edit(**UNREADABLE, replicas=3)
        for kind, name in before:
            server.remove(kind, name)
        await operator.settle()
        after = {key: server.objects[key]["spec"] for key in before}
        assert after == {key: {**spec, **({"replicas": 3} if key[0] == "Deployment" else {})} for key, spec in before.items()}
        status, reason, message = condition(server, "Degraded")
        assert (status, reason) == ("True", "UnreadableSpec")
        assert "spec.engine.resources.limits.nvidia.com/gpu is '-x'" in message
        assert gauge("aerie_resources_held", {"reason": "UnreadableSpec"}) == 1
        server.calls.clear()
        for _ in range(3):
            operator.hear()
            await operator.reconciler.reconcile(CHAT)
        assert server.calls == [], "and nothing is said twice"
        server.edit(engine={"image": "vllm/vllm-openai:v0.33.0"})
        await operator.settle()
        assert condition(server, "Degraded")[0] == "False"
        assert gauge("aerie_resources_held", {"reason": "UnreadableSpec"}) == 0
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["phase"] == "Ready"

    run(work())


def test_a_spec_that_cannot_be_read_and_serves_nobody_is_left_as_it_is(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.edit(**UNREADABLE)
        operator = Operator(server)
        operator.hear()
        await operator.reconciler.reconcile(CHAT)
        assert server.writes == ["STATUS"]
        status, reason, message = condition(server, "Degraded")
        assert (status, reason) == ("True", "UnreadableSpec")
        assert "spec.engine.resources.limits" in message

    run(work())


def test_why_a_job_has_no_pod_is_read_from_its_events(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.edit()
        operator = Operator(server)
        operator.hear()
        await operator.reconciler.reconcile(CHAT)
        ((_, name),) = (place for place in server.objects if place[0] == "Job")
        job = server.objects["Job", name]
        server._store({**job, "metadata": {**job["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}})
        notes = {"00:01": f'pods "{name}-bcdfg" is forbidden: exceeded', "00:00": "older"}
        server.events = [{"metadata": {}, "note": note, "deprecatedLastTimestamp": at} for at, note in notes.items()]
        operator.hear()
        again = await operator.reconciler.reconcile(CHAT)
        status = server.objects["SpeculativeDeployment", "chat"]["status"]
        (told,) = (one for one in status["conditions"] if one["type"] == "PreflightPassed")
        assert (told["status"], told["reason"]) == ("Unknown", "FailedCreate")
        assert told["message"].endswith(f'pods "{name}-..." is forbidden: exceeded')
        assert again is not None
        server.calls.clear()
        server.events[0]["note"] = f'pods "{name}-hjklm" is forbidden: exceeded'
        operator.hear()
        await operator.reconciler.reconcile(CHAT)
        assert server.writes == [], "another attempt is no news"

    run(work())


# ------------------------------------------------------------------------------------------------- answers to one object
KINDS = ("Service", "PodDisruptionBudget", "ConfigMap", "Job", "Deployment")
ANSWERS = {
    404: "the server could not find the requested resource",
    409: "Apply failed with 1 conflict",
    422: "spec: Invalid value",
    429: "too many requests, please try again later",
    500: "failed calling webhook",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", ANSWERS)
def test_what_is_answered_to_one_object_keeps_no_other_from_being_written(run: Run, kind: str, status: int) -> None:
    async def work() -> None:
        operator = await settled()
        server = operator.server
        for item in [item for (of, _), item in server.objects.items() if of in KINDS and of != "Job"]:
            # Without the annotation by which Aerie knows what it has applied.
            server._store({**item, "metadata": {**item["metadata"], "annotations": {}}})
        server.edit(replicas=3, rollout={"progressDeadline": "40m"})
        server.refuses[kind] = ApiError(status, "Reason", ANSWERS[status])
        server.calls.clear()
        operator.hear()
        await operator.list()
        passing = status not in (404, 422)
        for _ in range(5):
            if passing and kind != "Job":
                with pytest.raises(ApiError, match=ANSWERS[status]):
                    await operator.reconciler.reconcile(CHAT)
                operator.reconciler.queue.add_rate_limited(CHAT)
            else:
                await operator.reconciler.reconcile(CHAT)
        applied = {call.split()[1] for call in server.writes if call.startswith("APPLY")}
        assert applied >= {"Service", "PodDisruptionBudget", "ConfigMap", "Deployment"}
        document = server.objects["SpeculativeDeployment", "chat"]
        degraded = next(each for each in document["status"]["conditions"] if each["type"] == "Degraded")
        assert document["status"]["observedGeneration"] == document["metadata"]["generation"]
        if kind != "Job":  # there is none to be made
            assert degraded["reason"] == "ApplyFailed"
            assert ANSWERS[status] in degraded["message"]
        server.refuses.clear()
        await operator.settle()
        degraded = next(
            each for each in server.objects["SpeculativeDeployment", "chat"]["status"]["conditions"] if each["type"] == "Degraded"
        )
        assert degraded["reason"] == "AsExpected"

    run(work())


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_of_somebody_else_is_left_alone_and_named(run: Run, kind: str) -> None:
    async def work() -> None:
        plain = await settled()
        ours = next(item for (of, _), item in plain.server.objects.items() if of == kind)
        name = ours["metadata"]["name"]
        server = Server()
        server.edit()
        server._store({**ours, "metadata": {"name": name, "labels": {"team": "other"}}, "status": {}})
        before = copy.deepcopy({key: server.objects[kind, name][key] for key in ("spec", "data") if key in ours})
        operator = Operator(server)
        await operator.settle()
        theirs = server.objects[kind, name]
        assert theirs["metadata"]["labels"] == {"team": "other"}
        assert {key: theirs[key] for key in before} == before
        document = server.objects["SpeculativeDeployment", "chat"]
        degraded = next(each for each in document["status"]["conditions"] if each["type"] == "Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "NameTaken")
        assert degraded["message"].startswith(f"{kind} {name} ")
        assert not [call for call in server.writes if call in (f"APPLY {kind} {name}", f"DELETE {kind} {name}")]

    run(work())


def test_fields_of_a_newer_release_stay_when_the_status_is_written_and_cause_no_write(run: Run) -> None:
    async def work() -> None:
        operator = await settled()
        server = operator.server
        item = copy.deepcopy(server.objects["SpeculativeDeployment", "chat"])
        for part in (item["status"], item["status"]["stable"], item["status"]["rolloutHistory"][0]):
            part["novel"] = {"of": "another release"}
        server._store(item)
        operator.hear()
        server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert server.calls == []
        server.edit(replicas=3)
        await operator.settle()
        found = server.objects["SpeculativeDeployment", "chat"]["status"]
        assert found["stable"]["replicas"] == 3
        for part in (found, found["stable"], found["rolloutHistory"][0]):
            assert part["novel"] == {"of": "another release"}

    run(work())


class Older(Server):
    """An API server whose definition lacks fields of the status."""

    lacks: tuple[str, ...] = ("rolloutHistory", "selector")

    async def replace_status(self, resource: ObjectDict, status: ObjectDict) -> ObjectDict:
        return await super().replace_status(resource, {key: value for key, value in status.items() if key not in self.lacks})

    async def request(self, verb: str, path: str, *_: Any, **__: Any) -> Any:
        assert (verb, path.rpartition("/")[2]) == ("GET", "speculativedeployments.aerie.dev")
        definition = build_custom_resource_definition()
        properties = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
        for field in self.lacks:
            del properties[field]
        return definition


def test_an_older_definition_is_told_once_and_causes_no_endless_writes(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        server = Older()
        server.edit()
        operator = Operator(server)
        await operator.settle()
        status, reason, message = condition(server, "Degraded")
        assert (status, reason) == ("True", "VersionSkew")
        assert "status.rolloutHistory, status.selector: apply the definition of this release" in message
        metric = operator.reconciler.metrics.registry.get_sample_value
        assert metric("aerie_status_fields_dropped") == 2
        operator.hear()
        server.calls.clear()
        for _ in range(3):
            await operator.reconciler.reconcile(CHAT)
        assert server.calls == []
        server.edit(replicas=3)
        await operator.settle()
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["readyReplicas"] == 3, "work goes on"
        server.lacks = ()
        watching = asyncio.create_task(operator.reconciler.crd_monitor.run(server))
        await asyncio.sleep(1)
        await operator.settle()
        assert condition(server, "Degraded")[0] == "False"
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["selector"]
        assert metric("aerie_status_fields_dropped") == 0
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        run(work())
    told = [record.levelname for record in caplog.records if "CustomResourceDefinition" in record.message]
    assert told == ["ERROR", "ERROR", "WARNING"], "the second field is written after the first one"


def test_an_older_definition_is_told_before_anything_is_written(run: Run) -> None:
    async def work() -> None:
        server = Older()
        server.edit()
        operator = Operator(server)
        watching = asyncio.create_task(operator.reconciler.crd_monitor.run(server))
        await asyncio.sleep(1)
        operator.hear()
        await operator.reconciler.reconcile(CHAT)
        assert condition(server, "Degraded")[:2] == ("True", "VersionSkew")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    run(work())
