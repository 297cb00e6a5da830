"""Asking a container how it is: startup, readiness and liveness probes with their thresholds.

`run_probe` is one question; `ProbeState` is the thresholds as a small state machine, pure, so that it can be tested by example.
Rules as a kubelet has them: success is any HTTP status from 200 to 399; a probe that times out has failed; HTTPS is requested
without verification, because a kubelet does so; redirects count as success and are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aerie_lab.kube.client import KubeObject

CommandExecutor = Callable[[Sequence[str], float], Awaitable[tuple[int | None, str]]]
"""(command, timeout in seconds) -> (exit code, output); exit code None when it took too long."""


@dataclass
class ProbeState:
    """Turns single answers into a verdict: `failureThreshold` failures or `successThreshold` successes in a row."""

    failure_threshold: int
    success_threshold: int
    verdict: bool | None = None
    streak: int = 0
    last_success: bool | None = None

    def record(self, success: bool) -> bool | None:
        """Take one answer; the new verdict when it changes, else None."""
        self.streak = self.streak + 1 if success == self.last_success else 1
        self.last_success = success
        if self.streak < (self.success_threshold if success else self.failure_threshold) or self.verdict == success:
            return None
        self.verdict = success
        return success


def build_probe_state(probe: KubeObject) -> ProbeState:
    """Return the thresholds of a probe; the API server has filled in the defaults."""
    return ProbeState(probe.get("failureThreshold", 3), probe.get("successThreshold", 1))


def resolve_port(port: int | str, container: KubeObject) -> int:
    """Return a port number from a number or the name of one of the container's ports. Raises ValueError."""
    if isinstance(port, int) or str(port).isdigit():
        return int(port)
    for entry in container.get("ports") or []:
        if entry.get("name") == port:
            return int(entry["containerPort"])
    raise ValueError(f"couldn't find port: {port}")


async def run_probe(probe: KubeObject, container: KubeObject, address: str, execute: CommandExecutor) -> tuple[bool, str]:
    """Ask once: (success, what was wrong)."""
    timeout = float(probe.get("timeoutSeconds", 1))
    try:
        if command := probe.get("exec"):
            code, output = await execute(command["command"], timeout)
            if code is None:
                return False, f"command timed out after {timeout:g}s"
            return code == 0, output.strip()[:500]
        async with asyncio.timeout(timeout):
            if request := probe.get("httpGet"):
                status = await http_get(request, container, address)
                return 200 <= status < 400, f"HTTP probe failed with statuscode: {status}"
            port = resolve_port(probe["tcpSocket"]["port"], container)
            _, writer = await asyncio.open_connection(probe["tcpSocket"].get("host") or address, port)
            writer.close()
            return True, ""
    except TimeoutError:
        return False, f"no response within {timeout:g}s"
    except (OSError, ValueError) as error:
        return False, str(error)


async def http_get(request: dict[str, Any], container: KubeObject, address: str) -> int:
    """Return the status of a GET for a probe or a preStop hook. Raises OSError, ValueError."""
    host = request.get("host") or address
    port = resolve_port(request["port"], container)
    context = None
    if request.get("scheme") == "HTTPS":
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        headers = {"Host": f"{host}:{port}", "User-Agent": "kube-probe/lab", "Accept": "*/*", "Connection": "close"}
        headers |= {entry["name"]: entry["value"] for entry in request.get("httpHeaders") or []}
        lines = [f"GET {request.get('path') or '/'} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        writer.write("\r\n".join(lines).encode())
        status_line = (await reader.readline()).decode("latin-1").split(" ", 2)
        if len(status_line) < 2 or not status_line[1].isdigit():
            raise ValueError("the response is not HTTP")
        return int(status_line[1])
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await asyncio.wait_for(writer.wait_closed(), 1)
