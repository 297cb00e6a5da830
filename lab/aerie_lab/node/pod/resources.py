"""Resources of one pod on its node: address, network and volumes.

Guarantees: network, volumes and address are released in this order, so an address is released after its last use; a network is
released even if the pod is stopped while it is made. Not guaranteed: that the release succeeds; a failure is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from aerie_lab.kube.client import KubeObject
from aerie_lab.node.pod.context import AgentContext, Node
from aerie_lab.node.volumes import PodVolumes
from aerie_lab.sandbox.network import PodNetwork

_log = logging.getLogger(__name__)
RESOURCE_RETRY_SECONDS = 2.0
"""Pause before another attempt to make a network or volumes."""
_VOLUME_REFRESH_SECONDS = 30.0


class PodResources:
    """Address, network and volumes of one pod, once they are made."""

    def __init__(
        self, pod: KubeObject, node: Node, folder: Path, context: AgentContext, record_event: Callable[..., None]
    ) -> None:
        self.address: str | None = None
        self.network: PodNetwork | None = None
        self._uid: str = pod["metadata"]["uid"]
        self._name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self._node = node
        self._folder = folder
        self._context = context
        self._record_event = record_event
        self._volumes: PodVolumes | None = None
        self._volumes_outdated = (
            asyncio.Event()
        )  # files made from the pod's labels and annotations, or older than _VOLUME_REFRESH_SECONDS

    def reserve_address(self) -> None:
        """Reserve the pod's address."""
        self.address = self._context.networks.reserve_address()

    def downward_addresses(self) -> dict[str, str]:
        """Return the addresses that a pod can refer to in its environment and volumes."""
        address = self.address or ""
        return {"podIP": address, "podIPs": address, "hostIP": self._node.address, "hostIPs": self._node.address}

    async def create_network(self, address: str) -> PodNetwork:
        """Return the pod's network, once it can be made; `release` releases it whatever happens meanwhile."""
        while True:
            async with self._context.network_lock:
                making = asyncio.create_task(asyncio.to_thread(self._context.networks.create, address))
                try:
                    self.network = await asyncio.shield(making)
                    return self.network
                except asyncio.CancelledError:  # a thread cannot be stopped, and what it makes has to be given back
                    with contextlib.suppress(OSError):
                        self.network = await making
                    raise
                except OSError as error:
                    _log.warning("pod %s/%s: %s", *self._name, error)
                    self._record_event("FailedCreatePodSandBox", str(error), warning=True)
            await asyncio.sleep(RESOURCE_RETRY_SECONDS)

    def write_hosts_file(self, spec: KubeObject, hostname: str) -> None:
        """Write the pod's /etc/hosts."""
        lines = ["127.0.0.1\tlocalhost", f"{self.address}\t{hostname}"]
        aliases = spec.get("hostAliases") or []
        lines += [f"{alias['ip']}\t{' '.join(alias.get('hostnames') or [])}" for alias in aliases]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")

    def create_volumes(self) -> PodVolumes:
        """Return the pod's volumes, which `PodVolumes.prepare` then makes."""
        self._volumes = PodVolumes(
            self._uid,
            self._folder / "volumes",
            self._context.client,
            self._context.images,
            self.downward_addresses(),
            self._node.allocatable,
        )
        return self._volumes

    def mark_volumes_outdated(self) -> None:
        """Refresh the volumes now: the pod's labels or annotations have changed."""
        self._volumes_outdated.set()

    async def refresh_volumes(self, get_pod: Callable[[], KubeObject]) -> None:
        """Refresh the volumes when they are outdated, until cancelled."""
        assert self._volumes is not None
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._volumes_outdated.wait(), _VOLUME_REFRESH_SECONDS)
            self._volumes_outdated.clear()
            await self._volumes.refresh(get_pod())

    async def release(self, *, remove_volumes: bool) -> None:
        """Release network, volumes and address, in this order: an address is released after its last use."""
        if self.network is not None:
            network, self.network = self.network, None
            async with self._context.network_lock:
                try:
                    await asyncio.to_thread(self._context.networks.remove, network)
                except Exception:  # noqa: BLE001  pyroute2 has no common base for its errors, and the rest must be given back
                    _log.exception("pod %s/%s: its network", *self._name)
        if self._volumes is not None and remove_volumes:
            try:
                await asyncio.to_thread(self._volumes.remove)
            except OSError:
                _log.exception("pod %s/%s: its volumes", *self._name)
        if self.address is not None:
            self._context.networks.release_address(self.address)
