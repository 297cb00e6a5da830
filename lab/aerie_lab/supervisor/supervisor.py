"""Process 1 of a lab: starts its components, keeps them running, serves its ports on the machine, and ends with all of them.

Started by `up` through sandbox.world, so its end is the end of every process of the lab, and of its namespaces and mounts.

    127.0.0.1:API port      ──►  the API server          (plain TCP; TLS is end to end)
    127.0.0.1:gateway port  ──►  the gateway's Service
    control.sock            ──►  status, stop, restart, hold, resume

Guarantees: a component that exits is started again after a second, and the count is kept; output of each is in
logs/NAME.log. Not guaranteed: that pods survive the node agent. When it exits, its containers are gone with it.
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
from aerie_lab.binaries import binary
from aerie_lab.errors import LabError, StartError, StateError
from aerie_lab.relay import relay
from aerie_lab.supervisor.components import API_PORT, GATEWAY_SERVICE, Component, components

_START_LIMIT = 60.0
_RESTART_PAUSE = 1.0


@dataclass
class _Running:
    component: Component
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None
    restarts: int = 0
    held: bool = False
    last_exit: str = ""
    freed: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs the components of the lab in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.phase = "starting"
        self.problem = ""
        self.started = time.monotonic()
        self._parts = {c.name: _Running(c) for c in components(folder, binary)}
        self._stopping = asyncio.Event()

    async def run(self, api: socket.socket, gateway: socket.socket | None, leash: int | None) -> None:
        """Serve until asked to stop, or until the other end of the pipe `leash` is closed."""
        loop = asyncio.get_running_loop()
        if leash is not None:
            loop.add_reader(leash, self._let_go, leash)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGCHLD, self._reap_orphans)
        server = await control.serve(
            self.folder / "control.sock",
            {
                "status": self.status,
                "stop": self.stop,
                "restart": self.restart,
                "hold": self.hold,
                "resume": self.resume,
            },
        )
        forwards = [await _forward(api, "127.0.0.1", API_PORT)]
        if gateway is not None:
            forwards.append(await _forward(gateway, GATEWAY_SERVICE, 80))
        starting = asyncio.create_task(self._start())
        await self._stopping.wait()
        starting.cancel()
        for forward in forwards:
            forward.close()
        await self._end()
        server.close()

    def _let_go(self, leash: int) -> None:
        asyncio.get_running_loop().remove_reader(leash)
        self._stopping.set()

    async def _start(self) -> None:
        try:
            for part in self._parts.values():
                await self._launch(part)
                part.keeper = asyncio.create_task(self._keep(part))
                await self._until_healthy(part)
            self.phase = "running"
        except LabError as error:
            self.phase, self.problem = "failed", str(error)

    async def _launch(self, part: _Running) -> None:
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
                env={**os.environ, **part.component.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"{part.component.name} cannot be started: {error}") from error
        finally:
            os.close(log)

    async def _keep(self, part: _Running) -> None:
        """Start the component again whenever it exits, unless it is held."""
        while True:
            assert part.process is not None
            code = await part.process.wait()
            part.last_exit = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            if part.held:
                part.freed.clear()
                await part.freed.wait()
            elif not self._stopping.is_set():
                await asyncio.sleep(_RESTART_PAUSE)
            if self._stopping.is_set():
                return
            part.restarts += 1
            with contextlib.suppress(StartError):
                await self._launch(part)

    async def _until_healthy(self, part: _Running) -> None:
        deadline = time.monotonic() + _START_LIMIT
        before = part.restarts
        while part.component.health and not await self._healthy(part.component):
            if part.restarts > before + 2 or time.monotonic() > deadline:
                raise StartError(
                    f"{part.component.name} did not become ready ({part.last_exit or 'still running'}). "
                    f"Its last lines:\n{tail(self.folder / 'logs' / f'{part.component.name}.log')}"
                )
            await asyncio.sleep(0.05)

    async def _healthy(self, component: Component) -> bool:
        url = urlsplit(component.health or "")
        context = None
        if component.verify:
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
        ours = {part.process.pid for part in self._parts.values() if part.process is not None}
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in ours:
                    # asyncio's own watcher will collect it, and its turn may come after this one: look again then.
                    asyncio.get_running_loop().call_later(0.05, self._reap_orphans)
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)

    async def _end(self) -> None:
        for part in reversed(self._parts.values()):
            if part.process is not None and part.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    part.process.send_signal(signal.SIGCONT)
                    part.process.terminate()
                if part.component.name == "node-agent":  # it ends its pods before the control plane goes
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(part.process.wait(), 5)
        # The rest need not be waited for: they end with this process, and nothing of theirs is kept.

    async def status(self) -> dict[str, Any]:
        """What `aerie-lab status` shows of the components."""
        return {
            "phase": self.phase,
            "problem": self.problem,
            "uptime": time.monotonic() - self.started,
            "components": {
                name: {
                    "running": part.process is not None and part.process.returncode is None,
                    "held": part.held,
                    "restarts": part.restarts,
                    "last_exit": part.last_exit,
                    "pid": part.process.pid if part.process else None,
                }
                for name, part in self._parts.items()
            },
        }

    async def stop(self) -> None:
        """End the lab."""
        asyncio.get_running_loop().call_later(0.05, self._stopping.set)

    def _part(self, component: str) -> _Running:
        if component not in self._parts:
            raise StateError(f"'{component}' is no component of the lab: one of {', '.join(self._parts)}.")
        return self._parts[component]

    async def restart(self, component: str) -> None:
        """Kill the component (as a crash would) and wait until it is ready again."""
        part = self._part(component)
        if part.held:
            raise StateError(f"{component} is held: undo that fault first (`aerie-lab fault list`).")
        before = part.restarts
        if part.process is not None and part.process.returncode is None:
            part.process.kill()
        while part.restarts == before:
            await asyncio.sleep(0.02)
        await self._until_healthy(part)

    async def hold(self, component: str) -> None:
        """Kill the component and keep it down until `resume`."""
        part = self._part(component)
        part.held = True
        if part.process is not None and part.process.returncode is None:
            part.process.kill()
            await part.process.wait()

    async def resume(self, component: str) -> None:
        """Let a held component start again and wait until it is ready."""
        part = self._part(component)
        if part.held:
            before = part.restarts
            part.held = False
            while part.restarts == before:
                part.freed.set()
                await asyncio.sleep(0.02)
            await self._until_healthy(part)


async def _forward(listener: socket.socket, host: str, port: int) -> asyncio.Server:
    """Connect whoever comes to `listener`, which lies on the machine's side, with host:port inside the lab."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not await relay(reader, writer, host, port):
            writer.close()

    return await asyncio.start_server(carry, sock=listener)


def tail(path: Path, lines: int = 8) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no output)"


def main() -> None:
    """`python -m aerie_lab.supervisor FOLDER --api FD [--gateway FD] [--leash FD]`: descriptors that `up` opened."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("--api", "--gateway", "--leash"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    api = socket.socket(fileno=given.api)
    gateway = socket.socket(fileno=given.gateway) if given.gateway is not None else None
    asyncio.run(Supervisor(given.folder).run(api, gateway, given.leash))
