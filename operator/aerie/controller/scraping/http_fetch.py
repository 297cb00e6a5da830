"""One answer over HTTP from a server that nobody vouches for: an engine's metrics page, or what a Prometheus server says.

Guarantees: an answer has limits in time and size, whatever the server does (wire.py for HTTP itself); a compressed one is
refused, since its size shows too late; no redirect is followed, no proxy used, no connection kept. What goes wrong is a
`ScrapeError` with its kind, so that failures can be counted; its message names the address that was asked and the kind, and has
nothing of the answer in it but its status.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import httpx

from aerie.controller.scraping.http_client import LimitedHttpTransport
from aerie.engine.metrics import exposition as pages

HTTP_RESPONSE_TIMEOUT_SECONDS = 5.0
"""For one answer, all in all."""
MAX_HTTP_RESPONSE_BYTES = 2 * 1024 * 1024
"""Bytes of an answer of Prometheus, of some pods' pages together."""


class ScrapeError(Exception):
    """What was asked for could not be had; `reason` is one of timeout, unreachable, broken, status, too_large, token,
    forbidden."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def create_http_client(
    transport: httpx.AsyncBaseTransport | None = None, tls_context: ssl.SSLContext | None = None
) -> httpx.AsyncClient:
    """A client that goes nowhere but where it is told, and keeps no connection. Without authorities, for plain HTTP alone."""
    return httpx.AsyncClient(
        transport=transport or LimitedHttpTransport(tls_context),
        headers={"Accept-Encoding": "identity", "Connection": "close"},
        follow_redirects=False,
        trust_env=False,
    )


async def fetch_metrics(http_client: httpx.AsyncClient, url: str) -> bytes:
    """The metrics page there. Raises ScrapeError."""
    # OpenMetrics is another format.
    status, page = await send_request(http_client, "GET", url, {"Accept": "text/plain"}, max_bytes=pages.MAX_EXPOSITION_BYTES)
    if status != 200:
        raise ScrapeError("status", f"{url} answered with status {status}")
    return page


async def send_request(
    http_client: httpx.AsyncClient,
    method: str,
    url: str,
    headers: Mapping[str, str],
    form: Mapping[str, str] | None = None,
    max_bytes: int = MAX_HTTP_RESPONSE_BYTES,
) -> tuple[int, bytes]:
    """One request, and the status and body of its answer. Raises ScrapeError."""
    try:
        async with (
            asyncio.timeout(HTTP_RESPONSE_TIMEOUT_SECONDS),
            http_client.stream(method, url, headers=headers, data=form) as answer,
        ):
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise ScrapeError("broken", f"{url} answered in an encoding that was not asked for")
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > max_bytes:
                    raise ScrapeError("too_large", f"{url} answered with more than {max_bytes} bytes")
            return answer.status_code, bytes(body)
    except (TimeoutError, httpx.TimeoutException) as error:
        raise ScrapeError("timeout", f"{url} did not answer in time") from error
    except httpx.ConnectError as error:
        raise ScrapeError("unreachable", f"{url} cannot be reached: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # What the library says may quote the answer.
        raise ScrapeError("broken", f"{url} did not answer as a server of HTTP does") from error
