"""The simulator beside real vLLM on CPU: both started alike, the same traffic sent to both, and what each counted.

The simulator is configured from the real run: per-position acceptance and mean step time of that run, and how the step time grows
with the batch from two calibration loads before it. So the figures test what the simulator makes of its parameters (scheduling,
update rules, arithmetic of steps), not where the parameters come from. tests/vllm asserts them, `make bench NAME=engine` records
them.

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

from aerie_lab.engine.acceptance import CLASSES
from aerie_lab.engine.traffic import Report, Target, closed_loop
from aerie_lab.engine.workload import Lengths, Poisson, TrafficClass, turns

BUNDLE = Path(os.environ.get("AERIE_BUNDLE", Path(__file__).resolve().parents[3] / "drafter" / "bundle"))
"""The shipped target and drafters."""
K = 3
Kind = Literal["real", "simulated"]
LOG_CHARACTERS = 6000
"""The end of an engine's log that a failure shows."""
START = 900.0
"""Seconds for a start: 35 on an idle machine with two cores, several times that on a busy one."""


@dataclasses.dataclass
class Engine:
    """A running engine of either kind."""

    process: subprocess.Popen[str]
    client: httpx.Client
    log: Path
    kind: Kind

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    def page(self) -> str:
        return self.client.get("/metrics").text

    def settled(self) -> dict[str, float]:
        """The page's samples without labels, once they stand still: real vLLM books the last step's statistics after it has sent
        the last answer. Raises AssertionError where they do not in two minutes."""
        found = flat(self.page())
        for _ in range(120):
            time.sleep(1.0)
            before, found = found, flat(self.page())
            if found == before:
                return found
        raise AssertionError("the page does not stand still: does somebody else ask this engine?")

    def load(self, clients: int, requests: int, answer: int, seed: int) -> tuple[dict[str, float], Report]:
        """Closed-loop traffic; what it added to the page, by sample without labels, and what the clients saw."""
        kind = TrafficClass("docs", CLASSES["chat"], Lengths(60, 0.4), Lengths(answer, 0.4, most=400))
        made = list(itertools.islice(turns([kind], Poisson(1.0), 0.0, math.inf, seed), requests))
        before = self.settled()
        report = asyncio.run(closed_loop(Target(self.url, "agreement"), iter(made), clients))
        after = self.settled()
        return {name: value - before.get(name, 0.0) for name, value in after.items()}, report


def flat(page: str) -> dict[str, float]:
    """What the engine counts: sums over labels, but for the draft position."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name + (f"[{sample.labels['position']}]" if "position" in sample.labels else "")
            if sample.name.startswith("vllm:") and "le" not in sample.labels:
                found[name] = found.get(name, 0.0) + sample.value
    return found


def command(kind: Kind, vllm: Path, port: int, *words: str, model: Path | None = None) -> list[str]:
    """The same command line for both; `vllm` is the folder with the program."""
    program = [str(vllm / "vllm"), "serve"] if kind == "real" else [sys.executable, "-m", "aerie_lab.engine"]
    limits = ["--max-model-len=2048", "--max-num-seqs=16", "--dtype=float32", "--enforce-eager", "--block-size=128"]
    place = ["--host=127.0.0.1", f"--port={port}", "--served-model-name=agreement", "--kv-cache-memory-bytes=134217728"]
    return [*program, str(model or BUNDLE / "target"), *place, *limits, *words]


def speculation(drafter: Path, **more: str) -> str:
    """A static K; `more` keys as vLLM has them."""
    return json.dumps({"method": "eagle3", "model": str(drafter), "num_speculative_tokens": K, **more})


def environment(options: Mapping[str, Any]) -> dict[str, str]:
    """The environment of both; `options` are the simulator's own."""
    return {
        **os.environ,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Five seconds by default, as long as httpx keeps one: on busy cores a request would meet a connection that is closing.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3900",
        "OMP_NUM_THREADS": "1",
        "AERIE_SIMULATOR": json.dumps({"startup_seconds": 0.5, **options}),
    }


@contextlib.contextmanager
def engine(
    kind: Kind,
    vllm: Path,
    folder: Path,
    *words: str,
    options: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """An engine that answers /health; killed with all its processes at the end. `variables`: more of its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / f"{kind}-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(kind, vllm, port, *words),
            env=environment(options or {}) | dict(variables or {}),
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            began = time.monotonic()
            while not healthy(client):
                assert process.poll() is None, "the engine ended before it was healthy"
                assert time.monotonic() - began < START, "the engine is not healthy in time"
                time.sleep(0.1)
            yield Engine(process, client, log, kind)
    except Exception as error:
        error.add_note(f"The engine's log ends with:\n{log.read_text()[-LOG_CHARACTERS:]}")
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def healthy(client: httpx.Client) -> bool:
    """Whether /health answers 200."""
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@dataclasses.dataclass
class Pair:
    """One run against each kind."""

    real: dict[str, float]
    simulated: dict[str, float]
    pages: dict[Kind, str]
    reports: dict[Kind, Report]
    configured: dict[str, Any]
    """The simulator's options."""


def compared(vllm: Path, folder: Path) -> Pair:
    """The same 120 requests to both, one engine after the other; logs go to `folder`. Takes one and a half minutes."""
    words = ("--speculative-config", speculation(BUNDLE / "eagle31"))
    pages: dict[Kind, str] = {}
    reports: dict[Kind, Report] = {}
    with engine("real", vllm, folder, *words) as real:
        real.load(2, 4, 30, seed=0)  # first requests pay for lazily made state
        one, _ = real.load(1, 16, 100, seed=1)
        found, reports["real"] = real.load(4, 120, 120, seed=3)
        eight, _ = real.load(8, 64, 100, seed=2)
        pages["real"] = real.page()
    configured = configure(one, found, eight)
    with engine("simulated", vllm, folder, *words, options=configured) as simulated:
        again, reports["simulated"] = simulated.load(4, 120, 120, seed=3)
        pages["simulated"] = simulated.page()
    return Pair(found, again, pages, reports, configured)


def step(counted: dict[str, float]) -> tuple[float, float]:
    """Mean batch, and mean seconds of a step."""
    observed = counted["vllm:inter_token_latency_seconds_count"]
    return observed / counted["vllm:iteration_tokens_total_count"], counted["vllm:inter_token_latency_seconds_sum"] / observed


def configure(one: dict[str, float], found: dict[str, float], eight: dict[str, float]) -> dict[str, Any]:
    """Options of the simulator from what the real engine counted."""
    (b1, t1), (b, t), (b8, t8) = step(one), step(found), step(eight)
    token = max((t8 - t1) / ((b8 - b1) * (K + 1)), 0.0)
    prefill = max(
        (mean(one, "vllm:request_prefill_time_seconds") - t1) / mean(one, "vllm:request_prefill_kv_computed_tokens"), 0.0
    )
    # Mean steps contain what was prefilled in them.
    prompt = found["vllm:request_prefill_kv_computed_tokens_sum"] / found["vllm:iteration_tokens_total_count"]
    base = t - token * b * (K + 1) - prefill * prompt
    drafts = found["vllm:spec_decode_num_drafts_total"]
    rates = [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{i}]"] / drafts for i in range(K)]
    time_of_step = {"base": base, "token": token, "prefill": prefill}
    return {
        "step_time": {"formula": time_of_step},
        "acceptance": {"docs": {"rates": rates}},
        "default_class": "docs",
        "drafter_effect": False,
    }


def length(counted: dict[str, float]) -> float:
    """Acceptance length."""
    return 1 + counted["vllm:spec_decode_num_accepted_tokens_total"] / counted["vllm:spec_decode_num_drafts_total"]


def per_token(counted: dict[str, float]) -> float:
    """Mean time per output token, every request weighing the same."""
    name = "vllm:request_time_per_output_token_seconds"
    return counted[f"{name}_sum"] / counted[f"{name}_count"]


def decode(counted: dict[str, float]) -> float:
    """Time per token, long answers weighing more than short ones."""
    tokens = counted["vllm:generation_tokens_total"] - counted["vllm:time_to_first_token_seconds_count"]
    return counted["vllm:inter_token_latency_seconds_sum"] / tokens


def difference(pair: Pair, of: Callable[[dict[str, float]], float]) -> float:
    """Simulated over real, less one."""
    return of(pair.simulated) / of(pair.real) - 1


def measured(pair: Pair) -> str:
    """The table of docs/simulator.md."""
    rows = ["| quantity | real vLLM | simulator | difference |", "|---|---|---|---|"]
    for title, of in (
        ("acceptance length", length),
        ("mean time per output token, ms", lambda counted: 1000 * per_token(counted)),
        ("time per output token over all tokens, ms", lambda c: 1000 * decode(c)),
        ("mean time to first token, ms", lambda c: 1000 * mean(c, "vllm:time_to_first_token_seconds")),
        ("mean request latency, ms", lambda c: 1000 * mean(c, "vllm:e2e_request_latency_seconds")),
        ("mean batch", lambda counted: step(counted)[0]),
    ):
        rows.append(f"| {title} | {of(pair.real):.3f} | {of(pair.simulated):.3f} | {100 * difference(pair, of):+.1f} % |")
    return "\n".join(rows)


def mean(counted: dict[str, float], name: str) -> float:
    """Mean of a histogram."""
    return counted[f"{name}_sum"] / counted[f"{name}_count"]
