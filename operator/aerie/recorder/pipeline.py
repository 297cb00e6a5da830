"""A request on its path: parsed, redacted, written.

    admitted ─► one thread: parse, patterns ─► hook ─► one thread: write
                                                       └─ every MAINTENANCE_SECONDS: rotation, upload, retention

Guarantees: at most MAX_IN_WORK requests are in memory; while storage or hook hangs, others are dropped before they are read.
Each received request is counted once, as recorded or by the reason why it is not. An unforeseen error costs one request, and only
its type is logged, because its message may quote a prompt.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TypeVar

import aiohttp

from aerie.recorder.hook import Hook, call_hook
from aerie.recorder.metrics import RecorderMetrics
from aerie.recorder.prompts import Prompt, encode_line, parse_request
from aerie.recorder.redaction import Redaction
from aerie.recorder.skip_reasons import SkipReason
from aerie.recorder.storage import Storage

MAX_IN_WORK = 8
"""Requests in memory at the same time. A parsed one takes up to 20 times its bytes."""
MAINTENANCE_SECONDS = 30.0
STUCK_SECONDS = 60.0
"""Time after which an operation of the storage that has not ended counts as failed."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Pipeline:
    """Records admitted requests. `clock`: the present time."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        redaction: Redaction,
        hook: Hook | None,
        storage: Storage,
        metrics: RecorderMetrics,
        clock: Callable[[], datetime],
    ) -> None:
        self.metrics = metrics
        self._session, self._redaction, self._hook, self._storage, self._clock = session, redaction, hook, storage, clock
        self._parsing, self._storing = ThreadPoolExecutor(1, "parsing"), ThreadPoolExecutor(1, "storage")
        self._in_work = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._storage_problem = "not used yet"
        self._waiting_since: float | None = None

    @property
    def storage_problem(self) -> str:
        """Why prompts cannot be stored now; empty if they can."""
        since = self._waiting_since
        if since is not None and asyncio.get_running_loop().time() - since > STUCK_SECONDS:
            return "an operation of the storage does not end"
        return self._storage_problem

    def try_admit(self) -> bool:
        """Admit a request that is to be read, and return True, or return False. An admitted one is started or released."""
        if self._in_work >= MAX_IN_WORK:
            return False
        self._in_work += 1
        return True

    def release(self) -> None:
        """Give up an admitted request."""
        self._in_work -= 1

    def start(self, body: bytes) -> None:
        """Record an admitted request in the background, and release it."""
        task = asyncio.create_task(self._record_and_count(body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def maintain(self) -> None:
        """Maintain the storage at intervals, for ever."""
        while True:
            try:
                report = await self._run_in_storage(self._storage.maintain)
            except OSError as error:
                self._report_failure(error)
            else:
                self._storage_problem = ""
                self.metrics.deleted_files.inc(report.deleted_files)
                self.metrics.stored_files.set(len(report.files))
                self.metrics.stored_bytes.set(sum(file.size for file in report.files))
            await asyncio.sleep(MAINTENANCE_SECONDS)

    async def close(self, timeout_seconds: float) -> None:
        """Finish the requests in work and complete the files, if that is possible in time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await self._run_in_storage(self._storage.close)
        except (TimeoutError, OSError) as error:
            self._report_failure(error)
        for executor in (self._parsing, self._storing):
            executor.shutdown(wait=False, cancel_futures=True)

    async def _record_and_count(self, body: bytes) -> None:
        try:
            reason = await self._record(body)
        except Exception as error:  # noqa: BLE001 - a defect; the text of an unforeseen error may quote the prompt
            _log.error("A request caused a defect of Aerie (%s): report it.", type(error).__name__)
            reason = SkipReason.DEFECT
        finally:
            self.release()
        if reason is None:
            self.metrics.recorded.inc()
        else:
            self.metrics.skip(reason)

    async def _record(self, body: bytes) -> SkipReason | None:
        """Return why the request was not recorded; None if it was."""
        # In a thread, because many matches in a long prompt take seconds; in one thread, because a parsed prompt is large.
        parsed = await asyncio.get_running_loop().run_in_executor(self._parsing, self._parse_and_redact, body)
        if isinstance(parsed, SkipReason):
            return parsed
        prompt, sampling = parsed
        redacted = prompt if self._hook is None else await call_hook(self._session, self._hook, prompt)
        if isinstance(redacted, SkipReason):
            return redacted
        line = encode_line(redacted, sampling, self._clock())
        if isinstance(line, SkipReason):
            return line
        try:
            await self._run_in_storage(lambda: self._storage.append(line))
        except OSError as error:
            self._report_failure(error)
            return SkipReason.STORAGE_FAILED
        return None

    def _parse_and_redact(self, body: bytes) -> tuple[Prompt, Mapping[str, float]] | SkipReason:
        try:
            parsed = parse_request(json.loads(body))
            return parsed if isinstance(parsed, SkipReason) else (self._redaction.redact(parsed[0]), parsed[1])
        except (ValueError, RecursionError):  # no JSON, no text, or halves of surrogate pairs
            return SkipReason.INVALID

    async def _run_in_storage(self, function: Callable[[], _T]) -> _T:
        loop = asyncio.get_running_loop()
        if self._waiting_since is None:
            self._waiting_since = loop.time()
        try:
            return await loop.run_in_executor(self._storing, function)
        finally:
            self._waiting_since = None

    def _report_failure(self, error: Exception) -> None:
        self.metrics.storage_failures.inc()
        problem = str(error) or type(error).__name__
        if problem != self._storage_problem:
            _log.error("The storage cannot be used (%s): check the volume claim, or the object store and its Secret.", problem)
        self._storage_problem = problem
