"""Reads a drafter's files from their source, in a process of its own (source_process.py).

Guarantees: the caller's event loop is not blocked. A call that is cancelled ends the process. What the process returns is checked
like a request. Not guaranteed: an end within a time; see source_process.py for the limits of a fetch.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aerie_vllm.rejection import RejectionError
from aerie_vllm.requests import DrafterFiles, DrafterSource, parse_drafter

_COMMAND = (sys.executable, "-m", "aerie_vllm.source_process")


@dataclass(frozen=True)
class SourceFiles:
    """A source's files in a folder of the pod."""

    drafter: DrafterFiles
    commit: str | None
    """Commit of the Hub's repository; None for a folder."""


ReadSource = Callable[[DrafterSource, Sequence[str] | None], Awaitable[SourceFiles]]


async def read_source(source: DrafterSource, needed: Sequence[str] | None = None) -> SourceFiles:
    """Fetch the files where needed, and hash them. Raises RejectionError.

    `needed`: digests of drafters that a fetch must not remove from the pod's own cache; None: it removes none.
    """
    process = await asyncio.create_subprocess_exec(
        *_COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd="/"
    )
    try:
        output, _ = await process.communicate(json.dumps({**source.fields, "needed": needed}).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError:
        message = (
            f"the process that reads the drafter's files ended with status {process.returncode} and no answer: check the log and "
            "the memory of the pod, then try again."
        )
        raise RejectionError(422, "ReaderEnded", message) from None
    if "reason" in answer:
        raise RejectionError(422, answer["reason"], answer["message"])
    return SourceFiles(parse_drafter({"folder": answer["folder"], "files": answer["files"]}), answer["commit"])
