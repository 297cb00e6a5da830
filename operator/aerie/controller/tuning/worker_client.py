"""The process that decides on settings (aerie.tuning.worker.process), as the operator sees it: started when asked, ended when idle.

Guarantees: one process at most; a question has a limit in time, after which the process is killed; so it is when it does not
answer as it should, and when the operator ends. The next question starts another one. Its errors go to the operator's own
standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from aerie.tuning.worker.protocol import DecisionRequest, DecisionResponse

WORKER_IDLE_TIMEOUT_SECONDS = 20.0
"""Seconds without a question after which it ends: starting takes about one."""
DECISION_TIMEOUT_SECONDS = 120.0
"""Seconds for an answer, the start among them: a decision takes a fifth of one, and other pods may have the processor."""
_MAX_DECISION_RESPONSE_BYTES = 4 * 1024 * 1024
"""Bytes of an answer."""
WORKER_COMMAND = (sys.executable, "-m", "aerie.tuning.worker.process")


class TuningWorkerError(Exception):
    """There is no answer; the message says why."""


class TuningWorkerClient:
    """See the module. One question at a time."""

    def __init__(
        self,
        command: Sequence[str] = WORKER_COMMAND,
        timeout_seconds: float = DECISION_TIMEOUT_SECONDS,
        idle_timeout_seconds: float = WORKER_IDLE_TIMEOUT_SECONDS,
    ) -> None:
        self._command, self._timeout_seconds, self._idle_timeout_seconds = command, timeout_seconds, idle_timeout_seconds
        self._process: Process | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    async def request_decision(self, request: DecisionRequest) -> DecisionResponse:
        """The decision that is asked for. Raises DeciderError."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                line = await self._exchange(
                    await asyncio.to_thread(request.to_line)
                )  # a second of work for thousands of replicas
            found = DecisionResponse.from_line(line)
        except TimeoutError:
            await self.close()
            raise TuningWorkerError(f"no answer came within {self._timeout_seconds:g} s") from None
        except OSError as error:
            await self.close()
            raise TuningWorkerError(f"the process that decides cannot be run: {error}") from error
        except ValueError as error:  # also a line that is too long
            await self.close()
            raise TuningWorkerError(f"the process that decides failed: {error}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        self._idle_timer = asyncio.get_running_loop().call_later(self._idle_timeout_seconds, self._stop_idle_worker)
        return found

    async def close(self) -> None:
        """End it now."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _exchange(self, request_line: str) -> bytes:
        process = self._process
        if process is None or process.returncode is not None or process.stdin is None or process.stdin.is_closing():
            # One thread: the matrices are small, and the processor is the operator's.
            alone = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=_MAX_DECISION_RESPONSE_BYTES, env={**os.environ, **alone}
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request_line.encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ValueError(f"it ended with status {await process.wait()}")
        return line

    def _stop_idle_worker(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
