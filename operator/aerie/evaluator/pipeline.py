"""A request on its path: admitted, sent to both engines, counted.

Guarantees: each request that is received is counted as dropped, skipped or a pair, once. An unforeseen error costs one request,
and only its type is logged, because its message may quote a request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

import aiohttp

from aerie.evaluator.admission import Admission
from aerie.evaluator.batches import BatchLog
from aerie.evaluator.pairs import Pair
from aerie.evaluator.prompts import PromptFile
from aerie.evaluator.replay import Engines, replay_request
from aerie.evaluator.requests import ReplayRequest
from aerie.evaluator.skip_reasons import SkipReason

_log = logging.getLogger(__name__)

GREEDY_REPEAT_INTERVAL = 8
"""Greedy requests on average for one that is sent twice, to tell rounding from a fault."""
FAILURE_PAUSE_SECONDS = 1.0
"""Pause after a prompt of the file that gave no pair, so that engines that fail are not flooded."""


def report_defect(error: Exception) -> SkipReason:
    """Log an unforeseen error by its type alone, and return the reason for which its request is counted."""
    _log.error("A request caused a defect of Aerie (%s): report it.", type(error).__name__)
    return SkipReason.DEFECT


class Pipeline:
    """Evaluates admitted requests in the background."""

    def __init__(self, session: aiohttp.ClientSession, engines: Engines, admission: Admission, log: BatchLog) -> None:
        self.admission, self.log = admission, log
        self._session, self._engines = session, engines
        self._tasks: set[asyncio.Task[None]] = set()

    async def try_admit(self) -> bool:
        """Admit a request that is to be read, and return True, or return False immediately."""
        return await self.admission.try_admit()

    def release(self) -> None:
        """Give up an admitted request."""
        self.admission.release()

    def start(self, request: ReplayRequest, pause_after_failure: float = 0.0) -> None:
        """Evaluate an admitted request, and release it. `pause_after_failure`: seconds before that, if it gives no pair."""
        task = asyncio.create_task(self._evaluate(request, pause_after_failure))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def send_prompts(self, prompts: PromptFile) -> None:
        """Evaluate the prompts of a file for ever, as fast as the engines answer."""
        for request in prompts.requests():
            await self.admission.admit()
            self.log.receive()
            if isinstance(request, SkipReason):
                self.log.skip(request)
                self.admission.release()
                await asyncio.sleep(FAILURE_PAUSE_SECONDS)
            else:
                self.start(request, FAILURE_PAUSE_SECONDS)

    async def close(self) -> None:
        """Stop all requests without counting them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _evaluate(self, request: ReplayRequest, pause_after_failure: float) -> None:
        try:
            async with self.admission.turn():
                sent = asyncio.get_running_loop().time()
                result = await self._replay(request)
                ended = asyncio.get_running_loop().time()
                self.log.track_failures(None if isinstance(result, Pair) else result, sent, ended)
                if isinstance(result, Pair):
                    self.log.add(result)
                    return
                self.log.skip(result)
                await asyncio.sleep(pause_after_failure)
        finally:
            self.admission.release()

    async def _replay(self, request: ReplayRequest) -> Pair | SkipReason:
        try:
            repeats = request.is_greedy and secrets.randbelow(GREEDY_REPEAT_INTERVAL) == 0
            return await replay_request(self._session, self._engines, request, repeats=repeats)
        except Exception as error:  # noqa: BLE001 - a defect; the text of an unforeseen error may quote the request or an answer
            return report_defect(error)
