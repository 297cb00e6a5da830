"""Life of one pod of a node, from the first sight of it to its removal from the API server.

    refused?  ─►  network, volumes  ─►  init containers in order  ─►  containers side by side  ─►  done, or deleted
       │               │ FailedMount: again
       stays Pending with the names of the unsupported fields

Status is written by one task, which sends the latest state and never an older one after it. Guarantees: a deleted pod's
processes end before the API object is removed; volumes and address are released exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import shutil
import time
from typing import Any

from aerie_lab.errors import KubeError
from aerie_lab.kube.client import STRATEGIC_MERGE_PATCH, KubeObject, core_path
from aerie_lab.node.container.context import ContainerContext
from aerie_lab.node.container.lifecycle import Container
from aerie_lab.node.pod.context import AgentContext, Node
from aerie_lab.node.pod.environment_inputs import read_environment_inputs
from aerie_lab.node.pod.resources import RESOURCE_RETRY_SECONDS, PodResources
from aerie_lab.node.status import ContainerState, PodFacts, build_pod_status, format_timestamp, status_covers
from aerie_lab.node.support import find_unsupported_fields, is_processless, read_processless_load_seconds
from aerie_lab.node.volumes import VolumeError
from aerie_lab.sandbox.network import PodNetwork

_log = logging.getLogger(__name__)
_API_RETRY_SECONDS = 1.0


class PodWorker:
    """Runs one pod. `update` takes newer versions of the object; `run` returns when the pod was removed from the server.

    A pod that comes with a status was run by an agent that is no more: what had ended stays ended, the rest starts again.
    """

    def __init__(self, pod: KubeObject, node: Node, context: AgentContext) -> None:
        self.pod = pod
        self.node = node
        self.uid: str = pod["metadata"]["uid"]
        self._status_writes_allowed = asyncio.Event()  # cleared while the node is silent
        self._status_writes_allowed.set()
        self._context = context
        self._folder = context.folder / "pods" / self.uid
        status, spec = pod.get("status") or {}, pod["spec"]
        policy = spec.get("restartPolicy", "Always")
        self._init_containers = [Container(c, self._folder, policy, init=True) for c in spec.get("initContainers") or []]
        self._main_containers = [Container(c, self._folder, policy, init=False) for c in spec["containers"]]
        self.containers = {c.state.name: c for c in (*self._init_containers, *self._main_containers)}
        self._was_finished = status.get("phase") in ("Succeeded", "Failed")
        if self._was_finished or not is_processless(pod):
            for previous_status in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
                self.containers[previous_status["name"]].adopt_status(previous_status)
        if self._init_containers:
            for container in self._main_containers:
                container.state.waiting = ("PodInitializing", "")
        self._started_at = _parse_timestamp(status["startTime"]) if "startTime" in status else time.time()
        self._resources = PodResources(pod, node, self._folder, context, self._record_event)
        if self._was_finished:
            self._resources.address = status.get("podIP")
        self._failure: tuple[str, str] | None = None
        self._is_finished = False
        self._status_changed = asyncio.Event()
        self._deletion_requested = asyncio.Event()
        self._object_removed = asyncio.Event()
        self._stop_tasks: set[asyncio.Task[None]] = set()
        if pod["metadata"].get("deletionTimestamp"):
            self._deletion_requested.set()

    # -- from outside -------------------------------------------------------------------------------------------------

    def update(self, pod: KubeObject) -> None:
        """Take a newer version of the object."""
        old, new = self.pod["metadata"], pod["metadata"]
        if int(new["resourceVersion"]) < int(old["resourceVersion"]):
            return  # the answer to our own last write came before this event
        self.pod = pod
        self._status_changed.set()  # another client may have written the status: it is compared, and written only if it differs
        if any(old.get(field) != new.get(field) for field in ("labels", "annotations")):
            self._resources.mark_volumes_outdated()
        if new.get("deletionTimestamp"):
            if self._deletion_requested.is_set() and old.get("deletionGracePeriodSeconds") != new.get(
                "deletionGracePeriodSeconds"
            ):
                self._shorten_grace(float(new["deletionGracePeriodSeconds"]))
            self._deletion_requested.set()

    def on_object_removed(self) -> None:
        """Handle the object's removal from the server: stop immediately if it was deleted by force, and write no status."""
        self._object_removed.set()
        self._deletion_requested.set()
        self._shorten_grace(0.0)

    def _shorten_grace(self, grace: float) -> None:
        task = asyncio.create_task(self._stop_containers(grace))
        self._stop_tasks.add(task)
        task.add_done_callback(self._stop_tasks.discard)

    def pause_status_writes(self) -> None:
        """Write no status until `resume_status_writes`."""
        self._status_writes_allowed.clear()

    def resume_status_writes(self) -> None:
        """End `pause_status_writes`."""
        self._status_writes_allowed.set()

    @property
    def name(self) -> tuple[str, str]:
        """(namespace, name)."""
        metadata = self.pod["metadata"]
        return metadata["namespace"], metadata["name"]

    @property
    def address(self) -> str | None:
        """The pod's address, once it has one."""
        return self._resources.address

    @property
    def network(self) -> PodNetwork | None:
        """The pod's network, while it has one."""
        return self._resources.network

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the pod from start to removal."""
        telling = asyncio.create_task(self._write_status_on_change())
        try:
            if not self._was_finished:
                await self._run_until_deleted()
            await self._deletion_requested.wait()
        finally:
            await _cancel_all(telling)
        if not self._object_removed.is_set():
            await self._remove_object()
            await self._object_removed.wait()  # finalizers may keep it for a while; it must not be taken for a new pod
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _run_until_deleted(self) -> None:
        living = asyncio.create_task(self._run_pod())
        deleted = asyncio.create_task(self._deletion_requested.wait())
        try:
            limit = self.pod["spec"].get("activeDeadlineSeconds")
            left = None if limit is None else max(0.0, self._started_at + limit - time.time())
            await asyncio.wait({living, deleted}, return_when=asyncio.FIRST_COMPLETED, timeout=left)
            if not living.done() and not deleted.done():
                self._fail("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
            await self._stop_containers()
            self._is_finished = True
        except asyncio.CancelledError:
            self._status_writes_allowed.clear()  # the agent ends, not the pod: its successor continues from the last status
            raise
        finally:
            await self._stop_containers(0.0)
            await _cancel_all(living, deleted)
            await self._resources.release(remove_volumes=self._is_finished)
            self._status_changed.set()

    async def _run_pod(self) -> None:
        try:
            if refused := find_unsupported_fields(self.pod):
                await self._report_unsupported(refused)
            self._resources.reserve_address()
            if is_processless(self.pod):
                await self._run_processless()
            await self._run_containers(await self._set_up_pod())
        except Exception as error:  # noqa: BLE001  a defect of the lab: the pod reports it, and the other pods continue
            _log.exception("pod %s/%s", *self.name)
            self._fail("LabFailure", f"the lab could not run this pod: {error}")

    def _fail(self, reason: str, message: str) -> None:
        self._failure = (reason, message)
        self._record_event(reason, message, warning=True)

    async def _run_containers(self, context: ContainerContext) -> None:
        refreshing = asyncio.create_task(self._resources.refresh_volumes(lambda: self.pod))
        try:
            for container in self._init_containers:
                await container.run(context)
                ended = container.state.terminated
                if ended is None or ended["exitCode"] != 0:
                    return
            for container in self._main_containers:
                if container.state.waiting[0] == "PodInitializing":
                    container.state.waiting = ("ContainerCreating", "")
            self._status_changed.set()
            async with asyncio.TaskGroup() as group:
                for container in self._main_containers:
                    group.create_task(container.run(context))
        finally:
            refreshing.cancel()

    def _container_states(self) -> list[ContainerState]:
        return [container.state for container in self.containers.values()]

    async def _report_unsupported(self, fields: list[str]) -> None:
        """Stay Pending with the reason. Failing would make a ReplicaSet replace the pod for ever."""
        message = f"the lab's node agent does not offer {', '.join(fields)}: leave it out, or use a real cluster"
        for state in self._container_states():
            state.waiting = ("LabUnsupported", message)
        self._record_event("LabUnsupported", message, warning=True)
        self._status_changed.set()
        await asyncio.Event().wait()

    async def _run_processless(self) -> None:
        """Become Ready without a process, after the load time in the pod's annotation."""
        if loads := read_processless_load_seconds(self.pod):
            for state in self._container_states():
                state.container_id, state.running_since = "processless", self._started_at
            self._status_changed.set()
            await asyncio.sleep(loads)
        for state in self._container_states():
            state.container_id = "processless"
            if state.init:
                state.terminated = {"exitCode": 0, "reason": "Completed", "finishedAt": format_timestamp(self._started_at)}
            else:
                state.running_since, state.started, state.ready = self._started_at, True, True
        self._status_changed.set()
        await asyncio.Event().wait()

    # -- before the containers ----------------------------------------------------------------------------------------

    async def _set_up_pod(self) -> ContainerContext:
        resources = self._resources
        assert resources.address is not None
        self._status_changed.set()
        self._folder.mkdir(parents=True, exist_ok=True)
        network = await resources.create_network(resources.address)
        hostname = self.pod["spec"].get("hostname") or self.pod["metadata"]["name"]
        resources.write_hosts_file(self.pod["spec"], hostname)
        volumes = resources.create_volumes()
        while True:
            try:
                await volumes.prepare(self.pod)
                break
            except VolumeError as error:
                self._record_event("FailedMount", str(error), warning=True)
                for state in self._container_states():
                    if not state.is_done:
                        state.waiting = (state.waiting[0] or "ContainerCreating", str(error))
                self._status_changed.set()
                await asyncio.sleep(RESOURCE_RETRY_SECONDS)
        for state in self._container_states():
            state.waiting = (state.waiting[0], "")
        return ContainerContext(
            get_pod=lambda: self.pod,
            folder=self._folder,
            hostname=hostname,
            address=resources.address,
            network_fd=network.namespace_fd,
            images=self._context.images,
            read_environment_inputs=self._read_environment_inputs,
            build_mounts=volumes.build_mounts,
            shared_memory=volumes.mount_shared_memory(),
            record_event=self._record_event,
            on_state_change=self._status_changed.set,
            restart_backoff=self._context.restart_backoff,
        )

    async def _read_environment_inputs(self, container: KubeObject) -> dict[str, Any]:
        addresses = self._resources.downward_addresses()
        return await read_environment_inputs(container, self.pod, self._context, addresses, self.node.allocatable)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _stop_containers(self, grace: float | None = None) -> None:
        """End what runs, and let nothing start any more."""
        if grace is None:
            metadata, spec = self.pod["metadata"], self.pod["spec"]
            grace = metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30))
        left = [c for c in self.containers.values() if not c.state.is_done]
        await asyncio.gather(*(c.stop(0.0 if self._object_removed.is_set() else float(grace)) for c in left))
        for container in left:
            if container.state.terminated is None and container.state.last_terminated is not None:
                container.state.terminated = container.state.last_terminated

    async def _remove_object(self) -> None:
        namespace, name = self.name
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        while True:
            await self._status_writes_allowed.wait()
            try:
                await self._write_status()
                await self._context.client.delete(core_path("pods", namespace, name), options)
                return
            except KubeError as error:
                if error.status in (404, 409):
                    return
                _log.warning("pod %s/%s: %s", *self.name, error)
                await asyncio.sleep(_API_RETRY_SECONDS)

    # -- status -------------------------------------------------------------------------------------------------------

    async def _write_status_on_change(self) -> None:
        while True:
            await self._status_changed.wait()
            await self._status_writes_allowed.wait()
            self._status_changed.clear()
            try:
                await self._write_status()
            except KubeError as error:
                if error.status not in (404, 409):  # removed, or another pod of this name: the informer will report it
                    _log.warning("pod %s/%s: %s", *self.name, error)
                    self._status_changed.set()
                    await asyncio.sleep(_API_RETRY_SECONDS)

    async def _write_status(self) -> None:
        if self._was_finished:
            return
        address = self._resources.address
        networked = address is not None and not self._is_finished
        facts = PodFacts(
            self.pod, self.node.address, address, self._started_at, networked, self._failure, is_finished=self._is_finished
        )
        init, main = [c.state for c in self._init_containers], [c.state for c in self._main_containers]
        status = build_pod_status(facts, init, main, time.time())
        if status_covers(self.pod.get("status"), status):
            return
        namespace, name = self.name
        if "podIPs" in status:  # a list that is merged by address, and a pod that was taken over has got another one
            status["podIPs"] = [{"$patch": "replace"}, *status["podIPs"]]
        body = {"metadata": {"uid": self.uid}, "status": status}
        self.update(await self._context.client.patch(core_path("pods", namespace, name, "status"), body, STRATEGIC_MERGE_PATCH))

    def _record_event(self, reason: str, message: str, *, warning: bool = False, container: str = "") -> None:
        self._context.events.record({**self.pod, "kind": "Pod"}, reason, message, warning=warning, container=container)


def _parse_timestamp(moment: str) -> float:
    return datetime.datetime.fromisoformat(moment).timestamp()


async def _cancel_all(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
