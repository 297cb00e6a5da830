"""For how long a run of a container lasts at most: by the fault `crash`, for containers that end again and again.

Guarantee: a change holds at once, for the run under way too, counted from its start. Not guaranteed: anything after the agent
has ended, with which all its containers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time


class RunTimeLimit:
    """Of the runs of one container; without bound until it is set."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._change_event = asyncio.Event()

    def set(self, seconds: float | None) -> None:
        """From now on; None: without bound."""
        self._seconds = seconds
        self._change_event.set()

    async def wait_until_exceeded(self) -> None:
        """Returns when the run that begins now has lasted for so long."""
        began = time.monotonic()
        while True:
            self._change_event.clear()
            left = None if self._seconds is None else began + self._seconds - time.monotonic()
            if left is not None and left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change_event.wait(), left)
