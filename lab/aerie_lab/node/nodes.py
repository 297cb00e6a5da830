"""The Nodes that the agent plays: their registration, their Leases, and their heartbeat.

A silent node (a fault) renews nothing, so the real node lifecycle controller finds it out as it would a lost machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import platform
import time

from aerie_lab.errors import KubeError
from aerie_lab.kube.client import STRATEGIC, KubeClient, Object, core, path
from aerie_lab.node.pod import Node
from aerie_lab.node.status import timestamp
from aerie_lab.sandbox.addresses import node_address
from aerie_lab.settings import Settings

KUBELET_PORT = 10250
_LEASE_SECONDS = 20
_RENEW = 5.0
_log = logging.getLogger(__name__)


def nodes_of(settings: Settings) -> list[Node]:
    """The nodes named by the settings."""
    allocatable = {
        "cpu": str(settings.cpus),
        "memory": f"{settings.memory_gib}Gi",
        "ephemeral-storage": "1Ti",
        "pods": str(settings.pods),
        **({"nvidia.com/gpu": str(settings.gpus)} if settings.gpus else {}),
    }
    return [Node(f"node-{i + 1}", node_address(i), allocatable) for i in range(settings.nodes)]


class NodeKeeper:
    """Keeps one Node registered and alive."""

    def __init__(self, node: Node, client: KubeClient, version: str) -> None:
        self.node = node
        self.silent = False
        self._client = client
        self._version = version
        self._unregistered = self._unready = True
        self._woken = asyncio.Event()

    async def run(self) -> None:
        """Register, and renew, until cancelled."""
        while True:
            if not self.silent:
                try:
                    if self._unregistered:
                        self._unregistered = False
                        await self._register()
                    if self._unready:
                        self._unready = False
                        await self._report_ready()
                    await self._renew()
                except KubeError as error:
                    _log.warning("node %s: %s", self.node.name, error)
                    self._unregistered = self._unready = True  # whatever was lost meanwhile is written again
                    await asyncio.sleep(0.5)
                    continue
            self._woken.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), 0 if self._unready and not self.silent else _RENEW)

    def wake(self) -> None:
        """Renew and report now, as after a silence."""
        self._unready = True
        self._woken.set()

    def changed(self, kind: str, node: Object) -> None:
        """Take an event of the Node: one that was deleted registers again; one that was found lost says that it is not."""
        conditions = (node.get("status") or {}).get("conditions") or []
        if kind == "DELETED":
            self._unregistered = True
            self.wake()
        elif any(c["type"] == "Ready" and c["status"] != "True" for c in conditions):
            self.wake()

    async def _report_ready(self) -> None:
        await self._client.patch(core("nodes", None, self.node.name, "status"), {"status": self._status()}, STRATEGIC)

    async def _register(self) -> None:
        name = self.node.name
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": machine,
            "topology.kubernetes.io/zone": "lab",
        }
        if "nvidia.com/gpu" in self.node.allocatable:
            labels["nvidia.com/gpu.present"] = "true"
        await self._client.apply(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}, manager="aerie-lab-node"
        )

    def _status(self) -> Object:
        now = timestamp(time.time())
        good = [("MemoryPressure", "False"), ("DiskPressure", "False"), ("PIDPressure", "False"), ("Ready", "True")]
        return {
            "capacity": dict(self.node.allocatable),
            "allocatable": dict(self.node.allocatable),
            "addresses": [
                {"type": "InternalIP", "address": self.node.address},
                {"type": "Hostname", "address": self.node.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": KUBELET_PORT}},
            "nodeInfo": {
                "kubeletVersion": self._version,
                "containerRuntimeVersion": "aerie-lab://1",
                "kernelVersion": platform.release(),
                "osImage": "a folder of this machine",
                "operatingSystem": "linux",
                "architecture": platform.machine(),
                "machineID": self.node.name,
                "systemUUID": self.node.name,
                "bootID": self.node.name,
                "kubeProxyVersion": "",
            },
            "conditions": [
                {
                    "type": kind,
                    "status": status,
                    "reason": "LabNode",
                    "message": "the lab's node agent is running",
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": now,
                }
                for kind, status in good
            ],
        }

    async def _renew(self) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        where = path("coordination.k8s.io/v1", "leases", "kube-node-lease", self.node.name)
        spec = {"holderIdentity": self.node.name, "leaseDurationSeconds": _LEASE_SECONDS, "renewTime": now}
        try:
            await self._client.patch(where, {"spec": spec})
        except KubeError as error:
            if error.status != 404:
                raise
            await self._client.apply(
                {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": self.node.name, "namespace": "kube-node-lease"},
                    "spec": spec,
                },
                manager="aerie-lab-node",
            )
