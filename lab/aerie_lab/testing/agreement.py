"""Comparison of the simulator with real vLLM on CPU: equal arguments, equal traffic, and the counters of both.

The simulator is configured from the real run: per-position acceptance and mean step time of that run, and the growth of the step
time with the batch from two calibration loads before it. So the measurements test what the simulator makes of its parameters
(scheduling, update rules, arithmetic of steps), not where the parameters come from. tests/vllm asserts them, and
`make bench NAME=engine` records them.

Not guaranteed: that times agree while other work keeps the cores busy: the real engine's speed then changes within a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from aerie_lab.engine.load_generation.traffic import TrafficReport, TrafficTarget, run_closed_loop
from aerie_lab.engine.load_generation.workload import LengthDistribution, PoissonArrivals, TrafficClass, generate_turns
from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE
from aerie_lab.testing import vllm_start

BUNDLE_FOLDER = Path(os.environ.get("AERIE_BUNDLE", Path(__file__).resolve().parents[3] / "drafter" / "bundle"))
"""The shipped target and drafters."""
NUM_SPECULATIVE_TOKENS = 3
EngineKind = Literal["real", "simulated"]
LOG_CHARACTERS = 6000
"""The end of an engine's log that a failure shows."""
START_TIMEOUT_SECONDS = 900.0
"""Seconds for a start: 35 on an idle machine with two cores, several times that on a busy one."""


@dataclasses.dataclass
class RunningEngine:
    """A running engine of either kind."""

    process: subprocess.Popen[str]
    client: httpx.Client
    log_file: Path
    kind: EngineKind

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    def read_metrics(self) -> str:
        return self.client.get("/metrics").text

    def read_stable_samples(self) -> dict[str, float]:
        """The page's samples without labels, once they stand still: real vLLM books the last step's statistics after it has sent
        the last answer. Raises AssertionError where they do not in two minutes."""
        current = sum_samples(self.read_metrics())
        for _ in range(120):
            time.sleep(1.0)
            before, current = current, sum_samples(self.read_metrics())
            if current == before:
                return current
        raise AssertionError("the metrics keep changing: does another client use this engine?")

    def run_load(self, clients: int, requests: int, answer_tokens: int, seed: int) -> tuple[dict[str, float], TrafficReport]:
        """Closed-loop traffic; what it added to the page, by sample without labels, and what the clients saw."""
        kind = TrafficClass(
            "docs", CLASS_ACCEPTANCE["chat"], LengthDistribution(60, 0.4), LengthDistribution(answer_tokens, 0.4, max_tokens=400)
        )
        turns = list(itertools.islice(generate_turns([kind], PoissonArrivals(1.0), 0.0, math.inf, seed), requests))
        before = self.read_stable_samples()
        report = asyncio.run(run_closed_loop(TrafficTarget(self.url, "agreement"), iter(turns), clients))
        after = self.read_stable_samples()
        return {name: value - before.get(name, 0.0) for name, value in after.items()}, report


def sum_samples(exposition: str) -> dict[str, float]:
    """Return the engine's counters, summed over all labels except the draft position."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            name = sample.name + (f"[{sample.labels['position']}]" if "position" in sample.labels else "")
            if sample.name.startswith("vllm:") and "le" not in sample.labels:
                samples[name] = samples.get(name, 0.0) + sample.value
    return samples


def build_command(kind: EngineKind, vllm_folder: Path, port: int, *arguments: str, model: Path | None = None) -> list[str]:
    """Return the command line, equal for both; `vllm_folder` has the program."""
    program = [str(vllm_folder / "vllm"), "serve"] if kind == "real" else [sys.executable, "-m", "aerie_lab.engine"]
    limits = ["--max-model-len=2048", "--max-num-seqs=16", "--dtype=float32", "--enforce-eager", "--block-size=128"]
    place = ["--host=127.0.0.1", f"--port={port}", "--served-model-name=agreement", "--kv-cache-memory-bytes=134217728"]
    return [*program, str(model or BUNDLE_FOLDER / "target"), *place, *limits, *arguments]


def build_speculative_config(drafter: Path, **more: str) -> str:
    """Return the config of a static K; `more` has further keys of vLLM."""
    return json.dumps({"method": "eagle3", "model": str(drafter), "num_speculative_tokens": NUM_SPECULATIVE_TOKENS, **more})


def build_engine_environment(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment, equal for both; `options` are the simulator's own."""
    return {**vllm_start.build_environment(), "AERIE_SIMULATOR": json.dumps({"startup_seconds": 0.5, **options})}


@contextlib.contextmanager
def start_engine(
    kind: EngineKind,
    vllm_folder: Path,
    folder: Path,
    *arguments: str,
    options: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[RunningEngine]:
    """An engine that answers /health; killed with all its processes at the end. `variables`: more of its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / f"{kind}-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            build_command(kind, vllm_folder, port, *arguments),
            env=build_engine_environment(options or {}) | dict(variables or {}),
            stdout=output,
            stderr=output,
            text=True,
            process_group=0,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            began = time.monotonic()
            while not is_healthy(client):
                assert process.poll() is None, "the engine ended before it was healthy"
                assert time.monotonic() - began < START_TIMEOUT_SECONDS, "the engine is not healthy in time"
                time.sleep(0.1)
            yield RunningEngine(process, client, log, kind)
    except Exception as error:
        error.add_note(f"The engine's log ends with:\n{log.read_text()[-LOG_CHARACTERS:]}")
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_healthy(client: httpx.Client) -> bool:
    """Return whether /health answers 200."""
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@dataclasses.dataclass
class AgreementRun:
    """One run against each kind."""

    real: dict[str, float]
    simulated: dict[str, float]
    pages: dict[EngineKind, str]
    reports: dict[EngineKind, TrafficReport]
    simulator_options: dict[str, Any]
    """The simulator's options."""


def run_agreement(vllm_folder: Path, folder: Path) -> AgreementRun:
    """Send the same 120 requests to both, one engine after the other; logs go to `folder`. Takes one and a half minutes."""
    words = ("--speculative-config", build_speculative_config(BUNDLE_FOLDER / "eagle31"))
    pages: dict[EngineKind, str] = {}
    reports: dict[EngineKind, TrafficReport] = {}
    with start_engine("real", vllm_folder, folder, *words) as real:
        real.run_load(2, 4, 30, seed=0)  # the first requests are slower: lazy initialization
        one_client, _ = real.run_load(1, 16, 100, seed=1)
        four_clients, reports["real"] = real.run_load(4, 120, 120, seed=3)
        eight, _ = real.run_load(8, 64, 100, seed=2)
        pages["real"] = real.read_metrics()
    configured = build_simulator_options(one_client, four_clients, eight)
    with start_engine("simulated", vllm_folder, folder, *words, options=configured) as simulated:
        simulated_samples, reports["simulated"] = simulated.run_load(4, 120, 120, seed=3)
        pages["simulated"] = simulated.read_metrics()
    return AgreementRun(four_clients, simulated_samples, pages, reports, configured)


def mean_step(samples: dict[str, float]) -> tuple[float, float]:
    """Return the mean batch, and the mean seconds of a step."""
    observed = samples["vllm:inter_token_latency_seconds_count"]
    return observed / samples["vllm:iteration_tokens_total_count"], samples["vllm:inter_token_latency_seconds_sum"] / observed


def build_simulator_options(
    one_client: dict[str, float], four_clients: dict[str, float], eight_clients: dict[str, float]
) -> dict[str, Any]:
    """Options of the simulator from what the real engine counted."""
    (b1, t1), (b, t), (b8, t8) = mean_step(one_client), mean_step(four_clients), mean_step(eight_clients)
    token = max((t8 - t1) / ((b8 - b1) * (NUM_SPECULATIVE_TOKENS + 1)), 0.0)
    prefill = max(
        (histogram_mean(one_client, "vllm:request_prefill_time_seconds") - t1)
        / histogram_mean(one_client, "vllm:request_prefill_kv_computed_tokens"),
        0.0,
    )
    # Mean steps contain what was prefilled in them.
    prompt = four_clients["vllm:request_prefill_kv_computed_tokens_sum"] / four_clients["vllm:iteration_tokens_total_count"]
    base = t - token * b * (NUM_SPECULATIVE_TOKENS + 1) - prefill * prompt
    drafts = four_clients["vllm:spec_decode_num_drafts_total"]
    rates = [
        four_clients[f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{i}]"] / drafts for i in range(NUM_SPECULATIVE_TOKENS)
    ]
    time_of_step = {"base_seconds": base, "seconds_per_token": token, "seconds_per_prompt_token": prefill}
    return {
        "step_time": {"formula": time_of_step},
        "acceptance": {"docs": {"rates": rates}},
        "default_class": "docs",
        "apply_drafter_effect": False,
    }


def acceptance_length(samples: dict[str, float]) -> float:
    """Return the acceptance length."""
    return 1 + samples["vllm:spec_decode_num_accepted_tokens_total"] / samples["vllm:spec_decode_num_drafts_total"]


def mean_time_per_output_token(samples: dict[str, float]) -> float:
    """Return the mean time per output token, with equal weights of the requests."""
    name = "vllm:request_time_per_output_token_seconds"
    return samples[f"{name}_sum"] / samples[f"{name}_count"]


def mean_time_per_token(samples: dict[str, float]) -> float:
    """Return the time per token; longer answers have more weight."""
    tokens = samples["vllm:generation_tokens_total"] - samples["vllm:time_to_first_token_seconds_count"]
    return samples["vllm:inter_token_latency_seconds_sum"] / tokens


def relative_difference(run: AgreementRun, metric: Callable[[dict[str, float]], float]) -> float:
    """Return simulated over real, less one."""
    return metric(run.simulated) / metric(run.real) - 1


def render_agreement_table(run: AgreementRun) -> str:
    """Return the table of docs/reference/simulator.md."""
    rows = ["| quantity | real vLLM | simulator | difference |", "|---|---|---|---|"]
    for title, of in (
        ("acceptance length", acceptance_length),
        ("mean time per output token, ms", lambda counted: 1000 * mean_time_per_output_token(counted)),
        ("time per output token over all tokens, ms", lambda c: 1000 * mean_time_per_token(c)),
        ("mean time to first token, ms", lambda c: 1000 * histogram_mean(c, "vllm:time_to_first_token_seconds")),
        ("mean request latency, ms", lambda c: 1000 * histogram_mean(c, "vllm:e2e_request_latency_seconds")),
        ("mean batch", lambda counted: mean_step(counted)[0]),
    ):
        rows.append(f"| {title} | {of(run.real):.3f} | {of(run.simulated):.3f} | {100 * relative_difference(run, of):+.1f} % |")
    return "\n".join(rows)


def histogram_mean(samples: dict[str, float], name: str) -> float:
    """Return the mean of a histogram."""
    return samples[f"{name}_sum"] / samples[f"{name}_count"]
