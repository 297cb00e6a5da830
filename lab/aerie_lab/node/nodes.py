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
from aerie_lab.kube.client import STRATEGIC_MERGE_PATCH, KubeClient, KubeObject, core_path, resource_path
from aerie_lab.node.pod.context import Node
from aerie_lab.node.status import format_timestamp
from aerie_lab.sandbox.addresses import node_address
from aerie_lab.settings import LabSettings

KUBELET_PORT = 10250
_LEASE_DURATION_SECONDS = 20
_LEASE_RENEW_SECONDS = 5.0
_log = logging.getLogger(__name__)


def build_nodes(settings: LabSettings) -> list[Node]:
    """Return the nodes named by the settings."""
    allocatable = {
        "cpu": str(settings.cpus_per_node),
        "memory": f"{settings.memory_gib_per_node}Gi",
        "ephemeral-storage": "1Ti",
        "pods": str(settings.pods_per_node),
        **({"nvidia.com/gpu": str(settings.gpus_per_node)} if settings.gpus_per_node else {}),
    }
    return [Node(f"node-{i + 1}", node_address(i), allocatable) for i in range(settings.nodes)]


class NodeRegistrar:
    """Keeps one Node registered and alive."""

    def __init__(self, node: Node, client: KubeClient, version: str) -> None:
        self.node = node
        self.is_silenced = False
        self._client = client
        self._version = version
        self._needs_registration = self._needs_ready_report = True
        self._wake_event = asyncio.Event()

    async def run(self) -> None:
        """Register, and renew, until cancelled."""
        while True:
            if not self.is_silenced:
                try:
                    if self._needs_registration:
                        self._needs_registration = False
                        await self._register()
                    if self._needs_ready_report:
                        self._needs_ready_report = False
                        await self._report_ready()
                    await self._renew_lease()
                except KubeError as error:
                    _log.warning("node %s: %s", self.node.name, error)
                    self._needs_registration = self._needs_ready_report = True  # whatever was lost meanwhile is written again
                    await asyncio.sleep(0.5)
                    continue
            self._wake_event.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._wake_event.wait(), 0 if self._needs_ready_report and not self.is_silenced else _LEASE_RENEW_SECONDS
                )

    def report_now(self) -> None:
        """Renew and report now, as after a silence."""
        self._needs_ready_report = True
        self._wake_event.set()

    def on_node_event(self, event_type: str, node: KubeObject) -> None:
        """Handle an event of the Node: register a deleted one again, report a lost one as ready."""
        conditions = (node.get("status") or {}).get("conditions") or []
        if event_type == "DELETED":
            self._needs_registration = True
            self.report_now()
        elif any(c["type"] == "Ready" and c["status"] != "True" for c in conditions):
            self.report_now()

    async def _report_ready(self) -> None:
        await self._client.patch(
            core_path("nodes", None, self.node.name, "status"), {"status": self._build_status()}, STRATEGIC_MERGE_PATCH
        )

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
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}, field_manager="aerie-lab-node"
        )

    def _build_status(self) -> KubeObject:
        now = format_timestamp(time.time())
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

    async def _renew_lease(self) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        where = resource_path("coordination.k8s.io/v1", "leases", "kube-node-lease", self.node.name)
        spec = {"holderIdentity": self.node.name, "leaseDurationSeconds": _LEASE_DURATION_SECONDS, "renewTime": now}
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
                field_manager="aerie-lab-node",
            )
