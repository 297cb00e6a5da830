"""One pod of a node, from the first sight of it to its removal from the API server.

    refused?  ─►  network, volumes  ─►  init containers in order  ─►  containers side by side  ─►  done, or deleted
       │               │ FailedMount: again
       stays Pending with the fields it asked for and the lab does not have

Status is written by one task, which sends the latest state and never an older one after it. Guarantees: a deleted pod's
processes are gone before the API object is; volumes and address are given back exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_lab.errors import KubeError
from aerie_lab.images.table import ImageTable
from aerie_lab.kube.client import STRATEGIC, KubeClient, Object, core
from aerie_lab.kube.mirror import Mirror
from aerie_lab.node.container import Container, Surroundings
from aerie_lab.node.environment import service_variables
from aerie_lab.node.events import EventRecorder
from aerie_lab.node.status import ContainerState, PodFacts, pod_status, tells, timestamp
from aerie_lab.node.support import HUB_LABEL, is_processless, seconds_to_load, unsupported
from aerie_lab.node.volumes import PodVolumes, VolumeError
from aerie_lab.sandbox.network import PodNetwork, PodNetworks

_log = logging.getLogger(__name__)
_MOUNT_RETRY = 2.0
_REFRESH = 30.0
_API_RETRY = 1.0


@dataclass(frozen=True)
class Node:
    """What a pod must know of the node it runs on."""

    name: str
    address: str
    allocatable: Mapping[str, str]


@dataclass(frozen=True)
class Machinery:
    """What all pods of the agent share."""

    client: KubeClient
    networks: PodNetworks
    wiring: asyncio.Lock
    """Held while a pod network is made or removed: one at a time."""
    images: ImageTable
    services: Mirror
    events: EventRecorder
    folder: Path
    restart_backoff: float


class PodWorker:
    """Runs one pod. `update` takes newer versions of the object; `run` returns when the pod is gone from the server.

    A pod that comes with a status was run by an agent that is no more: what had ended stays ended, the rest starts again.
    """

    def __init__(self, pod: Object, node: Node, shared: Machinery) -> None:
        self.pod = pod
        self.node = node
        self.uid: str = pod["metadata"]["uid"]
        self.network: PodNetwork | None = None
        self._may_tell = asyncio.Event()  # cleared while the node is silent
        self._may_tell.set()
        self._shared = shared
        self._folder = shared.folder / "pods" / self.uid
        status, spec = pod.get("status") or {}, pod["spec"]
        policy = spec.get("restartPolicy", "Always")
        self._init = [Container(c, self._folder, policy, init=True) for c in spec.get("initContainers") or []]
        self._main = [Container(c, self._folder, policy, init=False) for c in spec["containers"]]
        self.containers = {c.state.name: c for c in (*self._init, *self._main)}
        self._was_over = status.get("phase") in ("Succeeded", "Failed")
        if self._was_over or not is_processless(pod):
            for told in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
                self.containers[told["name"]].take_over(told)
        if self._init:
            for container in self._main:
                container.state.waiting = ("PodInitializing", "")
        self._started_at = _seconds(status["startTime"]) if "startTime" in status else time.time()
        self._address: str | None = status.get("podIP") if self._was_over else None
        self._volumes: PodVolumes | None = None
        self._failure: tuple[str, str] | None = None
        self._over = False
        self._dirty = asyncio.Event()
        self._outdated = asyncio.Event()  # files made from the pod's labels and annotations, or older than _REFRESH
        self._deleted = asyncio.Event()
        self._gone = asyncio.Event()
        self._hurries: set[asyncio.Task[None]] = set()
        if pod["metadata"].get("deletionTimestamp"):
            self._deleted.set()

    # -- from outside -------------------------------------------------------------------------------------------------

    def update(self, pod: Object) -> None:
        """Take a newer version of the object."""
        old, new = self.pod["metadata"], pod["metadata"]
        if int(new["resourceVersion"]) < int(old["resourceVersion"]):
            return  # the answer to our own last write came before this event
        self.pod = pod
        self._dirty.set()  # somebody else may have written the status: it is compared, and written only if it differs
        if any(old.get(field) != new.get(field) for field in ("labels", "annotations")):
            self._outdated.set()
        if new.get("deletionTimestamp"):
            if self._deleted.is_set() and old.get("deletionGracePeriodSeconds") != new.get("deletionGracePeriodSeconds"):
                self._end_faster(float(new["deletionGracePeriodSeconds"]))
            self._deleted.set()

    def removed(self) -> None:
        """The object is gone from the server: end at once, if it was deleted by force, and tell nobody."""
        self._gone.set()
        self._deleted.set()
        self._end_faster(0.0)

    def _end_faster(self, grace: float) -> None:
        task = asyncio.create_task(self._end_containers(grace))
        self._hurries.add(task)
        task.add_done_callback(self._hurries.discard)

    def be_silent(self) -> None:
        """Tell the API server nothing until `speak`."""
        self._may_tell.clear()

    def speak(self) -> None:
        """End a silence."""
        self._may_tell.set()

    @property
    def name(self) -> tuple[str, str]:
        """(namespace, name)."""
        metadata = self.pod["metadata"]
        return metadata["namespace"], metadata["name"]

    @property
    def address(self) -> str | None:
        """The pod's address, once it has one."""
        return self._address

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From start to removal."""
        telling = asyncio.create_task(self._tell_status())
        try:
            if not self._was_over:
                await self._live_until_deleted()
            await self._deleted.wait()
        finally:
            await _cancel(telling)
        if not self._gone.is_set():
            await self._remove_object()
            await self._gone.wait()  # finalizers may keep it for a while; it must not be taken for a new pod
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _live_until_deleted(self) -> None:
        living = asyncio.create_task(self._live())
        deleted = asyncio.create_task(self._deleted.wait())
        try:
            limit = self.pod["spec"].get("activeDeadlineSeconds")
            left = None if limit is None else max(0.0, self._started_at + limit - time.time())
            await asyncio.wait({living, deleted}, return_when=asyncio.FIRST_COMPLETED, timeout=left)
            if not living.done() and not deleted.done():
                self._fail("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
            await self._end_containers()
            self._over = True
        except asyncio.CancelledError:
            self._may_tell.clear()  # the agent ends, not the pod: its successor goes on from what was told last
            raise
        finally:
            await self._end_containers(0.0)
            await _cancel(living, deleted)
            await self._give_back()
            self._dirty.set()

    async def _live(self) -> None:
        try:
            if refused := unsupported(self.pod):
                await self._refuse(refused)
            self._address = self._shared.networks.reserve()
            if is_processless(self.pod):
                await self._pretend()
            await self._run_containers(await self._set_up())
        except Exception as error:  # noqa: BLE001  a defect of the lab: the pod tells, and the other pods go on
            _log.exception("pod %s/%s", *self.name)
            self._fail("LabFailure", f"the lab could not run this pod: {error}")

    def _fail(self, reason: str, message: str) -> None:
        self._failure = (reason, message)
        self._event(reason, message, warning=True)

    async def _run_containers(self, around: Surroundings) -> None:
        refreshing = asyncio.create_task(self._refresh_volumes())
        try:
            for container in self._init:
                await container.run(around)
                ended = container.state.terminated
                if ended is None or ended["exitCode"] != 0:
                    return
            for container in self._main:
                if container.state.waiting[0] == "PodInitializing":
                    container.state.waiting = ("ContainerCreating", "")
            self._dirty.set()
            async with asyncio.TaskGroup() as group:
                for container in self._main:
                    group.create_task(container.run(around))
        finally:
            refreshing.cancel()

    def _states(self) -> list[ContainerState]:
        return [container.state for container in self.containers.values()]

    async def _refuse(self, fields: list[str]) -> None:
        """Stay Pending and say why. Failing would make a ReplicaSet replace the pod for ever."""
        message = f"the lab's node agent does not offer {', '.join(fields)}: leave it out, or use a real cluster"
        for state in self._states():
            state.waiting = ("LabUnsupported", message)
        self._event("LabUnsupported", message, warning=True)
        self._dirty.set()
        await asyncio.Event().wait()

    async def _pretend(self) -> None:
        """Be Ready without a process, after as long as the pod says that it loads."""
        if loads := seconds_to_load(self.pod):
            for state in self._states():
                state.container_id, state.running_since = "processless", self._started_at
            self._dirty.set()
            await asyncio.sleep(loads)
        for state in self._states():
            state.container_id = "processless"
            if state.init:
                state.terminated = {"exitCode": 0, "reason": "Completed", "finishedAt": timestamp(self._started_at)}
            else:
                state.running_since, state.started, state.ready = self._started_at, True, True
        self._dirty.set()
        await asyncio.Event().wait()

    # -- before the containers ----------------------------------------------------------------------------------------

    async def _set_up(self) -> Surroundings:
        assert self._address is not None
        self._dirty.set()
        self._folder.mkdir(parents=True, exist_ok=True)
        network = await self._connect(self._address)
        hostname = self.pod["spec"].get("hostname") or self.pod["metadata"]["name"]
        (self._folder / "hosts").write_text(self._hosts(hostname))
        volumes = self._volumes = PodVolumes(
            self.uid, self._folder / "volumes", self._shared.client, self._shared.images, self._downward(), self.node.allocatable
        )
        while True:
            try:
                await volumes.prepare(self.pod)
                break
            except VolumeError as error:
                self._event("FailedMount", str(error), warning=True)
                for state in self._states():
                    if not state.done:
                        state.waiting = (state.waiting[0] or "ContainerCreating", str(error))
                self._dirty.set()
                await asyncio.sleep(_MOUNT_RETRY)
        for state in self._states():
            state.waiting = (state.waiting[0], "")
        return Surroundings(
            pod=lambda: self.pod,
            folder=self._folder,
            hostname=hostname,
            address=self._address,
            network=network.fd,
            images=self._shared.images,
            gather=self._gather,
            mounts=volumes.mounts_of,
            shared_memory=volumes.shared_memory(),
            tell=self._event,
            changed=self._dirty.set,
            restart_backoff=self._shared.restart_backoff,
        )

    async def _connect(self, address: str) -> PodNetwork:
        """The pod's network, once it can be made; it is known to `_give_back` whatever happens meanwhile."""
        while True:
            async with self._shared.wiring:
                making = asyncio.create_task(asyncio.to_thread(self._shared.networks.create, address))
                try:
                    self.network = await asyncio.shield(making)
                    return self.network
                except asyncio.CancelledError:  # a thread cannot be stopped, and what it makes has to be given back
                    with contextlib.suppress(OSError):
                        self.network = await making
                    raise
                except OSError as error:
                    _log.warning("pod %s/%s: %s", *self.name, error)
                    self._event("FailedCreatePodSandBox", str(error), warning=True)
            await asyncio.sleep(_MOUNT_RETRY)

    def _hosts(self, hostname: str) -> str:
        lines = ["127.0.0.1\tlocalhost", f"{self._address}\t{hostname}"]
        aliases = self.pod["spec"].get("hostAliases") or []
        lines += [f"{alias['ip']}\t{' '.join(alias.get('hostnames') or [])}" for alias in aliases]
        return "\n".join(lines) + "\n"

    def _downward(self) -> dict[str, str]:
        address = self._address or ""
        return {"podIP": address, "podIPs": address, "hostIP": self.node.address, "hostIPs": self.node.address}

    async def _gather(self, container: Object) -> dict[str, Any]:
        """What `environment` needs from the API server, fetched afresh for each start."""
        namespace, spec = self.pod["metadata"]["namespace"], self.pod["spec"]
        found: dict[tuple[str, str], Object] = {}
        for plural, name in _references(container):
            try:
                found[plural, name] = await self._shared.client.get(core(plural, namespace, name))
            except KubeError as error:
                if error.status != 404:
                    raise
        around = await self._shared.client.get(core("namespaces", name=namespace))
        links = spec.get("enableServiceLinks", True)
        return {
            "hub": (around["metadata"].get("labels") or {}).get(HUB_LABEL) == "true",
            "services": service_variables(self._shared.services.objects.values(), namespace, links),
            "lookup": lambda plural, name: found.get((plural, name)),
            "status": self._downward(),
            "node": self.node.allocatable,
        }

    async def _refresh_volumes(self) -> None:
        assert self._volumes is not None
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._outdated.wait(), _REFRESH)
            self._outdated.clear()
            await self._volumes.refresh(self.pod)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _end_containers(self, grace: float | None = None) -> None:
        """End what runs, and let nothing start any more."""
        if grace is None:
            metadata, spec = self.pod["metadata"], self.pod["spec"]
            grace = metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30))
        left = [c for c in self.containers.values() if not c.state.done]
        await asyncio.gather(*(c.stop(0.0 if self._gone.is_set() else float(grace)) for c in left))
        for container in left:
            if container.state.terminated is None and container.state.last_terminated is not None:
                container.state.terminated = container.state.last_terminated

    async def _give_back(self) -> None:
        """Network, volumes and address, in this order: an address is given back when nobody has it any more."""
        if self.network is not None:
            network, self.network = self.network, None
            async with self._shared.wiring:
                try:
                    await asyncio.to_thread(self._shared.networks.remove, network)
                except Exception:  # noqa: BLE001  pyroute2 has no common base for its errors, and the rest must be given back
                    _log.exception("pod %s/%s: its network", *self.name)
        if self._volumes is not None and self._over:
            try:
                await asyncio.to_thread(self._volumes.remove)
            except OSError:
                _log.exception("pod %s/%s: its volumes", *self.name)
        if self._address is not None:
            self._shared.networks.release(self._address)

    async def _remove_object(self) -> None:
        namespace, name = self.name
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        while True:
            await self._may_tell.wait()
            try:
                await self._write_status()
                await self._shared.client.delete(core("pods", namespace, name), options)
                return
            except KubeError as error:
                if error.status in (404, 409):
                    return
                _log.warning("pod %s/%s: %s", *self.name, error)
                await asyncio.sleep(_API_RETRY)

    # -- telling ------------------------------------------------------------------------------------------------------

    async def _tell_status(self) -> None:
        while True:
            await self._dirty.wait()
            await self._may_tell.wait()
            self._dirty.clear()
            try:
                await self._write_status()
            except KubeError as error:
                if error.status not in (404, 409):  # gone, or another pod of this name: the mirror will say so
                    _log.warning("pod %s/%s: %s", *self.name, error)
                    self._dirty.set()
                    await asyncio.sleep(_API_RETRY)

    async def _write_status(self) -> None:
        if self._was_over:
            return
        networked = self._address is not None and not self._over
        facts = PodFacts(self.pod, self.node.address, self._address, self._started_at, networked, self._failure, over=self._over)
        init, main = [c.state for c in self._init], [c.state for c in self._main]
        status = pod_status(facts, init, main, time.time())
        if tells(self.pod.get("status"), status):
            return
        namespace, name = self.name
        if "podIPs" in status:  # a list that is merged by address, and a pod that was taken over has got another one
            status["podIPs"] = [{"$patch": "replace"}, *status["podIPs"]]
        body = {"metadata": {"uid": self.uid}, "status": status}
        self.update(await self._shared.client.patch(core("pods", namespace, name, "status"), body, STRATEGIC))

    def _event(self, reason: str, message: str, *, warning: bool = False, container: str = "") -> None:
        self._shared.events.tell({**self.pod, "kind": "Pod"}, reason, message, warning=warning, container=container)


def _seconds(moment: str) -> float:
    return datetime.datetime.fromisoformat(moment).timestamp()


def _references(container: Object) -> set[tuple[str, str]]:
    """(plural, name) of each config map and secret that the container's environment names."""
    found = set()
    sources = list(container.get("envFrom") or [])
    sources += [entry["valueFrom"] for entry in container.get("env") or [] if entry.get("valueFrom")]
    for source in sources:
        for field, plural in (
            ("configMapRef", "configmaps"),
            ("configMapKeyRef", "configmaps"),
            ("secretRef", "secrets"),
            ("secretKeyRef", "secrets"),
        ):
            if reference := source.get(field):
                found.add((plural, reference["name"]))
    return found


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
