"""The preparation of a drafter: its files are fetched where needed, hashed, and checked against the engine, which continues.

    Running -> Ready    the files' folder and SHA-256 are known, and the drafter fits; the ranks hold it until they read another
            -> Failed   the problem is known; the same request begins it again

Guarantees: one preparation at a time; another source replaces it and ends its process. A request of a source that is prepared or
in preparation changes nothing. Not guaranteed: that the files stay as they are; a change compares them with their SHA-256.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aerie_vllm.metrics import Metrics
from aerie_vllm.rejection import EndpointError
from aerie_vllm.requests import DrafterFiles, DrafterSource
from aerie_vllm.source_reader import SourceFiles
from aerie_vllm.worker_protocol import Drafter, Problem

_CLOSE_SECONDS = 5.0
"""Longest wait for processes that were killed: one that hangs in the kernel does not end."""
_log = logging.getLogger(f"vllm.{__name__}")
ReadFiles = Callable[[DrafterSource], Awaitable[SourceFiles]]


@dataclass
class Preparation:
    """A preparation and its result."""

    source: DrafterSource
    started: float
    ended: float | None = None
    files: SourceFiles | None = None
    drafter: Drafter | None = None
    """The drafter as the ranks describe it, once it is prepared."""
    problem: Problem | None = None


class Preparer:
    """The latest preparation, and the task that performs it."""

    def __init__(self, read_files: ReadFiles, check: Callable[[DrafterFiles], Awaitable[Drafter]], metrics: Metrics) -> None:
        """`check` brings a drafter into the memory of all ranks, and raises EndpointError if it does not fit."""
        self._read_files, self._check, self._metrics = read_files, check, metrics
        self._latest: Preparation | None = None
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """The task of the latest preparation, and those of replaced ones whose processes have not ended yet."""

    def begin(self, source: DrafterSource) -> bool:
        """Prepare the source's drafter, unless it is prepared or in preparation; return whether it is prepared."""
        latest = self._latest
        if latest is not None and latest.source == source and latest.problem is None:
            return latest.drafter is not None
        if self._task is not None:
            self._task.cancel()
        self._latest = preparation = Preparation(source, _now())
        self._task = asyncio.ensure_future(self._prepare(preparation))
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)
        return False

    def forget(self, digest: str) -> None:
        """Forget a preparation with this result, because the drafter was rejected since: its files have changed, for one."""
        if self._latest is not None and self._latest.drafter is not None and self._latest.drafter["digest"] == digest:
            self._latest = None

    async def close(self) -> None:
        """End the preparation in progress and its process."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)

    def describe(self) -> dict[str, object] | None:
        """Return the latest preparation as the endpoint reports it."""
        if (latest := self._latest) is None:
            return None
        files, drafter = latest.files, latest.drafter
        return {
            "source": latest.source.fields,
            "phase": "Failed" if latest.problem is not None else "Running" if drafter is None else "Ready",
            "seconds": (_now() if latest.ended is None else latest.ended) - latest.started,
            "folder": None if drafter is None or files is None else files.drafter.folder,
            "files": None if drafter is None else drafter["files"],
            "digest": None if drafter is None else drafter["digest"],
            "kind": None if drafter is None else drafter["kind"],
            "commit": None if drafter is None or files is None else files.commit,
            "problem": latest.problem,
        }

    async def _prepare(self, preparation: Preparation) -> None:
        try:
            preparation.files = files = await self._read_files(preparation.source)
            preparation.drafter = await self._check(files.drafter)
        except EndpointError as error:
            _log.warning("the preparation of %s failed: %s", preparation.source.fields, error.message)
            self._metrics.count_rejection(error.reason)
            preparation.problem = error.problem
        except Exception:  # noqa: BLE001 - a caller has to learn that it has ended
            _log.exception("the preparation of %s failed", preparation.source.fields)
            preparation.problem = {"reason": "InternalError", "message": "the endpoint failed: its log has the cause."}
        finally:
            preparation.ended = _now()


def _now() -> float:
    return asyncio.get_running_loop().time()
