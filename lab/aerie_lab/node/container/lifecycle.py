"""Life of one container of a pod: its starts and restarts, its probes, its end.

    image ─► environment, command, mounts ─► process ─► probes ...... exit ─► restart after a pause, or done
      │            │                            │
      ErrImagePull CreateContainerConfigError   StartError

Restarts follow the pod's restartPolicy with a kubelet's back-off: immediately after the first exit, then after 10 s, doubled up
to 300 s, and from the start again after ten good minutes (the 10 s can be shortened for a lab).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aerie_lab.errors import KubeError
from aerie_lab.images.table import Image, ImageError
from aerie_lab.kube.client import KubeObject
from aerie_lab.node import probes
from aerie_lab.node.container.context import ContainerContext
from aerie_lab.node.container.launch import build_launch_spec, start_process
from aerie_lab.node.container.run_files import RunFiles
from aerie_lab.node.container.termination import Termination
from aerie_lab.node.environment import ConfigError
from aerie_lab.node.run_time_limit import RunTimeLimit
from aerie_lab.node.status import ContainerState, format_timestamp
from aerie_lab.node.volumes import VolumeError
from aerie_lab.sandbox.container import ContainerProcess, LaunchError, LaunchSpec, execute_in_container

_CONFIG_RETRY_SECONDS = 2.0
_BACKOFF_RESET_SECONDS = 600.0


class Container:
    """Runs one container until it is done or stopped. It is created with its pod; `run` gets its context."""

    def __init__(self, spec: KubeObject, folder: Path, restart_policy: str, *, init: bool) -> None:
        self.spec = spec
        self.state = ContainerState(spec["name"], spec["image"], init=init)
        self.exit_event = asyncio.Event()
        """Set while no process of this container runs or is being started: log readers stop following then."""
        self.exit_event.set()
        self._launch_done = asyncio.Event()  # cleared while a process is being started and is not known yet
        self._launch_done.set()
        self._restart_policy = "OnFailure" if init and restart_policy == "Always" else restart_policy
        self._process: ContainerProcess | None = None
        self._launch_spec: LaunchSpec | None = None
        self._stop_event = asyncio.Event()
        self._folder = folder
        self._files = RunFiles(folder, self.state.name)
        self._exec_count = 0
        self.run_time_limit = RunTimeLimit()
        """Limit of each run's duration, for a fault."""

    @property
    def process(self) -> ContainerProcess | None:
        """The running process, for faults."""
        return self._process

    def log_path(self, previous: bool = False) -> Path:
        """Return the log of the current run, or of the one before."""
        return self._files.log(max(0, self.state.restarts - int(previous)))

    def adopt_status(self, previous_status: KubeObject) -> None:
        """Continue from the status that a previous agent wrote; its processes ended with it."""
        state, self.state.restarts = previous_status["state"], previous_status["restartCount"]
        self.state.container_id = (previous_status.get("containerID") or "").removeprefix("lab://")
        ended = state.get("terminated") or previous_status["lastState"].get("terminated")
        if running := state.get("running"):
            ended = {
                "exitCode": 137,
                "reason": "ContainerStatusUnknown",
                "message": "The container was running when the node agent ended, and ended with it",
                "startedAt": running["startedAt"],
                "finishedAt": format_timestamp(time.time()),
                "containerID": previous_status.get("containerID", ""),
            }
        if ended is None:
            return
        if "waiting" not in state and self._is_final_exit(ended["exitCode"]):
            self.state.terminated = ended
        else:
            self.state.last_terminated = ended
            self.state.restarts += 1

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self, context: ContainerContext) -> None:
        """Run, and run again, until done. No process is left when it returns, or is cancelled."""
        self._context = context
        self._termination = Termination(self.spec, context.address, self._execute, self._record_event)
        pause = 0.0
        while not self.state.is_done and not self._stop_event.is_set():
            began = time.monotonic()
            ended = await self._run_once()
            if ended is None:
                return
            if self._stop_event.is_set() or self._is_final_exit(ended["exitCode"]):
                self.state.terminated = ended
                context.on_state_change()
                return
            self.state.last_terminated, self.state.waiting = ended, ("", "")
            context.on_state_change()
            if time.monotonic() - began > _BACKOFF_RESET_SECONDS:
                pause = 0.0
            if pause:
                self._set_waiting("CrashLoopBackOff", f"back-off {pause:g}s restarting failed container={self.state.name}")
                self._record_event("BackOff", f"Back-off restarting failed container {self.state.name}", warning=True)
                await asyncio.sleep(pause)
            pause = min(max(2 * pause, context.restart_backoff), 30 * context.restart_backoff)
            self.state.restarts += 1

    def _is_final_exit(self, code: int) -> bool:
        return self._restart_policy == "Never" or (self._restart_policy == "OnFailure" and code == 0)

    async def stop(self, grace: float) -> None:
        """preStop, SIGTERM, and SIGKILL after `grace` seconds in all; returns when the process has ended.

        It may be called again meanwhile, to shorten the grace period.
        """
        self._stop_event.set()
        await self._launch_done.wait()
        if self._process is not None:
            self._record_event("Killing", f"Stopping container {self.state.name}")
            self._termination.begin(self._process, grace)
        await self.exit_event.wait()

    # -- one run ------------------------------------------------------------------------------------------------------

    async def _run_once(self) -> dict[str, Any] | None:
        """Run the container once, and return its terminated state; None when stopped before a process was started."""
        launch = await self._wait_for_launch_spec()
        if launch is None or self._stop_event.is_set():
            return None
        began = time.time()
        self.state.container_id = uuid.uuid4().hex
        self.exit_event.clear()
        self._launch_done.clear()
        try:
            # A process that is being started has to become known, whatever happens meanwhile.
            starting = asyncio.create_task(
                start_process(launch, self.log_path(), self._folder / f"launch-{self.state.name}.spec", self._context.network_fd)
            )
            try:
                process, outputs = await asyncio.shield(starting)
            except asyncio.CancelledError:
                with contextlib.suppress(LaunchError):
                    (await starting)[0].signal(signal.SIGKILL)
                raise
            self._process, self._launch_spec = process, launch
        except LaunchError as error:
            self.exit_event.set()
            self._record_event("Failed", f"Error: {error}", warning=True)
            return self._build_terminated_state(128, began, "StartError", f"failed to start container: {error}")
        except BaseException:
            self.exit_event.set()
            raise
        finally:
            self._launch_done.set()
        self.state.running_since, self.state.waiting = began, ("", "")
        self._record_event("Started", f"Started container {self.state.name}")
        asking, crashing = (
            asyncio.create_task(self._run_probes(process)),
            asyncio.create_task(self._kill_at_run_time_limit(process)),
        )
        self._context.on_state_change()
        try:
            code = await process.wait()
            # The last output is read before the exit is reported; no descendant can hold the pipe, because all have ended.
            await asyncio.gather(*outputs)
        finally:
            process.signal(signal.SIGKILL)  # nothing happens unless this was cancelled
            asking.cancel()
            crashing.cancel()
            self._process = None
            self._termination.on_exit()
            self.state.ready = self.state.started = False
            self.state.running_since = None
            self.exit_event.set()
        message = self._files.read_termination_message(self.spec, self.state.restarts, code)
        return self._build_terminated_state(code, began, "Completed" if code == 0 else "Error", message)

    async def _kill_at_run_time_limit(self, process: ContainerProcess) -> None:
        await self.run_time_limit.wait_until_exceeded()
        process.signal(signal.SIGKILL)

    async def _wait_for_launch_spec(self) -> LaunchSpec | None:
        """Return the process's inputs; waits while a referenced object is missing. None when stopped meanwhile."""
        image = await self._wait_for_image()
        while image is not None and not self._stop_event.is_set():
            try:
                return await build_launch_spec(self.spec, image, self._files, self.state.restarts, self._context)
            except (ConfigError, VolumeError, KubeError, OSError) as error:
                self._set_waiting("CreateContainerConfigError", str(error))
                self._record_event("Failed", f"Error: {error}", warning=True)
                await asyncio.sleep(_CONFIG_RETRY_SECONDS)
        return None

    async def _wait_for_image(self) -> Image | None:
        """Return the image's command; waits with a kubelet's alternating reasons while there is none."""
        pause = self._context.restart_backoff
        while not self._stop_event.is_set():
            try:
                image = self._context.images.resolve_image(self.spec["image"])
                self._record_event("Pulled", f'Container image "{self.spec["image"]}" already present on machine')
                return image
            except ImageError as error:
                self._set_waiting("ErrImagePull", str(error))
                self._record_event("Failed", f'Failed to pull image "{self.spec["image"]}": {error}', warning=True)
                await asyncio.sleep(min(pause, 1.0))
                self._set_waiting("ImagePullBackOff", f'Back-off pulling image "{self.spec["image"]}": {error}')
                await asyncio.sleep(pause)
                pause = min(2 * pause, 30 * self._context.restart_backoff)
        return None

    def _build_terminated_state(self, code: int, began: float, reason: str, message: str) -> dict[str, Any]:
        ended: dict[str, Any] = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": reason,
            "startedAt": format_timestamp(began),
            "finishedAt": format_timestamp(time.time()),
            "containerID": f"lab://{self.state.container_id}",
        }
        if code < 0:
            ended["signal"] = -code
        if message:
            ended["message"] = message
        return ended

    # -- probes -------------------------------------------------------------------------------------------------------

    async def _run_probes(self, process: ContainerProcess) -> None:
        began = time.monotonic()
        if startup := self.spec.get("startupProbe"):
            judge = probes.build_probe_state(startup)
            await _wait_initial_delay(began, startup)
            while (verdict := judge.record(await self._probe_once("Startup", startup))) is None:
                await asyncio.sleep(startup.get("periodSeconds", 10))
            if not verdict:
                await self._kill_unhealthy(process, startup, "startup")
                return
        self.state.started = True
        readiness, liveness = self.spec.get("readinessProbe"), self.spec.get("livenessProbe")
        if not readiness:
            self.state.ready = True
        self._context.on_state_change()
        async with asyncio.TaskGroup() as group:
            if readiness:
                group.create_task(self._run_readiness_probe(began, readiness))
            if liveness:
                group.create_task(self._run_liveness_probe(began, process, liveness))

    async def _run_readiness_probe(self, began: float, probe: KubeObject) -> None:
        judge = probes.build_probe_state(probe)
        judge.verdict = False
        await _wait_initial_delay(began, probe)
        while True:
            verdict = judge.record(await self._probe_once("Readiness", probe))
            if verdict is not None:
                self.state.ready = verdict
                self._context.on_state_change()
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _run_liveness_probe(self, began: float, process: ContainerProcess, probe: KubeObject) -> None:
        judge = probes.build_probe_state(probe)
        judge.verdict = True
        await _wait_initial_delay(began, probe)
        while judge.record(await self._probe_once("Liveness", probe)) is not False:
            await asyncio.sleep(probe.get("periodSeconds", 10))
            if self._stop_event.is_set():  # a terminating container gets no liveness probes
                return
        await self._kill_unhealthy(process, probe, "liveness")

    async def _probe_once(self, kind: str, probe: KubeObject) -> bool:
        good, problem = await probes.run_probe(probe, self.spec, self._context.address, self._execute)
        if not good:
            self._record_event("Unhealthy", f"{kind} probe failed: {problem}", warning=True)
        return good

    async def _kill_unhealthy(self, process: ContainerProcess, probe: KubeObject, kind: str) -> None:
        grace = probe.get("terminationGracePeriodSeconds")
        if grace is None:
            grace = self._context.get_pod()["spec"].get("terminationGracePeriodSeconds", 30)
        self._record_event("Killing", f"Container {self.state.name} failed {kind} probe, will be restarted")
        self._termination.begin(process, float(grace))

    async def _execute(self, command: Sequence[str], timeout: float) -> tuple[int | None, str]:
        process, launch = self._process, self._launch_spec
        if process is None or launch is None:
            return 1, "the container is not running"
        self._exec_count += 1
        spec = self._folder / f"enter-{self.state.name}-{self._exec_count}.spec"
        return await execute_in_container(process, command, launch, spec, timeout)

    # -- telling ------------------------------------------------------------------------------------------------------

    def _set_waiting(self, reason: str, message: str) -> None:
        self.state.waiting, self.state.running_since = (reason, message), None
        self._context.on_state_change()

    def _record_event(self, reason: str, message: str, *, warning: bool = False) -> None:
        self._context.record_event(reason, message, warning=warning, container=self.state.name)


async def _wait_initial_delay(began: float, probe: KubeObject) -> None:
    """Wait for a probe's initial delay, which counts from the container's start."""
    await asyncio.sleep(max(0.0, began + probe.get("initialDelaySeconds", 0) - time.monotonic()))
