"""Termination of a container's process: preStop, SIGTERM, and SIGKILL at the end of the grace period.

Guarantees: another request to terminate may shorten the grace period, and never extends it; a preStop that uses it up leaves
the process a little time after SIGTERM, unless no grace period was given. Not guaranteed: that preStop runs to its end.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from aerie_lab.kube.client import KubeObject
from aerie_lab.node import probes
from aerie_lab.sandbox.container import ContainerProcess

_MIN_GRACE_SECONDS = 2.0


class Termination:
    """Terminates the processes of one container, one after the other."""

    def __init__(
        self,
        spec: KubeObject,
        address: str,
        execute: probes.CommandExecutor,
        record_event: Callable[..., None],
    ) -> None:
        self._spec = spec
        self._address = address
        self._execute = execute
        self._record_event = record_event
        self._task: asyncio.Task[None] | None = None
        self._kill_deadline = 0.0  # what is left of the grace period, while there is a task
        self._skip_grace = False  # no grace period is left to anyone
        self._deadline_shortened = asyncio.Event()  # _kill_deadline has come nearer

    def begin(self, process: ContainerProcess, grace: float) -> None:
        """Begin to terminate the process; a termination in progress continues, and at most gets faster."""
        kill_at = time.monotonic() + grace
        if self._task is None:
            self._kill_deadline, self._skip_grace = kill_at, grace <= 0
            self._task = asyncio.create_task(self._terminate_process(process, grace))
        elif kill_at < self._kill_deadline:
            self._kill_deadline, self._skip_grace = kill_at, grace <= 0
            self._deadline_shortened.set()

    def on_exit(self) -> None:
        """Handle the process's exit: the next `begin` is about another process."""
        self._task = None

    async def _terminate_process(self, process: ContainerProcess, grace: float) -> None:
        hook = (self._spec.get("lifecycle") or {}).get("preStop")
        if hook and grace > 0:
            await self._finish_within_grace(self._run_hook(process, hook, grace))
        process.signal(signal.SIGTERM)
        if not self._skip_grace:  # a hook may have used up the time: SIGTERM is given a little in any case
            self._kill_deadline = max(self._kill_deadline, time.monotonic() + _MIN_GRACE_SECONDS)
        if not await self._finish_within_grace(process.wait()):
            process.signal(signal.SIGKILL)
            await process.wait()

    async def _finish_within_grace(self, work: Coroutine[Any, Any, object]) -> bool:
        """Return whether `work` was done before the grace period ended, which may get shorter meanwhile."""
        task = asyncio.create_task(work)
        while not task.done() and (left := self._kill_deadline - time.monotonic()) > 0:
            self._deadline_shortened.clear()
            hurry = asyncio.create_task(self._deadline_shortened.wait())
            await asyncio.wait({task, hurry}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
        if task.done():
            return True
        task.cancel()
        await asyncio.wait({task})
        return False

    async def _run_hook(self, process: ContainerProcess, hook: KubeObject, grace: float) -> None:
        if sleep := hook.get("sleep"):
            await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=float(sleep["seconds"]))
        elif request := hook.get("httpGet"):
            try:
                await probes.http_get(request, self._spec, self._address)
            except (OSError, ValueError) as error:
                self._record_event("FailedPreStopHook", f"PreStopHook failed: {error}", warning=True)
        elif command := hook.get("exec"):
            code, output = await self._execute(command["command"], grace)
            if code != 0:
                self._record_event("FailedPreStopHook", f"PreStopHook failed: exit code {code}: {output[:300]}", warning=True)
