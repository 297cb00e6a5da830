"""Bringing a lab up: credentials, the lab's world, its components, and what a user expects of a fresh cluster.

    credentials ─► namespaces and process 1 ─► components healthy ─► gateway applied ─► nodes, account and gateway ready

Guarantee: `start_lab` returns a complete lab or raises a LabError that names the failed part, with its last lines. The caller
removes what a failed start leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from aerie_lab import control, gateway
from aerie_lab.binaries import ensure_family
from aerie_lab.binaries.commands import ProgressCallback
from aerie_lab.cluster import process
from aerie_lab.cluster.certificates import Authority, write_kubeconfig
from aerie_lab.cluster.signal_cleanup import defer_signals
from aerie_lab.errors import KubeError, StartError, StateError
from aerie_lab.kube.client import KubeClient, KubeObject, core_path, resource_path
from aerie_lab.node.support import HUB_LABEL
from aerie_lab.sandbox.addresses import CONTROL_PLANE_IP, node_address
from aerie_lab.settings import LAB_FILE_FORMAT, LabSettings
from aerie_lab.supervisor.components import API_SERVER_PORT, build_scheduler_configuration
from aerie_lab.supervisor.supervisor import read_log_tail

_START_TIMEOUT_SECONDS = 120.0


def build_api_url(settings: LabSettings) -> str:
    """Return the URL of the API server on this machine."""
    return f"https://127.0.0.1:{settings.api_port}"


def read_supervisor_status(folder: Path) -> dict[str, Any]:
    """Return the supervisor's status of the components."""
    status: dict[str, Any] = control.send_request(folder / "control.sock", "status")
    return status


def start_lab(folder: Path, settings: LabSettings, report_progress: ProgressCallback, caller_pipe: int | None) -> LabSettings:
    """Start a lab in the empty `folder`, and return its settings with the chosen ports.

    The lab ends when the other end of `caller_pipe`, the reading end of a pipe, is closed.
    """
    for part in ("logs", "components", "pods"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(_open_listener(settings.api_port, "--api-port"))
        descriptors = {"--api": api.fileno()}
        settings = dataclasses.replace(settings, api_port=api.getsockname()[1])
        if settings.gateway:
            gateway_listener = stack.enter_context(_open_listener(settings.gateway_port, "--gateway-port"))
            descriptors["--gateway"] = gateway_listener.fileno()
            settings = dataclasses.replace(settings, gateway_port=gateway_listener.getsockname()[1])
        if caller_pipe is not None:
            descriptors["--caller-pipe"] = caller_pipe
        (folder / "lab.json").write_text(json.dumps({"format": LAB_FILE_FORMAT, "settings": settings.to_json()}, indent=2))
        _write_credentials(folder, settings)
        report_progress("starting the control plane")
        _start_lab_process(folder, settings, descriptors)
    _wait_for_components(folder)
    asyncio.run(_set_up_cluster(folder, settings, report_progress))
    (folder / "complete").touch()
    return settings


def _write_credentials(folder: Path, settings: LabSettings) -> None:
    certificates, components = folder / "certificates", folder / "components"
    authority = Authority(certificates)
    names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names += ["kubernetes.default.svc.cluster.local", "127.0.0.1", "10.96.0.1", CONTROL_PLANE_IP]
    authority.issue("kube-apiserver", hosts=names)
    authority.issue("kube-apiserver-to-node", groups=["system:masters"])
    authority.issue("kube-controller-manager", user="system:kube-controller-manager")
    authority.issue("kube-scheduler", user="system:kube-scheduler")
    authority.issue("admin", groups=["system:masters"])
    nodes = [node_address(i) for i in range(settings.nodes)]
    # The agent is part of the lab's foundation, as a kubelet is: it may read what any pod may mount.
    authority.issue("node-agent", groups=["system:masters"], hosts=nodes)
    authority.issue_token_key()
    inside = f"https://127.0.0.1:{API_SERVER_PORT}"
    for name in ("kube-controller-manager", "kube-scheduler"):
        write_kubeconfig(components / f"{name}.kubeconfig", inside, certificates, name)
    write_kubeconfig(components / "admin.kubeconfig", inside, certificates, "admin")
    write_kubeconfig(folder / "kubeconfig", build_api_url(settings), certificates, "admin", inline=True)
    scheduler = build_scheduler_configuration(components / "kube-scheduler.kubeconfig")
    (components / "kube-scheduler.yaml").write_text(yaml.safe_dump(scheduler))


def _start_lab_process(folder: Path, settings: LabSettings, descriptors: dict[str, int]) -> None:
    command = [sys.executable, "-m", "aerie_lab.sandbox.world", str(folder), str(settings.nodes)]
    command += [sys.executable, "-m", "aerie_lab.supervisor", str(folder)]
    command += [argument for option, descriptor in descriptors.items() for argument in (option, str(descriptor))]
    log = folder / "logs" / "supervisor.log"
    # A signal that takes the lab down waits for this program, which would outlive the command by a moment.
    with log.open("ab") as output, defer_signals():
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=list(descriptors.values()),
            start_new_session=True,
            check=False,
            cwd="/",
        )
    if completed.returncode != 0:
        raise StartError(log.read_text(errors="replace").strip() or f"the lab's process ended ({completed.returncode})")


def _wait_for_components(folder: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if process.find_lab_pid(folder) is None:
            log = (folder / "logs" / "supervisor.log").read_text(errors="replace").strip()
            raise StartError(f"the lab's process ended while starting: {log[-2000:]}")
        with contextlib.suppress(StateError):
            status = read_supervisor_status(folder)
            if status["phase"] == "failed":
                raise StartError(status["problem"])
            if status["phase"] == "running":
                return
        time.sleep(0.05)
    raise StartError(f"the lab's components were not up after {_START_TIMEOUT_SECONDS:g} s.")


async def _set_up_cluster(folder: Path, settings: LabSettings, report_progress: ProgressCallback) -> None:
    """Set up what a user expects of a new cluster: nodes, a default service account, the gateway."""

    async def nodes_ready(client: KubeClient) -> bool:
        nodes = (await client.get(core_path("nodes")))["items"]
        ready = [node for node in nodes if _is_condition_true(node, "Ready") and not node["spec"].get("taints")]
        return len(ready) == settings.nodes

    async with KubeClient(build_api_url(settings), folder / "certificates", "admin") as client:
        if settings.gateway:
            report_progress("installing the gateway")
            await _install_gateway(client, settings.gateway_name)
        report_progress("waiting for nodes" + (" and gateway" if settings.gateway else ""))
        await _wait_until(folder, nodes_ready, client, "the nodes were not Ready")
        await _wait_until(folder, _service_account_exists, client, "the default service account was not made")
        await client.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "labels": {HUB_LABEL: "true"}}}
        )
        if settings.gateway:
            ready = functools.partial(_is_gateway_ready, name=settings.gateway_name)
            await _wait_until(folder, ready, client, "the gateway was not ready")


async def _install_gateway(client: KubeClient, name: str) -> None:
    """Apply the gateway's objects, each kind after those that it needs: Contour ends when a definition is not served yet."""
    definitions, rest = gateway.load_gateway_objects(ensure_family("contour"), name)
    await _apply_all(client, definitions)
    await _apply_all(client, [item for item in rest if item["kind"] == "Namespace"])
    await _apply_all(client, [item for item in rest if item["kind"] not in ("Namespace", "Deployment")])
    for definition in definitions:
        await _wait_until_served(client, definition["spec"])
    await _apply_all(client, [item for item in rest if item["kind"] == "Deployment"])


async def _apply_all(client: KubeClient, items: list[KubeObject]) -> None:
    """Apply the objects, and retry those that were rejected for a missing object: a definition is served with a delay."""
    for attempt in range(100):
        outcome = await asyncio.gather(*(client.apply(item) for item in items), return_exceptions=True)
        failed = [(item, result) for item, result in zip(items, outcome, strict=True) if isinstance(result, BaseException)]
        for _, failure in failed:
            if attempt == 99 or not (isinstance(failure, KubeError) and failure.status in (0, 404, 409)):
                raise failure
        if not failed:
            return
        items = [item for item, _ in failed]
        await asyncio.sleep(0.1)


async def _wait_until_served(client: KubeClient, definition: KubeObject) -> None:
    """Wait until the resource of a definition is served in all its versions. Raises KubeError when it is not after 10 s."""
    for version in definition["versions"]:
        if version["served"]:
            where = resource_path(f"{definition['group']}/{version['name']}", definition["names"]["plural"])
            for attempt in range(100):
                try:
                    await client.get(where, limit="1")
                    break
                except KubeError as error:
                    if attempt == 99 or error.status not in (0, 404):
                        raise
                await asyncio.sleep(0.1)


async def _wait_until(
    folder: Path, check: Callable[[KubeClient], Awaitable[bool]], client: KubeClient, error_message: str
) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(KubeError):
            if await check(client):
                return
        for name, part in (await asyncio.to_thread(read_supervisor_status, folder))["components"].items():
            if part["restarts"] > 2:
                last = read_log_tail(folder / "logs" / f"{name}.log")
                raise StartError(f"{name} ends again and again ({part['last_exit']}). Its last lines:\n{last}")
        await asyncio.sleep(0.1)
    raise StartError(f"{error_message} after {_START_TIMEOUT_SECONDS:g} s.")


def _open_listener(port: int, option: str) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"port {port} of 127.0.0.1 is taken: give another one with {option}, or 0 for a free one."
            ) from error
        raise StartError(f"port {port} of 127.0.0.1 cannot be used ({error.strerror}): give another with {option}.") from error
    return listener


def _is_condition_true(item: KubeObject, condition_type: str) -> bool:
    conditions = (item.get("status") or {}).get("conditions") or []
    return any(c["type"] == condition_type and c["status"] == "True" for c in conditions)


async def _service_account_exists(client: KubeClient) -> bool:
    await client.get(core_path("serviceaccounts", "default", "default"))
    return True


async def _is_gateway_ready(client: KubeClient, name: str) -> bool:
    where = resource_path("gateway.networking.k8s.io/v1", "gateways", *name.split("/"))
    pods = (await client.get(core_path("pods", gateway.CONTOUR_NAMESPACE)))["items"]
    ready = {pod["metadata"]["labels"]["app"] for pod in pods if _is_condition_true(pod, "Ready")}
    return {"contour", "envoy"} <= ready and _is_condition_true(await client.get(where), "Programmed")
