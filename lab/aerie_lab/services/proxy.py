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

from aerie_lab.kube.client import Object
from aerie_lab.kube.mirror import Key, key_of
from aerie_lab.relay import relay

_log = logging.getLogger(__name__)
Endpoint = tuple[str, int]
Port = tuple[str, int]
"""(cluster IP, port)."""


def endpoints_of(slices: list[Object], port_name: str) -> list[Endpoint]:
    """The addresses that new connections may go to, best kind only."""
    ready: list[Endpoint] = []
    leaving: list[Endpoint] = []
    for part in slices:
        numbers = [p["port"] for p in part.get("ports") or [] if (p.get("name") or "") == port_name and p.get("port")]
        for endpoint in part.get("endpoints") or []:
            conditions = endpoint.get("conditions") or {}
            found = [(address, number) for address in endpoint["addresses"] for number in numbers]
            if conditions.get("ready") is not False:
                ready += found
            elif conditions.get("serving") and conditions.get("terminating"):
                leaving += found
    return sorted(set(ready)) or sorted(set(leaving))


class ServiceProxy:
    """One listener per Service port."""

    def __init__(self) -> None:
        self._services: dict[Key, Object] = {}
        self._slices: dict[Key, dict[str, Object]] = {}
        self._listeners: dict[Port, asyncio.Server] = {}
        self._turn: dict[Port, int] = {}
        self._changed = asyncio.Event()
        self.listening = asyncio.Event()
        """Set once the services known at first are listened for."""

    def service_changed(self, kind: str, service: Object) -> None:
        """Take an event of the services mirror."""
        if kind == "DELETED":
            self._services.pop(key_of(service), None)
        else:
            self._services[key_of(service)] = service
        self._changed.set()

    def slice_changed(self, kind: str, part: Object) -> None:
        """Take an event of the endpoint slices mirror."""
        namespace, name = key_of(part)
        owner = (part["metadata"].get("labels") or {}).get("kubernetes.io/service-name", "")
        slices = self._slices.setdefault((namespace, owner), {})
        if kind == "DELETED":
            slices.pop(name, None)
        else:
            slices[name] = part
        if not slices:
            del self._slices[namespace, owner]

    async def run(self) -> None:
        """Open and close listeners as services come and go, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = dict(self._wanted())
            for port in self._listeners.keys() - wanted.keys():
                self._listeners.pop(port).close()
                self._turn.pop(port, None)
            for port in wanted.keys() - self._listeners.keys():
                try:
                    # A test may listen on a port of all addresses: requests for a service's address still come here.
                    carry = functools.partial(self._carry, port)
                    self._listeners[port] = await asyncio.start_server(carry, *port, reuse_port=True)
                except OSError as error:
                    _log.warning("service address %s:%d: %s", *port, error)
            self.listening.set()

    def _wanted(self) -> Mapping[Port, tuple[Key, str]]:
        wanted: dict[Port, tuple[Key, str]] = {}
        for key, service in self._services.items():
            address = service["spec"].get("clusterIP")
            if not address or address == "None" or service["spec"].get("type") == "ExternalName":
                continue
            for port in service["spec"].get("ports") or []:
                if port.get("protocol", "TCP") == "TCP":
                    wanted[address, port["port"]] = (key, port.get("name") or "")
        return wanted

    async def _carry(self, port: Port, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target: Any = self._wanted().get(port)
        if target is not None:
            key, name = target
            endpoints = endpoints_of(list(self._slices.get(key, {}).values()), name)
            self._turn[port] = self._turn.get(port, -1) + 1
            start = self._turn[port]
            for index in range(len(endpoints)):
                host, number = endpoints[(start + index) % len(endpoints)]
                if await relay(reader, writer, host, number):
                    return
        writer.transport.abort()  # a reset, as a Service without endpoints gives
