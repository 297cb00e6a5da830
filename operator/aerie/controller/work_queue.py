"""Queue of resources to reconcile.

Guarantees, as those of client-go's workqueue: a key waits at most once, however often it is added. A key in progress is not
handed out again; if it was added meanwhile, it comes back once. After failures a key comes back with growing delays up to a
limit; `forget` resets them. A delayed key that is added again comes back at the earlier time.

Beyond client-go: a finished key can be given a rest, during which it is not handed out, whoever adds it. No addition is lost. Not
guaranteed: persistence over a restart; the reconcile of all resources at the start makes up for it.

Times are those of the event loop, so that tests run in virtual time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class NamespacedName(NamedTuple):
    """Namespace and name of a resource or pod."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Backoff:
    """Exponential delay after failures: `initial_seconds`, doubled with each further failure, up to `max_seconds`."""

    initial_seconds: float = 0.5
    max_seconds: float = 120.0

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after this many failures in a row; the first failure is 1."""
        return min(self.max_seconds, self.initial_seconds * 2.0 ** min(failures - 1, 60))


@dataclass
class WorkQueue:
    """Work queue with delays and back-off per key, for use from one event loop."""

    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        self._ready: deque[NamespacedName] = deque()
        self._added_at: dict[NamespacedName, float] = {}
        self._processing: set[NamespacedName] = set()
        self._dirty: set[NamespacedName] = set()
        self._delayed: list[tuple[float, int, NamespacedName]] = []
        self._due_at: dict[NamespacedName, float] = {}
        self._sequence = itertools.count()
        self._failures: dict[NamespacedName, int] = {}
        self._resting_until: dict[NamespacedName, float] = {}
        """Time until which a key is not handed out."""
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._is_shutting_down = False

    def __len__(self) -> int:
        """Return the number of keys that are ready to be worked on."""
        return len(self._ready)

    def add(self, key: NamespacedName) -> None:
        """Enqueue the key for work as soon as possible."""
        if key in self._processing:
            self._due_at.pop(key, None)
            self._dirty.add(key)
            return
        if (resting_until := self._resting_until.get(key)) is not None:
            if resting_until > asyncio.get_running_loop().time():
                self._delay_until(key, resting_until)
                return
            del self._resting_until[key]
        self._due_at.pop(key, None)
        if key not in self._added_at:
            self._added_at[key] = asyncio.get_running_loop().time()
            self._ready.append(key)
            self._changed.set()

    def add_after(self, key: NamespacedName, seconds: float) -> None:
        """Enqueue the key after `seconds`, unless it is due earlier."""
        if seconds <= 0:
            self.add(key)
            return
        if key not in self._added_at:
            self._delay_until(key, asyncio.get_running_loop().time() + seconds)

    def _delay_until(self, key: NamespacedName, due_at: float) -> None:
        if self._due_at.get(key, due_at + 1) <= due_at:
            return
        self._due_at[key] = due_at
        heapq.heappush(self._delayed, (due_at, next(self._sequence), key))
        self._changed.set()

    def add_rate_limited(self, key: NamespacedName) -> float:
        """Enqueue the key after its back-off because the work on it failed, and return the delay in seconds."""
        self._failures[key] = self._failures.get(key, 0) + 1
        seconds = self.backoff.delay(self._failures[key])
        self.add_after(key, seconds)
        return seconds

    def count_failures(self, key: NamespacedName) -> int:
        """Return how many times in a row the work on the key has failed."""
        return self._failures.get(key, 0)

    def forget(self, key: NamespacedName) -> None:
        """Reset the back-off of the key because the work on it succeeded."""
        self._failures.pop(key, None)

    async def get(self) -> tuple[NamespacedName, float]:
        """Wait for the next key; return it and the seconds it has waited. The caller has to call `done` afterwards."""
        while True:
            self._move_due_keys()
            if self._ready and not self._is_shutting_down:
                key = self._ready.popleft()
                self._processing.add(key)
                return key, asyncio.get_running_loop().time() - self._added_at.pop(key)
            self._changed.clear()
            timeout = self._delayed[0][0] - asyncio.get_running_loop().time() if self._delayed else None
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def wait_until_empty(self) -> None:
        """Wait until no key is ready and no work is in progress. Delayed keys do not count."""
        while self._ready or self._processing or self._dirty:
            self._idle.clear()
            await self._idle.wait()

    async def drain(self) -> None:
        """Hand out no more keys, and wait until no work is in progress."""
        self._is_shutting_down = True
        while self._processing:
            self._idle.clear()
            await self._idle.wait()

    def done(self, key: NamespacedName, rest_seconds: float = 0.0) -> None:
        """Mark the work on the key as finished. The key is not handed out again for `rest_seconds`."""
        self._processing.discard(key)
        if rest_seconds > 0:
            self._resting_until[key] = asyncio.get_running_loop().time() + rest_seconds
        self._idle.set()
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)

    def _move_due_keys(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._delayed and self._delayed[0][0] <= now:
            due_at, _, key = heapq.heappop(self._delayed)
            if self._due_at.get(key) == due_at:  # else it was added with an earlier time
                self.add(key)
