"""Client of the tuning worker process (aerie.tuning.worker.process): starts it on a request, and ends it when idle.

Guarantees: there is one process at most. A request has a timeout, after which the process is killed. It is also killed after an
invalid response, and when the operator ends. The next request starts another one. Its errors go to the operator's own standard
error.
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
"""Seconds without a request after which the process ends; starting one takes about a second."""
DECISION_TIMEOUT_SECONDS = 120.0
"""Timeout of a response in seconds, including the start.

A decision takes a fifth of a second, and other pods may occupy the processor.
"""
_MAX_DECISION_RESPONSE_BYTES = 4 * 1024 * 1024
"""Size limit of a response in bytes."""
WORKER_COMMAND = (sys.executable, "-m", "aerie.tuning.worker.process")


class TuningWorkerError(Exception):
    """Error of a request without a response; the message says why."""


class TuningWorkerClient:
    """Client of the worker process, for one request at a time."""

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
        """Request a decision, and return it. Raises TuningWorkerError."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                request_line = await asyncio.to_thread(request.to_line)  # takes a second for thousands of replicas
                line = await self._exchange(request_line)
            response = DecisionResponse.from_line(line)
        except TimeoutError:
            await self.close()
            raise TuningWorkerError(f"the tuning worker did not respond within {self._timeout_seconds:g} s") from None
        except OSError as error:
            await self.close()
            raise TuningWorkerError(f"the tuning worker cannot be started: {error}") from error
        except ValueError as error:  # also a line that is too long
            await self.close()
            raise TuningWorkerError(f"the tuning worker failed: {error}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        self._idle_timer = asyncio.get_running_loop().call_later(self._idle_timeout_seconds, self._stop_idle_worker)
        return response

    async def close(self) -> None:
        """Kill the process."""
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
            # One thread is enough for small matrices, and leaves the processor to the operator.
            single_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=_MAX_DECISION_RESPONSE_BYTES, env={**os.environ, **single_thread}
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
