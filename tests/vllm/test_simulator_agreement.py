"""The simulator against real vLLM on CPU, on the same traffic: expositions, relations of counters, acceptance length, schedules,
and how both fail and end. docs/reference/simulator.md has the table that `pair` prints. aerie_lab.testing.agreement describes
how the simulator is configured, and why its results are its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aerie.engine import command_line
from aerie.engine.arguments import EngineArguments
from aerie.engine.metrics import rates
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import Counters, diff_samples
from aerie.engine.releases import Version
from aerie.engine.speculation import Schedule, ScheduleTier
from aerie_lab.testing import wait_until
from aerie_lab.testing.agreement import (
    BUNDLE_FOLDER,
    NUM_SPECULATIVE_TOKENS,
    START_TIMEOUT_SECONDS,
    AgreementRun,
    EngineKind,
    RunningEngine,
    acceptance_length,
    build_command,
    build_engine_environment,
    build_speculative_config,
    is_healthy,
    render_agreement_table,
    run_agreement,
    start_engine,
)
from tests.nightly import at_night

pytestmark = pytest.mark.timeout(2400)  # the first test may have to install vLLM


@pytest.fixture(scope="module")
def pair(vllm: Path, tmp_path_factory: pytest.TempPathFactory, report_progress: Callable[[str], None]) -> AgreementRun:
    run = run_agreement(vllm, tmp_path_factory.mktemp("agreement"))
    report_progress(render_agreement_table(run))
    return run


@pytest.mark.nightly  # test_metrics.py has the exposition of real vLLM, tests/unit/simulator the counters
def test_expositions_have_the_same_families_labels_and_buckets(pair: AgreementRun) -> None:
    def shape(exposition: str) -> dict[str, tuple[str, str, set[str]]]:
        return {
            family.name: (
                family.type,
                family.documentation,
                {
                    sample.name + str(sorted((k, v) for k, v in sample.labels.items() if k not in VARYING_LABELS))
                    for sample in family.samples
                },
            )
            for family in text_string_to_metric_families(exposition)
        }

    real, simulated = shape(pair.pages["real"]), shape(pair.pages["simulated"])
    assert real.keys() == simulated.keys()
    for name in real:
        if not name.startswith("vllm:cache_config_info"):
            assert simulated[name] == real[name], name
    names = [
        {
            key
            for f in text_string_to_metric_families(exposition)
            if f.name == "vllm:cache_config_info"
            for key in f.samples[0].labels
        }
        for exposition in pair.pages.values()
    ]
    assert names[0] == names[1]
    comments = [[line for line in exposition.splitlines() if line.startswith("# ")] for exposition in pair.pages.values()]
    assert comments[0] == comments[1]


VARYING_LABELS = {"version", "patchlevel"}


@pytest.mark.nightly  # test_metrics.py has the exposition of real vLLM, tests/unit/simulator the counters
@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_relations_of_the_counters(pair: AgreementRun, kind: EngineKind) -> None:
    counters = pair.real if kind == "real" else pair.simulated
    report = pair.reports[kind]
    requests = len(report.outcomes)
    assert not report.errors
    assert counters["vllm:generation_tokens_total"] == sum(outcome.tokens for outcome in report.outcomes)
    assert counters["vllm:request_success_total"] == requests == counters["vllm:time_to_first_token_seconds_count"]
    steps = counters["vllm:inter_token_latency_seconds_count"]
    # A static K drafts in every step except the one that ends the prefill.
    assert counters["vllm:spec_decode_num_drafts_total"] == steps
    assert counters["vllm:spec_decode_num_draft_tokens_total"] == NUM_SPECULATIVE_TOKENS * steps
    positions = [counters[f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{i}]"] for i in range(NUM_SPECULATIVE_TOKENS)]
    assert sum(positions) == counters["vllm:spec_decode_num_accepted_tokens_total"]
    assert positions == sorted(positions, reverse=True)
    # Tokens past an answer's end are accepted but not returned: at most K for each request.
    surplus = requests + steps + sum(positions) - counters["vllm:generation_tokens_total"]
    assert 0 <= surplus <= NUM_SPECULATIVE_TOKENS * requests
    computed = counters["vllm:request_prefill_kv_computed_tokens_sum"]
    assert counters["vllm:iteration_tokens_total_sum"] == counters["vllm:generation_tokens_total"] + computed
    assert counters["vllm:iteration_tokens_total_count"] <= steps + requests
    assert counters["vllm:prompt_tokens_total"] - counters["vllm:prompt_tokens_cached_total"] == computed


@pytest.mark.nightly  # test_metrics.py has the exposition of real vLLM, tests/unit/simulator the counters
def test_acceptance_length_agrees_within_2_per_cent(pair: AgreementRun) -> None:
    assert acceptance_length(pair.simulated) == pytest.approx(acceptance_length(pair.real), rel=0.02), render_agreement_table(
        pair
    )


def run_failing_start(kind: EngineKind, vllm: Path, *flags: str, model: Path | None = None) -> tuple[int, str]:
    """Return exit status and output of a start that fails."""
    process = subprocess.run(
        build_command(kind, vllm, 1, *flags, model=model),
        env=build_engine_environment({}),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_SECONDS,
    )
    return process.returncode, process.stdout + process.stderr


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_an_unknown_flag_prevents_the_start(vllm: Path, kind: EngineKind) -> None:
    status, output = run_failing_start(kind, vllm, "--no-such-flag", "3")
    assert status == 2
    assert output.rstrip().splitlines()[-1] == "vllm: error: unrecognized arguments: --no-such-flag 3"


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_a_drafter_whose_config_lacks_its_norms_prevents_the_start(vllm: Path, tmp_path: Path, kind: EngineKind) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for file in (BUNDLE_FOLDER / "eagle31").iterdir():
        if file.name != "config.json":
            (wrong / file.name).symlink_to(file.resolve())
    config = json.loads((BUNDLE_FOLDER / "eagle31" / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in ("fc_norm", "norm_output")}))
    status, output = run_failing_start(kind, vllm, "--speculative-config", build_speculative_config(wrong))
    assert status == 1
    assert re.search("no module or parameter named 'fc_norm'", output)


@contextlib.contextmanager
def open_stream(running: RunningEngine, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a client that writes a long stream to `file`, and is killed at the end."""
    body = {"model": "agreement", "prompt": "The", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    command = ["curl", "--silent", "--no-buffer", "--header", "Content-Type: application/json", "--data", json.dumps(body)]
    client = subprocess.Popen([*command, "--output", str(file), f"{running.url}/v1/completions"])
    try:
        wait_until(lambda: len(read_events(file)) > 3, "the stream has begun", timeout_seconds=120)
        yield client
    finally:
        client.kill()
        client.wait()


def read_events(file: Path) -> list[str]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def events_if_silent(file: Path) -> list[str]:
    """Return all events if none was added for five seconds, else an empty list."""
    before = read_events(file)
    time.sleep(5.0)
    return before if read_events(file) == before else []


SLOW_STEPS = {"step_time": {"formula": {"base_seconds": 0.006, "seconds_per_token": 0.0}}}


@pytest.mark.parametrize("kind", [at_night("real"), "simulated"])
def test_sigterm_with_an_open_stream(vllm: Path, tmp_path: Path, kind: EngineKind) -> None:
    """The response never finishes: vLLM ends it with an error or an abort, or sends nothing more."""
    file = tmp_path / "stream"
    with start_engine(kind, vllm, tmp_path, options=SLOW_STEPS) as running:
        with open_stream(running, file):
            running.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not is_healthy(running.client), "the port is closed", timeout_seconds=30)
            stream_events = wait_until(lambda: events_if_silent(file), "the stream is silent", timeout_seconds=60)
            time.sleep(2.0)
            assert read_events(file) == stream_events
        assert running.process.wait(60) == 0
    last = json.loads(stream_events[-2] if stream_events[-1] == "[DONE]" else stream_events[-1])
    if "error" in last:
        assert last["error"]["code"] == 500
    else:  # the engine's abort reaches the client, or the server has closed before it could
        assert last["choices"][0]["finish_reason"] == ("abort" if stream_events[-1] == "[DONE]" else None), last


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_sigterm_with_an_open_stream_and_a_shutdown_timeout(vllm: Path, tmp_path: Path, kind: EngineKind) -> None:
    file = tmp_path / "stream"
    with start_engine(kind, vllm, tmp_path, "--shutdown-timeout=100", options=SLOW_STEPS) as running:
        with open_stream(running, file) as client:
            running.process.send_signal(signal.SIGTERM)
            body = {"model": "agreement", "prompt": "x", "max_tokens": 2}
            statuses: set[int] = set()
            while client.poll() is None and len(statuses) < 2:
                with contextlib.suppress(httpx.TransportError):  # the port closes at the end
                    statuses |= {httpx.post(f"{running.url}/v1/completions", json=body, timeout=30).status_code}
                    statuses |= {httpx.get(f"{running.url}/health", timeout=30).status_code}
            assert client.wait(120) == 0
        assert statuses == {500, 200}, "new requests are refused while the process is healthy"
        stream_events = read_events(file)
        assert stream_events[-1] == "[DONE]"
        assert json.loads(stream_events[-2])["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(60) == 0


SCHEDULE = Schedule((ScheduleTier(1, 2, NUM_SPECULATIVE_TOKENS), ScheduleTier(3, 16, 1)), max_tokens=NUM_SPECULATIVE_TOKENS)


@pytest.fixture(scope="module", params=["real", "simulated"])
def scheduled(request: pytest.FixtureRequest, vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine with a schedule, as Aerie writes it; the last test ends it."""
    drafter = command_line.DrafterArguments(str(BUNDLE_FOLDER / "eagle31"))
    config = command_line.build_speculative_config(SCHEDULE, drafter, Version.parse("0.32.0"), EngineArguments())
    flags = ("--speculative-config", json.dumps(config))
    with start_engine(request.param, vllm, tmp_path_factory.mktemp("scheduled"), *flags, options=SLOW_STEPS) as running:
        yield running


def measure_window(running: RunningEngine, clients: int, requests: int) -> Counters:
    """Return the counters that closed-loop traffic added, as the operator reads them."""
    before = parse_exposition(running.read_metrics().encode())
    running.run_load(clients, requests, 60, seed=clients)
    window = diff_samples(before, parse_exposition(running.read_metrics().encode()))
    assert isinstance(window, Counters)
    return window


def test_a_schedule_drafts_by_batch_size(scheduled: RunningEngine) -> None:
    """One request at a time is always in the first tier. Eight are in the second except at the beginning and the end."""
    alone, together = measure_window(scheduled, 1, 6), measure_window(scheduled, 8, 32)
    assert rates.mean_draft_length(alone) == NUM_SPECULATIVE_TOKENS
    mean = rates.mean_draft_length(together)
    assert isinstance(mean, float)
    assert 1 <= mean < NUM_SPECULATIVE_TOKENS
    for window in (alone, together):
        assert window.speculation is not None
        # Every position up to the maximum of the schedule is counted, in any tier.
        assert len(window.speculation.accepted_per_position) == NUM_SPECULATIVE_TOKENS
        assert sum(window.speculation.accepted_per_position) == window.speculation.accepted
        assert window.speculation.drafts == window.request_steps
        # Drafts have 1 or K tokens and no other number, which separates the tiers.
        longer = (window.speculation.draft_tokens - window.speculation.drafts) / (NUM_SPECULATIVE_TOKENS - 1)
        assert longer == int(longer)
        survival = rates.survival_by_position(window, SCHEDULE)
        assert isinstance(survival, tuple)
        assert all(bounds.is_exact or not longer for bounds in survival)
        assert rates.acceptance_length(window, SCHEDULE) == rates.Bounds(
            *[1 + window.speculation.accepted / window.speculation.drafts] * 2
        )


def test_a_killed_engine_ends_the_stream_with_an_error(scheduled: RunningEngine, tmp_path: Path) -> None:
    file = tmp_path / "stream"
    # Looked up before the stream begins, which lasts for seconds only.
    pid, number = (
        (find_worker(scheduled.process.pid), signal.SIGKILL)
        if scheduled.kind == "real"
        else (scheduled.process.pid, signal.SIGUSR1)
    )
    with open_stream(scheduled, file) as client:
        os.kill(pid, number)
        assert client.wait(120) == 0
    events = read_events(file)
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2]).get("error")
    assert error, f"{len(events)} events, and no error at the end: {events[-3:]}"
    assert error["message"].startswith("EngineCore encountered an issue.")
    assert scheduled.process.wait(120) == 0


def find_worker(pid: int) -> int:
    """Return the engine's worker process, the last descendant of the API server."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    descendants = [child for parent in children.get(pid, []) for child in children.get(parent, [])]
    workers = [child for child in descendants if "Worker" in (Path("/proc") / str(child) / "cmdline").read_text()]
    assert workers, f"no worker below {pid}: {children.get(pid)}, {descendants}"
    return workers[0]
