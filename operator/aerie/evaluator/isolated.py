"""Sends requests to one isolated engine, by its turns (turns.py): the operator reads from the engine what they took.

Guarantees: at most `in_flight` new requests are sent at once, and about `MAX_RECORDED_BYTES` in a window; what exceeds
that is dropped before it is read. Repeated requests are sent at the times of the first window. Answers are read to their end and
dropped. Not guaranteed: that the engine answers; the operator counts what it has generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

import aiohttp

from aerie.evaluator.batches import BatchLog
from aerie.evaluator.prompts import PromptFile
from aerie.evaluator.requests import ReplayRequest
from aerie.evaluator.skip_reasons import SkipReason
from aerie.evaluator.turns import TurnSchedule

POLL_SECONDS = 0.2
"""Seconds between two looks at the engine's turn."""
POLL_TIMEOUT_SECONDS = 2.0
MAX_RECORDED_BYTES = 32 * 1024 * 1024
"""Size of the requests of a window, which are in memory until the second window of the pair. Beyond it, no more are sent."""
_READY_PATH = "/aerie/ready"
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class IsolatedEngine:
    """The isolated engine."""

    url: str
    window_seconds: float
    """Length of its windows."""
    api_key: str = field(default="", repr=False)
    """Key that the engine requires; empty if it requires none."""
    timeout_seconds: float = 120.0
    """Limit of an answer, from sending the request on."""


class TurnPipeline:
    """Sends new requests in the first window of a pair, and repeats them in the second one."""

    def __init__(self, session: aiohttp.ClientSession, engine: IsolatedEngine, in_flight: int, log: BatchLog) -> None:
        self.log = log
        self._session, self._engine, self._in_flight = session, engine, in_flight
        self._schedule = TurnSchedule(engine.window_seconds)
        self._running = self._reading = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def try_admit(self) -> bool:
        """Admit a request that is to be read, and return True, or return False immediately."""
        if self._reading >= self._in_flight or not self._has_room():
            return False
        self._reading += 1
        return True

    def release(self) -> None:
        """Give up an admitted request."""
        self._reading -= 1

    def start(self, request: ReplayRequest) -> None:
        """Send an admitted request now, and record it for the second window; drop it if its time has passed."""
        self.release()
        if not self._has_room():
            self.log.drop()
            return
        self._schedule.record(request, _now())
        self._run(request, 0.0)

    async def send_prompts(self, prompts: PromptFile) -> None:
        """Send the prompts of a file for ever, as fast as the engine answers."""
        for request in prompts.requests():
            while not await self.try_admit():
                await asyncio.sleep(POLL_SECONDS / 4)
            self.log.receive()
            if isinstance(request, SkipReason):
                self.log.skip(request)
                self.release()
                await asyncio.sleep(POLL_SECONDS)
            else:
                self.start(request)

    def _has_room(self) -> bool:
        is_free = self._running < self._in_flight and self._schedule.recorded_bytes < MAX_RECORDED_BYTES
        return is_free and self._schedule.may_send(_now())

    async def follow_turns(self) -> None:
        """Read the engine's turn at intervals, and repeat requests in second windows, for ever."""
        while True:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ValueError, RecursionError):
                turn = await self._read_turn()
                for item in self._schedule.observe_turn(turn, _now()):
                    self._run(item.request, item.seconds)
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Stop all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, request: ReplayRequest, delay: float) -> None:
        self._running += 1
        task = asyncio.create_task(self._send(request, delay))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, request: ReplayRequest, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        try:
            await self._request(request)
        finally:
            self._running -= 1

    async def _request(self, request: ReplayRequest) -> None:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        if self._engine.api_key:
            headers["Authorization"] = f"Bearer {self._engine.api_key}"
        url = self._engine.url + request.path
        started = _now()
        try:
            async with (
                asyncio.timeout(self._engine.timeout_seconds),
                self._session.post(url, data=request.body, headers=headers, allow_redirects=False) as response,
            ):
                async for _ in response.content.iter_chunked(_CHUNK_BYTES):
                    pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            self.log.skip(SkipReason.BOTH_FAILED)
            return
        if response.status == 200:
            self._schedule.observe_duration(_now() - started)
        else:
            self.log.skip(SkipReason.REJECTED if 400 <= response.status < 500 else SkipReason.BOTH_FAILED)

    async def _read_turn(self) -> str | None:
        """Return the engine's turn; None while it is not isolated. Raises an error of connection, time or content where the
        engine does not report whether it is."""
        body = bytearray()
        async with (
            asyncio.timeout(POLL_TIMEOUT_SECONDS),
            self._session.get(self._engine.url + _READY_PATH, allow_redirects=False) as response,
        ):
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                body += chunk
                if len(body) > _CHUNK_BYTES:
                    raise ValueError("the report of the engine's turn is too long.")
        document = json.loads(body)
        turn = document.get("turn") if isinstance(document, dict) else None
        return turn if isinstance(turn, str) else None


def _now() -> float:
    return asyncio.get_running_loop().time()
