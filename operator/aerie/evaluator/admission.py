"""The limit of requests in memory: what exceeds the engines' capacity is dropped before it is read.

Guarantee: at most `in_flight + waiting` requests are in memory, of which at most `in_flight` are being answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

IN_FLIGHT, WAITING = 16, 4
"""Requests that the engines answer at the same time, and those that wait for that, by default. The engines have no users then, so
they bear several; the evaluator's memory bounds both."""


class Admission:
    """Limits of requests in memory and of requests that the engines answer at the same time."""

    def __init__(self, in_flight: int, waiting: int) -> None:
        self._admitted = asyncio.Semaphore(in_flight + waiting)
        self._replayed = asyncio.Semaphore(in_flight)

    async def try_admit(self) -> bool:
        """Admit a request and return True, or return False immediately. An admitted request has to be released."""
        if self._admitted.locked():
            return False
        await self._admitted.acquire()  # does not wait
        return True

    async def admit(self) -> None:
        """Admit a request as soon as there is room for it. It has to be released."""
        await self._admitted.acquire()

    def release(self) -> None:
        """Make room for another request."""
        self._admitted.release()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until the engines may get an admitted request, which they answer within the block."""
        async with self._replayed:
            yield
