"""Evaluations of a drafter against itself on real vLLM: how often they roll back, and whether they notice wrong answers.

    prompts of the bundle, half of them sampled ─► evaluator ─┬─► engine with EAGLE 3.1 ─┐
                                                              └─► engine with EAGLE 3.1 ─┴─► batches ─► one verdict after another

Two engines and one evaluator run from the first evaluation to the last, as nothing in them remembers an evaluation. Each batch
counts in one evaluation. An evaluation ends with its verdict, or after MAX_PAIRS pairs.

Both engines get the seed of each request, so sampled answers are equal, too, unless an engine or a drafter is at fault. vLLM as
released is at fault on a CPU (issue 55005): with speculation its sampled answers do not follow the target's distribution.

Guarantee: the evaluator and the decisions are the product's own. Not guaranteed: anything about times; the engines share two
cores, so whoever runs first is slowed down by the other.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.state import PairBatch, PairedState, add_batches
from aerie.analysis.paired.verdict import ANSWERS_DIFFER, PairedVerdict, evaluate_pairs
from aerie.evaluator.process import serve
from aerie.evaluator.replay import Engines
from aerie.evaluator.requests import ReplayRules
from aerie.evaluator.settings import EvaluatorSettings
from aerie_drafter.evaluate.prompts import read_prompts
from aerie_lab.binaries import ensure_family
from aerie_lab.testing.agreement import BUNDLE_FOLDER, RunningEngine, build_speculative_config, start_engine
from aerie_lab.testing.sampled import UNPATCHED_ENVIRONMENT

MAX_PAIRS = 1500
MAX_ANSWER_TOKENS, IN_FLIGHT = 40, 8
_TOKEN = "of-the-benchmark" * 2


def measure_same_drafter(evaluations: int) -> dict[str, float]:
    """Return the keys of so many evaluations, and print their verdicts."""
    results = _evaluate_same_drafter(evaluations, (0.0, 0.7, 1.0), {})
    pairs = [count for verdict, count in results if verdict.outcome == "Promote"]
    return {
        "aa_runs": len(results),
        "aa_rollbacks": sum(verdict.outcome == "Rollback" for verdict, _ in results),
        "aa_accepted": len(pairs),
        "aa_pairs_max": max(pairs, default=0),
    }


def measure_released_sampling(evaluations: int) -> dict[str, float]:
    """Return the keys of so many evaluations of sampled requests with vLLM as released, and print their verdicts."""
    results = _evaluate_same_drafter(evaluations, (0.7, 1.0), UNPATCHED_ENVIRONMENT)
    pairs = [count for verdict, count in results if verdict.rollback_reason == ANSWERS_DIFFER]
    return {
        "released_sampling_runs": len(results),
        "released_sampling_noticed": len(pairs),
        "released_sampling_pairs_max": max(pairs, default=0),
    }


def _evaluate_same_drafter(
    evaluations: int, temperatures: Sequence[float], environment: Mapping[str, str]
) -> list[tuple[PairedVerdict, int]]:
    """Return the verdict and the pairs of each evaluation. `temperatures`: of the requests in turn."""
    vllm = ensure_family("vllm", lambda line: print(line, flush=True))
    speculation = build_speculative_config(BUNDLE_FOLDER / "eagle31")
    flags = ("--speculative-config", speculation, "--per-request-spec-decode-metrics=detailed", "--enable-per-request-metrics")
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        engines = [stack.enter_context(start_engine("real", vllm, folder, *flags, variables=environment)) for _ in range(2)]
        return asyncio.run(_evaluate(engines, _write_prompts(folder, temperatures), evaluations))


async def _evaluate(engines: list[RunningEngine], prompts: Path, evaluations: int) -> list[tuple[PairedVerdict, int]]:
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
    return results


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


def _write_prompts(folder: Path, temperatures: Sequence[float]) -> Path:
    """Write the bundle's prompts, at the temperatures in turn, as the evaluator reads them."""
    path = folder / "prompts.jsonl"
    lines = [
        json.dumps({"messages": list(prompt.messages), "temperature": temperatures[index % len(temperatures)]})
        for index, prompt in enumerate(read_prompts(BUNDLE_FOLDER / "prompts.jsonl"))
    ]
    path.write_text("\n".join(lines))
    return path
