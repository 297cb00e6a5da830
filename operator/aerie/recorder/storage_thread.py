"""A thread for operations of the storage, and why they cannot be done.

Guarantees: operations are done one after another, in the order of the calls. One that does not end within STUCK_SECONDS after its
call is a problem, although no error reports it. Not guaranteed: that such an operation ends with the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

STUCK_SECONDS = 60.0
"""Time after which an operation that has not ended counts as failed."""
_T = TypeVar("_T")


class StorageThread:
    """A thread of this name."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._called_at: deque[float] = deque()
        self.failure = "not used yet"
        """Why the last operation failed; empty if it did not."""

    @property
    def problem(self) -> str:
        """Why operations cannot be done now; empty if they can."""
        if self._called_at and asyncio.get_running_loop().time() - self._called_at[0] > STUCK_SECONDS:
            return "an operation of the storage does not end"
        return self.failure

    async def run(self, operation: Callable[[], _T]) -> _T:
        """Do an operation in the thread, and return its result."""
        loop = asyncio.get_running_loop()
        self._called_at.append(loop.time())
        try:
            return await loop.run_in_executor(self._executor, operation)
        finally:
            self._called_at.popleft()

    def shut_down(self) -> None:
        """Do nothing that has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)
