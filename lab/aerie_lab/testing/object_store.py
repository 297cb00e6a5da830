"""A server with the API of Amazon S3 over a folder, for tests: each bucket is a folder below it.

Not guaranteed: that another server answers in the same way.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx

from aerie_lab.binaries import ensure_binary
from aerie_lab.testing.namespace import wait_until

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"


@contextlib.contextmanager
def run_object_store(folder: Path, *buckets: str, port: int | None = None) -> Iterator[str]:
    """Run a server on a free port of this machine, or on `port`; yields its URL. Its log is in `folder`."""
    if port is None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    data = folder / "buckets"
    for bucket in buckets:
        (data / bucket).mkdir(parents=True, exist_ok=True)
    metadata = folder / "metadata"  # in files: not every file system has extended attributes
    metadata.mkdir(exist_ok=True)
    address = f"127.0.0.1:{port}"
    command = [str(ensure_binary("versitygw")), f"--access={ACCESS_KEY}", f"--secret={SECRET_KEY}", f"--port={address}"]
    with (folder / "object-store.log").open("ab") as output:
        running = subprocess.Popen([*command, "posix", f"--sidecar={metadata}", str(data)], stdout=output, stderr=output)
    try:
        wait_until(lambda: _responds(f"http://{address}"), "the object store responds")
        yield f"http://{address}"
    finally:
        running.kill()
        running.wait(60)


def _responds(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 403  # it has no anonymous users
    except httpx.TransportError:
        return False
