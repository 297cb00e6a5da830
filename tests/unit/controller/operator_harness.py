"""An API server with the controllers that Aerie needs, and an operator whose reconciles a test starts.

Guarantees: the server counts all calls of the operator, and the operator gets watch events only when the test delivers them.
Not guaranteed: any other behaviour of an API server, such as defaults, validation or a Gateway API.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from aerie.controller.kubernetes.cache import ObjectCache
from aerie.controller.kubernetes.client import ApiError, Cluster, ObjectDict, PageErrorHandler, ResourceKind
from aerie.controller.kubernetes.listing import Lister
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.probes.equivalence import EquivalenceProber
from aerie.controller.reconciler import Reconciler
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.work_queue import NamespacedName, WorkQueue
from aerie.manifests import naming
from aerie.manifests.preflight_job import PreflightJobConfig

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
        self.create_errors: dict[str, ApiError] = {}
        """Error of a creation, by name."""
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
        if desired["kind"] == "Event":
            self.calls.append(f"EVENT {desired['reason']}")
            return desired
        name = desired["metadata"]["name"]
        self.calls.append(f"POST {desired['kind']} {name}")
        if (error := self.create_errors.get(name)) is not None:
            raise error
        if (desired["kind"], name) in self.objects:
            raise ApiError(409, "AlreadyExists", f"{name} already exists")
        self.objects[desired["kind"], name] = copy.deepcopy(desired)  # a Secret, which no watch shows
        return copy.deepcopy(desired)

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
            "rollout": {"inPlace": {"mode": "Off"}},
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


def get_condition(server: Server, kind: str) -> tuple[str, str, str]:
    conditions = server.objects["SpeculativeDeployment", "chat"]["status"]["conditions"]
    return next(
        (condition["status"], condition["reason"], condition["message"]) for condition in conditions if condition["type"] == kind
    )
