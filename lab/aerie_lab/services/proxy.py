"""Listens on every Service's cluster IP and port, and carries connections to its ready endpoints in turn.

The whole service range is local to the lab's network namespace (sandbox/network.py), so listening is all it takes.
Guarantees: only endpoints that are ready and not terminating get new connections, except that terminating ones that still
serve are used when there are no others, as kube-proxy does; an endpoint that refuses is skipped. Established connections
are left alone. Not guaranteed: UDP, session affinity, node ports; the client's address is not kept.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from typing import Any

from aerie_lab.kube.client import KubeObject
from aerie_lab.kube.informer import ObjectKey, object_key
from aerie_lab.relay import relay_connection

_log = logging.getLogger(__name__)
Endpoint = tuple[str, int]
ServiceAddress = tuple[str, int]
"""(cluster IP, port)."""


def select_endpoints(slices: list[KubeObject], port_name: str) -> list[Endpoint]:
    """Return the addresses that new connections may go to, best kind only."""
    ready: list[Endpoint] = []
    leaving: list[Endpoint] = []
    for part in slices:
        numbers = [p["port"] for p in part.get("ports") or [] if (p.get("name") or "") == port_name and p.get("port")]
        for endpoint in part.get("endpoints") or []:
            conditions = endpoint.get("conditions") or {}
            addresses = [(address, number) for address in endpoint["addresses"] for number in numbers]
            if conditions.get("ready") is not False:
                ready += addresses
            elif conditions.get("serving") and conditions.get("terminating"):
                leaving += addresses
    return sorted(set(ready)) or sorted(set(leaving))


class ServiceProxy:
    """One listener per Service port."""

    def __init__(self) -> None:
        self._services: dict[ObjectKey, KubeObject] = {}
        self._slices: dict[ObjectKey, dict[str, KubeObject]] = {}
        self._listeners: dict[ServiceAddress, asyncio.Server] = {}
        self._rotation: dict[ServiceAddress, int] = {}
        self._services_changed = asyncio.Event()
        self.initial_listeners_ready = asyncio.Event()
        """Set once the services known at first are listened for."""

    def on_service_event(self, event_type: str, service: KubeObject) -> None:
        """Take an event of the services mirror."""
        if event_type == "DELETED":
            self._services.pop(object_key(service), None)
        else:
            self._services[object_key(service)] = service
        self._services_changed.set()

    def on_endpoint_slice_event(self, event_type: str, endpoint_slice: KubeObject) -> None:
        """Take an event of the endpoint slices mirror."""
        namespace, name = object_key(endpoint_slice)
        owner = (endpoint_slice["metadata"].get("labels") or {}).get("kubernetes.io/service-name", "")
        slices = self._slices.setdefault((namespace, owner), {})
        if event_type == "DELETED":
            slices.pop(name, None)
        else:
            slices[name] = endpoint_slice
        if not slices:
            del self._slices[namespace, owner]

    async def run(self) -> None:
        """Open and close listeners as services come and go, until cancelled."""
        while True:
            await self._services_changed.wait()
            self._services_changed.clear()
            desired = dict(self._desired_listeners())
            for port in self._listeners.keys() - desired.keys():
                self._listeners.pop(port).close()
                self._rotation.pop(port, None)
            for port in desired.keys() - self._listeners.keys():
                try:
                    # A test may listen on a port of all addresses: requests for a service's address still come here.
                    carry = functools.partial(self._relay_to_endpoint, port)
                    self._listeners[port] = await asyncio.start_server(carry, *port, reuse_port=True)
                except OSError as error:
                    _log.warning("service address %s:%d: %s", *port, error)
            self.initial_listeners_ready.set()

    def _desired_listeners(self) -> Mapping[ServiceAddress, tuple[ObjectKey, str]]:
        desired: dict[ServiceAddress, tuple[ObjectKey, str]] = {}
        for key, service in self._services.items():
            address = service["spec"].get("clusterIP")
            if not address or address == "None" or service["spec"].get("type") == "ExternalName":
                continue
            for port in service["spec"].get("ports") or []:
                if port.get("protocol", "TCP") == "TCP":
                    desired[address, port["port"]] = (key, port.get("name") or "")
        return desired

    async def _relay_to_endpoint(self, port: ServiceAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target: Any = self._desired_listeners().get(port)
        if target is not None:
            key, name = target
            endpoints = select_endpoints(list(self._slices.get(key, {}).values()), name)
            self._rotation[port] = self._rotation.get(port, -1) + 1
            start = self._rotation[port]
            for index in range(len(endpoints)):
                host, number = endpoints[(start + index) % len(endpoints)]
                if await relay_connection(reader, writer, host, number):
                    return
        writer.transport.abort()  # a reset, as a Service without endpoints gives
