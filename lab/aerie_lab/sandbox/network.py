"""The lab's network: one bridge in the lab's network namespace, and a namespace with one address for each pod.

    lab namespace     lo         127.0.0.1, control plane 10.245.0.1, nodes 10.245.0.11.., all of 10.96.0.0/16 (services)
                      lab0       bridge, 10.244.0.1/16
                       ├─ p1 ═══ eth0 10.244.0.2/16   a pod's namespace; default route by the bridge
                       └─ p2 ═══ eth0 10.244.0.3/16

A pod binds 0.0.0.0 and its own 127.0.0.1 as on any cluster. A whole service range is local to the lab's namespace, so
that a proxy may listen on any cluster IP without adding addresses. No packet can leave: the lab has no route to the outside.
Guarantees: a pod's namespace lives as long as its file descriptor or a process in it; nothing is written to /run/netns.
Not guaranteed: IPv6, network policies, more than 1,000 pods with a network of their own (the bridge's port limit).
"""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import dataclass

from pyroute2 import IPRoute, NetlinkError

from aerie_lab.sandbox import linux
from aerie_lab.sandbox.addresses import BRIDGE_IP, BRIDGE_MAC, CONTROL_PLANE_IP, SERVICE_CIDR, node_address

_POD_PREFIX_LENGTH = 16
_BRIDGE_INTERFACE = "lab0"
_LOCAL_TABLE = 255
_MAX_POD_ADDRESS_NUMBER = 65_000
"""The last pod address, as a number within the bridge's range."""


def set_up_lab_network(nodes: int) -> None:
    """Furnish the network namespace that this process is alone in."""
    with IPRoute() as ip:
        loopback = _interface_index(ip, "lo")
        ip.link("set", index=loopback, state="up")
        for address in (CONTROL_PLANE_IP, *(node_address(i) for i in range(nodes))):
            ip.addr("add", index=loopback, address=address, prefixlen=32)
        ip.route("add", dst=SERVICE_CIDR, type="local", oif=loopback, table=_LOCAL_TABLE, scope="host")
        ip.link("add", ifname=_BRIDGE_INTERFACE, kind="bridge", address=BRIDGE_MAC)
        bridge = _interface_index(ip, _BRIDGE_INTERFACE)
        ip.addr("add", index=bridge, address=BRIDGE_IP, prefixlen=_POD_PREFIX_LENGTH)
        ip.link("set", index=bridge, state="up")


def _interface_index(ip: IPRoute, name: str) -> int:
    return int(ip.link_lookup(ifname=name)[0])


def _delete_interface(ip: IPRoute, link: int) -> None:
    try:
        ip.link("del", index=link)
    except NetlinkError as error:
        if error.code != errno.ENODEV:  # gone with the last process in its namespace
            raise


@dataclass(frozen=True)
class PodNetwork:
    """A pod's network namespace: `namespace_fd` keeps it alive, `bridge_interface_index` is the bridge's end."""

    namespace_fd: int
    bridge_interface_index: int
    address: str


class PodNetworks:
    """Makes and removes pod networks. Blocking (~12 ms each): call it from a worker thread, one call at a time."""

    def __init__(self) -> None:
        self._lab_namespace_fd = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._created_count = 0
        self._reserved_addresses: set[str] = set()
        # Anywhere: endpoints of an agent that died must not point at the pods of its successor.
        self._last_number = int(time.time()) % _MAX_POD_ADDRESS_NUMBER

    def remove_orphaned_interfaces(self) -> None:
        """Remove the cables that an agent left which died."""
        with IPRoute() as ip:
            for link in ip.link_lookup(master=_interface_index(ip, _BRIDGE_INTERFACE)):
                _delete_interface(ip, link)

    def reserve_address(self) -> str:
        """Return an address that no pod has. Addresses rotate, so that a stale endpoint reaches no other pod."""
        for _ in range(_MAX_POD_ADDRESS_NUMBER):
            self._last_number = self._last_number + 1 if self._last_number < _MAX_POD_ADDRESS_NUMBER else 2
            address = f"10.244.{self._last_number // 256}.{self._last_number % 256}"
            if self._last_number % 256 not in (0, 255) and address not in self._reserved_addresses:
                self._reserved_addresses.add(address)
                return address
        raise OSError(0, "no pod address is left")

    def release_address(self, address: str) -> None:
        """Give an address back."""
        self._reserved_addresses.discard(address)

    def create(self, address: str) -> PodNetwork:
        """Return a new namespace that has `address`, joined to the bridge."""
        self._created_count += 1
        name = f"p{self._created_count}"
        namespace_fds: list[int] = []
        failure: list[BaseException] = []

        def inside() -> None:  # a thread of its own: a network namespace belongs to a thread
            try:
                linux.unshare(linux.CLONE_NEWNET)
                namespace_fds.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
                with IPRoute() as ip:
                    ip.link("add", ifname="eth0", kind="veth", peer={"ifname": name, "net_ns_fd": self._lab_namespace_fd})
                    for link in ("lo", "eth0"):
                        index = _interface_index(ip, link)
                        if link == "eth0":
                            ip.addr("add", index=index, address=address, prefixlen=_POD_PREFIX_LENGTH)
                        ip.link("set", index=index, state="up")
                    ip.route("add", dst="default", gateway=BRIDGE_IP)
            except BaseException as error:  # noqa: BLE001  raised again in the calling thread
                failure.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if failure:
            for fd in namespace_fds:
                os.close(fd)
            raise OSError(0, f"cannot make the pod's network: {failure[0]}") from failure[0]
        try:
            with IPRoute() as ip:
                link = _interface_index(ip, name)
                ip.link("set", index=link, master=_interface_index(ip, _BRIDGE_INTERFACE), state="up")
        except (NetlinkError, IndexError) as error:
            os.close(namespace_fds[0])  # and with it the namespace and the cable
            raise OSError(0, f"cannot connect the pod's network: {error}") from error
        return PodNetwork(namespace_fds[0], link, address)

    def remove(self, network: PodNetwork) -> None:
        """Drop the pod's cable and our hold on its namespace."""
        try:
            with IPRoute() as ip:
                _delete_interface(ip, network.bridge_interface_index)
        finally:
            os.close(network.namespace_fd)

    def set_connected(self, network: PodNetwork, connected: bool) -> None:
        """Pull the pod's cable, or plug it in again."""
        with IPRoute() as ip:
            ip.link("set", index=network.bridge_interface_index, state="up" if connected else "down")
