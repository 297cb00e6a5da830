"""Requests and responses between the lab's processes over a unix socket: one JSON object per line.

    {"verb": "restart", "component": "etcd"}   ->   {"ok": ...}   or   {"error": "a message"}

A unix socket is used because it is reachable from both sides of the lab's network namespace, and because its file mode
keeps other users out. Guarantee: a handler's LabError reaches the caller with the same message; its response is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aerie_lab.errors import LabError, StateError

RequestHandler = Callable[..., Awaitable[Any]]
_MAX_MESSAGE_BYTES = 16 * 1024 * 1024


async def serve_requests(socket_path: Path, handlers: Mapping[str, RequestHandler]) -> asyncio.Server:
    """Answer on the socket until the server is closed. Each handler is called with the request's other fields."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                writer.write(json.dumps(await _handle(line, handlers)).encode() + b"\n")
                await writer.drain()
        writer.close()

    socket_path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(answer, socket_path, limit=_MAX_MESSAGE_BYTES)
    os.chmod(socket_path, 0o600)
    return server


async def _handle(line: bytes, handlers: Mapping[str, RequestHandler]) -> dict[str, Any]:
    try:
        request = json.loads(line)
        verb = request.pop("verb")
        if verb not in handlers:
            return {"error": f"unknown request '{verb}': one of {', '.join(sorted(handlers))}"}
        return {"ok": await handlers[verb](**request)}
    except LabError as error:
        return {"error": str(error)}
    except (TypeError, KeyError, ValueError) as error:
        return {"error": f"malformed request: {error}"}


def send_request(socket_path: Path, verb: str, *, timeout: float = 30.0, **fields: Any) -> Any:
    """Send one request and wait for its answer. Raises StateError when no process listens, LabError with the response's error."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(socket_path))
            connection.sendall(json.dumps({"verb": verb, **fields}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
    except OSError as error:
        raise StateError(
            f"nothing listens at {socket_path} ({error}): check with `aerie-lab status` whether the lab is up."
        ) from error
    if not line:
        raise StateError(f"{socket_path} closed without an answer to '{verb}'.")
    answer = json.loads(line)
    if "error" in answer:
        raise LabError(answer["error"])
    return answer["ok"]
