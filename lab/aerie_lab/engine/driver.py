"""Runs one replica by the clock: what is due is done, and whoever waits for tokens is told.

The replica's steps end at their own times, however late the event loop looks: lateness delays answers by a millisecond or so and
never adds up. Nothing here knows of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from aerie_lab.engine.replica import Replica
from aerie_lab.engine.request import Request


class EngineStoppedError(Exception):
    """The engine has ended, and the request with it."""


class Ticket:
    """One request in the engine, and what its waiter has been told of it."""

    def __init__(self, request: Request, stream: bool) -> None:
        self.request = request
        self.stream = stream
        self.told = 0
        self._news = asyncio.Event()
        self._stopped = False

    def tell(self, stopped: bool = False) -> None:
        self._stopped |= stopped
        self._news.set()

    async def progress(self) -> AsyncIterator[int]:
        """The number of new tokens, each time that there are some. Raises EngineStoppedError when the engine ends first."""
        while True:
            await self._news.wait()
            self._news.clear()
            request = self.request
            if new := request.generated - self.told:
                self.told = request.generated
                yield new
            if request.finish_reason is not None:
                return
            if self._stopped:
                raise EngineStoppedError(request.name)


class Driver:
    """Drives one replica."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.stopped = False
        self._loop = asyncio.get_running_loop()
        self._since_1970 = time.time() - self._loop.time()
        self._tickets: dict[str, Ticket] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def now(self) -> float:
        """The replica's clock: seconds since 1970, and steady."""
        return self._loop.time() + self._since_1970

    def submit(self, request: Request, *, stream: bool) -> Ticket:
        """Hand the request to the engine. Raises EngineStoppedError when it has ended."""
        if self.stopped:
            raise EngineStoppedError(request.name)
        self.catch_up()
        ticket = self._tickets[request.name] = Ticket(request, stream)
        self._idle.clear()
        self.replica.submit(request, self.now())
        self._arm()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The client has gone, or has all it asked for."""
        if self._tickets.pop(ticket.request.name, None) is not None and ticket.request.finish_reason is None and not self.stopped:
            self.replica.abort(ticket.request)
        self._rest()

    def catch_up(self) -> None:
        """Do what is due."""
        if self.stopped:
            return
        for request in self.replica.advance(self.now()):
            if (ticket := self._tickets.get(request.name)) is not None:
                ticket.tell()
        for ticket in self._tickets.values():
            if ticket.stream and ticket.request.generated != ticket.told:
                ticket.tell()

    def stop(self) -> None:
        """The engine ends at once; whoever waits is told."""
        self.stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for ticket in self._tickets.values():
            ticket.tell(stopped=True)

    def freeze(self) -> None:
        """The engine ends at once, and nobody is told: what is open stays open, without another token."""
        self.stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def drained(self) -> None:
        """Wait until no request is left."""
        await self._idle.wait()

    def _rest(self) -> None:
        if not self._tickets:
            self._idle.set()

    def _arm(self) -> None:
        if self._timer is None and (end := self.replica.next_end) is not None and not self.stopped:
            self._timer = self._loop.call_at(end - self._since_1970, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.catch_up()
        self._arm()
