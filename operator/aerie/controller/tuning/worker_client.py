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

from aerie.tuning.worker.protocol import Answer, Order

IDLE = 20.0
"""Seconds without a question after which it ends: starting takes about one."""
LIMIT = 120.0
"""Seconds for an answer, the start among them: a decision takes a fifth of one, and other pods may have the processor."""
_LONGEST = 4 * 1024 * 1024
"""Bytes of an answer."""
COMMAND = (sys.executable, "-m", "aerie.tuning.worker.process")


class DeciderError(Exception):
    """There is no answer; the message says why."""


class Decider:
    """See the module. One question at a time."""

    def __init__(self, command: Sequence[str] = COMMAND, limit: float = LIMIT, idle: float = IDLE) -> None:
        self._command, self._limit, self._idle = command, limit, idle
        self._process: Process | None = None
        self._ending: asyncio.TimerHandle | None = None

    async def ask(self, order: Order) -> Answer:
        """The decision that is asked for. Raises DeciderError."""
        if self._ending is not None:
            self._ending.cancel()
        try:
            async with asyncio.timeout(self._limit):
                line = await self._exchange(await asyncio.to_thread(order.to_line))  # a second of work for thousands of replicas
            found = Answer.from_line(line)
        except TimeoutError:
            await self.close()
            raise DeciderError(f"no answer came within {self._limit:g} s") from None
        except OSError as error:
            await self.close()
            raise DeciderError(f"the process that decides cannot be run: {error}") from error
        except ValueError as error:  # also a line that is too long
            await self.close()
            raise DeciderError(f"the process that decides failed: {error}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        self._ending = asyncio.get_running_loop().call_later(self._idle, self._end)
        return found

    async def close(self) -> None:
        """End it now."""
        if self._ending is not None:
            self._ending.cancel()
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _exchange(self, order: str) -> bytes:
        process = self._process
        if process is None or process.returncode is not None or process.stdin is None or process.stdin.is_closing():
            # One thread: the matrices are small, and the processor is the operator's.
            alone = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=_LONGEST, env={**os.environ, **alone}
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(order.encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ValueError(f"it ended with status {await process.wait()}")
        return line

    def _end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
