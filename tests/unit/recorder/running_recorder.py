"""A recorder on loopback, in the process of the test, and a hook beside it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from aerie.recorder.hook import Hook
from aerie.recorder.pipeline import Pipeline
from aerie.recorder.process import serve
from aerie.recorder.prompts import CHAT_PATH
from aerie.recorder.redaction import Pattern, Redaction
from aerie.recorder.settings import RecorderSettings
from aerie.recorder.storage import Retention
from tests.unit.controller.served import serve_http

TIME = datetime(2026, 3, 1, 14, 25, 9, tzinfo=UTC)
RETENTION = Retention(timedelta(days=7), 2**30)
CHAT: Mapping[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test within its time."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all files, the open one too."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl*")) for line in path.read_text("utf-8").splitlines()]


@dataclass
class RunningRecorder:
    """A recorder, and a client."""

    url: str
    folder: Path
    client: aiohttp.ClientSession
    pipeline: Pipeline

    async def send(self, body: Any = CHAT, path: str = CHAT_PATH, headers: Mapping[str, str] | None = None) -> int:
        """Return the status of the response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=io.BytesIO(data), headers=headers) as response:
            return response.status

    async def fetch(self, path: str) -> tuple[int, str]:
        async with self.client.get(self.url + path) as response:
            return response.status, await response.text()

    async def counts(self) -> dict[str, int]:
        """Return how many requests were recorded, and how many not by reason."""
        _, text = await self.fetch("/metrics")
        skipped = re.findall(r'^aerie_recorder_requests_skipped_total\{reason="(\w+)"\} (\S+)', text, re.MULTILINE)
        recorded = re.findall(r"^aerie_recorder_requests_(recorded)_total (\S+)", text, re.MULTILINE)
        return {name: int(float(value)) for name, value in (*recorded, *skipped) if float(value)}

    async def wait_for(self, **expected: int) -> None:
        """Return when these are all the counts."""
        while (counts := await self.counts()) != expected:
            assert sum(counts.values()) < sum(expected.values()), counts
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def run_recorder(
    folder: Path, patterns: Mapping[str, str] | None = None, hook: Hook | None = None, **settings: Any
) -> AsyncIterator[RunningRecorder]:
    """Run a recorder of all requests. `patterns`: replacements by pattern."""
    redaction = Redaction(Pattern(pattern, replacement) for pattern, replacement in (patterns or {}).items())
    defaults: dict[str, Any] = {"folder": folder, "retention": RETENTION, "rate": 1.0, "max_per_minute": 1000}
    own = RecorderSettings(redaction=redaction, hook=hook, host="127.0.0.1", port=free_port(), **defaults | settings)
    async with serve(own, lambda: TIME) as pipeline, aiohttp.ClientSession() as client:
        yield RunningRecorder(f"http://127.0.0.1:{own.port}", folder, client, pipeline)


@contextlib.asynccontextmanager
async def run_hook(handle: Callable[[web.Request], Awaitable[web.StreamResponse]], timeout: float = 5.0) -> AsyncIterator[Hook]:
    """Run a hook that answers by this function."""
    async with serve_http("POST", "/redact", handle) as url:
        yield Hook(f"{url}/redact", timeout)
