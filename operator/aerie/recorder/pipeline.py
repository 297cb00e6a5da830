"""A request on its path: parsed, redacted, written.

    admitted ─► one thread: parse, patterns ─► hook ─► one thread: write

    every MAINTENANCE_SECONDS    in the thread that writes: rotation    in a third one: upload, retention    hook: a test

Guarantees: at most MAX_IN_WORK requests are in memory; while writing or the hook hangs, others are dropped before they are read.
Each received request is counted once, as recorded or by the reason why it is not. An unforeseen error costs one request, or one
maintenance, and only its type is logged, because its message may quote a prompt. Uploads or deletions that fail are a problem
after MAX_UNKEPT_SECONDS at the latest. At the end, a hook that hangs takes at most half of the time from completing and uploading
the files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import aiohttp

from aerie.recorder.hook import Hook, HookClient
from aerie.recorder.metrics import RecorderMetrics
from aerie.recorder.prompts import Prompt, encode_line, parse_request
from aerie.recorder.redaction import Redaction, TooManyReplacementsError
from aerie.recorder.retention import StorageReport
from aerie.recorder.skip_reasons import SkipReason
from aerie.recorder.storage import Storage
from aerie.recorder.storage_thread import StorageThread

MAX_IN_WORK = 8
"""Requests in memory at the same time. A parsed one takes up to 20 times its bytes."""
MAINTENANCE_SECONDS = 30.0
MAX_UNKEPT_SECONDS = 3600.0
"""Time for which uploads to a store, or deletions there, may fail before it is a problem. The shortest retention is as long."""
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
        self._redaction, self._storage, self._clock = redaction, storage, clock
        self._hook = HookClient(session, hook) if hook is not None else None
        self._parsing = ThreadPoolExecutor(1, "parsing")
        self._writing, self._keeping = StorageThread("writing"), StorageThread("keeping")
        self._in_work = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept_at = -math.inf
        """When uploads and deletions last succeeded."""

    @property
    def problem(self) -> str:
        """Why prompts cannot be stored or deleted now; empty if they can."""
        # A store that has failed since the start is reported at once. Later, files wait in the pod, up to a limit of `writing`.
        unkept_seconds = asyncio.get_running_loop().time() - self._kept_at
        is_outage = self._storage.writes_without_keeping and unkept_seconds < MAX_UNKEPT_SECONDS
        keeping_problem = "" if is_outage else self._keeping.problem
        return self._writing.problem or keeping_problem or (self._hook.problem if self._hook is not None else "")

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
        await asyncio.gather(
            self._repeat(self._writing, self._storage.prepare),
            self._repeat(self._keeping, self._storage.upload, self._storage.apply_retention),
            self._test_hook(),
        )

    async def _test_hook(self) -> None:
        while self._hook is not None:
            try:
                await self._hook.test()
            except Exception as error:  # noqa: BLE001 - later tests have to run, and the maintenance of the storage
                _log.error("A test of the hook caused a defect of Aerie (%s): report it.", type(error).__name__)
            await asyncio.sleep(MAINTENANCE_SECONDS)

    async def _repeat(self, thread: StorageThread, *operations: Callable[[], Any]) -> None:
        while True:
            problems = [await self._maintain_once(thread, operation) for operation in operations]
            self._set_failure(thread, next(filter(None, problems), ""))
            if thread is self._keeping and not thread.failure:
                self._kept_at = asyncio.get_running_loop().time()
            await asyncio.sleep(MAINTENANCE_SECONDS)

    async def _maintain_once(self, thread: StorageThread, operation: Callable[[], Any]) -> str:
        """Return why an operation failed; empty if it did not."""
        try:
            report = await thread.run(operation)
        except OSError as error:
            problem = str(error) or type(error).__name__
        except Exception as error:  # noqa: BLE001 - the next maintenance has to take place
            problem = f"a defect of Aerie: {type(error).__name__}"
        else:
            if isinstance(report, StorageReport):
                self.metrics.deleted_files.inc(report.deleted_files)
                self.metrics.stored_files.set(len(report.files))
                self.metrics.stored_bytes.set(sum(file.size for file in report.files))
            return ""
        self.metrics.storage_failures.inc()
        return problem

    async def close(self, timeout_seconds: float) -> None:
        """Finish the requests in work and complete the files, if that is possible in time."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_seconds / 2)
        for task in self._tasks:
            task.cancel()
        for thread, operation in ((self._writing, self._storage.complete), (self._keeping, self._storage.upload)):
            try:
                async with asyncio.timeout_at(deadline):
                    problem = await self._maintain_once(thread, operation)
            except TimeoutError:
                problem = "an operation of the storage does not end"
            self._set_failure(thread, problem)
            thread.shut_down()
        self._parsing.shutdown(wait=False, cancel_futures=True)

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
        redacted = prompt if self._hook is None else await self._hook.redact(prompt)
        if isinstance(redacted, SkipReason):
            return redacted
        line = encode_line(redacted, sampling, self._clock())
        if isinstance(line, SkipReason):
            return line
        try:
            await self._writing.run(lambda: self._storage.append(line))
        except OSError as error:
            self.metrics.storage_failures.inc()
            self._set_failure(self._writing, str(error) or type(error).__name__)
            return SkipReason.STORAGE_FAILED
        return None

    def _parse_and_redact(self, body: bytes) -> tuple[Prompt, Mapping[str, float]] | SkipReason:
        try:
            parsed = parse_request(json.loads(body))
            return parsed if isinstance(parsed, SkipReason) else (self._redaction.redact(parsed[0]), parsed[1])
        except TooManyReplacementsError:
            return SkipReason.TOO_LARGE
        except (ValueError, RecursionError):  # no JSON, no text, or halves of surrogate pairs
            return SkipReason.INVALID

    def _set_failure(self, thread: StorageThread, problem: str) -> None:
        if problem and problem != thread.failure:
            _log.error("The storage cannot be used (%s): check the volume claim, or the object store and its Secret.", problem)
        thread.failure = problem
