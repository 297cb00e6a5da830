"""Runs one replica by the clock: completes due steps, and notifies those who wait for tokens.

The replica's steps end at their own times, however late the event loop looks: lateness delays what a client sees, by a
millisecond or so, and never adds up. Where nobody streams, the loop looks after several steps at once: a whole answer may be up
to MAX_ANSWER_DELAY_SECONDS late. Nothing here knows of HTTP.

A pause begins when the step in flight ends. Then no request advances until the engine is resumed; requests and KV cache stay, and
new requests wait. Not guaranteed: that a request which arrives in a pause joins the first step after it; it joins the second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping

from aerie_lab.engine.core.replica import Replica
from aerie_lab.engine.performance_model.acceptance import Acceptance
from aerie_lab.engine.performance_model.request import Request

MAX_ANSWER_DELAY_SECONDS = 0.025
"""Maximum time from the end of the step that completes a whole answer to the look that notices it. Forty engines that looked
after each step of 12 ms would need most of a processor."""
MAX_OWN_DELAY_SECONDS = 0.25
"""The same for a request of the engine itself, for whose answer nobody waits."""


class EngineStoppedError(Exception):
    """The engine has ended, and the request with it."""


class RequestHandle:
    """One request in the engine, and the progress that was reported to its client."""

    def __init__(self, request: Request, traffic_class: str, stream: bool, max_delay_seconds: float) -> None:
        self.request = request
        self.traffic_class = traffic_class
        self.stream = stream
        self.max_delay_seconds = max_delay_seconds
        self.reported_tokens = 0
        self._update_event = asyncio.Event()
        self._stopped = False

    def notify(self, stopped: bool = False) -> None:
        self._stopped |= stopped
        self._update_event.set()

    async def progress(self) -> AsyncIterator[int]:
        """Yield the number of new tokens, whenever there are any. Raises EngineStoppedError when the engine ends first."""
        while True:
            await self._update_event.wait()
            self._update_event.clear()
            request = self.request
            if new := request.generated_tokens - self.reported_tokens:
                self.reported_tokens = request.generated_tokens
                yield new
            if request.finish_reason is not None:
                return
            if self._stopped:
                raise EngineStoppedError(request.name)


class ReplicaDriver:
    """Drives one replica."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.stopped = False
        self._loop = asyncio.get_running_loop()
        self._epoch_offset = time.time() - self._loop.time()
        self._handles: dict[str, RequestHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause_time = math.inf
        """End of the last step before a pause; infinite unless the engine is paused."""
        self._idle = asyncio.Event()
        self._idle.set()

    def now(self) -> float:
        """Return the replica's clock: seconds since 1970, and steady."""
        return self._loop.time() + self._epoch_offset

    def submit(self, request: Request, traffic_class: str, *, stream: bool, has_client: bool = True) -> RequestHandle:
        """Hand the request of a client, or of the engine itself, to the engine. Raises EngineStoppedError when it has ended."""
        if self.stopped:
            raise EngineStoppedError(request.name)
        self.advance_to_now()
        max_delay = 0.0 if stream else MAX_ANSWER_DELAY_SECONDS if has_client else MAX_OWN_DELAY_SECONDS
        handle = self._handles[request.name] = RequestHandle(request, traffic_class, stream, max_delay)
        self._idle.clear()
        self.replica.submit(request, self.now())
        self._schedule_tick()
        return handle

    def release(self, handle: RequestHandle) -> None:
        """Release a request whose client has disconnected or has its whole answer."""
        if self._handles.pop(handle.request.name, None) is not None and handle.request.finish_reason is None and not self.stopped:
            self.replica.abort(handle.request)
        self._update_idle()

    def advance_to_now(self) -> None:
        """Complete the steps that are due."""
        if self.stopped:
            return
        for request in self.replica.advance(min(self.now(), self._pause_time)):
            if (handle := self._handles.get(request.name)) is not None:
                handle.notify()
        for handle in self._handles.values():
            if handle.stream and handle.request.generated_tokens != handle.reported_tokens:
                handle.notify()

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused, or is as soon as the step in flight ends."""
        return self._pause_time < math.inf

    @property
    def unfinished_count(self) -> int:
        """Number of requests that run or wait."""
        return self.replica.unfinished_count

    async def pause(self) -> None:
        """Pause the engine, and wait until the step in flight has ended."""
        self.advance_to_now()
        if not self.is_paused:
            end = self.replica.next_step_end
            self._pause_time = self.now() if end is None else end
        while (remaining := self._pause_time - self.now()) > 0:
            await asyncio.sleep(remaining)
        self.advance_to_now()

    def resume(self) -> None:
        """End a pause."""
        if self.is_paused:
            self._pause_time = math.inf
            self.replica.delay_step(self.now())
            self._schedule_tick()

    def change_acceptance(self, acceptance: Mapping[str, Acceptance]) -> None:
        """Give all requests the acceptance of their traffic class under another drafter."""
        self.advance_to_now()
        for handle in self._handles.values():
            self.replica.change_acceptance(handle.request, acceptance[handle.traffic_class])

    def stop(self) -> None:
        """Stop the engine immediately, and notify all clients."""
        self.stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for handle in self._handles.values():
            handle.notify(stopped=True)

    def freeze(self) -> None:
        """Stop the engine immediately without notice: open requests stay open and get no more tokens."""
        self.stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def wait_until_idle(self) -> None:
        """Wait until no request is left."""
        await self._idle.wait()

    def _update_idle(self) -> None:
        if not self._handles:
            self._idle.set()

    def _schedule_tick(self) -> None:
        end = self.replica.next_step_end
        if end is None or end > self._pause_time or self.stopped:
            return
        max_delay = min((handle.max_delay_seconds for handle in self._handles.values()), default=MAX_OWN_DELAY_SECONDS)
        look_time = end - self._epoch_offset + max_delay
        if self._timer is not None:
            if self._timer.when() <= look_time:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(look_time, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.advance_to_now()
        self._schedule_tick()
