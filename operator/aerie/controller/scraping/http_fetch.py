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

from aerie.controller.scraping.http_client import Wire
from aerie.engine.metrics import exposition as pages

SECONDS = 5.0
"""For one answer, all in all."""
LARGEST = 2 * 1024 * 1024
"""Bytes of an answer of Prometheus, of some pods' pages together."""


class ScrapeError(Exception):
    """What was asked for could not be had; `reason` is one of timeout, unreachable, broken, status, too_large, token,
    forbidden."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def client(transport: httpx.AsyncBaseTransport | None = None, authorities: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    """A client that goes nowhere but where it is told, and keeps no connection. Without authorities, for plain HTTP alone."""
    return httpx.AsyncClient(
        transport=transport or Wire(authorities),
        headers={"Accept-Encoding": "identity", "Connection": "close"},
        follow_redirects=False,
        trust_env=False,
    )


async def fetch(through: httpx.AsyncClient, url: str) -> bytes:
    """The metrics page there. Raises ScrapeError."""
    # OpenMetrics is another format.
    status, page = await exchange(through, "GET", url, {"Accept": "text/plain"}, largest=pages.LARGEST)
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
    """One request, and the status and body of its answer. Raises ScrapeError."""
    try:
        async with asyncio.timeout(SECONDS), through.stream(method, url, headers=headers, data=form) as answer:
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise ScrapeError("broken", f"{url} answered in an encoding that was not asked for")
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > largest:
                    raise ScrapeError("too_large", f"{url} answered with more than {largest} bytes")
            return answer.status_code, bytes(body)
    except (TimeoutError, httpx.TimeoutException) as error:
        raise ScrapeError("timeout", f"{url} did not answer in time") from error
    except httpx.ConnectError as error:
        raise ScrapeError("unreachable", f"{url} cannot be reached: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # What the library says may quote the answer.
        raise ScrapeError("broken", f"{url} did not answer as a server of HTTP does") from error
