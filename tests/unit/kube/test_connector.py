"""A cancelled request leaves no socket open, even if the server does not close it. Real sockets, in real time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aerie_lab.cluster.certificates import Authority
from aerie_lab.kube.client import KubeClient

EVENT = b'{"type": "ADDED", "object": {}}\n'
WATCH_BEGINNING = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(EVENT), EVENT)
"""Response to a watch, up to its first event."""


@contextlib.contextmanager
def silent_server(certificates: Path) -> Iterator[str]:
    """Yield the address of a server that begins a watch on each connection, and then neither reads nor closes it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    with contextlib.ExitStack() as connections, socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # until the server is shut down
                while True:
                    connection = connections.enter_context(context.wrap_socket(server.accept()[0], server_side=True))
                    connection.recv(65536)
                    connection.sendall(WATCH_BEGINNING)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    authority = Authority(tmp_path)
    authority.issue("server", hosts=["127.0.0.1"])
    authority.issue("admin")
    return tmp_path


def test_a_cancelled_watch_leaves_no_socket_open(certificates: Path) -> None:
    async def watch(server: str) -> None:
        async with KubeClient(server, certificates, "admin") as client:
            begun = asyncio.Event()

            async def follow() -> None:
                async for _ in client.watch("/api/v1/pods", "1"):
                    begun.set()

            watches = [asyncio.create_task(follow()) for _ in range(4)]
            await asyncio.wait_for(begun.wait(), 60)
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    with silent_server(certificates) as server:
        asyncio.run(watch(server))
        gc.collect()  # the ResourceWarning of an unclosed socket fails the test
