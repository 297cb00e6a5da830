"""Calls the drafter endpoint of one pod.

Guarantees: every result is a value; no answer of a pod raises. An answer has limits in time and size (scraping/http_fetch.py), no
redirect is followed, and only one state at a time is parsed, with a pause after it that grows with its size: many pods with large
states leave most of the event loop to others. The token is sent to the pod's address only, and appears in no message. Not
guaranteed: that the address still belongs to the pod; the token opens no other resource's pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import httpx

from aerie.controller.scraping.http_fetch import ScrapeError, send_request
from aerie.engine.drafter_endpoint.calls import DRAFTER_PATH, DrafterCall, LoadDrafter, build_request
from aerie.engine.drafter_endpoint.response import (
    ChangeDurations,
    EndpointProblem,
    read_change_response,
    read_state_response,
)
from aerie.engine.drafter_endpoint.state import MAX_STATE_BYTES, DrafterState, WindowCursor

READ_TIMEOUT_SECONDS = 5.0
QUICK_CALL_TIMEOUT_SECONDS = 60.0
"""Timeout of a preparation, which is answered at once, and of returns and renewals: they wait for a swap in progress, which lasts
one step of the engine and some more."""
LOAD_TIMEOUT_SECONDS = 960.0
"""Timeout of a load: the pod reads the files for 900 s at most (plugin/aerie_vllm/staging.py)."""
PARSE_BYTES_PER_SECOND = 4e6
"""Bytes of states that are parsed per second, of all pods together."""
MAX_INLINE_PARSE_BYTES = 32 * 1024
"""Bytes that are parsed in the event loop, some milliseconds; more of them, up to 0.3 s, are parsed in a thread beside it."""
_REASONS = {"timeout": "Timeout", "unreachable": "Unreachable", "too_large": "TooLarge"}
_FIXES = {
    "Timeout": "wait, or restart the pod if it lasts",
    "Unreachable": "check the pod, and let the operator through to the engine's port in network policies",
    "TooLarge": "check the pod's image",
    "InvalidResponse": "check the pod's image",
}
_T = TypeVar("_T")


class DrafterClient:
    """Client of all pods' endpoints."""

    def __init__(self, http_client: httpx.AsyncClient) -> None:
        self._http_client = http_client
        self._parse_lock = asyncio.Lock()

    async def read_state(self, address: str, token: str, cursor: WindowCursor | None) -> DrafterState | EndpointProblem:
        """Return the pod's state with the windows after the cursor: all that the pod has if its process is another one.

        `address`: `http://host:port`. `cursor`: None for all windows.
        """
        after = 0 if cursor is None else cursor.number
        state = await self._read_state(address, token, after)
        if after and cursor is not None and isinstance(state, DrafterState) and state.process_id != cursor.process_id:
            return await self._read_state(address, token, 0)
        return state

    async def send_call(self, address: str, token: str, call: DrafterCall) -> ChangeDurations | EndpointProblem:
        """Perform a change in the pod, and wait until it has ended."""
        request = build_request(call)
        timeout = LOAD_TIMEOUT_SECONDS if isinstance(call, LoadDrafter) else QUICK_CALL_TIMEOUT_SECONDS
        return await self._request(request.method, f"{address}{request.path}", token, timeout, read_change_response, request.body)

    async def _read_state(self, address: str, token: str, after: int) -> DrafterState | EndpointProblem:
        url = f"{address}{DRAFTER_PATH}?after={after}"
        return await self._request("GET", url, token, READ_TIMEOUT_SECONDS, read_state_response)

    async def _request(
        self,
        method: str,
        url: str,
        token: str,
        timeout_seconds: float,
        read: Callable[[int, bytes], _T | EndpointProblem],
        content: bytes | None = None,
    ) -> _T | EndpointProblem:
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        if content is not None:
            headers["Content-Type"] = "application/json"
        try:
            status, body = await send_request(
                self._http_client,
                method,
                url,
                headers,
                max_bytes=MAX_STATE_BYTES,
                content=content,
                timeout_seconds=timeout_seconds,
            )
        except ScrapeError as error:
            reason = _REASONS.get(error.reason, "InvalidResponse")
            return EndpointProblem(reason, f"{error}: {_FIXES[reason]}.")
        async with self._parse_lock:
            inline = len(body) <= MAX_INLINE_PARSE_BYTES
            result = read(status, body) if inline else await asyncio.to_thread(read, status, body)
            await asyncio.sleep(len(body) / PARSE_BYTES_PER_SECOND)
        return result
