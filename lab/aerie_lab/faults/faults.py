"""Injects faults into a lab and repairs them. The lab's folder records active faults, so that any command can repair them.

| fault           | effect                                                   | repair                                   |
|-----------------|----------------------------------------------------------|------------------------------------------|
| kill            | SIGKILL to a container                                   | none needed: its restart policy acts     |
| crash           | SIGKILL to each run of a container after some time       | runs end on their own                    |
| freeze          | SIGSTOP to all processes of a container                  | SIGCONT                                  |
| disconnect      | the pod has no network                                   | the pod is connected again               |
| silence-node    | a node renews no Lease and reports no status             | it reports again                         |
| corrupt-metrics | a simulated engine exposes false metrics                 | it exposes the true ones                 |
| fail-drafter    | changes of a simulated engine's drafter in place fail    | they succeed                             |
| restart         | a component is killed and starts again                   | none needed                              |
| stop-component  | a component is killed and stays down                     | it starts again                          |
| fill-node       | a pod without a process takes all free resources         | the pod is deleted                       |
| delete          | an object is deleted directly, not by its controller     | created again if the controller did not  |

Guarantees: a fault that needs repair is recorded before it is injected; `undo` of one that cannot be repaired any more (its
pod was deleted) removes the record. `down` ends all of them with the lab.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self

from aerie_lab.cluster import Lab
from aerie_lab.engine.metrics.metrics_corruption import MetricsCorruption
from aerie_lab.engine.serving.drafter_faults import DrafterFault
from aerie_lab.errors import KubeError, LabError, StateError
from aerie_lab.kube.client import KubeClient, KubeObject, core_path
from aerie_lab.node.environment import parse_quantity
from aerie_lab.node.support import PROCESSLESS_ANNOTATION

FAULTS_NAMESPACE = "aerie-lab-faults"
_FILLED_RESOURCES = ("cpu", "memory", "nvidia.com/gpu")
_FILL_TIMEOUT_SECONDS = 120.0
"""Seconds that filling a node waits for pods."""


@dataclass(frozen=True)
class FaultRecord:
    """An active fault, as faults.json stores it."""

    id: int
    kind: str
    target: dict[str, Any]
    start_time: float
    """Seconds since the epoch."""

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(str(value) for key, value in self.target.items() if key != 'object')}"


class Fault:
    """An active fault. As a context manager it is repaired at the end of the block."""

    def __init__(self, injector: FaultInjector, record: FaultRecord) -> None:
        self.record = record
        self._injector = injector

    def undo(self) -> None:
        """Repair the fault."""
        self._injector.undo(self.record.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


class FaultInjector:
    """The faults of one lab."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._file = lab.folder / "faults.json"

    # -- without repair -----------------------------------------------------------------------------------------------

    def kill(self, pod: str, container: str | None = None, *, namespace: str = "default") -> None:
        """Kill a container; `container` may be omitted for a pod with only one."""
        self._lab.call_agent("kill", namespace=namespace, pod=pod, container=self._resolve_container(namespace, pod, container))

    def restart(self, component: str) -> None:
        """Kill a component of the control plane; returns when it is ready again."""
        self._lab.call_supervisor("restart", component=component)

    # -- active until undone ------------------------------------------------------------------------------------------

    def crash(self, pod: str, seconds: float, container: str | None = None, *, namespace: str = "default") -> Fault:
        """Kill a container each time it has run for so many seconds; its restart policy starts it again."""
        if not 0 < seconds < math.inf:
            raise StateError(f"a container cannot be killed after {seconds:g} s: give a number of seconds above 0.")
        name = self._resolve_container(namespace, pod, container)
        return self._inject("crash", {"namespace": namespace, "pod": pod, "container": name, "seconds": seconds})

    def freeze(self, pod: str, container: str | None = None, *, namespace: str = "default") -> Fault:
        """Stop all processes of a container, without ending them."""
        name = self._resolve_container(namespace, pod, container)
        return self._inject("freeze", {"namespace": namespace, "pod": pod, "container": name})

    def disconnect(self, pod: str, *, namespace: str = "default") -> Fault:
        """Disconnect a pod from the network."""
        return self._inject("disconnect", {"namespace": namespace, "pod": pod})

    def silence_node(self, node: str) -> Fault:
        """Let a node report nothing: the control plane detects it as lost after about 20 s."""
        return self._inject("silence-node", {"node": node})

    def corrupt_metrics(self, pod: str, corruption: MetricsCorruption, *, namespace: str = "default") -> Fault:
        """Let a simulated engine expose false metrics: aerie_lab.engine.metrics.metrics_corruption."""
        return self._inject("corrupt-metrics", {"namespace": namespace, "pod": pod, "corruption": corruption})

    def fail_drafter(self, pod: str, fault: DrafterFault, *, namespace: str = "default") -> Fault:
        """Let changes of a simulated engine's drafter in place fail: aerie_lab.engine.serving.drafter_faults."""
        return self._inject("fail-drafter", {"namespace": namespace, "pod": pod, "fault": fault})

    def stop_component(self, component: str) -> Fault:
        """Keep a component of the control plane down until undone."""
        return self._inject("stop-component", {"component": component})

    def fill_node(self, node: str) -> Fault:
        """Leave no cpu, memory or GPU free on a node."""
        return self._inject("fill-node", {"node": node})

    def delete(self, kind: str, name: str, *, namespace: str = "default") -> Fault:
        """Delete an object, named as for kubectl, without its controller."""
        deleted: KubeObject = json.loads(self._lab.kubectl("get", kind, name, "-n", namespace, "-o", "json"))
        return self._inject("delete", {"kind": kind, "name": name, "namespace": namespace, "object": deleted})

    # -- records ------------------------------------------------------------------------------------------------------

    def list_active(self) -> list[FaultRecord]:
        """Return the active faults, oldest first."""
        with self._records() as records:
            return list(records)

    def undo(self, fault_id: int) -> None:
        """Repair the fault with this id. Raises StateError when there is none."""
        with self._records() as records:
            record = next((r for r in records if r.id == fault_id), None)
            if record is None:
                active = ", ".join(str(r.id) for r in records) or "none"
                raise StateError(f"there is no fault {fault_id}. Active faults: {active}.")
        self._repair(record)
        with self._records() as records:
            records[:] = [r for r in records if r.id != fault_id]

    def undo_all(self) -> None:
        """Repair all faults, newest first."""
        for record in reversed(self.list_active()):
            self.undo(record.id)

    def _inject(self, kind: str, target: dict[str, Any]) -> Fault:
        with self._records() as records:
            number = next(n for n in itertools.count(1) if n not in {r.id for r in records})
            record = FaultRecord(number, kind, target, time.time())
            records.append(record)
        try:
            self._apply_fault(record)
        except BaseException:
            with self._records() as records:
                records[:] = [r for r in records if r.id != number]
            raise
        return Fault(self, record)

    @contextlib.contextmanager
    def _records(self) -> Iterator[list[FaultRecord]]:
        with self._file.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            records = [FaultRecord(**entry) for entry in json.loads(text or "[]")]
            previous_records = list(records)
            yield records
            if records != previous_records:
                file.seek(0)
                file.truncate()
                json.dump([asdict(record) for record in records], file)

    # -- effects and repairs ------------------------------------------------------------------------------------------

    def _apply_fault(self, record: FaultRecord) -> None:
        match record.kind:
            case "crash" | "freeze" | "disconnect" | "silence-node" | "corrupt-metrics" | "fail-drafter":
                self._lab.call_agent(record.kind.replace("-", "_"), **record.target)
            case "stop-component":
                self._lab.call_supervisor("stop_component", **record.target)
            case "fill-node":
                try:
                    self._with_client(lambda client: self._fill(client, record))
                except TimeoutError:
                    raise LabError(
                        f"{record} took more than {_FILL_TIMEOUT_SECONDS:g} s: terminating pods of the node do not end."
                    ) from None
            case "delete":
                target = record.target
                self._lab.kubectl("delete", target["kind"], target["name"], "-n", target["namespace"], "--wait=false")

    def _repair(self, record: FaultRecord) -> None:
        match record.kind:
            case "freeze":
                with contextlib.suppress(LabError):  # the pod may have been deleted, and the fault with it
                    self._lab.call_agent("resume", **record.target)
            case "disconnect":
                with contextlib.suppress(LabError):
                    self._lab.call_agent("reconnect", **record.target)
            case "crash":
                with contextlib.suppress(LabError):
                    self._lab.call_agent("crash", **record.target | {"seconds": None})
            case "corrupt-metrics":
                with contextlib.suppress(LabError):
                    self._lab.call_agent("corrupt_metrics", **record.target | {"corruption": None})
            case "fail-drafter":
                with contextlib.suppress(LabError):
                    self._lab.call_agent("fail_drafter", **record.target | {"fault": None})
            case "silence-node":
                self._lab.call_agent("restore_node", **record.target)
            case "stop-component":
                self._lab.call_supervisor("resume_component", **record.target)
            case "fill-node":
                url_path = core_path("pods", FAULTS_NAMESPACE, _filler_pod_name(record))
                self._with_client(lambda client: client.delete(url_path, {"gracePeriodSeconds": 0}))
            case "delete":
                self._with_client(lambda client: self._recreate(client, record.target["object"]))

    def _with_client(self, act: Callable[[KubeClient], Any]) -> None:
        async def run() -> None:
            async with self._lab.client() as client:
                await act(client)

        asyncio.run(run())

    async def _fill(self, client: KubeClient, record: FaultRecord) -> None:
        node = record.target["node"]
        try:
            allocatable = (await client.get(core_path("nodes", None, node)))["status"]["allocatable"]
        except KubeError as error:
            if error.status == 404:
                raise StateError(f"there is no node '{node}' in this lab.") from error
            raise
        free = {name: parse_quantity(allocatable[name]) for name in _FILLED_RESOURCES if name in allocatable}
        for pod in await _wait_for_terminating_pods(client, node):
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                for name, amount in _sum_requests(pod).items():
                    free[name] = free.get(name, 0.0) - amount
        amounts = {
            name: f"{int(amount * 1000)}m" if name == "cpu" else str(int(amount)) for name, amount in free.items() if amount > 0
        }
        await client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": FAULTS_NAMESPACE}})
        await _create_with_account(
            client,
            core_path("pods", FAULTS_NAMESPACE),
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": _filler_pod_name(record), "annotations": {PROCESSLESS_ANNOTATION: "true"}},
                "spec": {
                    "nodeName": node,
                    "automountServiceAccountToken": False,
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{"name": "filler", "image": "none", "resources": {"requests": amounts, "limits": amounts}}],
                },
            },
        )

        # The scheduler watches bound and unbound pods separately: wait until it has received the bound one.
        async with asyncio.timeout(_FILL_TIMEOUT_SECONDS):
            while (await client.get(core_path("pods", FAULTS_NAMESPACE, _filler_pod_name(record))))["status"].get(
                "phase"
            ) != "Running":
                await asyncio.sleep(0.2)

    async def _recreate(self, client: KubeClient, deleted: KubeObject) -> None:
        metadata = {k: v for k, v in deleted["metadata"].items() if k in _RECREATED_METADATA_FIELDS}
        recreated = {k: v for k, v in deleted.items() if k != "status"} | {"metadata": metadata}
        url_path = await client.resolve_path(recreated)
        try:
            await client.get(url_path)
        except KubeError as error:
            if error.status != 404:
                raise
            await client.create(url_path.rpartition("/")[0], recreated)

    def _resolve_container(self, namespace: str, pod: str, container: str | None) -> str:
        if container is not None:
            return container
        running = [c for c in self._lab.call_agent("containers") if (c["namespace"], c["pod"]) == (namespace, pod)]
        if len(running) != 1:
            names = ", ".join(c["container"] for c in running) or "none is running"
            raise StateError(f"pod {namespace}/{pod}: name one container ({names}).")
        name: str = running[0]["container"]
        return name


async def _wait_for_terminating_pods(client: KubeClient, node: str) -> list[KubeObject]:
    """Return the node's pods once none is terminating, alone or with its namespace: resources of such pods will be free soon."""
    async with asyncio.timeout(_FILL_TIMEOUT_SECONDS):
        while True:
            pods: list[KubeObject] = (await client.get(core_path("pods"), fieldSelector=f"spec.nodeName={node}"))["items"]
            namespaces = (await client.get(core_path("namespaces")))["items"]
            terminating = {item["metadata"]["name"] for item in namespaces if item["metadata"].get("deletionTimestamp")}
            if not any(pod["metadata"].get("deletionTimestamp") or pod["metadata"]["namespace"] in terminating for pod in pods):
                return pods
            await asyncio.sleep(0.2)


async def _create_with_account(client: KubeClient, url_path: str, pod: KubeObject) -> None:
    """Create a pod in a new namespace, whose default service account may not exist yet."""
    for attempt in itertools.count(1):
        try:
            await client.create(url_path, pod)
            return
        except KubeError as error:
            if attempt > 100 or error.status != 403 or "serviceaccount" not in error.message:
                raise
        await asyncio.sleep(0.1)


_RECREATED_METADATA_FIELDS = ("name", "namespace", "labels", "annotations", "ownerReferences", "finalizers")


def _filler_pod_name(record: FaultRecord) -> str:
    return f"fill-{record.target['node']}"


def _sum_requests(pod: KubeObject) -> dict[str, float]:
    total: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        for name, amount in ((container.get("resources") or {}).get("requests") or {}).items():
            if name in _FILLED_RESOURCES:
                total[name] = total.get(name, 0.0) + parse_quantity(amount)
    return total
