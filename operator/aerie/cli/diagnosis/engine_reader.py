"""GET requests to one engine: over HTTP, or by kubectl through the API server's proxy of its pod.

The proxy needs `get` on `pods/proxy`, for GET requests alone. A port-forward would need `create` on `pods/portforward`, a tunnel
for any request.

Guarantees: an answer has limits in time and, over HTTP, in size. No redirect is followed, no proxy of the environment is used. A
failure is a `CommandError` that names the address and what to do. A key is sent to the named address alone.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import httpx

from aerie.cli.console import CommandError
from aerie.cli.fleet.kubectl import Kubectl
from aerie.engine.metrics.exposition import MAX_EXPOSITION_BYTES

REQUEST_TIMEOUT_SECONDS = 10.0
"""Timeout of one answer."""
_POD_HINT = "for an engine in a cluster use pod/NAME -n NAMESPACE, or kubectl port-forward"


@dataclass(frozen=True)
class Answer:
    """Status and body of an answer."""

    status: int
    body: bytes


class EngineReader(Protocol):
    """A way to an engine."""

    address: str
    """Address, as messages have it."""

    def get(self, path: str) -> Answer:
        """Return the answer to a GET request. Raises CommandError: the engine cannot be reached."""


class HttpEngineReader:
    """An engine at a URL; a context manager that closes the connection."""

    def __init__(self, address: str, key_file: Path | None = None, ca_file: Path | None = None) -> None:
        """Raises CommandError: the address is none, or a file cannot be read."""
        self.address = address.rstrip("/")
        try:
            url = httpx.URL(self.address)
        except httpx.InvalidURL as error:
            raise CommandError(f"{address} is no URL ({error}): use the form http://HOST:PORT.") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise CommandError(f"{address} is no URL of an engine: use the form http://HOST:PORT, or pod/NAME.")
        if url.path.rstrip("/") in ("/metrics", "/v1"):
            self.address = self.address.removesuffix(url.path.rstrip("/"))
        headers = {"Accept": "text/plain, application/json", "Accept-Encoding": "identity"}
        if key_file is not None:
            headers["Authorization"] = f"Bearer {_read_key(key_file)}"
        try:
            verify = ssl.create_default_context(cafile=str(ca_file)) if ca_file else True
        except (OSError, ssl.SSLError) as error:
            raise CommandError(f"--ca-file {ca_file} cannot be read ({error}): set a PEM file with CA certificates.") from None
        self._client = httpx.Client(headers=headers, timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str) -> Answer:
        url, deadline = f"{self.address}{path}", time.monotonic() + REQUEST_TIMEOUT_SECONDS
        try:
            with self._client.stream("GET", url) as response:
                body = bytearray()
                for chunk in response.iter_raw():
                    body += chunk
                    if len(body) > MAX_EXPOSITION_BYTES:
                        raise CommandError(f"{url} answers with more than {MAX_EXPOSITION_BYTES >> 20} MiB: it is no engine.")
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("too slow")
                return Answer(response.status_code, bytes(body))
        except httpx.TimeoutException:
            seconds = f"{REQUEST_TIMEOUT_SECONDS:g} s"
            raise CommandError(
                f"{url} does not answer within {seconds}: check the address, and whether the engine hangs."
            ) from None
        except httpx.ConnectError as error:
            raise CommandError(f"{self.address} cannot be reached ({error}): {_connect_fix(str(error))}.") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CommandError(
                f"{url} does not answer with valid HTTP ({type(error).__name__}): check host and port, and use https:// if the "
                "engine has --ssl-certfile."
            ) from None


def _read_key(key_file: Path) -> str:
    try:
        return key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--key-file {key_file} cannot be read ({error}): set a file with the engine's API key.") from None


def _connect_fix(message: str) -> str:
    if "CERTIFICATE" in message:
        return "set the CA certificates of its server with --ca-file"
    if "SSL" in message:
        return "use http://, unless the engine has --ssl-certfile"
    if "Name or service" in message or "nodename" in message:
        return f"correct the host; {_POD_HINT}"
    return f"correct host and port, and check that the engine runs; {_POD_HINT}"


class PodEngineReader:
    """An engine in a pod, through the API server."""

    def __init__(self, kubectl: Kubectl, namespace: str, pod: str, port: int, *, has_tls: bool) -> None:
        self.address = f"pod/{pod} -n {namespace}"
        self._kubectl, self._namespace = kubectl, namespace
        target = f"https:{pod}:{port}" if has_tls else f"{pod}:{port}"
        self._proxy = f"/api/v1/namespaces/{namespace}/pods/{target}/proxy"

    def get(self, path: str) -> Answer:
        try:
            body = self._kubectl.get_raw(f"{self._proxy}{path}", timeout_seconds=REQUEST_TIMEOUT_SECONDS)
        except CommandError as error:
            message = str(error)
            if "pods/proxy" in message:
                right = "ask for get on pods/proxy (the ClusterRole edit has it), or use kubectl port-forward and a URL"
                raise CommandError(f"{_first_sentence(message)}: {right}.") from None
            if "connection refused" in message:
                raise CommandError(
                    f"{self.address} does not listen: its engine still loads, or ended. See kubectl logs."
                ) from None
            status = next((status for part, status in _STATUS_BY_MESSAGE.items() if part in message), None)
            if status is None:
                raise
            return Answer(status, b"")
        return Answer(200, body.encode())


_STATUS_BY_MESSAGE: Mapping[str, int] = {
    "could not find the requested resource": 404,
    "Unauthorized": 401,
    "must be logged in to the server": 401,
}
"""HTTP status of the engine, by a part of kubectl's message about it."""


def _first_sentence(message: str) -> str:
    return message.rstrip(".").split(": ask for the ClusterRole")[0]
