"""Evaluations of a drafter against itself on real vLLM: how often they roll back, or find other answers.

    prompts of the bundle, half of them sampled ─► evaluator ─┬─► engine with EAGLE 3.1 ─┐
                                                              └─► engine with EAGLE 3.1 ─┴─► batches ─► one verdict after another

Two engines and one evaluator run from the first evaluation to the last, as nothing in them remembers an evaluation. Each batch
counts in one evaluation. An evaluation ends with its verdict, or after MAX_PAIRS pairs.

Both engines get the seed of each request, so sampled answers are equal, too, unless an engine or a drafter is at fault.

Guarantee: the evaluator and the decisions are the product's own. Not guaranteed: anything about times; the engines share two
cores, so whoever runs first is slowed down by the other.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.state import PairBatch, PairedState, add_batches
from aerie.analysis.paired.verdict import PairedVerdict, evaluate_pairs
from aerie.evaluator.process import serve
from aerie.evaluator.replay import Engines
from aerie.evaluator.requests import ReplayRules
from aerie.evaluator.settings import EvaluatorSettings
from aerie_drafter.evaluate.prompts import read_prompts
from aerie_lab.binaries import ensure_family
from aerie_lab.testing.agreement import BUNDLE_FOLDER, RunningEngine, build_speculative_config, start_engine

MAX_PAIRS = 1500
MAX_ANSWER_TOKENS, IN_FLIGHT = 40, 8
TEMPERATURES = (0.0, 0.7)
_TOKEN = "of-the-benchmark" * 2


def measure_same_drafter(evaluations: int) -> dict[str, float]:
    """Return the keys of so many evaluations, and print their verdicts."""
    vllm = ensure_family("vllm", lambda line: print(line, flush=True))
    speculation = build_speculative_config(BUNDLE_FOLDER / "eagle31")
    flags = ("--speculative-config", speculation, "--per-request-spec-decode-metrics=detailed", "--enable-per-request-metrics")
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        engines = [stack.enter_context(start_engine("real", vllm, folder, *flags)) for _ in range(2)]
        return asyncio.run(_evaluate(engines, _write_prompts(folder), evaluations))


async def _evaluate(engines: list[RunningEngine], prompts: Path, evaluations: int) -> dict[str, float]:
    results: list[tuple[PairedVerdict, int]] = []
    plan, state, began = PairedPlan(), PairedState(), time.monotonic()
    async for process, batch in _read_batches(engines, prompts):
        state = add_batches(state, process, [batch])
        state, verdict = evaluate_pairs(state, plan, 0.0)
        if verdict.outcome != "Continue" or state.steps.pairs >= MAX_PAIRS:
            results.append((verdict, state.steps.pairs))
            print(f"[{time.monotonic() - began:5.0f} s] {len(results)}: {verdict.outcome}: {verdict.message}", flush=True)
            state = PairedState(counted_batches=state.counted_batches)
        if len(results) == evaluations:
            break
    pairs = [count for verdict, count in results if verdict.outcome == "Promote"]
    return {
        "aa_runs": len(results),
        "aa_rollbacks": sum(verdict.outcome == "Rollback" for verdict, _ in results),
        "aa_accepted": len(pairs),
        "aa_pairs_max": max(pairs, default=0),
    }


async def _read_batches(engines: list[RunningEngine], prompts: Path) -> AsyncIterator[tuple[str, PairBatch]]:
    """Yield the batches of an evaluator between the engines, each with the evaluator's process, without end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    canary, control = (engine.url for engine in engines)
    settings = EvaluatorSettings(
        Engines((canary,), (control,), timeout_seconds=600.0),
        ReplayRules(MAX_ANSWER_TOKENS, has_neutral_defaults=True),
        _TOKEN,
        prompts=prompts,
        in_flight=IN_FLIGHT,
        host="127.0.0.1",
        port=port,
    )
    async with serve(settings) as process, aiohttp.ClientSession(headers={"Authorization": f"Bearer {_TOKEN}"}) as client:
        number = 0
        while True:
            query = {"process": process, "after": str(number)}
            async with client.get(f"http://127.0.0.1:{port}/aerie/pairs", params=query) as response:
                batches = [PairBatch.from_dict(document) for document in (await response.json())["batches"]]
            for batch in batches:
                number = batch.number
                yield process, batch
            await asyncio.sleep(0.5)


def _write_prompts(folder: Path) -> Path:
    """Write the bundle's prompts at alternating temperatures, as the evaluator reads them."""
    path = folder / "prompts.jsonl"
    lines = [
        json.dumps({"messages": list(prompt.messages), "temperature": TEMPERATURES[index % len(TEMPERATURES)]})
        for index, prompt in enumerate(read_prompts(BUNDLE_FOLDER / "prompts.jsonl"))
    ]
    path.write_text("\n".join(lines))
    return path
