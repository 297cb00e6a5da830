"""One answer over HTTP from a server that nobody vouches for: an engine's metrics page, or what a Prometheus server says.

Guarantees: an answer has limits in time and size, whatever the server does; no redirect is followed, no proxy used, no connection
kept. What goes wrong is a `ScrapeError` with its kind, so that failures can be counted.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import httpx

SECONDS = 5.0
"""For one answer, all in all."""
CONNECT_SECONDS = 2.0
LARGEST = 2 * 1024 * 1024
"""Bytes of one answer of Prometheus."""
LARGEST_PAGE = 1024 * 1024
"""Bytes of a metrics page. An engine has about 50 KiB of them; this is a pod with 16 data-parallel ranks behind one page."""


class ScrapeError(Exception):
    """What was asked for could not be had; `reason` is one of timeout, unreachable, broken, status, too_large, token."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def client(transport: httpx.AsyncBaseTransport | None = None, authorities: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    """A client that goes nowhere but where it is told, and keeps no connection. Without authorities, for plain HTTP alone."""
    return httpx.AsyncClient(
        transport=transport,
        timeout=httpx.Timeout(SECONDS, connect=CONNECT_SECONDS, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        headers={"Accept-Encoding": "identity"},  # a compressed answer's size shows too late
        follow_redirects=False,
        trust_env=False,
        verify=authorities or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # reading the machine's authorities takes time
    )


async def fetch(through: httpx.AsyncClient, url: str) -> bytes:
    """The metrics page there. Raises ScrapeError."""
    # OpenMetrics is another format.
    status, page = await exchange(through, "GET", url, {"Accept": "text/plain"}, largest=LARGEST_PAGE)
    if status != 200:
        raise ScrapeError("status", f"{url} answered with status {status}")
    return page


async def exchange(
    through: httpx.AsyncClient,
    method: str,
    url: str,
    headers: Mapping[str, str],
    form: Mapping[str, str] | None = None,
    largest: int = LARGEST,
) -> tuple[int, bytes]:
    """One request, and the status and body of its answer, of at most `largest` bytes. Raises ScrapeError."""
    try:
        async with asyncio.timeout(SECONDS), through.stream(method, url, headers=headers, data=form) as answer:
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > largest:
                    raise ScrapeError("too_large", f"{url} answered with more than {largest} bytes")
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise ScrapeError("broken", f"{url} answered in a content encoding that was not asked for")
            return answer.status_code, bytes(body)
    except (TimeoutError, httpx.TimeoutException) as error:
        raise ScrapeError("timeout", f"{url} did not answer in time") from error
    except httpx.ConnectError as error:
        raise ScrapeError("unreachable", f"{url} cannot be reached: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ScrapeError("broken", f"{url} did not answer as a server does: {error!r}") from error
