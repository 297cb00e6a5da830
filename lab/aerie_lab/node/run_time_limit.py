"""Limit of the duration of a container's runs, for the fault `crash`.

Guarantee: a change applies immediately, also to the current run, counted from its start. Not guaranteed: anything after the agent
has ended, with which all its containers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time


class RunTimeLimit:
    """Limit of the runs of one container; none until it is set."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._change_event = asyncio.Event()

    def set(self, seconds: float | None) -> None:
        """Set the limit from now on; None: no limit."""
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
