"""Sampled requests on real vLLM on CPU, the bundle's EAGLE 3.1 drafter, K = 3: acceptance, and the answers' distribution.

| key                           | what is measured                                                                             |
|-------------------------------|----------------------------------------------------------------------------------------------|
| al_tT_DRAFTS                  | acceptance length by vLLM's counters at temperature T (t1: 1, t07: 0.7), drafts greedy       |
|                               | (vLLM's default) or probabilistic (draft_sample_method); all prompts, 160 tokens at most     |
| distribution_p_DRAFTS         | p-value of a difference between answers with such drafts and without a drafter               |
| distribution_p_broken         | the same of the engine as released (vLLM issue 55005), greedy drafts; 0.0001 is the least    |
| counted_bias_pct              | acceptance length by the counters over received tokens per verification step, less 1: the    |
|                               | largest of all runs                                                                          |
| judged_bias_pct               | the same of windows.tokens_per_step: (generation - first tokens) per request step; its size  |
| served_offline_difference_pct | acceptance length served over `aerie-drafter evaluate` at temperature 1, less 1: the larger  |
|                               | of both kinds of drafts                                                                      |
| served_offline_error_pct      | the standard error of that difference, from rounds with other seeds                          |

Received tokens are counted by the client: token ids of each answer, and the verification steps that the answer itself reports.
Each request has a seed of its own. ROUNDS=1 in the environment makes it small (the default is 8, at temperature 1); the error is
then not known.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aerie.engine.metrics import rates
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import Counters, diff_samples
from aerie.engine.speculation import Static
from aerie_drafter.evaluate.offline import EvaluationOptions, ModelPair, evaluate_prompts, sum_acceptance
from aerie_drafter.evaluate.prompts import Prompt, read_prompts
from aerie_lab.binaries import ensure_family
from aerie_lab.testing.agreement import (
    BUNDLE_FOLDER,
    NUM_SPECULATIVE_TOKENS,
    RunningEngine,
    build_speculative_config,
    start_engine,
)
from aerie_lab.testing.sampled import (
    SAMPLING_SETTINGS,
    UNFILTERED_SAMPLING_SETTINGS,
    UNPATCHED_ENVIRONMENT,
    ChatRequest,
    EngineSamples,
    derive_seed,
    permutation_p_value,
    sample_engine,
    send_requests,
)

DRAFTER = BUNDLE_FOLDER / "eagle31"
DRAFTS = ("greedy", "probabilistic")
TEMPERATURES = {"t1": 1.0, "t07": 0.7}
LONGEST = 160
"""Maximum tokens of an answer."""
EACH = 300
"""Answers of each kind for the distribution."""
ROUNDS = int(os.environ.get("ROUNDS", "8"))


@dataclass(frozen=True)
class Run:
    """One run of all prompts."""

    counted: float
    """Acceptance length by vLLM's counters."""
    tokens_per_step: float
    received: float
    """Tokens after the first per verification step, as received by the client."""


def measure() -> dict[str, float]:
    vllm = ensure_family("vllm", _print_progress)
    prompts = read_prompts(BUNDLE_FOLDER / "prompts.jsonl")
    few = [prompt.messages for prompt in prompts[::40]]
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as scratch:
        folder = Path(scratch)
        with start_engine("real", vllm, folder) as off:
            alone = sample_engine(off, "off", few, EACH)
        with start_engine("real", vllm, folder, *_speculation_arguments("greedy"), variables=UNPATCHED_ENVIRONMENT) as broken:
            figures = {"distribution_p_broken": _distribution_p_value(alone, broken, "broken", few, UNFILTERED_SAMPLING_SETTINGS)}
        runs: dict[tuple[str, str], list[Run]] = {}
        for drafts in DRAFTS:
            with start_engine("real", vllm, folder, *_speculation_arguments(drafts)) as served:
                figures[f"distribution_p_{drafts}"] = _distribution_p_value(alone, served, drafts, few)
                for key, temperature in TEMPERATURES.items():
                    rounds = range(ROUNDS if key == "t1" else 1)
                    runs[key, drafts] = [_run(served, prompts, drafts, temperature, number) for number in rounds]
    for (key, drafts), some in runs.items():
        figures[f"al_{key}_{drafts}"] = round(statistics.fmean(run.counted for run in some), 3)
    figures |= _biases([run for some in runs.values() for run in some])
    return figures | _against_offline(prompts, {drafts: [run.counted for run in runs["t1", drafts]] for drafts in DRAFTS})


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _speculation_arguments(drafts: str) -> list[str]:
    config = build_speculative_config(DRAFTER, draft_sample_method=drafts)
    return ["--speculative-config", config, "--per-request-spec-decode-metrics", "detailed"]


def _distribution_p_value(
    alone: EngineSamples,
    running: RunningEngine,
    name: str,
    few: Sequence[Sequence[Mapping[str, str]]],
    kinds: Sequence[Mapping[str, float]] = SAMPLING_SETTINGS,
) -> float:
    p_value = permutation_p_value(alone, sample_engine(running, name, few, EACH, kinds))
    _print_progress(f"{name}: p = {p_value:.4f} against no drafter")
    return round(p_value, 4)


def _run(running: RunningEngine, prompts: Sequence[Prompt], drafts: str, temperature: float, number: int) -> Run:
    requests = [
        ChatRequest(prompt.messages, LONGEST, {"temperature": temperature}, derive_seed(drafts, temperature, number, index))
        for index, prompt in enumerate(prompts)
    ]
    running.read_stable_samples()
    before = parse_exposition(running.read_metrics().encode())
    answers = send_requests(running, requests)
    running.read_stable_samples()
    counted = diff_samples(before, parse_exposition(running.read_metrics().encode()))
    assert isinstance(counted, Counters), counted
    length, tokens_per_step = rates.acceptance_length(counted, Static(NUM_SPECULATIVE_TOKENS)), rates.tokens_per_step(counted)
    assert isinstance(length, rates.Bounds), length
    assert isinstance(tokens_per_step, float), tokens_per_step
    steps = sum(answer.verification_steps for answer in answers)
    run = Run(length.low, tokens_per_step, sum(len(answer.token_ids) - 1 for answer in answers) / steps)
    _print_progress(f"{drafts}, temperature {temperature:g}, round {number}: {run}, {steps} steps")
    return run


def _biases(runs: Sequence[Run]) -> dict[str, float]:
    return {
        "counted_bias_pct": round(100 * max(run.counted / run.received - 1 for run in runs), 2),
        "judged_bias_pct": round(100 * max(abs(run.tokens_per_step / run.received - 1) for run in runs), 3),
    }


def _against_offline(prompts: Sequence[Prompt], served: dict[str, list[float]]) -> dict[str, float]:
    """Compare with `aerie-drafter evaluate --temperature 1`, with --sampled-drafts for probabilistic drafts, once a round."""
    pair = ModelPair.load(BUNDLE_FOLDER / "target", DRAFTER)
    differences: list[tuple[float, float]] = []
    for drafts, served_lengths in served.items():
        options_by_round = [
            EvaluationOptions(
                NUM_SPECULATIVE_TOKENS, LONGEST, 1.0, drafts == "probabilistic", derive_seed("offline", drafts, number)
            )
            for number in range(ROUNDS)
        ]
        offline_lengths = [
            sum_acceptance(evaluate_prompts(pair, prompts, options)).acceptance_length for options in options_by_round
        ]
        mean = statistics.fmean(offline_lengths)
        _print_progress(f"{drafts}: served {statistics.fmean(served_lengths):.4f}, offline {mean:.4f}")
        differences.append(
            (statistics.fmean(served_lengths) / mean - 1, math.hypot(_error(served_lengths), _error(offline_lengths)) / mean)
        )
    difference, error = max(differences, key=lambda estimate: abs(estimate[0]))
    figures = {"served_offline_difference_pct": round(100 * abs(difference), 2)}
    return figures | ({"served_offline_error_pct": round(100 * error, 2)} if ROUNDS > 1 else {})


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
