"""One receiver of notifications: its address, its headers, its format, and one request to it.

Guarantees: files with the address and the headers are read for each request, so that a Secret may change. Redirects are not
followed, so a receiver cannot send the operator elsewhere. Of a response, at most `MAX_RESPONSE_BYTES` are read. No error text
contains an address, a header or anything else from these files. Nothing of a resource becomes part of an address or a header.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from aerie.controller.notifications.formats import BodyFormat
from aerie.rollout.facts.receivers import NotificationReceiver
from aerie.rollout.status.notifications import Notification

DELIVERY_ATTEMPT_TIMEOUT_SECONDS = 10.0
"""Timeout of one attempt in seconds, up to the headers of the response."""
BODY_TIMEOUT_SECONDS = 1.0
"""Time limit for the part of the body that is read, in seconds."""
MAX_RESPONSE_BYTES = 4096
"""Maximum size of the part of a response that is read."""
_MAX_SECRET_FILE_BYTES = 65536
_HEADER_NAME_CHARACTERS = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class ReceiverError(ValueError):
    """Error for an address or a file that cannot be used; its text is a message without secrets."""


@dataclass(frozen=True)
class Endpoint:
    """Address and headers of a receiver, of which each may be in a file."""

    url: str | None = field(default=None, repr=False)
    url_file: Path | None = None
    """File with the address; used if `url` is None."""
    headers_file: Path | None = None
    """File with a header in each line, `Name: value`."""

    def read_url(self) -> str:
        """Return the address. Raises ReceiverError."""
        if self.url is not None:
            return check_url(self.url, "the URL")
        assert self.url_file is not None
        return check_url(_read_secret_file(self.url_file, "the URL").strip(), f"the URL in the file {self.url_file}")

    def read_headers(self) -> dict[str, str]:
        """Return the headers. Raises ReceiverError."""
        if self.headers_file is None:
            return {}
        headers = {}
        for line in filter(str.strip, _read_secret_file(self.headers_file, "headers").splitlines()):
            name, colon, value = (part.strip() for part in line.partition(":"))
            if not (colon and name and value and _HEADER_NAME_CHARACTERS.issuperset(name)) or not _is_printable_ascii(value):
                raise ReceiverError(
                    f"the file {self.headers_file} has a line that is not a header: write `Name: value` in ASCII."
                )  # the line itself may be a secret
            headers[name] = value
        return headers


def check_url(url: str, name: str) -> str:
    """Return the address if a request can be sent to it. Raises ReceiverError, whose text begins with `name`."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and _is_printable_ascii(url)
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        is_valid = False
    if not is_valid or " " in url:
        raise ReceiverError(f"{name} must begin with http:// or https:// and contain a host.")
    return url


def _read_secret_file(path: Path, content: str) -> str:
    try:
        with path.open(encoding="utf-8") as stream:
            return stream.read(_MAX_SECRET_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ReceiverError(f"the file {path} with {content} of the receiver cannot be read: {reason}.") from None


def _is_printable_ascii(text: str) -> bool:
    return text.isascii() and text.isprintable()


@dataclass(frozen=True)
class Receiver:
    """One receiver of the operator."""

    name: str
    endpoint: Endpoint
    body_format: BodyFormat
    namespaces: frozenset[str] | None = None
    """Namespaces whose resources it gets notifications of; None: all."""

    @cached_property
    def facts(self) -> NotificationReceiver:
        """What decisions need of it."""
        return NotificationReceiver(self.name, self.body_format.accepts_recipients, self.namespaces)


@dataclass(frozen=True)
class ReceiverResponse:
    """Response of a receiver."""

    status_code: int
    retry_after_seconds: float | None
    """Delay that the receiver requests before the next attempt; None: none that can be read."""
    text: str
    """Beginning of the body, for `aerie notifications test`. It may repeat secrets of the request."""


class HttpClients:
    """HTTP clients for all receivers, created when they are needed."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._transport = transport
        self._clients_by_scheme: dict[str, httpx.AsyncClient] = {}

    def get(self, url: str) -> httpx.AsyncClient:
        """Return the client for an address."""
        scheme = urlsplit(url).scheme
        if scheme not in self._clients_by_scheme:
            self._clients_by_scheme[scheme] = httpx.AsyncClient(
                transport=self._transport,
                timeout=DELIVERY_ATTEMPT_TIMEOUT_SECONDS,
                follow_redirects=False,
                # Loading the machine's CA bundle takes time and memory that plain HTTP does not need.
                verify=ssl.create_default_context() if scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            )
        return self._clients_by_scheme[scheme]

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients_by_scheme.values():
            await client.aclose()


async def send_notification(
    clients: HttpClients, receiver: Receiver, notification: Notification, recipient: str
) -> ReceiverResponse:
    """Send a notification once, and return the response, whatever its status.

    Raises TemplateError; ReceiverError: no response, or a file that cannot be read.
    """
    body = receiver.body_format.build_body(notification, recipient)
    url = receiver.endpoint.read_url()
    headers = httpx.Headers(receiver.endpoint.read_headers())
    headers["Content-Type"] = receiver.body_format.content_type
    client = clients.get(url)
    try:
        async with asyncio.timeout(DELIVERY_ATTEMPT_TIMEOUT_SECONDS):
            response = await client.send(client.build_request("POST", url, content=body, headers=headers), stream=True)
    except TimeoutError:
        raise ReceiverError(f"no response within {DELIVERY_ATTEMPT_TIMEOUT_SECONDS:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise ReceiverError(_describe_failure(error)) from None
    return ReceiverResponse(response.status_code, _parse_retry_after(response.headers), await _read_beginning(response))


async def _read_beginning(response: httpx.Response) -> str:
    """Return the beginning of the body. The status counts, so a body that does not come is as good as an empty one."""
    content = b""
    with contextlib.suppress(TimeoutError, httpx.HTTPError, httpx.StreamError):
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                async for part in response.aiter_raw():
                    content += part
                    if len(content) >= MAX_RESPONSE_BYTES:
                        break
        finally:
            await response.aclose()
    return content[:MAX_RESPONSE_BYTES].decode(errors="replace")


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    value = headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdecimal() and len(value) <= 6 else None


def _describe_failure(error: Exception) -> str:
    """Return why there is no response. Texts of other errors may contain the request's address or headers."""
    if isinstance(error, httpx.TimeoutException):
        return f"no response within {DELIVERY_ATTEMPT_TIMEOUT_SECONDS:g} s"
    if isinstance(error, httpx.ConnectError):
        return str(error) or "the connection failed"
    return type(error).__name__
