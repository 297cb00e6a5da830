"""TLS connections to the lab's API server, none of which outlives its session.

aiohttp releases a connection whose response was cut short, such as a watch's, immediately; TLS then says goodbye and waits for
the other side to do so. Where the event loop ends before that, the socket is left to the garbage collector, which warns, at any
later moment, in whatever runs then. Guarantee: after `close` every socket is closed, whether or not the server still answers. Not
guaranteed: that of a request which another task has open and does not cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any
from weakref import WeakSet

import aiohttp

_CLOSE_TIMEOUT_SECONDS = 10.0
"""Seconds for what takes a few turns of the event loop."""


def build_tls_context(certificates: Path, client: str) -> ssl.SSLContext:
    """Return the TLS context of this user for the lab's API server."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    context.load_cert_chain(certificates / f"{client}.crt", certificates / f"{client}.key")
    return context


class ApiServerConnector(aiohttp.TCPConnector):
    """Connections of a session, at most `limit` at a time (0: unlimited)."""

    def __init__(self, context: ssl.SSLContext, limit: int) -> None:
        super().__init__(ssl=context, limit=limit, socket_factory=self._create_socket)
        self._sockets: WeakSet[socket.socket] = WeakSet()

    def _create_socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, *_ = address
        new_socket = socket.socket(family, kind, protocol)
        self._sockets.add(new_socket)
        return new_socket

    async def close(self, *, abort_ssl: bool = False) -> None:
        """Close all; what waits for the server's goodbye takes the end of the connection for it."""
        await super().close(abort_ssl=abort_ssl)
        for open_socket in self._open_sockets():
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                while self._open_sockets():
                    await asyncio.sleep(0.001)

    def _open_sockets(self) -> list[socket.socket]:
        return [each for each in self._sockets if each.fileno() >= 0]
