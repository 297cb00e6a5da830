"""Makes faults in a lab and undoes them; what is in force is kept in the lab's folder, so that any command can undo it.

| fault    | effect                                             | repair                                   |
|----------|----------------------------------------------------|------------------------------------------|
| kill     | SIGKILL to a container                             | none needed: its restart policy acts     |
| crash    | each run of a container is killed after some time  | runs last as long as they do             |
| freeze   | SIGSTOP to all processes of a container            | SIGCONT                                  |
| cut      | the pod's network cable is pulled                  | plugged in again                         |
| silence  | a node renews no Lease and tells nothing           | it speaks again                          |
| lie      | a simulated engine's metrics page is not true      | it tells the truth again                 |
| restart  | a component is killed, starts again                | none needed                              |
| hold     | a component is killed and stays down               | it starts again                          |
| fill     | a pod without a process takes all that a node has  | the pod is deleted                       |
| delete   | an object is deleted behind its controller's back  | created again, if its controller did not |

Guarantees: a fault that needs repair is recorded before it is made; `undo` of one that cannot be repaired any more (its
pod is gone) forgets it. `down` ends all of them with the lab.
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
from aerie_lab.engine.lies import MetricsCorruption
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
    """A fault in force, as faults.json keeps it."""

    id: int
    kind: str
    target: dict[str, Any]
    since: float
    """Seconds since the epoch."""

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(str(v) for k, v in self.target.items() if k != 'object')}"


class Fault:
    """A fault in force. As a context manager it is undone at the end of the block."""

    def __init__(self, injector: FaultInjector, record: FaultRecord) -> None:
        self.record = record
        self._injector = injector

    def undo(self) -> None:
        """Repair it."""
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

    # -- made and over at once ----------------------------------------------------------------------------------------

    def kill(self, pod: str, container: str | None = None, *, namespace: str = "default") -> None:
        """Kill a container (the pod's only one when not named)."""
        self._lab.call_agent("kill", namespace=namespace, pod=pod, container=self._resolve_container(namespace, pod, container))

    def restart(self, component: str) -> None:
        """Kill a component of the control plane; returns when it is ready again."""
        self._lab.call_supervisor("restart", component=component)

    # -- in force until undone ----------------------------------------------------------------------------------------

    def crash(self, pod: str, seconds: float, container: str | None = None, *, namespace: str = "default") -> Fault:
        """Kill a container whenever it has run for so many seconds; its restart policy brings it back for the next time."""
        if not 0 < seconds < math.inf:
            raise StateError(f"a container cannot be killed after {seconds:g} s: give a number of seconds above 0.")
        name = self._resolve_container(namespace, pod, container)
        return self._inject("crash", {"namespace": namespace, "pod": pod, "container": name, "seconds": seconds})

    def freeze(self, pod: str, container: str | None = None, *, namespace: str = "default") -> Fault:
        """Stop all processes of a container, without ending them."""
        name = self._resolve_container(namespace, pod, container)
        return self._inject("freeze", {"namespace": namespace, "pod": pod, "container": name})

    def cut(self, pod: str, *, namespace: str = "default") -> Fault:
        """Take a pod off the network."""
        return self._inject("cut", {"namespace": namespace, "pod": pod})

    def silence(self, node: str) -> Fault:
        """Let a node go silent: the control plane finds it lost after about 20 s."""
        return self._inject("silence", {"node": node})

    def lie(self, pod: str, corruption: MetricsCorruption, *, namespace: str = "default") -> Fault:
        """Let the metrics page of a simulated engine lie: aerie_lab.engine.lies."""
        return self._inject("lie", {"namespace": namespace, "pod": pod, "lie": corruption})

    def hold(self, component: str) -> Fault:
        """Take a component of the control plane down until undone."""
        return self._inject("hold", {"component": component})

    def fill(self, node: str) -> Fault:
        """Leave no cpu, memory or GPU free on a node."""
        return self._inject("fill", {"node": node})

    def delete(self, kind: str, name: str, *, namespace: str = "default") -> Fault:
        """Delete an object, named as for kubectl, behind its controller's back."""
        found: KubeObject = json.loads(self._lab.kubectl("get", kind, name, "-n", namespace, "-o", "json"))
        return self._inject("delete", {"kind": kind, "name": name, "namespace": namespace, "object": found})

    # -- kept ---------------------------------------------------------------------------------------------------------

    def list_active(self) -> list[FaultRecord]:
        """The faults in force, oldest first."""
        with self._records() as records:
            return list(records)

    def undo(self, fault_id: int) -> None:
        """Repair the fault with this id. Raises StateError when there is none."""
        with self._records() as records:
            record = next((r for r in records if r.id == fault_id), None)
            if record is None:
                known = ", ".join(str(r.id) for r in records) or "none is in force"
                raise StateError(f"there is no fault {fault_id}: {known}.")
        self._repair(record)
        with self._records() as records:
            records[:] = [r for r in records if r.id != fault_id]

    def undo_all(self) -> None:
        """Repair all, newest first."""
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
            before = list(records)
            yield records
            if records != before:
                file.seek(0)
                file.truncate()
                json.dump([asdict(record) for record in records], file)

    # -- doing --------------------------------------------------------------------------------------------------------

    def _apply_fault(self, record: FaultRecord) -> None:
        match record.kind:
            case "crash" | "freeze" | "cut" | "silence" | "lie":
                self._lab.call_agent(record.kind, **record.target)
            case "hold":
                self._lab.call_supervisor("hold", **record.target)
            case "fill":
                try:
                    self._with_client(lambda client: self._fill(client, record))
                except TimeoutError:
                    raise LabError(
                        f"{record} took more than {_FILL_TIMEOUT_SECONDS:g} s: pods on their way out do not go."
                    ) from None
            case "delete":
                target = record.target
                self._lab.kubectl("delete", target["kind"], target["name"], "-n", target["namespace"], "--wait=false")

    def _repair(self, record: FaultRecord) -> None:
        match record.kind:
            case "freeze" | "cut":
                with contextlib.suppress(LabError):  # its pod may be gone, and the fault with it
                    self._lab.call_agent({"freeze": "thaw", "cut": "mend"}[record.kind], **record.target)
            case "crash" | "lie":
                what = {"crash": "seconds", "lie": "lie"}[record.kind]
                with contextlib.suppress(LabError):
                    self._lab.call_agent(record.kind, **record.target | {what: None})
            case "silence":
                self._lab.call_agent("speak", **record.target)
            case "hold":
                self._lab.call_supervisor("resume", **record.target)
            case "fill":
                where = core_path("pods", FAULTS_NAMESPACE, _filler_pod_name(record))
                self._with_client(lambda client: client.delete(where, {"gracePeriodSeconds": 0}))
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
        left = {name: parse_quantity(allocatable[name]) for name in _FILLED_RESOURCES if name in allocatable}
        for pod in await _wait_for_terminating_pods(client, node):
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                for name, amount in _sum_requests(pod).items():
                    left[name] = left.get(name, 0.0) - amount
        amounts = {
            name: f"{int(amount * 1000)}m" if name == "cpu" else str(int(amount)) for name, amount in left.items() if amount > 0
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

        # The scheduler hears of pods that are bound and of those that are not by two ways: give the first one time.
        async with asyncio.timeout(_FILL_TIMEOUT_SECONDS):
            while (await client.get(core_path("pods", FAULTS_NAMESPACE, _filler_pod_name(record))))["status"].get(
                "phase"
            ) != "Running":
                await asyncio.sleep(0.2)

    async def _recreate(self, client: KubeClient, old: KubeObject) -> None:
        metadata = {k: v for k, v in old["metadata"].items() if k in _RECREATED_METADATA_FIELDS}
        fresh = {k: v for k, v in old.items() if k != "status"} | {"metadata": metadata}
        where = await client.resolve_path(fresh)
        try:
            await client.get(where)
        except KubeError as error:
            if error.status != 404:
                raise
            await client.create(where.rpartition("/")[0], fresh)

    def _resolve_container(self, namespace: str, pod: str, container: str | None) -> str:
        if container is not None:
            return container
        running = [c for c in self._lab.call_agent("containers") if (c["namespace"], c["pod"]) == (namespace, pod)]
        if len(running) != 1:
            listed = ", ".join(c["container"] for c in running) or "none runs"
            raise StateError(f"pod {namespace}/{pod}: name one container ({listed}).")
        name: str = running[0]["container"]
        return name


async def _wait_for_terminating_pods(client: KubeClient, node: str) -> list[KubeObject]:
    """The node's pods, once none is on its way out, by itself or with its namespace: what those hold would be free again a moment
    later."""
    async with asyncio.timeout(_FILL_TIMEOUT_SECONDS):
        while True:
            found: list[KubeObject] = (await client.get(core_path("pods"), fieldSelector=f"spec.nodeName={node}"))["items"]
            spaces = (await client.get(core_path("namespaces")))["items"]
            going = {one["metadata"]["name"] for one in spaces if one["metadata"].get("deletionTimestamp")}
            if not any(pod["metadata"].get("deletionTimestamp") or pod["metadata"]["namespace"] in going for pod in found):
                return found
            await asyncio.sleep(0.2)


async def _create_with_account(client: KubeClient, where: str, pod: KubeObject) -> None:
    """Create a pod in a namespace that may be so young that its default service account is still to come."""
    for attempt in itertools.count(1):
        try:
            await client.create(where, pod)
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
