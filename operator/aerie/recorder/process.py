"""Assembles the recorder and runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import aiohttp

from aerie.recorder.metrics import RecorderMetrics
from aerie.recorder.pipeline import Pipeline
from aerie.recorder.sampling import Sampler
from aerie.recorder.server import Endpoints
from aerie.recorder.settings import RecorderSettings
from aerie.recorder.storage import Storage

CLOSE_SECONDS = 20.0
"""Time for the last requests and uploads; below the grace period of the pod."""
_log = logging.getLogger(__name__)


async def run_recorder(settings: RecorderSettings) -> None:
    """Run until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    async with serve(settings):
        _log.info("Listening on port %d; %g of the requests are recorded", settings.port, settings.rate)
        await stop.wait()


def _now() -> datetime:
    return datetime.now(UTC)


@contextlib.asynccontextmanager
async def serve(settings: RecorderSettings, clock: Callable[[], datetime] = _now) -> AsyncIterator[Pipeline]:
    """Serve within the block."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False))
        storage = Storage(settings.folder, settings.bucket, settings.retention, clock)
        pipeline = Pipeline(session, settings.redaction, settings.hook, storage, RecorderMetrics(), clock)
        stack.push_async_callback(pipeline.close, CLOSE_SECONDS)
        maintenance = asyncio.create_task(pipeline.maintain())
        stack.callback(maintenance.cancel)
        endpoints = Endpoints(pipeline, Sampler(settings.rate, settings.max_per_minute), asyncio.get_running_loop().time)
        await stack.enter_async_context(endpoints.serve(settings.host, settings.port))
        yield pipeline
