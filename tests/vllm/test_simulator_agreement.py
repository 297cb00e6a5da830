"""The simulator against real vLLM on CPU, on the same traffic: pages, relations of counters, acceptance length, schedules, and
how both fail and end. docs/simulator.md has the table that `measured` prints; aerie_lab.testing.agreement says how the simulator
is configured, and why what it shows is its own.
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

pytestmark = pytest.mark.timeout(2400)  # the first test may have to install vLLM


@pytest.fixture(scope="module")
def pair(vllm: Path, tmp_path_factory: pytest.TempPathFactory, report_progress: Callable[[str], None]) -> AgreementRun:
    made = run_agreement(vllm, tmp_path_factory.mktemp("agreement"))
    report_progress(render_agreement_table(made))
    return made


def test_pages_have_the_same_families_labels_and_buckets(pair: AgreementRun) -> None:
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
def test_relations_of_the_counters(pair: AgreementRun, kind: EngineKind) -> None:
    counted = pair.real if kind == "real" else pair.simulated
    report = pair.reports[kind]
    requests = len(report.outcomes)
    assert not report.errors
    assert counted["vllm:generation_tokens_total"] == sum(outcome.tokens for outcome in report.outcomes)
    assert counted["vllm:request_success_total"] == requests == counted["vllm:time_to_first_token_seconds_count"]
    steps = counted["vllm:inter_token_latency_seconds_count"]
    # A static K drafts in every step but the one that ends the prefill.
    assert counted["vllm:spec_decode_num_drafts_total"] == steps
    assert counted["vllm:spec_decode_num_draft_tokens_total"] == NUM_SPECULATIVE_TOKENS * steps
    positions = [counted[f"vllm:spec_decode_num_accepted_tokens_per_pos_total[{i}]"] for i in range(NUM_SPECULATIVE_TOKENS)]
    assert sum(positions) == counted["vllm:spec_decode_num_accepted_tokens_total"]
    assert positions == sorted(positions, reverse=True)
    # Tokens past an answer's end are accepted but not returned: at most K for each request.
    surplus = requests + steps + sum(positions) - counted["vllm:generation_tokens_total"]
    assert 0 <= surplus <= NUM_SPECULATIVE_TOKENS * requests
    computed = counted["vllm:request_prefill_kv_computed_tokens_sum"]
    assert counted["vllm:iteration_tokens_total_sum"] == counted["vllm:generation_tokens_total"] + computed
    assert counted["vllm:iteration_tokens_total_count"] <= steps + requests
    assert counted["vllm:prompt_tokens_total"] - counted["vllm:prompt_tokens_cached_total"] == computed


def test_acceptance_length_agrees_within_2_per_cent(pair: AgreementRun) -> None:
    assert acceptance_length(pair.simulated) == pytest.approx(acceptance_length(pair.real), rel=0.02), render_agreement_table(
        pair
    )


def ends(kind: EngineKind, vllm: Path, *words: str, model: Path | None = None) -> tuple[int, str]:
    """Exit status and standard error of a start that fails."""
    done = subprocess.run(
        build_command(kind, vllm, 1, *words, model=model),
        env=build_engine_environment({}),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_SECONDS,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_an_unknown_flag(vllm: Path, kind: EngineKind) -> None:
    status, said = ends(kind, vllm, "--no-such-flag", "3")
    assert status == 2
    assert said.rstrip().splitlines()[-1] == "vllm: error: unrecognized arguments: --no-such-flag 3"


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_a_drafter_whose_config_does_not_own_up_to_its_norms(vllm: Path, tmp_path: Path, kind: EngineKind) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for file in (BUNDLE_FOLDER / "eagle31").iterdir():
        if file.name != "config.json":
            (wrong / file.name).symlink_to(file.resolve())
    config = json.loads((BUNDLE_FOLDER / "eagle31" / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in ("fc_norm", "norm_output")}))
    status, said = ends(kind, vllm, "--speculative-config", build_speculative_config(wrong))
    assert status == 1
    assert re.search("no module or parameter named 'fc_norm'", said)


@contextlib.contextmanager
def open_stream(running: RunningEngine, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A client in the midst of a long stream that it writes to `file`; it leaves at the end."""
    body = {"model": "agreement", "prompt": "The", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    ask = ["curl", "--silent", "--no-buffer", "--header", "Content-Type: application/json", "--data", json.dumps(body)]
    client = subprocess.Popen([*ask, "--output", str(file), f"{running.url}/v1/completions"])
    try:
        wait_until(lambda: len(events(file)) > 3, "the stream has begun", timeout_seconds=120)
        yield client
    finally:
        client.kill()
        client.wait()


def events(file: Path) -> list[str]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def silent(file: Path) -> list[str]:
    """All events, where none has come for five seconds; else nothing."""
    before = events(file)
    time.sleep(5.0)
    return before if events(file) == before else []


SLOW = {"step_time": {"formula": {"base_seconds": 0.006, "seconds_per_token": 0.0}}}


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_sigterm_with_an_open_stream(vllm: Path, tmp_path: Path, kind: EngineKind) -> None:
    """The answer is never finished: vLLM tells its client so, as an error or as an abort, or says nothing more."""
    file = tmp_path / "stream"
    with start_engine(kind, vllm, tmp_path, options=SLOW) as running:
        with open_stream(running, file):
            running.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not is_healthy(running.client), "the port is closed", timeout_seconds=30)
            cut = wait_until(lambda: silent(file), "the stream is silent", timeout_seconds=60)
            time.sleep(2.0)
            assert events(file) == cut
        assert running.process.wait(60) == 0
    last = json.loads(cut[-2] if cut[-1] == "[DONE]" else cut[-1])
    if "error" in last:
        assert last["error"]["code"] == 500
    else:  # the engine's abort reaches the client, or the server has closed before it could
        assert last["choices"][0]["finish_reason"] == ("abort" if cut[-1] == "[DONE]" else None), last


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_sigterm_with_an_open_stream_and_a_shutdown_timeout(vllm: Path, tmp_path: Path, kind: EngineKind) -> None:
    file = tmp_path / "stream"
    with start_engine(kind, vllm, tmp_path, "--shutdown-timeout=100", options=SLOW) as running:
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


SCHEDULE = Schedule((ScheduleTier(1, 2, NUM_SPECULATIVE_TOKENS), ScheduleTier(3, 16, 1)), max_tokens=NUM_SPECULATIVE_TOKENS)


@pytest.fixture(scope="module", params=["real", "simulated"])
def scheduled(request: pytest.FixtureRequest, vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine with a schedule, as Aerie writes it; the last test ends it."""
    drafter = command_line.DrafterArguments(str(BUNDLE_FOLDER / "eagle31"))
    config = command_line.build_speculative_config(SCHEDULE, drafter, Version.parse("0.32.0"), EngineArguments())
    words = ("--speculative-config", json.dumps(config))
    with start_engine(request.param, vllm, tmp_path_factory.mktemp("scheduled"), *words, options=SLOW) as running:
        yield running


def window_of(running: RunningEngine, clients: int, requests: int) -> Counters:
    """What closed-loop traffic added to the page, as the operator reads it."""
    before = parse_exposition(running.read_metrics().encode())
    running.run_load(clients, requests, 60, seed=clients)
    window = diff_samples(before, parse_exposition(running.read_metrics().encode()))
    assert isinstance(window, Counters)
    return window


def test_a_schedule_drafts_by_the_batch(scheduled: RunningEngine) -> None:
    """One request at a time is in the first tier throughout; eight are in the second but for the beginning and the end."""
    alone, together = window_of(scheduled, 1, 6), window_of(scheduled, 8, 32)
    assert rates.mean_draft_length(alone) == NUM_SPECULATIVE_TOKENS
    mean = rates.mean_draft_length(together)
    assert isinstance(mean, float)
    assert 1 <= mean < NUM_SPECULATIVE_TOKENS
    for window in (alone, together):
        assert window.speculation is not None
        # Every position up to the most that is ever drafted is counted, whatever the tier.
        assert len(window.speculation.accepted_per_position) == NUM_SPECULATIVE_TOKENS
        assert sum(window.speculation.accepted_per_position) == window.speculation.accepted
        assert window.speculation.drafts == window.request_steps
        # Drafts of 1 and of K tokens, and of no other number: what takes the tiers apart.
        longer = (window.speculation.draft_tokens - window.speculation.drafts) / (NUM_SPECULATIVE_TOKENS - 1)
        assert longer == int(longer)
        survival = rates.survival_by_position(window, SCHEDULE)
        assert isinstance(survival, tuple)
        assert all(bounds.is_exact or not longer for bounds in survival)
        assert rates.acceptance_length(window, SCHEDULE) == rates.Bounds(
            *[1 + window.speculation.accepted / window.speculation.drafts] * 2
        )


def test_the_death_of_the_engine(scheduled: RunningEngine, tmp_path: Path) -> None:
    file = tmp_path / "stream"
    with open_stream(scheduled, file) as client:
        if scheduled.kind == "real":
            os.kill(worker_of(scheduled.process.pid), signal.SIGKILL)
        else:
            scheduled.process.send_signal(signal.SIGUSR1)
        assert client.wait(120) == 0
    *_, error, last = events(file)
    assert last == "[DONE]"
    assert json.loads(error)["error"]["message"].startswith("EngineCore encountered an issue.")
    assert scheduled.process.wait(120) == 0


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
