"""Speed of the operator's parser and of preflight, and speed and accuracy of simulated engines.

| key           | what is measured                                                                                          |
|---------------|-----------------------------------------------------------------------------------------------------------|
| parse_300k_ms | a metrics response of 300 KiB: a captured one of real vLLM, with several data-parallel ranks; median of 200 |
| preflight_s   | headers of a target with 700 shards and 105,000 tensors, from a folder, and all checks; best of five      |
| sim_rps       | simulated engine as a process: streamed requests (100 tokens in, 32 out) per second of its CPU time      |
| sim_rss_mib   | the same process: its peak resident memory with 64 clients                                                |
| des_x_realtime | four simulated pods at 1 request/s each (512 in, 200 out, medians), K = 3, scraped every 15 s: simulated  |
|               | seconds per second of CPU time, one core; two hours of them                                               |
| agreement_al_pct | real vLLM on CPU (EAGLE 3.1 drafter of the bundle, K = 3, 120 requests, 4 clients) and the simulator,  |
|               | configured from its counters, on the same traffic: difference in acceptance length, per cent              |
| agreement_tpot_pct | the same in mean time per output token; only a quiet machine tells something                         |
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from aerie.engine.metrics.exposition import parse_exposition
from aerie_lab.engine.acceptance import CLASS_ACCEPTANCE
from aerie_lab.engine.fleet import SimulatedFleet, SimulatedPod
from aerie_lab.engine.request import EngineSettings
from aerie_lab.engine.step import STEP_TIME_FORMULAS
from aerie_lab.engine.traffic import TrafficTarget, run_closed_loop
from aerie_lab.engine.workload import LengthDistribution, PoissonArrivals, TrafficClass, generate_turns
from benchmarks._engine_agreement import agreement
from benchmarks._engine_preflight import preflight

PAGE = Path(__file__).resolve().parent.parent / "tests" / "unit" / "engine" / "data" / "vllm-0.32.0-ngram-2.prom"


def measure() -> dict[str, float]:
    own = {"parse_300k_ms": parse_page(), "preflight_s": preflight(), **simulator(), "des_x_realtime": simulated_fleet()}
    return own | agreement()


def parse_page(size: int = 300 * 1024, repeats: int = 200) -> float:
    """Measure the milliseconds to parse an exposition of at least `size` bytes, with different labels for every rank."""
    single_rank = PAGE.read_bytes()
    ranks = (single_rank.replace(b'engine="0"', b'engine="%d"' % rank) for rank in range(-(-size // len(single_rank))))
    exposition = b"".join(ranks)
    parse_exposition(exposition)
    milliseconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        parse_exposition(exposition)
        milliseconds.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(milliseconds), 2)


def simulator(requests: int = 6000, clients: int = 64) -> dict[str, float]:
    """Measure requests per CPU second and peak MiB of the simulator's process. Raises AssertionError if a response is wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "startup_seconds": 0,
        "step_time": {
            "formula": {
                "base_seconds": 5e-3,
                "seconds_per_token": 2e-5,
                "seconds_per_draft_token": 2e-4,
                "seconds_per_prompt_token": 1e-6,
            }
        },
    }
    speculation = '{"method": "ngram", "num_speculative_tokens": 3}'
    command = [sys.executable, "-m", "aerie_lab.engine", "bench", "--port", str(port), "--speculative-config", speculation]
    process = subprocess.Popen(command, env={**os.environ, "AERIE_SIMULATOR": json.dumps(options)}, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _until_healthy(url)
        kind = TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(100, 0.5), LengthDistribution(32, 0.5))
        before = _cpu_seconds(process.pid)
        turns = itertools.islice(generate_turns([kind], PoissonArrivals(1.0), 0.0, float("inf")), requests)
        report = asyncio.run(run_closed_loop(TrafficTarget(url, "bench"), turns, clients))
        seconds = _cpu_seconds(process.pid) - before
        assert not report.errors, report.errors
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
        return {"sim_rps": round(requests / seconds), "sim_rss_mib": round(peak / 1024, 1)}
    finally:
        process.kill()
        process.wait()


def _until_healthy(url: str, within: float = 60.0) -> None:
    began = time.monotonic()
    while True:
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            if time.monotonic() - began > within:
                raise
            time.sleep(0.05)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(value) for value in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def simulated_fleet(seconds: float = 7200.0) -> float:
    """Measure the simulated seconds per CPU second."""
    pods = [
        SimulatedPod(f"pod-{i}", EngineSettings(num_speculative_tokens=3), STEP_TIME_FORMULAS["dense-8b"], 1 + 0.02 * i)
        for i in range(4)
    ]
    kind = TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(512, 0.5), LengthDistribution(200, 0.5))
    fleet = SimulatedFleet(pods, [kind], PoissonArrivals(4.0))
    began = time.process_time()
    scrapes = sum(1 for _ in fleet.run(seconds))
    spent = time.process_time() - began
    assert scrapes >= 4 * seconds / 15 - 4
    return round(seconds / spent)
