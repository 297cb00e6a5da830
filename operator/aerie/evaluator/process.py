"""Assembles the evaluator, and runs it until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator

from aiohttp import web

from aerie.evaluator.admission import Admission
from aerie.evaluator.batches import BatchLog
from aerie.evaluator.isolated import IsolatedEngine, TurnPipeline
from aerie.evaluator.keyed_hash import KeyedHash
from aerie.evaluator.metrics import EvaluatorMetrics
from aerie.evaluator.pipeline import Pipeline
from aerie.evaluator.prompts import open_prompts
from aerie.evaluator.replay import create_session
from aerie.evaluator.server import Endpoints
from aerie.evaluator.settings import EvaluatorSettings

_log = logging.getLogger(__name__)


async def run_evaluator(settings: EvaluatorSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises PromptError."""
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    async with serve(settings) as process:
        source = "mirrored requests" if settings.prompts is None else str(settings.prompts)
        _log.info("Process %s listens on port %d; it evaluates %s", process, settings.port, source)
        await stop.wait()


@contextlib.asynccontextmanager
async def serve(settings: EvaluatorSettings) -> AsyncIterator[str]:
    """Serve within the block. Yields the name of the process. Raises PromptError."""
    keyed_hash, metrics = KeyedHash(), EvaluatorMetrics()
    prompts = None if settings.prompts is None else open_prompts(settings.prompts, settings.rules, keyed_hash)
    log = BatchLog(metrics, time.time)
    async with contextlib.AsyncExitStack() as stack:
        if prompts is not None:
            stack.enter_context(prompts.stream)
        session = await stack.enter_async_context(create_session())
        pipeline: Pipeline | TurnPipeline
        if isinstance(settings.engines, IsolatedEngine):
            pipeline = TurnPipeline(session, settings.engines, settings.in_flight, log)
            turns = asyncio.create_task(pipeline.follow_turns())
            stack.callback(turns.cancel)
        else:
            pipeline = Pipeline(session, settings.engines, Admission(settings.in_flight, settings.waiting), log)
        stack.push_async_callback(pipeline.close)
        endpoints = Endpoints(pipeline, metrics, keyed_hash, settings.rules, settings.token, settings.cluster_header)
        runner = endpoints.build_runner(accepts_requests=prompts is None)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, settings.host, settings.port).start()
        if prompts is not None:
            task = asyncio.create_task(pipeline.send_prompts(prompts))
            stack.callback(task.cancel)
        yield log.process
