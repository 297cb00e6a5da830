"""One container of a pod: its starts and restarts, its probes, its end.

    image ─► environment, command, mounts ─► process ─► probes ...... exit ─► restart after a pause, or done
      │            │                            │
      ErrImagePull CreateContainerConfigError   StartError

Restarts follow the pod's restartPolicy with a kubelet's back-off: at once after the first exit, then after 10 s, doubled up
to 300 s, and from the start again after ten good minutes (the 10 s can be shortened for a lab).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_lab.errors import KubeError
from aerie_lab.images.table import Image, ImageError, ImageTable
from aerie_lab.kube.client import Object
from aerie_lab.node import probes
from aerie_lab.node.environment import ConfigError, command_line, environment
from aerie_lab.node.lifespan import Lifespan
from aerie_lab.node.logs import LogFile, tail
from aerie_lab.node.status import ContainerState, timestamp
from aerie_lab.node.volumes import VolumeError
from aerie_lab.sandbox.addresses import HUB
from aerie_lab.sandbox.container import ContainerProcess, Launch, LaunchError, execute, start

_CONFIG_RETRY = 2.0
_GOOD_RUN = 600.0
_MINIMUM_GRACE = 2.0
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MESSAGE_BYTES = 4096


@dataclass(frozen=True)
class Surroundings:
    """What a container needs of its pod. The callables ask the pod for what may change."""

    pod: Callable[[], Object]
    folder: Path
    hostname: str
    address: str
    network: int | None
    images: ImageTable
    gather: Callable[[Object], Awaitable[dict[str, Any]]]
    """The arguments of `environment` that need the API: lookup, status, node, and service variables."""
    mounts: Callable[[Object, Mapping[str, str]], list[dict[str, Any]]]
    shared_memory: Path
    tell: Callable[..., None]
    changed: Callable[[], None]
    restart_backoff: float


class Container:
    """Runs one container until it is done or stopped. It is made with its pod; `run` gives it its surroundings."""

    def __init__(self, spec: Object, folder: Path, restart_policy: str, *, init: bool) -> None:
        self.spec = spec
        self.state = ContainerState(spec["name"], spec["image"], init=init)
        self.ended = asyncio.Event()
        """Set while no process of this container runs or is being started: log readers stop following then."""
        self.ended.set()
        self._launched = asyncio.Event()  # cleared while a process is being started and is not known yet
        self._launched.set()
        self._policy = "OnFailure" if init and restart_policy == "Always" else restart_policy
        self._process: ContainerProcess | None = None
        self._launch: Launch | None = None
        self._stopping = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._kill_at = 0.0  # what is left of the grace period, while _ending
        self._at_once = False  # no grace period is left to anyone
        self._hurry = asyncio.Event()  # _kill_at has come nearer
        self._folder = folder
        self._asked = 0
        self.lifespan = Lifespan()
        """For how long each run lasts, by a fault."""

    @property
    def process(self) -> ContainerProcess | None:
        """The running process, for faults."""
        return self._process

    def log_path(self, previous: bool = False) -> Path:
        """The log of the current run, or of the one before."""
        return self._run_file("logs", max(0, self.state.restarts - int(previous)))

    def _run_file(self, kind: str, number: int) -> Path:
        return self._folder / kind / self.state.name / f"{number}.log"

    def take_over(self, told: Object) -> None:
        """Go on from the status that an agent wrote which is no more: with it ended what was running."""
        state, self.state.restarts = told["state"], told["restartCount"]
        self.state.container_id = (told.get("containerID") or "").removeprefix("lab://")
        ended = state.get("terminated") or told["lastState"].get("terminated")
        if running := state.get("running"):
            ended = {
                "exitCode": 137,
                "reason": "ContainerStatusUnknown",
                "message": "The container was running when the node agent ended, and ended with it",
                "startedAt": running["startedAt"],
                "finishedAt": timestamp(time.time()),
                "containerID": told.get("containerID", ""),
            }
        if ended is None:
            return
        if "waiting" not in state and self._is_final(ended["exitCode"]):
            self.state.terminated = ended
        else:
            self.state.last_terminated = ended
            self.state.restarts += 1

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self, around: Surroundings) -> None:
        """Run, and run again, until done. No process is left when it returns, or is cancelled."""
        self._around = around
        pause = 0.0
        while not self.state.done and not self._stopping.is_set():
            began = time.monotonic()
            ended = await self._run_once()
            if ended is None:
                return
            if self._stopping.is_set() or self._is_final(ended["exitCode"]):
                self.state.terminated = ended
                around.changed()
                return
            self.state.last_terminated, self.state.waiting = ended, ("", "")
            around.changed()
            if time.monotonic() - began > _GOOD_RUN:
                pause = 0.0
            if pause:
                self._wait("CrashLoopBackOff", f"back-off {pause:g}s restarting failed container={self.state.name}")
                self._tell("BackOff", f"Back-off restarting failed container {self.state.name}", warning=True)
                await asyncio.sleep(pause)
            pause = min(max(2 * pause, around.restart_backoff), 30 * around.restart_backoff)
            self.state.restarts += 1

    def _is_final(self, code: int) -> bool:
        return self._policy == "Never" or (self._policy == "OnFailure" and code == 0)

    async def stop(self, grace: float) -> None:
        """preStop, SIGTERM, and SIGKILL after `grace` seconds in all; returns when the process has ended.

        It may be called again meanwhile, to shorten the grace period.
        """
        self._stopping.set()
        await self._launched.wait()
        if self._process is not None:
            self._tell("Killing", f"Stopping container {self.state.name}")
            self._end(self._process, grace)
        await self.ended.wait()

    def _end(self, process: ContainerProcess, grace: float) -> None:
        """Begin to end the process; what has begun goes on by itself, and at most gets faster."""
        kill_at = time.monotonic() + grace
        if self._ending is None:
            self._kill_at, self._at_once = kill_at, grace <= 0
            self._ending = asyncio.create_task(self._end_process(process, grace))
        elif kill_at < self._kill_at:
            self._kill_at, self._at_once = kill_at, grace <= 0
            self._hurry.set()

    async def _end_process(self, process: ContainerProcess, grace: float) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        if hook and grace > 0:
            await self._within_grace(self._run_hook(process, hook, grace))
        process.signal(signal.SIGTERM)
        if not self._at_once:  # a hook may have used up the time: SIGTERM is given a little in any case
            self._kill_at = max(self._kill_at, time.monotonic() + _MINIMUM_GRACE)
        if not await self._within_grace(process.wait()):
            process.signal(signal.SIGKILL)
            await process.wait()

    async def _within_grace(self, work: Coroutine[Any, Any, object]) -> bool:
        """Whether `work` was done before the grace period ended, which may get shorter meanwhile."""
        task = asyncio.create_task(work)
        while not task.done() and (left := self._kill_at - time.monotonic()) > 0:
            self._hurry.clear()
            hurry = asyncio.create_task(self._hurry.wait())
            await asyncio.wait({task, hurry}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        if task.done():
            return True
        task.cancel()
        await asyncio.wait({task})
        return False

    async def _run_hook(self, process: ContainerProcess, hook: Object, grace: float) -> None:
        if sleep := hook.get("sleep"):
            await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=float(sleep["seconds"]))
        elif request := hook.get("httpGet"):
            try:
                await probes.http_get(request, self.spec, self._around.address)
            except (OSError, ValueError) as error:
                self._tell("FailedPreStopHook", f"PreStopHook failed: {error}", warning=True)
        elif command := hook.get("exec"):
            code, output = await self._execute(command["command"], grace)
            if code != 0:
                self._tell("FailedPreStopHook", f"PreStopHook failed: exit code {code}: {output[:300]}", warning=True)

    # -- one run ------------------------------------------------------------------------------------------------------

    async def _run_once(self) -> dict[str, Any] | None:
        """From image to exit: the terminated state; None when stopped before a process was started."""
        launch = await self._prepared()
        if launch is None or self._stopping.is_set():
            return None
        began = time.time()
        self.state.container_id = uuid.uuid4().hex
        self.ended.clear()
        self._launched.clear()
        try:
            # A process that is being started has to become known, whatever happens meanwhile.
            starting = asyncio.create_task(self._start(launch))
            try:
                process, outputs = await asyncio.shield(starting)
            except asyncio.CancelledError:
                with contextlib.suppress(LaunchError):
                    (await starting)[0].signal(signal.SIGKILL)
                raise
            self._process, self._launch = process, launch
        except LaunchError as error:
            self.ended.set()
            self._tell("Failed", f"Error: {error}", warning=True)
            return self._terminated(128, began, "StartError", f"failed to start container: {error}")
        except BaseException:
            self.ended.set()
            raise
        finally:
            self._launched.set()
        self.state.running_since, self.state.waiting = began, ("", "")
        self._tell("Started", f"Started container {self.state.name}")
        asking, crashing = asyncio.create_task(self._ask(process)), asyncio.create_task(self._crash(process))
        self._around.changed()
        try:
            code = await process.wait()
            # What the process wrote last is read before its end is told; a descendant cannot hold the pipe: it is dead too.
            await asyncio.gather(*outputs)
        finally:
            process.signal(signal.SIGKILL)  # nothing happens unless this was cancelled
            asking.cancel()
            crashing.cancel()
            self._process = self._ending = None
            self.state.ready = self.state.started = False
            self.state.running_since = None
            self.ended.set()
        return self._terminated(code, began, "Completed" if code == 0 else "Error", self._termination_message(code))

    async def _crash(self, process: ContainerProcess) -> None:
        await self.lifespan.over()
        process.signal(signal.SIGKILL)

    async def _prepared(self) -> Launch | None:
        """All that the process gets; waits while something it refers to is missing. None when stopped meanwhile."""
        image = await self._image()
        while image is not None and not self._stopping.is_set():
            try:
                return await self._prepare(image)
            except (ConfigError, VolumeError, KubeError, OSError) as error:
                self._wait("CreateContainerConfigError", str(error))
                self._tell("Failed", f"Error: {error}", warning=True)
                await asyncio.sleep(_CONFIG_RETRY)
        return None

    async def _image(self) -> Image | None:
        """The image's command; waits with a kubelet's alternating reasons while there is none."""
        pause = self._around.restart_backoff
        while not self._stopping.is_set():
            try:
                image = self._around.images.image(self.spec["image"])
                self._tell("Pulled", f'Container image "{self.spec["image"]}" already present on machine')
                return image
            except ImageError as error:
                self._wait("ErrImagePull", str(error))
                self._tell("Failed", f'Failed to pull image "{self.spec["image"]}": {error}', warning=True)
                await asyncio.sleep(min(pause, 1.0))
                self._wait("ImagePullBackOff", f'Back-off pulling image "{self.spec["image"]}": {error}')
                await asyncio.sleep(pause)
                pause = min(2 * pause, 30 * self._around.restart_backoff)
        return None

    async def _prepare(self, image: Image) -> Launch:
        pod = self._around.pod()
        gathered = await self._around.gather(self.spec)
        own = {"PATH": ":".join([*image.path, _DEFAULT_PATH]), "HOSTNAME": self._around.hostname, "HOME": "/root"}
        if gathered.pop("hub"):
            own["HF_ENDPOINT"] = HUB
        known = environment(pod, self.spec, base=gathered.pop("services"), **gathered)
        command = command_line(self.spec, image.entrypoint, image.arguments, known)
        if not command:
            raise ConfigError("no command: neither the image nor the container names one")
        for kind in ("logs", "messages"):  # a kubelet keeps those of the run before, and no older ones
            self._run_file(kind, self.state.restarts).parent.mkdir(parents=True, exist_ok=True)
            for old in self._run_file(kind, 0).parent.glob(f"{self.state.restarts - 2}.log*"):
                old.unlink(missing_ok=True)
        message_file = self._run_file("messages", self.state.restarts)
        message_file.write_bytes(b"")
        mounts = [
            {"source": str(self._folder / "hosts"), "path": "/etc/hosts", "read_only": False},
            {
                "source": str(message_file),
                "path": self.spec.get("terminationMessagePath") or "/dev/termination-log",
                "read_only": False,
            },
        ]
        security = self.spec.get("securityContext") or {}
        return Launch(
            command=command,
            environment=own | image.environment | known,
            working_directory=self.spec.get("workingDir") or "/",
            hostname=self._around.hostname,
            mounts=mounts + self._around.mounts(self.spec, known),
            read_only_root=bool(security.get("readOnlyRootFilesystem")),
            shared_memory=str(self._around.shared_memory),
        )

    async def _start(self, launch: Launch) -> tuple[ContainerProcess, Sequence[asyncio.Task[None]]]:
        """The process, and the tasks that copy its output to the log until it ends. Raises LaunchError."""
        loop = asyncio.get_running_loop()
        try:
            log = LogFile(self.log_path())
        except OSError as error:
            raise LaunchError(f"no log can be written: {error}") from error
        outputs: list[asyncio.Task[None]] = []
        write_ends: list[int] = []
        try:
            for stream in ("stdout", "stderr"):
                read_end, write_end = os.pipe()
                write_ends.append(write_end)
                reader = asyncio.StreamReader(limit=1 << 20)
                protocol = asyncio.StreamReaderProtocol(reader)
                await loop.connect_read_pipe(lambda p=protocol: p, os.fdopen(read_end, "rb"))  # type: ignore[misc]
                outputs.append(asyncio.create_task(log.copy(reader, stream)))
            asyncio.gather(*outputs, return_exceptions=True).add_done_callback(lambda _: log.close())
            spec = self._folder / f"launch-{self.state.name}.spec"
            return await start(launch, self._around.network, spec, *write_ends), outputs
        except OSError as error:
            raise LaunchError(str(error)) from error
        finally:
            for write_end in write_ends:
                os.close(write_end)

    def _terminated(self, code: int, began: float, reason: str, message: str) -> dict[str, Any]:
        ended: dict[str, Any] = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": reason,
            "startedAt": timestamp(began),
            "finishedAt": timestamp(time.time()),
            "containerID": f"lab://{self.state.container_id}",
        }
        if code < 0:
            ended["signal"] = -code
        if message:
            ended["message"] = message
        return ended

    def _termination_message(self, code: int) -> str:
        with contextlib.suppress(OSError), self._run_file("messages", self.state.restarts).open("rb") as file:
            if raw := file.read(_MESSAGE_BYTES):
                return raw.decode(errors="replace")
        if code != 0 and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            return tail(self.log_path(), 80)[-2048:]
        return ""

    # -- probes -------------------------------------------------------------------------------------------------------

    async def _ask(self, process: ContainerProcess) -> None:
        began = time.monotonic()
        if startup := self.spec.get("startupProbe"):
            judge = probes.judge_of(startup)
            await _delay(began, startup)
            while (verdict := judge.hear(await self._answer("Startup", startup))) is None:
                await asyncio.sleep(startup.get("periodSeconds", 10))
            if not verdict:
                await self._kill_unhealthy(process, startup, "startup")
                return
        self.state.started = True
        readiness, liveness = self.spec.get("readinessProbe"), self.spec.get("livenessProbe")
        if not readiness:
            self.state.ready = True
        self._around.changed()
        async with asyncio.TaskGroup() as group:
            if readiness:
                group.create_task(self._ask_readiness(began, readiness))
            if liveness:
                group.create_task(self._ask_liveness(began, process, liveness))

    async def _ask_readiness(self, began: float, probe: Object) -> None:
        judge = probes.judge_of(probe)
        judge.verdict = False
        await _delay(began, probe)
        while True:
            verdict = judge.hear(await self._answer("Readiness", probe))
            if verdict is not None:
                self.state.ready = verdict
                self._around.changed()
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _ask_liveness(self, began: float, process: ContainerProcess, probe: Object) -> None:
        judge = probes.judge_of(probe)
        judge.verdict = True
        await _delay(began, probe)
        while judge.hear(await self._answer("Liveness", probe)) is not False:
            await asyncio.sleep(probe.get("periodSeconds", 10))
            if self._stopping.is_set():  # a container on its way out is not asked whether it lives
                return
        await self._kill_unhealthy(process, probe, "liveness")

    async def _answer(self, kind: str, probe: Object) -> bool:
        good, problem = await probes.run_probe(probe, self.spec, self._around.address, self._execute)
        if not good:
            self._tell("Unhealthy", f"{kind} probe failed: {problem}", warning=True)
        return good

    async def _kill_unhealthy(self, process: ContainerProcess, probe: Object, kind: str) -> None:
        grace = probe.get("terminationGracePeriodSeconds")
        if grace is None:
            grace = self._around.pod()["spec"].get("terminationGracePeriodSeconds", 30)
        self._tell("Killing", f"Container {self.state.name} failed {kind} probe, will be restarted")
        self._end(process, float(grace))

    async def _execute(self, command: Sequence[str], timeout: float) -> tuple[int | None, str]:
        process, launch = self._process, self._launch
        if process is None or launch is None:
            return 1, "the container is not running"
        self._asked += 1
        spec = self._folder / f"enter-{self.state.name}-{self._asked}.spec"
        return await execute(process, command, launch, spec, timeout)

    # -- telling ------------------------------------------------------------------------------------------------------

    def _wait(self, reason: str, message: str) -> None:
        self.state.waiting, self.state.running_since = (reason, message), None
        self._around.changed()

    def _tell(self, reason: str, message: str, *, warning: bool = False) -> None:
        self._around.tell(reason, message, warning=warning, container=self.state.name)


async def _delay(began: float, probe: Object) -> None:
    """Wait for a probe's initial delay, which counts from the container's start."""
    await asyncio.sleep(max(0.0, began + probe.get("initialDelaySeconds", 0) - time.monotonic()))
