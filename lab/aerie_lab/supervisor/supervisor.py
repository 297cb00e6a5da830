"""Process 1 of a lab: starts its components, keeps them running, serves its ports on the machine, and ends with all of them.

Started by `up` through sandbox.world, so its end is the end of every process of the lab, and of its namespaces and mounts.

    127.0.0.1:API port      ──►  the API server          (plain TCP; TLS is end to end)
    127.0.0.1:gateway port  ──►  the gateway's Service
    control.sock            ──►  status, stop, restart, hold, resume

Guarantees: a component that exits is started again after a second, and the count is kept; output of each is in
logs/NAME.log. Not guaranteed: that pods survive the node agent. When it exits, its containers end with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aerie_lab import control
from aerie_lab.binaries import ensure_binary
from aerie_lab.errors import LabError, StartError, StateError
from aerie_lab.relay import relay_connection
from aerie_lab.supervisor.components import API_SERVER_PORT, GATEWAY_SERVICE_IP, Component, build_components

_START_TIMEOUT_SECONDS = 60.0
_RESTART_DELAY_SECONDS = 1.0
SUPERVISOR_VERBS = ("status", "stop", "restart", "stop_component", "resume_component")
"""Requests on control.sock: each is the method of that name."""


@dataclass
class _ComponentProcess:
    component: Component
    process: asyncio.subprocess.Process | None = None
    restart_task: asyncio.Task[None] | None = None
    restarts: int = 0
    is_stopped_by_fault: bool = False
    last_exit: str = ""
    resume_event: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs the components of the lab in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.phase = "starting"
        self.problem = ""
        self.start_time = time.monotonic()
        self._processes = {c.name: _ComponentProcess(c) for c in build_components(folder, ensure_binary)}
        self._stop_event = asyncio.Event()

    async def run(self, api_listener: socket.socket, gateway_listener: socket.socket | None, caller_pipe: int | None) -> None:
        """Serve until `stop` is requested, or until the other end of `caller_pipe` is closed."""
        loop = asyncio.get_running_loop()
        if caller_pipe is not None:
            loop.add_reader(caller_pipe, self._stop_on_pipe_close, caller_pipe)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_event.set)
        loop.add_signal_handler(signal.SIGCHLD, self._reap_orphans)
        server = await control.serve_requests(
            self.folder / "control.sock",
            {verb: getattr(self, verb) for verb in SUPERVISOR_VERBS},
        )
        forwards = [await _forward_connections(api_listener, "127.0.0.1", API_SERVER_PORT)]
        if gateway_listener is not None:
            forwards.append(await _forward_connections(gateway_listener, GATEWAY_SERVICE_IP, 80))
        starting = asyncio.create_task(self._start_components())
        await self._stop_event.wait()
        starting.cancel()
        for forward in forwards:
            forward.close()
        await self._stop_components()
        server.close()

    def _stop_on_pipe_close(self, caller_pipe: int) -> None:
        asyncio.get_running_loop().remove_reader(caller_pipe)
        self._stop_event.set()

    async def _start_components(self) -> None:
        try:
            for part in self._processes.values():
                await self._launch(part)
                part.restart_task = asyncio.create_task(self._restart_on_exit(part))
                await self._wait_until_healthy(part)
            self.phase = "running"
        except LabError as error:
            self.phase, self.problem = "failed", str(error)

    async def _launch(self, part: _ComponentProcess) -> None:
        log = os.open(
            self.folder / "logs" / f"{part.component.name}.log",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o644,
        )
        try:
            part.process = await asyncio.create_subprocess_exec(
                *part.component.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**part.component.environment, **os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"{part.component.name} cannot be started: {error}") from error
        finally:
            os.close(log)

    async def _restart_on_exit(self, part: _ComponentProcess) -> None:
        """Start the component again whenever it exits, unless a fault stopped it."""
        while True:
            assert part.process is not None
            code = await part.process.wait()
            part.last_exit = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            if part.is_stopped_by_fault:
                part.resume_event.clear()
                await part.resume_event.wait()
            elif not self._stop_event.is_set():
                await asyncio.sleep(_RESTART_DELAY_SECONDS)
            if self._stop_event.is_set():
                return
            part.restarts += 1
            with contextlib.suppress(StartError):
                await self._launch(part)

    async def _wait_until_healthy(self, part: _ComponentProcess) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        before = part.restarts
        while part.component.health_url and not await self._is_healthy(part.component):
            if part.restarts > before + 2 or time.monotonic() > deadline:
                raise StartError(
                    f"{part.component.name} did not become ready ({part.last_exit or 'still running'}). "
                    f"Its last lines:\n{read_log_tail(self.folder / 'logs' / f'{part.component.name}.log')}"
                )
            await asyncio.sleep(0.05)

    async def _is_healthy(self, component: Component) -> bool:
        url = urlsplit(component.health_url or "")
        context = None
        if component.use_lab_certificates:
            certificates = self.folder / "certificates"
            context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
            context.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")
        try:
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection(url.hostname, url.port, ssl=context)
                writer.write(f"GET {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n\r\n".encode())
                status = await reader.readline()
                writer.close()
                return b" 200 " in status
        except (OSError, TimeoutError):
            return False

    def _reap_orphans(self) -> None:
        """Collect processes that were left to process 1. Children that asyncio waits for are left to asyncio."""
        ours = {part.process.pid for part in self._processes.values() if part.process is not None}
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in ours:
                    # asyncio's own watcher will collect it, and its turn may come after this one: look again then.
                    asyncio.get_running_loop().call_later(0.05, self._reap_orphans)
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)

    async def _stop_components(self) -> None:
        for part in reversed(self._processes.values()):
            if part.process is not None and part.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    part.process.send_signal(signal.SIGCONT)
                    part.process.terminate()
                if part.component.name == "node-agent":  # it ends its pods before the control plane ends
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(part.process.wait(), 5)
        # The rest need not be waited for: they end with this process, and nothing of theirs is kept.

    async def status(self) -> dict[str, Any]:
        """Return the components for `aerie-lab status`."""
        return {
            "phase": self.phase,
            "problem": self.problem,
            "uptime": time.monotonic() - self.start_time,
            "components": {
                name: {
                    "running": part.process is not None and part.process.returncode is None,
                    "stopped_by_fault": part.is_stopped_by_fault,
                    "restarts": part.restarts,
                    "last_exit": part.last_exit,
                    "pid": part.process.pid if part.process else None,
                }
                for name, part in self._processes.items()
            },
        }

    async def stop(self) -> None:
        """End the lab."""
        asyncio.get_running_loop().call_later(0.05, self._stop_event.set)

    def _find_process(self, component: str) -> _ComponentProcess:
        if component not in self._processes:
            raise StateError(f"'{component}' is not a component of the lab: choose one of {', '.join(self._processes)}.")
        return self._processes[component]

    async def restart(self, component: str) -> None:
        """Kill the component (as a crash would) and wait until it is ready again."""
        part = self._find_process(component)
        if part.is_stopped_by_fault:
            raise StateError(f"{component} is stopped by a fault: undo that fault first (`aerie-lab fault list`).")
        before = part.restarts
        if part.process is not None and part.process.returncode is None:
            part.process.kill()
        while part.restarts == before:
            await asyncio.sleep(0.02)
        await self._wait_until_healthy(part)

    async def stop_component(self, component: str) -> None:
        """Kill the component and keep it down until `resume_component`."""
        part = self._find_process(component)
        part.is_stopped_by_fault = True
        if part.process is not None and part.process.returncode is None:
            part.process.kill()
            await part.process.wait()

    async def resume_component(self, component: str) -> None:
        """Start a stopped component again and wait until it is ready."""
        part = self._find_process(component)
        if part.is_stopped_by_fault:
            before = part.restarts
            part.is_stopped_by_fault = False
            while part.restarts == before:
                part.resume_event.set()
                await asyncio.sleep(0.02)
            await self._wait_until_healthy(part)


async def _forward_connections(listener: socket.socket, host: str, port: int) -> asyncio.Server:
    """Connect clients of `listener`, which is on the machine's side, with host:port inside the lab."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not await relay_connection(reader, writer, host, port):
            writer.close()

    return await asyncio.start_server(carry, sock=listener)


def read_log_tail(path: Path, lines: int = 8) -> str:
    """Return the last lines of a log."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no output)"


def main() -> None:
    """`python -m aerie_lab.supervisor FOLDER --api FD [--gateway FD] [--caller-pipe FD]`: descriptors that `up` opened."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("--api", "--gateway", "--caller-pipe"):
        parser.add_argument(name, type=int)
    arguments = parser.parse_args()
    api = socket.socket(fileno=arguments.api)
    gateway = socket.socket(fileno=arguments.gateway) if arguments.gateway is not None else None
    asyncio.run(Supervisor(arguments.folder).run(api, gateway, arguments.caller_pipe))
