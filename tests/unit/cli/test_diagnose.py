"""Diagnosis of one engine: numbers, findings, screens, and failures. Counters are those of measured drafters."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from aerie.cli.app import run_command_line
from aerie.cli.console import CommandError
from aerie.cli.diagnosis.acceptance import Acceptance, measure_acceptance
from aerie.cli.diagnosis.engine_reader import Answer
from aerie.cli.diagnosis.findings import LOWEST_LOADED_ACCEPTANCE, LOWEST_TRAINED_ACCEPTANCE, Severity, find_problems
from aerie.cli.diagnosis.observation import READS, EngineObservation, observe_engine
from aerie.cli.diagnosis.screen import build_document, render_diagnosis
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import SpeculationCounters
from tests.golden import Messages

DATA = Path(__file__).parents[1] / "engine" / "data"
BEFORE, AFTER = ((DATA / f"vllm-0.32.0-ngram-{number}.prom").read_bytes() for number in (1, 2))
ROOT = Path(__file__).parents[3]
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "wrong_drafters.json").read_text())
FAULTS = (
    *("norm_output_flipped", "switches_ignored", "residual_flipped", "layers_one_lower", "layers_one_higher"),
    *("layers_exchanged", "vocabulary_ignored", "weights_lost"),
)


class RecordedEngine:
    """An engine with recorded answers."""

    address = "http://engine:8000"

    def __init__(self, pages: Sequence[bytes], version: bytes = b'{"version": "0.32.0"}') -> None:
        self.pages, self.version = list(pages), version

    def get(self, path: str) -> Answer:
        if path == "/version":
            return Answer(200, self.version) if self.version else Answer(404, b"")
        if path == "/v1/models":
            return Answer(401, b'{"error": "Unauthorized"}')
        return Answer(200, self.pages.pop(0) if len(self.pages) > 1 else self.pages[0])


def observe(pages: Sequence[bytes] = (BEFORE, AFTER), duration: float = 30.0, version: bytes = b'{"version": "0.32.0"}') -> Any:
    return observe_engine(RecordedEngine(pages, version), duration, sleep=lambda _: None)


def build_observation(drafter: str, requests: float = 400, version: str = "0.33.0", **gauges: float) -> EngineObservation:
    """Return an engine with the acceptance of a drafter of the measurement."""
    rates = [MEASURED.get(f"q{position}_{drafter}", 0.0) for position in (1, 2, 3)]
    sample = parse_exposition(BEFORE)
    drafts = 13 * requests
    accepted = tuple(drafts * math.prod(rates[:position]) for position in (1, 2, 3))
    counters = sample.counters
    assert counters.speculation is not None
    first = counters.time_to_first_token
    speculation = SpeculationCounters(
        counters.speculation.drafts + drafts,
        counters.speculation.draft_tokens + 3 * drafts,
        counters.speculation.accepted + sum(accepted),
        tuple(a + b for a, b in zip(counters.speculation.accepted_per_position, accepted, strict=True)),
    )
    changes: dict[str, Any] = {
        "speculation": speculation,
        "request_steps": counters.request_steps + drafts,
        "step_seconds": counters.step_seconds + 0.012 * drafts,
        "iterations": counters.iterations + drafts / 4,
        "generation_tokens": counters.generation_tokens + requests + drafts + sum(accepted),
        "time_to_first_token": replace(first, counts=tuple(count + requests for count in first.counts), sum=first.sum + 20),
    }
    last = replace(sample, counters=replace(counters, **changes))
    samples = [replace(each, gauges=replace(each.gauges, **gauges)) for each in (sample, last)]
    return EngineObservation("http://engine:8000", version, ("docs",), tuple(samples), 30.0, {"method": "eagle3"})


def diagnose(observation: EngineObservation) -> tuple[Any, tuple[Any, ...]]:
    acceptance = measure_acceptance(observation.counters, observation.setting, observation.request_count)
    return acceptance, find_problems(observation, acceptance)


def action_titles(observation: EngineObservation) -> list[str]:
    return [finding.title for finding in diagnose(observation)[1] if finding.severity is Severity.ACTION]


# -- numbers
def test_numbers_of_a_recorded_engine() -> None:
    observation = observe()
    acceptance, findings = diagnose(observation)
    window = parse_exposition(AFTER).counters - parse_exposition(BEFORE).counters
    assert window.speculation is not None
    assert acceptance.length.low == pytest.approx(1 + window.speculation.accepted / window.speculation.drafts)
    assert acceptance.interval.low < acceptance.length.low <= acceptance.length.high < acceptance.interval.high
    assert [item.position for item in acceptance.positions] == [1, 2, 3]
    assert observation.request_count == 16
    assert [finding.severity for finding in findings if finding.severity is Severity.ACTION] == []


def test_without_requests_the_figures_are_since_the_start() -> None:
    observation = observe([AFTER, AFTER])
    assert observation.is_since_start
    assert observation.counters == parse_exposition(AFTER).counters
    assert not observe().is_since_start


def test_counters_and_gauges_are_read_several_times() -> None:
    assert len(observe().samples) == READS
    assert len(observe(duration=0.0).samples) == 1


def test_more_draft_tokens_are_extrapolated_and_marked() -> None:
    acceptance, _ = diagnose(build_observation("eagle31_right"))
    rows = acceptance.lengths_by_tokens()
    assert [(row.draft_tokens, row.is_extrapolated) for row in rows] == [(1, False), (2, False), (3, False), (4, True), (5, True)]
    assert all(row.lower <= row.length <= row.upper for row in rows)
    assert all(left.length < right.length for left, right in itertools.pairwise(rows))
    assert rows[2].length == pytest.approx(MEASURED["al_k3_eagle31_right"], abs=0.01)
    # The rule, against what the same drafter did at position 4.
    accepted = math.prod(MEASURED[f"q{position}_eagle31_right"] for position in (1, 2, 3, 4))
    assert rows[3].lower - rows[2].length < accepted < rows[3].upper - rows[2].length


# -- findings
@pytest.mark.parametrize("drafter", ["eagle31", "eagle3", "weak"])
def test_a_correctly_loaded_drafter_needs_no_action(drafter: str) -> None:
    for requests in (3, 40, 4000):
        assert action_titles(build_observation(f"{drafter}_right", requests)) == []


@pytest.mark.parametrize(
    ("drafter", "fault"),
    [(drafter, fault) for drafter in ("eagle31", "eagle3") for fault in FAULTS if f"q1_{drafter}_{fault}" in MEASURED],
)
def test_what_a_wrongly_loaded_drafter_looks_like(drafter: str, fault: str, messages: Messages) -> None:
    """Neighbouring layers and a flipped residual of EAGLE 3.1 cost too little to distinguish them from a weaker drafter."""
    findings = diagnose(build_observation(f"{drafter}_{fault}"))[1]
    messages.check(
        f"{drafter}, {fault.replace('_', ' ')}", "\n".join(f"{item.severity}: {item.title}" for item in findings) or "-"
    )


def test_few_requests_give_no_wrong_alarm() -> None:
    assert action_titles(build_observation("eagle31_norm_output_flipped", 4)) == []
    assert action_titles(build_observation("eagle31_norm_output_flipped", 400)) == ["acceptance falls from position to position"]


def test_limits_are_those_of_the_measurement() -> None:
    right = {drafter: MEASURED[f"q1_{drafter}_right"] for drafter in ("eagle31", "eagle3", "weak")}
    assert right["weak"] == LOWEST_LOADED_ACCEPTANCE
    assert right["weak"] < LOWEST_TRAINED_ACCEPTANCE < min(right["eagle3"], right["eagle31"])
    for drafter in ("eagle31", "eagle3"):
        for fault in ("vocabulary_ignored", "weights_lost"):
            assert MEASURED[f"q1_{drafter}_{fault}"] < 0.04 < LOWEST_LOADED_ACCEPTANCE


def test_a_full_engine_needs_action() -> None:
    waiting = build_observation("eagle31_right", waiting_requests=7.0, kv_cache_usage=0.97)
    assert action_titles(waiting) == ["requests wait all the time"]
    last = waiting.samples[-1]
    finished = {**last.counters.finished, "error": last.counters.finished.get("error", 0.0) + 3}
    worse = replace(last, counters=replace(last.counters, preemptions=last.counters.preemptions + 4, finished=finished))
    titles = action_titles(replace(waiting, samples=(waiting.samples[0], worse)))
    assert titles == ["requests wait all the time", "requests are preempted", "requests end with an error"]


@pytest.mark.parametrize(
    ("version", "title"),
    [
        ("0.23.0", "vLLM 0.23.0 is too old"),
        ("0.99.0", "unverified version"),
        ("", "unknown version"),
        ("2025-nightly", "unknown version"),
    ],
)
def test_versions(version: str, title: str) -> None:
    findings = diagnose(build_observation("eagle31_right", version=version))[1]
    assert title in [finding.title for finding in findings]


def test_a_cpu_build_cannot_sample() -> None:
    assert "sampling on CPU" in [item.title for item in diagnose(build_observation("eagle31_right", version="0.32.0+cpu"))[1]]


def test_an_engine_without_speculation_is_healthy() -> None:
    observation = build_observation("eagle31_right")
    samples = tuple(replace(each, counters=replace(each.counters, speculation=None)) for each in observation.samples)
    acceptance, findings = diagnose(replace(observation, samples=samples))
    assert not isinstance(acceptance, Acceptance)
    assert findings == ()
    assert "off: the engine counts no drafts" in render(replace(observation, samples=samples), 80)


def test_a_schedule_comes_from_the_command_line() -> None:
    observation = build_observation("eagle31_right")
    schedule = {"method": "eagle3", "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 1]]}
    assert str(replace(observation, speculative_config=schedule).setting) == "1-8:3,9-64:1"
    assert str(replace(observation, speculative_config={"enable_adaptive_verification": True}).setting) == "up to 3"
    assert str(replace(observation, speculative_config=None).setting) == "3"


# -- screens
def render(observation: EngineObservation, width: int) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    acceptance, findings = diagnose(observation)
    with console.capture() as capture:
        console.print(render_diagnosis(observation, acceptance, findings))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


@pytest.mark.parametrize("width", [80, 130])
@pytest.mark.parametrize("drafter", ["eagle31_right", "eagle31_norm_output_flipped", "eagle31_weights_lost"])
def test_screens_fit_the_terminal(drafter: str, width: int, messages: Messages) -> None:
    text = render(build_observation(drafter), width)
    assert max(map(len, text.splitlines())) <= width
    messages.check(f"{drafter.replace('_', ' ')}, {width} columns", text)


def test_text_of_the_engine_moves_no_cursor() -> None:
    observation = replace(build_observation("eagle31_right"), models=("a\x1b[2Jb[bold]",), version="0.33\x1b[2J")
    text = render(observation, 130)
    assert "\x1b" not in text
    assert "b[bold]" in text


def test_the_document_for_programs() -> None:
    observation = build_observation("eagle31_weights_lost")
    document = build_document(observation, *diagnose(observation))
    assert json.loads(json.dumps(document))["findings"][0]["severity"] == "action"
    assert document["acceptance"]["length"] == pytest.approx(1.0)


# -- failures
@pytest.mark.parametrize(
    ("pages", "version", "text"),
    [
        ([b"# HELP python_info x\npython_info 1.0\n"], b'{"version": "0.33.0"}', "without --disable-log-stats"),
        ([b"node_cpu_seconds_total 1.0\n"], b"", "not from a vLLM engine"),
        ([BEFORE[:5000]], b'{"version": "0.33.0"}', "the connection was cut"),
        ([AFTER, BEFORE], b'{"version": "0.33.0"}', "diagnose it again"),
    ],
)
def test_what_is_no_metrics_of_vllm(pages: list[bytes], version: bytes, text: str) -> None:
    with pytest.raises(CommandError, match=text):
        diagnose(observe(pages, version=version))


class Handler(BaseHTTPRequestHandler):
    """Answers by path; /hang is not answered."""

    def do_GET(self) -> None:
        status, body = self.server.answers.get(self.path, (404, b""))  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.keys.append(self.headers.get("Authorization"))  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """A server with settable `answers`; `keys` are those of its requests."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        http_server.answers, http_server.keys = {}, []  # type: ignore[attr-defined]
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield http_server
        http_server.shutdown()
        thread.join()


def test_a_url_is_diagnosed(server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = {
        "/metrics": (200, AFTER),
        "/version": (200, b'{"version": "0.32.0"}'),
        "/v1/models": (200, b'{"data": [{"id": "tiny"}]}'),
    }
    (tmp_path / "key").write_text("secret\n")
    url = f"http://127.0.0.1:{server.server_port}"
    arguments = ["diagnose", f"{url}/metrics", "--since-start", "--key-file", str(tmp_path / "key"), "-o", "json"]
    assert run_command_line(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["address"], document["models"]) == ("EngineDiagnosis", url, ["tiny"])
    assert set(server.keys) == {"Bearer secret"}


def test_failures_say_what_to_do(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    rows = [
        ("127.0.0.1:8000", "use the form http://HOST:PORT, or pod/NAME"),
        ("http://127.0.0.1:1", "check that the engine runs"),
        (f"https://127.0.0.1:{server.server_port}", "use http://"),
        (url, "it is no vLLM engine"),
    ]
    for address, text in rows:
        assert run_command_line(["diagnose", address, "--since-start"]) == 2
        assert text in " ".join(capsys.readouterr().err.split())
    server.answers = {"/metrics": (401, b""), "/version": (200, b'{"version": "0.33.0"}')}
    assert run_command_line(["diagnose", url, "--since-start"]) == 2
    assert "--key-file" in capsys.readouterr().err
    server.answers["/metrics"] = (200, b"x" * 2**21)
    assert run_command_line(["diagnose", url, "--since-start"]) == 2
    assert "it is no engine" in capsys.readouterr().err


# -- pods
KUBECTL = r"""#!/bin/sh
printf '%s\n' "$*" >> "$KUBECTL_FOLDER/log"
case "$*" in
  *--raw*) name=$(basename "${4}") ;;
  *) name=pod ;;
esac
[ -f "$KUBECTL_FOLDER/fail" ] && [ "$name" != pod ] && { cat "$KUBECTL_FOLDER/fail" >&2; exit 1; }
[ -f "$KUBECTL_FOLDER/$name" ] && cat "$KUBECTL_FOLDER/$name"
exit 0
"""
ARGUMENTS = [
    "acme/model",
    "--port=8443",
    "--ssl-certfile",
    "/tls/crt",
    "--speculative-config",
    '{"method": "eagle3", "model": "d"}',
]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl with a pod of Aerie, whose engine answers; `fail` is the message of failed requests to the engine."""
    script = tmp_path / "kubectl"
    script.write_text(KUBECTL)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECTL_FOLDER", str(tmp_path))
    container = {"name": "engine", "image": "registry/engine:1", "args": ARGUMENTS}
    metadata = {"name": "chat-1", "namespace": "prod", "labels": {"aerie.dev/name": "chat"}}
    (tmp_path / "pod").write_text(json.dumps({"metadata": metadata, "spec": {"containers": [container]}}))
    (tmp_path / "metrics").write_bytes(AFTER)
    (tmp_path / "version").write_text('{"version": "0.32.0"}')
    (tmp_path / "models").write_text("{}")
    return tmp_path


def test_a_pod_is_read_through_the_api_server(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["diagnose", "pod/chat-1", "-n", "prod", "--since-start"]) == 0
    assert "K=3, method eagle3" in capsys.readouterr().out
    proxy = "get --raw /api/v1/namespaces/prod/pods/https:chat-1:8443/proxy"
    log = (kubectl / "log").read_text().splitlines()
    assert log[0] == "--namespace=prod get pods chat-1 --ignore-not-found -o json"
    assert log[1:] == [f"--namespace=prod {proxy}{path} --request-timeout=10s" for path in ("/version", "/metrics", "/v1/models")]


@pytest.mark.parametrize(
    ("stderr", "text"),
    [
        (
            'Error from server (Forbidden): pods "chat-1" is forbidden: User "alice" cannot get resource "pods/proxy"',
            "ask for get on pods/proxy",
        ),
        ("Error from server (ServiceUnavailable): dial tcp 10.0.0.1:8000: connect: connection refused", "its engine still loads"),
        ("error: You must be logged in to the server (Unauthorized)", "answers with status 401"),
    ],
)
def test_a_pod_that_does_not_answer(kubectl: Path, stderr: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (kubectl / "fail").write_text(stderr)
    assert run_command_line(["diagnose", "pod/chat-1", "-n", "prod", "--since-start"]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_a_pod_that_does_not_exist(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kubectl / "pod").unlink()
    assert run_command_line(["diagnose", "pod/chat-2"]) == 2
    assert "there is no pod chat-2: set its namespace with -n" in " ".join(capsys.readouterr().err.split())
