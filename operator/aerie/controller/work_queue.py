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


class Key(NamedTuple):
    """A resource."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Backoff:
    """Seconds before a key that failed comes back: `first`, doubled with each further failure, up to `most`."""

    first: float = 0.5
    most: float = 120.0

    def after(self, failures: int) -> float:
        """Seconds after this many failures in a row, from 1."""
        return min(self.most, self.first * 2.0 ** min(failures - 1, 60))


@dataclass
class WorkQueue:
    """See the module. To be used from one event loop."""

    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        self._ready: deque[Key] = deque()
        self._added_at: dict[Key, float] = {}
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._later: list[tuple[float, int, Key]] = []
        self._due: dict[Key, float] = {}
        self._count = itertools.count()
        self._failures: dict[Key, int] = {}
        self._rests: dict[Key, float] = {}
        """Until when a key is not handed out."""
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        """Keys that wait to be worked on now."""
        return len(self._ready)

    def add(self, key: Key) -> None:
        """Have the key looked at as soon as possible."""
        if key in self._working:
            self._due.pop(key, None)
            self._again.add(key)
            return
        if (rested := self._rests.get(key)) is not None:
            if rested > asyncio.get_running_loop().time():
                self._put_off(key, rested)
                return
            del self._rests[key]
        self._due.pop(key, None)
        if key not in self._added_at:
            self._added_at[key] = asyncio.get_running_loop().time()
            self._ready.append(key)
            self._changed.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Have the key looked at in `seconds`, unless it is sooner anyway."""
        if seconds <= 0:
            self.add(key)
            return
        if key not in self._added_at:
            self._put_off(key, asyncio.get_running_loop().time() + seconds)

    def _put_off(self, key: Key, due: float) -> None:
        if self._due.get(key, due + 1) <= due:
            return
        self._due[key] = due
        heapq.heappush(self._later, (due, next(self._count), key))
        self._changed.set()

    def failed(self, key: Key) -> float:
        """The work on the key failed: have it back after its back-off; the seconds until then."""
        self._failures[key] = self._failures.get(key, 0) + 1
        seconds = self.backoff.after(self._failures[key])
        self.add_after(key, seconds)
        return seconds

    def failures(self, key: Key) -> int:
        """How often in a row the work on the key has failed."""
        return self._failures.get(key, 0)

    def forget(self, key: Key) -> None:
        """The work on the key succeeded: the next failure is the first."""
        self._failures.pop(key, None)

    async def get(self) -> tuple[Key, float]:
        """The next key, and the seconds it has waited. `done` has to follow."""
        while True:
            self._mature()
            if self._ready and not self._closed:
                key = self._ready.popleft()
                self._working.add(key)
                return key, asyncio.get_running_loop().time() - self._added_at.pop(key)
            self._changed.clear()
            wait = self._later[0][0] - asyncio.get_running_loop().time() if self._later else None
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def emptied(self) -> None:
        """Wait until no key waits, other than for its time, and no work is under way."""
        while self._ready or self._working or self._again:
            self._idle.clear()
            await self._idle.wait()

    async def drained(self) -> None:
        """Hand out no key any more, and wait until no work is under way."""
        self._closed = True
        while self._working:
            self._idle.clear()
            await self._idle.wait()

    def done(self, key: Key, rest: float = 0.0) -> None:
        """The work on the key is over, and it is not handed out again for `rest` seconds."""
        self._working.discard(key)
        if rest > 0:
            self._rests[key] = asyncio.get_running_loop().time() + rest
        self._idle.set()
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _mature(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._later and self._later[0][0] <= now:
            due, _, key = heapq.heappop(self._later)
            if self._due.get(key) == due:  # else it was overtaken
                self.add(key)
