"""The simulator against real vLLM on CPU, on the same traffic: pages, relations of counters, acceptance length, time per token,
and how both fail and end. docs/simulator.md has the table that `measured` prints.

The simulator is configured from the real run: per-position acceptance and mean step time of that run, and how the step time grows
with the batch from two calibration loads before it. So the figures test what the simulator makes of its parameters (scheduling,
update rules, arithmetic of steps), not where the parameters come from.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aerie_lab.engine.acceptance import CLASSES
from aerie_lab.engine.traffic import Report, Target, closed_loop
from aerie_lab.engine.workload import Lengths, Poisson, TrafficClass, turns
from aerie_lab.testing import until

pytestmark = pytest.mark.timeout(2400)  # the first test may have to install vLLM

BUNDLE = Path(os.environ.get("AERIE_BUNDLE", Path(__file__).resolve().parents[2] / "drafter" / "bundle"))
K = 3
Kind = Literal["real", "simulated"]
START = 300.0


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

    def load(self, clients: int, requests: int, answer: int, seed: int) -> tuple[dict[str, float], Report]:
        """Closed-loop traffic; what it added to the page, by sample without labels, and what the clients saw."""
        kind = TrafficClass("docs", CLASSES["chat"], Lengths(60, 0.4), Lengths(answer, 0.4, most=400))
        made = list(itertools.islice(turns([kind], Poisson(1.0), 0.0, math.inf, seed), requests))
        before = flat(self.page())
        report = asyncio.run(closed_loop(Target(self.url, "agreement"), iter(made), clients))
        time.sleep(1.0)  # real vLLM books the last step's statistics after it has sent the last answer
        after = flat(self.page())
        return {name: value - before.get(name, 0.0) for name, value in after.items()}, report


def flat(page: str) -> dict[str, float]:
    """Sums over labels, but for the draft position."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name + (f"[{sample.labels['position']}]" if "position" in sample.labels else "")
            if "le" not in sample.labels:
                found[name] = found.get(name, 0.0) + sample.value
    return found


def command(kind: Kind, vllm: Path, port: int, *words: str, model: Path | None = None) -> list[str]:
    program = [str(vllm / "vllm"), "serve"] if kind == "real" else [sys.executable, "-m", "aerie_lab.engine"]
    limits = ["--max-model-len=2048", "--max-num-seqs=16", "--dtype=float32", "--enforce-eager", "--block-size=128"]
    place = ["--host=127.0.0.1", f"--port={port}", "--served-model-name=agreement", "--kv-cache-memory-bytes=134217728"]
    return [*program, str(model or BUNDLE / "target"), *place, *limits, *words]


def speculation(drafter: Path) -> str:
    return json.dumps({"method": "eagle3", "model": str(drafter), "num_speculative_tokens": K})


def environment(options: dict[str, Any]) -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "AERIE_SIMULATOR": json.dumps({"startup_seconds": 0.5} | options),
    }


@contextlib.contextmanager
def engine(kind: Kind, vllm: Path, folder: Path, *words: str, options: dict[str, Any] | None = None) -> Iterator[Engine]:
    """An engine that answers /health; killed with all its processes at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / f"{kind}-{port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(kind, vllm, port, *words),
            env=environment(options or {}),
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            began = time.monotonic()
            while not healthy(client):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() - began < START, log.read_text()[-3000:]
                time.sleep(0.1)
            yield Engine(process, client, log, kind)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def healthy(client: httpx.Client) -> bool:
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


@pytest.fixture(scope="module")
def pair(vllm: Path, tmp_path_factory: pytest.TempPathFactory, say: Callable[[str], None]) -> Pair:
    folder = tmp_path_factory.mktemp("agreement")
    words = ("--speculative-config", speculation(BUNDLE / "eagle31"))
    pages: dict[Kind, str] = {}
    reports: dict[Kind, Report] = {}
    load = {"clients": 4, "requests": 120, "answer": 120, "seed": 3}
    with engine("real", vllm, folder, *words) as real:
        real.load(2, 4, 30, seed=0)  # first requests pay for lazily made state
        one, _ = real.load(1, 16, 100, seed=1)
        found, reports["real"] = real.load(**load)
        eight, _ = real.load(8, 64, 100, seed=2)
        pages["real"] = real.page()
    configured = configure(one, found, eight)
    with engine("simulated", vllm, folder, *words, options=configured) as simulated:
        again, reports["simulated"] = simulated.load(**load)
        pages["simulated"] = simulated.page()
    made = Pair(found, again, pages, reports, configured)
    say(measured(made))
    return made


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
    return 1 + counted["vllm:spec_decode_num_accepted_tokens_total"] / counted["vllm:spec_decode_num_drafts_total"]


def per_token(counted: dict[str, float]) -> float:
    name = "vllm:request_time_per_output_token_seconds"
    return counted[f"{name}_sum"] / counted[f"{name}_count"]


def decode(counted: dict[str, float]) -> float:
    """Time per token, long answers weighing more than short ones."""
    tokens = counted["vllm:generation_tokens_total"] - counted["vllm:time_to_first_token_seconds_count"]
    return counted["vllm:inter_token_latency_seconds_sum"] / tokens


def measured(pair: Pair) -> str:
    """The agreement table."""
    rows = ["| quantity | real vLLM | simulator | difference |", "|---|---|---|---|"]
    for title, of in (
        ("acceptance length", length),
        ("mean time per output token, ms", lambda counted: 1000 * per_token(counted)),
        ("time per output token over all tokens, ms", lambda c: 1000 * decode(c)),
        ("mean time to first token, ms", lambda c: 1000 * mean(c, "vllm:time_to_first_token_seconds")),
        ("mean request latency, ms", lambda c: 1000 * mean(c, "vllm:e2e_request_latency_seconds")),
        ("mean batch", lambda counted: step(counted)[0]),
    ):
        real, simulated = of(pair.real), of(pair.simulated)
        rows.append(f"| {title} | {real:.3f} | {simulated:.3f} | {100 * (simulated / real - 1):+.1f} % |")
    return "\n".join(rows)


def mean(counted: dict[str, float], name: str) -> float:
    return counted[f"{name}_sum"] / counted[f"{name}_count"]


def test_pages_have_the_same_families_labels_and_buckets(pair: Pair) -> None:
    def shape(page: str) -> dict[str, tuple[str, str, set[str]]]:
        return {
            family.name: (
                family.type,
                family.documentation,
                {
                    sample.name + str(sorted((k, v) for k, v in sample.labels.items() if k not in VARYING))
                    for sample in family.samples
                },
            )
            for family in text_string_to_metric_families(page)
        }

    real, simulated = shape(pair.pages["real"]), shape(pair.pages["simulated"])
    assert real.keys() == simulated.keys()
    for name in real:
        if not name.startswith("vllm:cache_config_info"):
            assert simulated[name] == real[name], name
    names = [
        {key for f in text_string_to_metric_families(page) if f.name == "vllm:cache_config_info" for key in f.samples[0].labels}
        for page in pair.pages.values()
    ]
    assert names[0] == names[1]
    order = [[line for line in page.splitlines() if line.startswith("# ")] for page in pair.pages.values()]
    assert order[0] == order[1]


VARYING = {"version", "patchlevel"}


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_relations_of_the_counters(pair: Pair, kind: Kind) -> None:
    counted = pair.real if kind == "real" else pair.simulated
    report = pair.reports[kind]
    requests = len(report.outcomes)
    assert not report.errors
    assert counted["vllm:generation_tokens_total"] == sum(outcome.tokens for outcome in report.outcomes)
    assert counted["vllm:request_success_total"] == requests == counted["vllm:time_to_first_token_seconds_count"]
    steps = counted["vllm:inter_token_latency_seconds_count"]
    # A static K drafts in every step but the one that ends the prefill.
    assert counted["vllm:spec_decode_num_drafts_total"] == steps
    assert counted["vllm:spec_decode_num_draft_tokens_total"] == K * steps
    positions = [counted[f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{i}]"] for i in range(K)]
    assert sum(positions) == counted["vllm:spec_decode_num_accepted_tokens_total"]
    assert positions == sorted(positions, reverse=True)
    # Tokens past an answer's end are accepted but not returned: at most K for each request.
    surplus = requests + steps + sum(positions) - counted["vllm:generation_tokens_total"]
    assert 0 <= surplus <= K * requests
    computed = counted["vllm:request_prefill_kv_computed_tokens_sum"]
    assert counted["vllm:iteration_tokens_total_sum"] == counted["vllm:generation_tokens_total"] + computed
    assert counted["vllm:iteration_tokens_total_count"] <= steps + requests
    assert counted["vllm:prompt_tokens_total"] - counted["vllm:prompt_tokens_cached_total"] == computed


def test_acceptance_length_agrees_within_2_per_cent(pair: Pair) -> None:
    assert length(pair.simulated) == pytest.approx(length(pair.real), rel=0.02), measured(pair)


def ends(kind: Kind, vllm: Path, *words: str, model: Path | None = None) -> tuple[int, str]:
    """Exit status and standard error of a start that fails."""
    done = subprocess.run(
        command(kind, vllm, 1, *words, model=model), env=environment({}), capture_output=True, text=True, timeout=START
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_an_unknown_flag(vllm: Path, kind: Kind) -> None:
    status, said = ends(kind, vllm, "--no-such-flag", "3")
    assert status == 2
    assert said.rstrip().splitlines()[-1] == "vllm: error: unrecognized arguments: --no-such-flag 3"


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_a_drafter_whose_config_does_not_own_up_to_its_norms(vllm: Path, tmp_path: Path, kind: Kind) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for file in (BUNDLE / "eagle31").iterdir():
        if file.name != "config.json":
            (wrong / file.name).symlink_to(file.resolve())
    config = json.loads((BUNDLE / "eagle31" / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in ("fc_norm", "norm_output")}))
    status, said = ends(kind, vllm, "--speculative-config", speculation(wrong))
    assert status == 1
    assert re.search("no module or parameter named 'fc_norm'", said)


@contextlib.contextmanager
def open_stream(running: Engine, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A client in the midst of a long stream that it writes to `file`; it leaves at the end."""
    body = {"model": "agreement", "prompt": "The", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    ask = ["curl", "--silent", "--no-buffer", "--header", "Content-Type: application/json", "--data", json.dumps(body)]
    client = subprocess.Popen([*ask, "--output", str(file), f"{running.url}/v1/completions"])
    try:
        until(lambda: len(events(file)) > 3, "the stream has begun", within=60)
        yield client
    finally:
        client.kill()
        client.wait()


def events(file: Path) -> list[str]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


SLOW = {"step_time": {"formula": {"base": 0.006, "token": 0.0}}}


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_sigterm_with_an_open_stream(vllm: Path, tmp_path: Path, kind: Kind) -> None:
    """The answer is never finished: vLLM tells its client so, or says nothing more until the client leaves; both were seen."""
    file = tmp_path / "stream"
    with engine(kind, vllm, tmp_path, options=SLOW) as running:
        with open_stream(running, file):
            running.process.send_signal(signal.SIGTERM)
            until(lambda: not healthy(running.client), "the port is closed", within=30)
            time.sleep(2.0)
            cut = events(file)
            time.sleep(2.0)
            assert events(file) == cut
        assert running.process.wait(60) == 0
    if cut[-1] == "[DONE]":
        assert json.loads(cut[-2])["error"]["code"] == 500
    else:
        assert json.loads(cut[-1])["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_sigterm_with_an_open_stream_and_a_shutdown_timeout(vllm: Path, tmp_path: Path, kind: Kind) -> None:
    file = tmp_path / "stream"
    with engine(kind, vllm, tmp_path, "--shutdown-timeout=100", options=SLOW) as running:
        with open_stream(running, file) as client:
            running.process.send_signal(signal.SIGTERM)
            body = {"model": "agreement", "prompt": "x", "max_tokens": 2}
            statuses: set[int] = set()
            while client.poll() is None and len(statuses) < 2:
                with contextlib.suppress(httpx.TransportError):  # at the very end the port closes
                    statuses |= {httpx.post(f"{running.url}/v1/completions", json=body, timeout=30).status_code}
                    statuses |= {httpx.get(f"{running.url}/health", timeout=30).status_code}
            assert client.wait(120) == 0
        assert statuses == {500, 200}, "new requests are refused while the process is healthy"
        done = events(file)
        assert done[-1] == "[DONE]"
        assert json.loads(done[-2])["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(60) == 0


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_the_death_of_the_engine(vllm: Path, tmp_path: Path, kind: Kind) -> None:
    file = tmp_path / "stream"
    with engine(kind, vllm, tmp_path, options=SLOW) as running:
        with open_stream(running, file) as client:
            if kind == "real":
                os.kill(worker_of(running.process.pid), signal.SIGKILL)
            else:
                running.process.send_signal(signal.SIGUSR1)
            assert client.wait(30) == 0
        *_, error, last = events(file)
        assert last == "[DONE]"
        assert json.loads(error)["error"]["message"].startswith("EngineCore encountered an issue.")
        assert running.process.wait(30) == 0


def worker_of(pid: int) -> int:
    """The engine's worker process, the last descendant of the API server."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    below = [child for parent in children.get(pid, []) for child in children.get(parent, [])]
    named = [child for child in below if "Worker" in (Path("/proc") / str(child) / "cmdline").read_text()]
    assert named, f"no worker below {pid}: {children.get(pid)}, {below}"
    return named[0]
