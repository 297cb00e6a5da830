"""Carries bytes between two TCP connections until both sides have ended; half-closed connections stay half-closed."""

from __future__ import annotations

import asyncio
import contextlib

_CHUNK_BYTES = 256 * 1024
_CONNECT_TIMEOUT_SECONDS = (
    5.0  # seconds; everything is on this machine, so one that has not answered by then is cut off or frozen
)


async def relay_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> bool:
    """Connect to host:port and carry. Returns False when it cannot be reached; the caller then still owns the writer."""
    try:
        far_reader, far_writer = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_TIMEOUT_SECONDS)
    except (OSError, TimeoutError):
        return False
    try:
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
    finally:
        for end in (writer, far_writer):
            end.close()
    return True


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        # One side was reset: the other must not wait for an end that will not come.
        with contextlib.suppress(OSError):
            writer.transport.abort()
