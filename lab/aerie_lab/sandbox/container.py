"""Starts and signals a container's process, and waits for it, in the node agent's event loop.

The launcher (launch.py) creates the namespaces and hands the process over. A pidfd identifies it, so that a signal never reaches
another process with the same number. Guarantees: when process 1 of a container has ended, the kernel has ended all its other
processes; `start_container` returns only once the command runs, or raises LaunchError with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aerie_lab.errors import LabError


class LaunchError(LabError):
    """The container's command could not be started."""


@dataclass(frozen=True)
class LaunchSpec:
    """All that a container's process gets."""

    command: Sequence[str]
    environment: Mapping[str, str]
    working_directory: str
    hostname: str
    mounts: Sequence[Mapping[str, Any]]
    """source, path, read_only; outer paths first."""
    read_only_root: bool
    shared_memory: str


def _launcher_command(verb: str, spec: Path) -> list[str]:
    return [sys.executable, "-S", "-m", "aerie_lab.sandbox.launch", verb, str(spec)]


# Without `site` the launcher starts three times as fast; then the package's own folder must be named. What it compiles
# is kept in the lab's own /run, whether or not the package's folder may be written to.
_LAUNCHER_ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONPYCACHEPREFIX": "/run/aerie-lab/compiled"}


class ContainerProcess:
    """A running container: process 1 of its own PID namespace."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._pidfd, self._collect_exit_status)

    def _collect_exit_status(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        self._pidfd = -1
        if not self._exit_code.done():
            assert result is not None
            self._exit_code.set_result(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

    async def wait(self) -> int:
        """Return the exit code, negative for the signal that ended it."""
        return await asyncio.shield(self._exit_code)

    def signal(self, number: int) -> None:
        """Send a signal to process 1 of the container; nothing happens when it has ended."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the container. Raises ProcessLookupError when it has ended."""
        if self._pidfd < 0:
            raise ProcessLookupError(self.pid)
        try:
            namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        except OSError as error:  # a zombie has no namespace any more
            raise ProcessLookupError(self.pid) from error
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/pid") == namespace:
                    os.kill(int(entry), number)


async def start_container(
    launch: LaunchSpec, network_fd: int | None, spec_path: Path, stdout: int, stderr: int
) -> ContainerProcess:
    """Start a container. `network_fd` is the descriptor of its network namespace, `spec_path` the file for the launcher.

    Raises LaunchError. The calling process must be a subreaper (linux.become_subreaper).
    """
    report, reported = os.pipe()
    document = asdict(launch) | {"network_fd": network_fd, "report_fd": reported}
    try:
        spec_path.write_bytes(marshal.dumps(document))
        launcher = await asyncio.create_subprocess_exec(
            *_launcher_command("run", spec_path),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=_LAUNCHER_ENVIRONMENT,
            pass_fds=[reported] if network_fd is None else [reported, network_fd],
        )
    except OSError as error:
        os.close(report)
        raise LaunchError(f"the launcher cannot be started: {error}") from error
    finally:
        os.close(reported)
    answer = (await _read_pipe(report)).decode(errors="replace")
    await launcher.wait()
    launcher_report = dict(line.split(" ", 1) for line in answer.splitlines())
    if "pid" not in launcher_report:
        raise LaunchError(f"the launcher failed (exit code {launcher.returncode})")
    process = ContainerProcess(int(launcher_report["pid"]))
    if "error" in launcher_report:
        await process.wait()
        raise LaunchError(f"{launcher_report['error']} [command: {launch.command[0]}]")
    return process


async def execute_in_container(
    process: ContainerProcess, command: Sequence[str], launch: LaunchSpec, spec_path: Path, timeout: float
) -> tuple[int | None, str]:
    """Run a command inside a running container: (exit code, output); the code is None when it took too long."""
    document = {
        "pid": process.pid,
        "command": list(command),
        "environment": dict(launch.environment),
        "working_directory": launch.working_directory,
    }
    spec_path.write_bytes(marshal.dumps(document))
    child = await asyncio.create_subprocess_exec(
        *_launcher_command("enter", spec_path),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=_LAUNCHER_ENVIRONMENT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(child.communicate(), timeout)
        return child.returncode, output.decode(errors="replace")
    except TimeoutError:
        return None, ""
    finally:
        if child.returncode is None:  # timed out or cancelled, or the container has ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
        spec_path.unlink(missing_ok=True)


async def _read_pipe(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
    try:
        return await reader.read()
    finally:
        transport.close()
