"""The dead man's switch: a drafter on trial stays, and a pod is isolated, only while somebody renews the lease.

Times are those of the event loop, which is the monotonic clock: a machine's clock that is set moves no deadline.

Guarantees: when a lease ends, `on_end` is called, and is called again with back-off until it succeeds (which clears the lease) or
the lease is cleared or replaced. Not guaranteed: that the engine can return in time; while another call pauses it, it cannot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_log = logging.getLogger(f"vllm.{__name__}")
_MIN_WAIT_SECONDS = 0.001
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


@dataclass(frozen=True)
class Lease:
    """The right of a drafter on trial to stay loaded, or of a pod to stay isolated."""

    digest: str | None
    """The drafter on trial; None for an isolation."""
    deadline: float
    """Time of the event loop."""


class DeadMansSwitch:
    """The lease, and the task that acts when it ends."""

    def __init__(self, subject: str, on_end: Callable[[Lease], Awaitable[None]]) -> None:
        """`subject`: what the lease is for, in log messages."""
        self._subject, self._on_end = subject, on_end
        self._changed = asyncio.Event()
        self.lease: Lease | None = None

    def arm(self, digest: str | None, seconds: float) -> None:
        """Begin or renew a lease."""
        self.lease = Lease(digest, asyncio.get_running_loop().time() + seconds)
        self._changed.set()

    def clear(self) -> None:
        """Remove the lease: nothing happens at its end."""
        self.lease = None
        self._changed.set()

    def compute_remaining_seconds(self) -> float:
        """Return the seconds until the lease ends: 0 if it has ended or there is none."""
        return 0.0 if self.lease is None else max(0.0, self.lease.deadline - asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Act on each lease that ends, until cancelled."""
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            self._changed.clear()
            lease = self.lease
            if lease is None or self.compute_remaining_seconds() > 0:
                retry_seconds = FIRST_RETRY_SECONDS
                # A wait that is rounded to no time at all would be repeated without end.
                await self._wait(None if lease is None else max(_MIN_WAIT_SECONDS, self.compute_remaining_seconds()))
                continue
            try:
                await self._on_end(lease)
                if self.lease is lease:
                    self.clear()
            except Exception as error:  # noqa: BLE001 - whatever the reason, the drafter must not stay
                _log.warning("the lease of %s has ended, and the engine could not return yet: %s", self._subject, error)
                await self._wait(retry_seconds)
                retry_seconds = min(2 * retry_seconds, MAX_RETRY_SECONDS)

    async def _wait(self, seconds: float | None) -> None:
        """Wait until the lease changes, or for `seconds`."""
        waiter = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((waiter,), timeout=seconds)
        finally:
            waiter.cancel()
