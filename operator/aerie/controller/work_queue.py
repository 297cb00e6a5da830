"""The queue of keys that have to be looked at.

Guarantees, as those of client-go's workqueue: a key waits at most once, however often it is added; a key that is being worked
on is not handed out again, and comes back once if it was added meanwhile; after failures it comes back later and later, up to
a limit, and `forget` resets that. A delayed key that is added again comes back at the earlier of the times. Beyond client-go: a
key whose work is done may be given a rest, during which it is not handed out, whoever adds it; nothing that was added is lost.
Not guaranteed: anything over a restart; a pass over all objects at the start does that.

Time is the event loop's, so that tests run in virtual time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class NamespacedName(NamedTuple):
    """A resource."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Backoff:
    """Seconds before a key that failed comes back: `first`, doubled with each further failure, up to `most`."""

    initial_seconds: float = 0.5
    max_seconds: float = 120.0

    def delay(self, failures: int) -> float:
        """Seconds after this many failures in a row, from 1."""
        return min(self.max_seconds, self.initial_seconds * 2.0 ** min(failures - 1, 60))


@dataclass
class WorkQueue:
    """See the module. To be used from one event loop."""

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
        """Until when a key is not handed out."""
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._is_shutting_down = False

    def __len__(self) -> int:
        """Keys that wait to be worked on now."""
        return len(self._ready)

    def add(self, key: NamespacedName) -> None:
        """Have the key looked at as soon as possible."""
        if key in self._processing:
            self._due_at.pop(key, None)
            self._dirty.add(key)
            return
        if (rested := self._resting_until.get(key)) is not None:
            if rested > asyncio.get_running_loop().time():
                self._delay_until(key, rested)
                return
            del self._resting_until[key]
        self._due_at.pop(key, None)
        if key not in self._added_at:
            self._added_at[key] = asyncio.get_running_loop().time()
            self._ready.append(key)
            self._changed.set()

    def add_after(self, key: NamespacedName, seconds: float) -> None:
        """Have the key looked at in `seconds`, unless it is sooner anyway."""
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
        """The work on the key failed: have it back after its back-off; the seconds until then."""
        self._failures[key] = self._failures.get(key, 0) + 1
        seconds = self.backoff.delay(self._failures[key])
        self.add_after(key, seconds)
        return seconds

    def count_failures(self, key: NamespacedName) -> int:
        """How often in a row the work on the key has failed."""
        return self._failures.get(key, 0)

    def forget(self, key: NamespacedName) -> None:
        """The work on the key succeeded: the next failure is the first."""
        self._failures.pop(key, None)

    async def get(self) -> tuple[NamespacedName, float]:
        """The next key, and the seconds it has waited. `done` has to follow."""
        while True:
            self._move_due_keys()
            if self._ready and not self._is_shutting_down:
                key = self._ready.popleft()
                self._processing.add(key)
                return key, asyncio.get_running_loop().time() - self._added_at.pop(key)
            self._changed.clear()
            wait = self._delayed[0][0] - asyncio.get_running_loop().time() if self._delayed else None
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def wait_until_empty(self) -> None:
        """Wait until no key waits, other than for its time, and no work is under way."""
        while self._ready or self._processing or self._dirty:
            self._idle.clear()
            await self._idle.wait()

    async def drain(self) -> None:
        """Hand out no key any more, and wait until no work is under way."""
        self._is_shutting_down = True
        while self._processing:
            self._idle.clear()
            await self._idle.wait()

    def done(self, key: NamespacedName, rest_seconds: float = 0.0) -> None:
        """The work on the key is over, and it is not handed out again for `rest` seconds."""
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
            due, _, key = heapq.heappop(self._delayed)
            if self._due_at.get(key) == due:  # else it was overtaken
                self.add(key)
