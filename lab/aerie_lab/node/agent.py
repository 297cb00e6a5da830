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
from aerie_lab.kube.client import KubeClient, Object, core, path
from aerie_lab.kube.mirror import Mirror
from aerie_lab.node import api
from aerie_lab.node.container import Container
from aerie_lab.node.events import EventRecorder
from aerie_lab.node.nodes import NodeKeeper, nodes_of
from aerie_lab.node.pod import Machinery, PodWorker
from aerie_lab.node.volumes import MEMORY, remove_memory
from aerie_lab.sandbox import linux
from aerie_lab.sandbox.container import ContainerProcess
from aerie_lab.sandbox.network import PodNetworks
from aerie_lab.services.proxy import ServiceProxy
from aerie_lab.settings import Settings

_log = logging.getLogger(__name__)
SERVER = "https://127.0.0.1:6443"


class Agent:
    """All nodes of one lab."""

    def __init__(self, folder: Path, settings: Settings, client: KubeClient, version: str) -> None:
        self._client = client
        self._nodes = {node.name: NodeKeeper(node, client, version) for node in nodes_of(settings)}
        self._proxy = ServiceProxy()
        self._services = Mirror(client, core("services"), self._proxy.service_changed)
        self._slices = Mirror(client, path("discovery.k8s.io/v1", "endpointslices"), self._proxy.slice_changed)
        self._node_objects = Mirror(client, core("nodes"), self._node_changed)
        self._pods = Mirror(client, core("pods"), self._pod_changed, fieldSelector="spec.nodeName!=")
        self._events = EventRecorder(client)
        self._workers: dict[str, PodWorker] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._folder = folder
        self._shared = Machinery(
            client=client,
            networks=PodNetworks(),
            wiring=asyncio.Lock(),
            images=ImageTable([Path(file) for file in settings.images]),
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
        verbs = ("containers", "kill", "crash", "freeze", "thaw", "cut", "mend", "silence", "speak", "lie", "ready")
        server = await control.serve(self._folder / "agent.sock", {verb: getattr(self, verb) for verb in verbs})
        kubelet = await api.serve(self._folder / "certificates", self._find)
        keepers, parts = self._nodes.values(), (self._node_objects, self._services, self._slices, self._events, self._proxy)
        tasks = [asyncio.create_task(keeper.run()) for keeper in keepers]
        tasks += [asyncio.create_task(part.run()) for part in parts]
        tasks += [asyncio.create_task(self._follow_pods()), asyncio.create_task(_wait_for(stop))]
        try:
            # All of them run for ever, except the last one: whichever is done ends the agent, with its exception if any.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            server.close()
            for task in (*tasks, *self._running):
                task.cancel()
            await asyncio.gather(*tasks, *self._running, return_exceptions=True)
            await kubelet.cleanup()

    async def _follow_pods(self) -> None:
        await asyncio.to_thread(self._shared.networks.clear)
        await self._services.synced.wait()  # a container's environment tells of the services there are,
        await self._slices.synced.wait()  # and what runs in it reaches them at once
        await self._proxy.listening.wait()
        following = asyncio.create_task(self._pods.run())
        try:
            await self._pods.synced.wait()
            self._clear_leftovers()
            await following
        finally:
            following.cancel()

    def _clear_leftovers(self) -> None:
        """Remove what an agent that died left of pods that are gone by now."""
        for folder in (self._folder / "pods", MEMORY):
            for entry in folder.iterdir() if folder.is_dir() else ():
                if entry.name not in self._workers:
                    remove_memory(entry.name)
                    shutil.rmtree(entry, ignore_errors=True)

    # -- pods ---------------------------------------------------------------------------------------------------------

    def _pod_changed(self, kind: str, pod: Object) -> None:
        keeper = self._nodes.get(pod["spec"].get("nodeName", ""))
        if keeper is None or keeper.silent:  # a node that is cut off hears nothing either; `speak` makes up for it
            return
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if kind == "DELETED":
            if worker is not None:
                worker.removed()
        elif worker is not None:
            worker.update(pod)
        else:
            worker = PodWorker(pod, keeper.node, self._shared)
            self._workers[uid] = worker
            task = asyncio.create_task(self._run_worker(worker))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run_worker(self, worker: PodWorker) -> None:
        try:
            await worker.run()
        except Exception:  # noqa: BLE001  a defect in one pod must not take the others along
            _log.exception("pod %s/%s", *worker.name)
        finally:
            self._workers.pop(worker.uid, None)

    def _worker(self, namespace: str, pod: str) -> PodWorker | None:
        """The pod of this name; the newest, while an older one is still on its way out."""
        return next((w for w in reversed(self._workers.values()) if w.name == (namespace, pod)), None)

    def _find(self, namespace: str, pod: str, container: str) -> Container | None:
        worker = self._worker(namespace, pod)
        return worker.containers.get(container) if worker is not None else None

    # -- asked over agent.sock ----------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        """Whether the agent follows the pods."""
        return self._pods.synced.is_set()

    async def containers(self) -> list[dict[str, Any]]:
        """Every running container: namespace, pod, container, pid (inside the lab), node."""
        return [
            {"namespace": w.name[0], "pod": w.name[1], "container": name, "pid": c.process.pid, "node": w.node.name}
            for w in self._workers.values()
            for name, c in w.containers.items()
            if c.process is not None
        ]

    def _process(self, namespace: str, pod: str, container: str) -> ContainerProcess:
        found = self._find(namespace, pod, container)
        if found is None or found.process is None:
            running = [f"{c} of {n}/{p}" for n, p, c in self._running_names() if (n, p) == (namespace, pod)]
            hint = f"running there: {', '.join(running)}" if running else "that pod has no running container"
            raise StateError(f"no running container '{container}' in pod {namespace}/{pod}: {hint}.")
        return found.process

    def _running_names(self) -> list[tuple[str, str, str]]:
        return [(*w.name, n) for w in self._workers.values() for n, c in w.containers.items() if c.process is not None]

    async def kill(self, namespace: str, pod: str, container: str) -> None:
        """SIGKILL to a container."""
        self._process(namespace, pod, container).signal(signal.SIGKILL)

    async def crash(self, namespace: str, pod: str, container: str, seconds: float | None) -> None:
        """Let no run of a container last longer; None: no longer so."""
        found = self._find(namespace, pod, container)
        if found is None:
            raise StateError(f"there is no container '{container}' in pod {namespace}/{pod} of this lab.")
        found.lifespan.set(seconds)

    async def freeze(self, namespace: str, pod: str, container: str) -> None:
        """SIGSTOP to all processes of a container."""
        self._signal_all(namespace, pod, container, signal.SIGSTOP)

    async def thaw(self, namespace: str, pod: str, container: str) -> None:
        """SIGCONT to all processes of a container."""
        self._signal_all(namespace, pod, container, signal.SIGCONT)

    def _signal_all(self, namespace: str, pod: str, container: str, number: int) -> None:
        try:
            self._process(namespace, pod, container).signal_all(number)
        except ProcessLookupError as error:
            raise StateError(f"container '{container}' of pod {namespace}/{pod} has just ended.") from error

    async def cut(self, namespace: str, pod: str) -> None:
        """Pull a pod's network cable."""
        await self._plug(namespace, pod, False)

    async def mend(self, namespace: str, pod: str) -> None:
        """Plug a pod's network cable in again."""
        await self._plug(namespace, pod, True)

    async def _plug(self, namespace: str, pod: str, connected: bool) -> None:
        async with self._shared.wiring:
            worker = self._worker(namespace, pod)
            if worker is None or worker.network is None:
                raise StateError(f"pod {namespace}/{pod} has no network in this lab.")
            await asyncio.to_thread(self._shared.networks.cut, worker.network, connected)

    async def lie(self, namespace: str, pod: str, lie: str | None) -> None:
        """Let a simulated engine's metrics page lie; None: no longer."""
        worker = self._worker(namespace, pod)
        if worker is None or worker.address is None:
            raise StateError(f"pod {namespace}/{pod} has no address in this lab.")
        ports = [port["containerPort"] for one in worker.pod["spec"]["containers"] for port in one.get("ports") or []]
        url = f"http://{worker.address}:{ports[0] if ports else 8000}/simulator/lie"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as http,
                http.post(url, json={"lie": lie}) as said,
            ):
                if said.status != 200:
                    raise StateError(f"pod {namespace}/{pod} is no simulated engine, or: {(await said.text()).strip()}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StateError(f"pod {namespace}/{pod} does not answer at {url}: {error}.") from error

    def _keeper(self, node: str) -> NodeKeeper:
        if node not in self._nodes:
            raise StateError(f"'{node}' is no node of this lab: one of {', '.join(self._nodes)}.")
        return self._nodes[node]

    async def silence(self, node: str) -> None:
        """Hear and tell nothing on this node any more; its pods go on running."""
        keeper = self._keeper(node)
        keeper.silent = True
        for worker in self._workers.values():
            if worker.node.name == node:
                worker.be_silent()

    async def speak(self, node: str) -> None:
        """End a silence."""
        keeper = self._keeper(node)
        keeper.silent = False
        keeper.wake()
        for worker in list(self._workers.values()):
            if worker.node.name == node:
                worker.speak()
                current = self._pods.objects.get(worker.name)
                if current is None or current["metadata"]["uid"] != worker.uid:
                    worker.removed()
        for pod in list(self._pods.objects.values()):
            if pod["spec"].get("nodeName") == node:
                self._pod_changed("MODIFIED", pod)

    def _node_changed(self, kind: str, node: Object) -> None:
        if keeper := self._nodes.get(node["metadata"]["name"]):
            keeper.changed(kind, node)


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


async def serve(folder: Path) -> None:
    """Run the agent of the lab in `folder`."""
    linux.become_subreaper()
    if sys.version_info < (3, 12):  # later ones do this by themselves: no thread for each process that is waited for
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.set_child_watcher(watcher)
    settings = Settings.from_folder(folder)
    async with KubeClient(SERVER, folder / "certificates", "node-agent") as client:
        version = await _server_version(client)
        await Agent(folder, settings, client, version).run()


async def _server_version(client: KubeClient) -> str:
    """The API server's version, once it answers: the nodes say they are as old."""
    while True:
        try:
            return str((await client.get("/version"))["gitVersion"])
        except KubeError as error:
            _log.warning("%s", error)
            await asyncio.sleep(0.2)


def main() -> None:
    """`python -m aerie_lab.node FOLDER`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    asyncio.run(serve(Path(sys.argv[1])))
