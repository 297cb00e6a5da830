"""Fetches one answer over HTTP from an untrusted server: an engine's metrics, or the response of a Prometheus server.

Guarantees: an answer has limits in time and size, whatever the server does (http_client.py for HTTP itself). A compressed answer
is rejected, because its size is known too late. No redirect is followed, no proxy is used, and no connection is kept. Any failure
is a `ScrapeError` with its kind, so that failures can be counted. Its message has the requested address and the kind, and nothing
of the answer but its status.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import httpx

from aerie.controller.scraping.http_client import LimitedHttpTransport
from aerie.engine.metrics import exposition

HTTP_RESPONSE_TIMEOUT_SECONDS = 5.0
"""Total timeout of one answer."""
MAX_HTTP_RESPONSE_BYTES = 2 * 1024 * 1024
"""Size limit of an answer of Prometheus, which has the metrics of some pods."""


class ScrapeError(Exception):
    """Error of a request that gave no usable answer.

    `reason` is one of timeout, unreachable, invalid_response, status, too_large, credentials, forbidden.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def create_http_client(
    transport: httpx.AsyncBaseTransport | None = None, tls_context: ssl.SSLContext | None = None
) -> httpx.AsyncClient:
    """Return a client that follows no redirect and keeps no connection. Without a `tls_context` it supports plain HTTP only."""
    return httpx.AsyncClient(
        transport=transport or LimitedHttpTransport(tls_context),
        headers={"Accept-Encoding": "identity", "Connection": "close"},
        follow_redirects=False,
        trust_env=False,
    )


async def fetch_metrics(http_client: httpx.AsyncClient, url: str) -> bytes:
    """Return the metrics at the URL, in the text format. Raises ScrapeError."""
    # The Accept header excludes OpenMetrics, which is another format.
    status, body = await send_request(
        http_client, "GET", url, {"Accept": "text/plain"}, max_bytes=exposition.MAX_EXPOSITION_BYTES
    )
    if status != 200:
        raise ScrapeError("status", f"{url} returned status {status}")
    return body


async def send_request(
    http_client: httpx.AsyncClient,
    method: str,
    url: str,
    headers: Mapping[str, str],
    form: Mapping[str, str] | None = None,
    max_bytes: int = MAX_HTTP_RESPONSE_BYTES,
    *,
    content: bytes | None = None,
    timeout_seconds: float | None = None,
) -> tuple[int, bytes]:
    """Send one request, and return the status and the body of its answer. Raises ScrapeError.

    Its body is a form or `content`. `timeout_seconds`: total timeout; None: HTTP_RESPONSE_TIMEOUT_SECONDS.
    """
    try:
        async with (
            asyncio.timeout(HTTP_RESPONSE_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds),
            http_client.stream(method, url, headers=headers, data=form, content=content) as response,
        ):
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ScrapeError("invalid_response", f"{url} answered in an encoding that was not requested")
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > max_bytes:
                    raise ScrapeError("too_large", f"{url} answered with more than {max_bytes} bytes")
            return response.status_code, bytes(body)
    except (TimeoutError, httpx.TimeoutException) as error:
        raise ScrapeError("timeout", f"{url} did not answer in time") from error
    except httpx.ConnectError as error:
        raise ScrapeError("unreachable", f"{url} cannot be reached: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # The library's message may quote the answer.
        raise ScrapeError("invalid_response", f"{url} did not answer with valid HTTP") from error
