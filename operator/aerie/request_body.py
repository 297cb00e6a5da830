"""The body of a request to an HTTP endpoint, read within limits of size and time.

Guarantee: memory for a body is bounded by its limit, whatever the client announces or sends. No error quotes the body.
"""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_CHUNK_BYTES = 64 * 1024


class BodyTooLargeError(Exception):
    """The body exceeds the limit."""


class IncompleteBodyError(Exception):
    """The body did not arrive whole in time."""


async def read_body(request: web.Request, max_bytes: int, timeout_seconds: float) -> bytes:
    """Return the body. Raises BodyTooLargeError or IncompleteBodyError."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_seconds):
            async for chunk in request.content.iter_chunked(_CHUNK_BYTES):
                body += chunk
                if len(body) > max_bytes:
                    raise BodyTooLargeError
    except (TimeoutError, OSError, web.RequestPayloadError, HttpProcessingError):
        raise IncompleteBodyError from None
    return bytes(body)
