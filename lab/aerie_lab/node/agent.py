"""The node agent's process: one event loop that plays all nodes, their pods, and the service proxy.

    pods mirror ──► one PodWorker per pod bound to a node of ours
    services and endpoint slices mirrors ──► ServiceProxy
    agent.sock ──► containers, and the faults that only the agent can make

Guarantees: with it end all its containers, and a part of it that fails ends it, so that the supervisor starts a whole one
again; a pod left over by an agent that died is taken over (see PodWorker), and what else it left is cleared away.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp

from aerie_lab import control
from aerie_lab.errors import KubeError, StateError
from aerie_lab.images.table import ImageTable
from aerie_lab.kube.client import KubeClient, KubeObject, core_path, resource_path
from aerie_lab.kube.informer import Informer
from aerie_lab.node import api
from aerie_lab.node.container.lifecycle import Container
from aerie_lab.node.events import EventRecorder
from aerie_lab.node.nodes import NodeRegistrar, build_nodes
from aerie_lab.node.pod.context import AgentContext
from aerie_lab.node.pod.worker import PodWorker
from aerie_lab.node.volumes import MEMORY_VOLUMES_FOLDER, unmount_memory_volumes
from aerie_lab.sandbox import linux
from aerie_lab.sandbox.container import ContainerProcess
from aerie_lab.sandbox.network import PodNetworks
from aerie_lab.services.proxy import ServiceProxy
from aerie_lab.settings import LabSettings

_log = logging.getLogger(__name__)
API_SERVER_URL = "https://127.0.0.1:6443"
AGENT_VERBS = (
    *("ready", "containers", "kill", "crash", "freeze", "resume", "disconnect", "reconnect"),
    *("silence_node", "restore_node", "corrupt_metrics", "fail_drafter"),
)
"""Requests on agent.sock: each is the method of that name."""


class NodeAgent:
    """All nodes of one lab."""

    def __init__(self, folder: Path, settings: LabSettings, client: KubeClient, version: str) -> None:
        self._client = client
        self._registrars = {node.name: NodeRegistrar(node, client, version) for node in build_nodes(settings)}
        self._proxy = ServiceProxy()
        self._services = Informer(client, core_path("services"), self._proxy.on_service_event)
        self._endpoint_slices = Informer(
            client, resource_path("discovery.k8s.io/v1", "endpointslices"), self._proxy.on_endpoint_slice_event
        )
        self._node_objects = Informer(client, core_path("nodes"), self._on_node_event)
        self._pods = Informer(client, core_path("pods"), self._on_pod_event, fieldSelector="spec.nodeName!=")
        self._events = EventRecorder(client)
        self._workers: dict[str, PodWorker] = {}
        self._worker_tasks: set[asyncio.Task[None]] = set()
        self._folder = folder
        self._context = AgentContext(
            client=client,
            networks=PodNetworks(),
            network_lock=asyncio.Lock(),
            images=ImageTable([Path(file) for file in settings.image_tables]),
            services=self._services,
            events=self._events,
            folder=folder,
            restart_backoff=settings.restart_backoff,
        )

    async def run(self) -> None:
        """Serve until SIGTERM."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        server = await control.serve_requests(self._folder / "agent.sock", {verb: getattr(self, verb) for verb in AGENT_VERBS})
        kubelet = await api.serve_kubelet_api(self._folder / "certificates", self._find_container)
        registrars, parts = (
            self._registrars.values(),
            (self._node_objects, self._services, self._endpoint_slices, self._events, self._proxy),
        )
        tasks = [asyncio.create_task(registrar.run()) for registrar in registrars]
        tasks += [asyncio.create_task(part.run()) for part in parts]
        tasks += [asyncio.create_task(self._watch_pods()), asyncio.create_task(_wait_for(stop))]
        try:
            # All of them run for ever, except the last one: whichever is done ends the agent, with its exception if any.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            server.close()
            for task in (*tasks, *self._worker_tasks):
                task.cancel()
            await asyncio.gather(*tasks, *self._worker_tasks, return_exceptions=True)
            await kubelet.cleanup()

    async def _watch_pods(self) -> None:
        await asyncio.to_thread(self._context.networks.remove_orphaned_interfaces)
        await self._services.synced.wait()  # a container's environment has the existing services,
        await self._endpoint_slices.synced.wait()  # and its process can reach them immediately
        await self._proxy.initial_listeners_ready.wait()
        following = asyncio.create_task(self._pods.run())
        try:
            await self._pods.synced.wait()
            self._remove_orphaned_folders()
            await following
        finally:
            following.cancel()

    def _remove_orphaned_folders(self) -> None:
        """Remove what a previous agent left of pods that no longer exist."""
        for folder in (self._folder / "pods", MEMORY_VOLUMES_FOLDER):
            for entry in folder.iterdir() if folder.is_dir() else ():
                if entry.name not in self._workers:
                    unmount_memory_volumes(entry.name)
                    shutil.rmtree(entry, ignore_errors=True)

    # -- pods ---------------------------------------------------------------------------------------------------------

    def _on_pod_event(self, event_type: str, pod: KubeObject) -> None:
        registrar = self._registrars.get(pod["spec"].get("nodeName", ""))
        if registrar is None or registrar.is_silenced:  # a silenced node receives nothing either; `restore_node` catches up
            return
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if event_type == "DELETED":
            if worker is not None:
                worker.on_object_removed()
        elif worker is not None:
            worker.update(pod)
        else:
            worker = PodWorker(pod, registrar.node, self._context)
            self._workers[uid] = worker
            task = asyncio.create_task(self._run_worker(worker))
            self._worker_tasks.add(task)
            task.add_done_callback(self._worker_tasks.discard)

    async def _run_worker(self, worker: PodWorker) -> None:
        try:
            await worker.run()
        except Exception:  # noqa: BLE001  a defect in one pod must not take the others along
            _log.exception("pod %s/%s", *worker.name)
        finally:
            self._workers.pop(worker.uid, None)

    def _find_worker(self, namespace: str, pod: str) -> PodWorker | None:
        """Return the pod of this name; the newest, while an older one is still terminating."""
        return next((w for w in reversed(self._workers.values()) if w.name == (namespace, pod)), None)

    def _find_container(self, namespace: str, pod: str, container: str) -> Container | None:
        worker = self._find_worker(namespace, pod)
        return worker.containers.get(container) if worker is not None else None

    # -- requests on agent.sock ---------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        """Return whether the agent follows the pods."""
        return self._pods.synced.is_set()

    async def containers(self) -> list[dict[str, Any]]:
        """Return every running container: namespace, pod, container, pid (inside the lab), node."""
        return [
            {"namespace": w.name[0], "pod": w.name[1], "container": name, "pid": c.process.pid, "node": w.node.name}
            for w in self._workers.values()
            for name, c in w.containers.items()
            if c.process is not None
        ]

    def _find_process(self, namespace: str, pod: str, container: str) -> ContainerProcess:
        target = self._find_container(namespace, pod, container)
        if target is None or target.process is None:
            running = [f"{c} of {n}/{p}" for n, p, c in self._running_container_names() if (n, p) == (namespace, pod)]
            hint = f"running there: {', '.join(running)}" if running else "that pod has no running container"
            raise StateError(f"no running container '{container}' in pod {namespace}/{pod}: {hint}.")
        return target.process

    def _running_container_names(self) -> list[tuple[str, str, str]]:
        return [(*w.name, n) for w in self._workers.values() for n, c in w.containers.items() if c.process is not None]

    async def kill(self, namespace: str, pod: str, container: str) -> None:
        """SIGKILL to a container."""
        self._find_process(namespace, pod, container).signal(signal.SIGKILL)

    async def crash(self, namespace: str, pod: str, container: str, seconds: float | None) -> None:
        """Limit the duration of each run of a container; None: no limit."""
        target = self._find_container(namespace, pod, container)
        if target is None:
            raise StateError(f"there is no container '{container}' in pod {namespace}/{pod} of this lab.")
        target.run_time_limit.set(seconds)

    async def freeze(self, namespace: str, pod: str, container: str) -> None:
        """SIGSTOP to all processes of a container."""
        self._signal_all(namespace, pod, container, signal.SIGSTOP)

    async def resume(self, namespace: str, pod: str, container: str) -> None:
        """SIGCONT to all processes of a container."""
        self._signal_all(namespace, pod, container, signal.SIGCONT)

    def _signal_all(self, namespace: str, pod: str, container: str, number: int) -> None:
        try:
            self._find_process(namespace, pod, container).signal_all(number)
        except ProcessLookupError as error:
            raise StateError(f"container '{container}' of pod {namespace}/{pod} has just ended.") from error

    async def disconnect(self, namespace: str, pod: str) -> None:
        """Disconnect a pod from the network."""
        await self._set_network_connected(namespace, pod, False)

    async def reconnect(self, namespace: str, pod: str) -> None:
        """Connect a pod with the network again."""
        await self._set_network_connected(namespace, pod, True)

    async def _set_network_connected(self, namespace: str, pod: str, connected: bool) -> None:
        async with self._context.network_lock:
            worker = self._find_worker(namespace, pod)
            if worker is None or worker.network is None:
                raise StateError(f"pod {namespace}/{pod} has no network in this lab.")
            await asyncio.to_thread(self._context.networks.set_connected, worker.network, connected)

    async def corrupt_metrics(self, namespace: str, pod: str, corruption: str | None) -> None:
        """Let a simulated engine expose false metrics; None: the true ones."""
        await self._set_in_simulator(namespace, pod, "metrics-corruption", {"corruption": corruption})

    async def fail_drafter(self, namespace: str, pod: str, fault: str | None) -> None:
        """Let changes of the drafter in a simulated engine fail; None: succeed."""
        await self._set_in_simulator(namespace, pod, "drafter-fault", {"fault": fault})

    async def _set_in_simulator(self, namespace: str, pod: str, name: str, body: dict[str, str | None]) -> None:
        """Send a setting to a simulated engine. Raises StateError if it is not there, or does not accept it."""
        worker = self._find_worker(namespace, pod)
        if worker is None or worker.address is None:
            raise StateError(f"pod {namespace}/{pod} has no address in this lab.")
        ports = [port["containerPort"] for container in worker.pod["spec"]["containers"] for port in container.get("ports") or []]
        url = f"http://{worker.address}:{ports[0] if ports else 8000}/simulator/{name}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as http,
                http.post(url, json=body) as response,
            ):
                if response.status != 200:
                    raise StateError(f"pod {namespace}/{pod} is no simulated engine, or: {(await response.text()).strip()}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StateError(f"pod {namespace}/{pod} does not respond at {url}: {error}.") from error

    def _find_registrar(self, node: str) -> NodeRegistrar:
        if node not in self._registrars:
            raise StateError(f"'{node}' is not a node of this lab: choose one of {', '.join(self._registrars)}.")
        return self._registrars[node]

    async def silence_node(self, node: str) -> None:
        """Receive and report nothing on this node; its pods keep running."""
        registrar = self._find_registrar(node)
        registrar.is_silenced = True
        for worker in self._workers.values():
            if worker.node.name == node:
                worker.pause_status_writes()

    async def restore_node(self, node: str) -> None:
        """End `silence_node`."""
        registrar = self._find_registrar(node)
        registrar.is_silenced = False
        registrar.report_now()
        for worker in list(self._workers.values()):
            if worker.node.name == node:
                worker.resume_status_writes()
                current = self._pods.objects.get(worker.name)
                if current is None or current["metadata"]["uid"] != worker.uid:
                    worker.on_object_removed()
        for pod in list(self._pods.objects.values()):
            if pod["spec"].get("nodeName") == node:
                self._on_pod_event("MODIFIED", pod)

    def _on_node_event(self, event_type: str, node: KubeObject) -> None:
        if registrar := self._registrars.get(node["metadata"]["name"]):
            registrar.on_node_event(event_type, node)


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


async def run_agent(folder: Path) -> None:
    """Run the agent of the lab in `folder`."""
    linux.become_subreaper()
    if sys.version_info < (3, 12):  # later versions do so by default: no thread per process
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.set_child_watcher(watcher)
    settings = LabSettings.from_folder(folder)
    async with KubeClient(API_SERVER_URL, folder / "certificates", "node-agent") as client:
        version = await _read_server_version(client)
        await NodeAgent(folder, settings, client, version).run()


async def _read_server_version(client: KubeClient) -> str:
    """Return the API server's version, once it answers: the nodes report the same one."""
    while True:
        try:
            return str((await client.get("/version"))["gitVersion"])
        except KubeError as error:
            _log.warning("%s", error)
            await asyncio.sleep(0.2)


def main() -> None:
    """`python -m aerie_lab.node FOLDER`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    asyncio.run(run_agent(Path(sys.argv[1])))
