"""The process: answers, streams, errors, metrics, start and end. tests/vllm measures vLLM itself."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aerie.analysis import equivalence
from aerie.engine import completions as greedy
from aerie_lab.engine.load_generation.background import BackgroundTraffic, Clients
from aerie_lab.engine.load_generation.traffic import TrafficTarget, run_closed_loop
from aerie_lab.engine.load_generation.workload import LengthDistribution, PoissonArrivals, TrafficClass, generate_turns
from aerie_lab.engine.performance_model.acceptance import CLASS_ACCEPTANCE

from .conftest import Running, Start, write_drafter

QUESTIONS = [greedy.build_completion_request("acme/model", prompt) for prompt in greedy.PROBE_PROMPTS]
NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')


def ask(running: Running, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return running.client.post(path, json={"prompt": "The eyrie", "max_tokens": 8, **body})


def events(running: Running, path: str = "/v1/completions", **body: Any) -> list[Any]:
    answer = ask(running, path, stream=True, stream_options={"include_usage": True}, **body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answers_and_their_metrics(start: Start) -> None:
    running = start("--served-model-name", "chat", *NGRAM)
    body = ask(running, model="chat", max_tokens=20).json()
    assert body["usage"] | {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22} == body["usage"]
    assert (body["object"], body["model"], body["choices"][0]["finish_reason"]) == ("text_completion", "chat", "length")
    assert len(body["choices"][0]["text"].split()) == 20
    chat = ask(running, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}]).json()
    assert (chat["object"], chat["choices"][0]["message"]["role"]) == ("chat.completion", "assistant")
    start_stream = events(running, max_tokens=30)
    assert (
        "".join(e["choices"][0]["text"] for e in start_stream if e["choices"]).split()
        == ask(running, max_tokens=30).json()["choices"][0]["text"].split()
    )
    assert [e["choices"][0]["finish_reason"] for e in start_stream if e["choices"]][-1] == "length"
    assert start_stream[-1]["usage"]["completion_tokens"] == 30
    first, *_ = events(running, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert running.metric("vllm:generation_tokens_total") == 20 + 8 + 30 + 30 + 8
    assert running.metric("vllm:request_success_total", finished_reason="length") == 5
    assert running.metric("vllm:spec_decode_num_drafts_total") > 0
    assert running.metric("http_requests_total", handler="/v1/completions", status="2xx") == 3
    families = {family.name for family in text_string_to_metric_families(running.client.get("/metrics").text)}
    assert {"vllm:cache_config_info", "process_resident_memory_bytes", "python_info"} <= families
    assert [model["id"] for model in running.client.get("/v1/models").json()["data"]] == ["chat"]
    assert running.client.get("/version").json() == {"version": "0.33.0"}


REJECTED_REQUESTS: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "other"}, 404, "The model `other` does not exist. Valid aliases: acme/model."),
    ({"max_tokens": 5000}, 400, "max_tokens=5000 cannot be greater than max_model_len=1024."),
    ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0."),
    ({"cache_salt": ""}, 400, "Parameter 'cache_salt' must be a non-empty string if provided."),
    ({"min_p": 0.5}, 400, "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."),
    ({"prompt": ""}, 400, "Either prompt or prompt_embeds must be provided and non-empty."),
    ({"prompt": "x" * 5000}, 400, "This model's maximum context length is 1024 tokens."),
    ({"n": 2}, 400, "n=2 is not supported by the simulator"),
]


def test_invalid_requests_are_rejected(start: Start) -> None:
    running = start("--max-model-len", "1024", *NGRAM)
    for body, status, sentence in REJECTED_REQUESTS:
        answer = ask(running, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
        assert sentence in answer.json()["error"]["message"]
    assert running.metric("http_requests_total", status="4xx") == len(REJECTED_REQUESTS)
    assert running.metric("vllm:request_success_total") == 0
    assert running.client.get("/nowhere").json() == {"detail": "Not Found"}
    assert running.client.post("/v1/completions", content=b"{bad").status_code == 400


def drafter_arguments(folder: Path, lossy: float) -> tuple[str, str]:
    """Return arguments for a drafter that changes this share of the tokens."""
    model = str(write_drafter(folder, simulator={"altered_share": lossy}))
    return "--speculative-config", json.dumps({"method": "eagle3", "model": model, "num_speculative_tokens": 3})


@pytest.mark.slow
def test_greedy_answers_differ_only_with_a_lossy_drafter(start: Start, tmp_path: Path) -> None:
    options = {"answer_tokens": 50.0}
    engines = [
        start(*NGRAM, options={**options, "seed": 1}),
        start(*drafter_arguments(tmp_path / "good", 0.0), options={**options, "seed": 2}),
        start(*drafter_arguments(tmp_path / "bad", 0.05), options={**options, "seed": 3}),
    ]
    answers_by_engine = [
        [greedy.parse_completion(engine.client.post(greedy.COMPLETIONS_PATH, content=question).content) for question in QUESTIONS]
        for engine in engines
    ]
    assert answers_by_engine[0] == answers_by_engine[1]
    assert len({len(answer.tokens) for answer in answers_by_engine[0]}) > 1, "not all prompts are answered at equal length"
    ngram, good, bad = answers_by_engine
    comparisons = [equivalence.compare_answers(*answers) for answers in zip(bad, ngram, good, strict=True)]
    assert equivalence.EquivalenceResult(tuple(comparisons), len(comparisons)).is_lossy(equivalence.EQUIVALENCE_ALPHA)
    assert all(comparison.control_position is None for comparison in comparisons)
    body: dict[str, Any] = {"temperature": 0, "prompt": greedy.PROBE_PROMPTS[0], "max_tokens": 40, "ignore_eos": True}
    text = ask(engines[2], **body).json()["choices"][0]["text"]
    assert text != ask(engines[1], **body).json()["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in events(engines[2], **body) if event["choices"]) == text


def test_log_probabilities_are_in_vllms_form(start: Start) -> None:
    running = start()
    logprobs = ask(running, max_tokens=2, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "text_offset": [0, 4],
        "token_logprobs": [-0.125, -0.125],
        "tokens": [" the", " eyrie"],
        "top_logprobs": [{" the": -0.125, " eyrie": -2.125}, {" eyrie": -0.125, " stands": -2.125}],
    }
    assert ask(running, max_tokens=2).json()["choices"][0]["logprobs"] is None
    assert ask(running, max_tokens=1, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] == [{" the": -0.125}]
    assert ask(running, logprobs=21).status_code == 400


def test_log_probabilities_of_chats_are_in_vllms_form(start: Start) -> None:
    running = start()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    chat = ask(running, "/v1/chat/completions", **body, logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    assert chat.json()["choices"][0]["logprobs"]["content"] == [
        {
            "token": "token_id:0",
            "logprob": -0.125,
            "bytes": list(b"token_id:0"),
            "top_logprobs": [
                {"token": "token_id:0", "logprob": -0.125, "bytes": list(b"token_id:0")},
                {"token": "token_id:1", "logprob": -2.125, "bytes": list(b"token_id:1")},
            ],
        }
    ]
    assert ask(running, "/v1/chat/completions", **body, top_logprobs=2).json()["choices"][0]["logprobs"] is None


def test_a_repeated_prompt_is_cached_in_whole_blocks(start: Start) -> None:
    running = start("--block-size", "32")
    for _ in range(2):
        ask(running, prompt=list(range(100)))
    ask(running, prompt=[*range(64), *range(1000, 1036)])
    assert running.metric("vllm:prefix_cache_hits_total") == 96 + 64
    assert running.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 300 - 160


def test_a_request_without_the_api_key_is_rejected(start: Start) -> None:
    running = start("--api-key", "secret")
    assert ask(running).status_code == 401
    assert running.client.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer secret"}).is_success
    running = start(variables={"VLLM_API_KEY": "other"})
    assert ask(running).status_code == 401
    assert running.client.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer other"}).is_success
    assert running.client.get("/health").is_success


def test_a_disconnected_client_frees_its_place(start: Start) -> None:
    running = start(options={"step_time": {"formula": {"base_seconds": 0.02, "seconds_per_token": 0.0}}})
    with running.client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 2000, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: httpx closes the stream of a generator that is dropped
        next(lines)
        assert running.metric("vllm:num_requests_running") == 1
    began = time.monotonic()
    while running.metric("vllm:num_requests_running"):
        assert time.monotonic() - began < 60
    assert running.metric("vllm:request_success_total") == 0


def test_traffic_checks_every_answer(start: Start) -> None:
    running = start(*NGRAM)
    kind = TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(50, 0.5), LengthDistribution(20, 0.5), mean_turns=3)
    many = itertools.islice(generate_turns([kind], PoissonArrivals(1.0), 0.0, 1e9), 200)
    report = asyncio.run(run_closed_loop(TrafficTarget(str(running.client.base_url).rstrip("/"), "acme/model"), many, clients=16))
    summary = report.summary()["all"]
    assert (summary["requests"], summary["errors"], report.errors.total()) == (200, 0, 0)
    assert sum(outcome.tokens for outcome in report.outcomes) == running.metric("vllm:generation_tokens_total")
    assert 0 < summary["ttft_p50_ms"] < summary["e2e_p50_ms"]
    assert running.metric("vllm:prefix_cache_hits_total") > 0


def test_traffic_reports_errors_by_kind(start: Start) -> None:
    running = start("--served-model-name", "other")
    kind = TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(5), LengthDistribution(5))
    turns = list(itertools.islice(generate_turns([kind], PoissonArrivals(1.0), 0.0, 1e9), 3))
    url = str(running.client.base_url).rstrip("/")
    report = asyncio.run(run_closed_loop(TrafficTarget(url, "acme/model"), iter(turns), clients=1))
    assert report.errors == {"status 404": 3}
    running.end()
    report = asyncio.run(run_closed_loop(TrafficTarget(url, "other"), iter(turns), clients=1))
    assert report.errors == {"ClientConnectorError": 3}


def test_clients_send_when_their_answers_have_ended_until_the_block_ends(start: Start) -> None:
    running = start(*NGRAM)
    kind = TrafficClass("chat", CLASS_ACCEPTANCE["chat"], LengthDistribution(50, 0.5), LengthDistribution(20, 0.5), mean_turns=1)
    most = 0.0
    with BackgroundTraffic(TrafficTarget(str(running.client.base_url).rstrip("/"), "acme/model"), Clients(3), [kind]) as traffic:
        began = time.monotonic()
        while len(traffic.report.outcomes) < 30 or most == 0:
            assert time.monotonic() - began < 60
            most = max(most, running.metric("vllm:num_requests_running"))
    assert most <= 3
    assert traffic.report.errors.total() == 0
    assert running.metric("vllm:request_success_total") == len(traffic.report.outcomes)


TOKENS = 300
"""Length of a stream: nine seconds at `SLOW`, so that what follows its beginning falls into it."""


def start_stream(running: Running, lines: list[str], begun: threading.Event, timeout: float = 60.0) -> threading.Thread:
    """Read a stream until it ends, sends [DONE], or sends nothing for `timeout` seconds."""

    def read() -> None:
        body = {"prompt": "a", "max_tokens": TOKENS, "stream": True}
        with (
            httpx.Client(base_url=running.client.base_url, timeout=timeout) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            content = answer.iter_lines()
            while True:
                try:
                    line = next(content)
                except (StopIteration, httpx.ReadTimeout):
                    return
                if line:
                    lines.append(line.removeprefix("data: "))
                    begun.set()
                    if lines[-1] == "[DONE]":
                        return

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    return thread


SLOW = {"step_time": {"formula": {"base_seconds": 0.03, "seconds_per_token": 0.0}}}


def test_an_idle_connection_is_closed_after_the_keep_alive_timeout(start: Start) -> None:
    running = start(variables={"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "1"})
    with socket.create_connection((running.client.base_url.host, running.client.base_url.port or 0), timeout=60) as idle:
        idle.sendall(b"GET /version HTTP/1.1\r\nHost: engine\r\n\r\n")
        response = b"".join(iter(lambda: idle.recv(4096), b""))  # to the end, which comes from the engine
    assert (response.count(b"HTTP/1.1 200"), response.endswith(b'{"version": "0.33.0"}')) == (1, True)
    assert start(variables={"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "soon"}, wait=False).process.wait(60) == 2


def test_after_sigterm_open_streams_are_silent_until_clients_disconnect(start: Start) -> None:
    running = start(options=SLOW)
    lines: list[str] = []
    reader = start_stream(running, lines, threading.Event(), timeout=5.0)
    running.process.send_signal(signal.SIGTERM)
    reader.join(60)  # leaves after five seconds of silence
    assert lines[-1] != "[DONE]"
    assert len(lines) < TOKENS
    assert running.process.wait(60) == 0


def test_sigterm_without_open_requests_ends_the_process_immediately(start: Start) -> None:
    running = start(options=SLOW)
    ask(running)
    assert running.end(within=60) == 0


def test_during_the_shutdown_timeout_streams_finish_and_requests_fail(start: Start) -> None:
    running = start("--shutdown-timeout", "60", options=SLOW)
    lines: list[str] = []
    reader = start_stream(running, lines, threading.Event())
    running.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    while (answer := ask(running)).status_code == 200:
        assert time.monotonic() - began < 60
    assert answer.json()["error"]["message"] == "cannot schedule new futures after shutdown"
    assert running.client.get("/health").status_code == 200
    reader.join(60)
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
    assert running.process.wait(60) == 0


def test_a_short_shutdown_timeout_truncates_open_streams(start: Start) -> None:
    running = start(
        "--shutdown-timeout", "1", options={"step_time": {"formula": {"base_seconds": 0.1, "seconds_per_token": 0.0}}}
    )
    lines: list[str] = []
    reader = start_stream(running, lines, threading.Event(), timeout=5.0)
    assert running.end() == 0
    reader.join(60)
    assert lines[-1] != "[DONE]"


def test_a_dead_engine_is_reported_and_ends_the_process(start: Start) -> None:
    running = start(options=SLOW)
    lines: list[str] = []
    reader = start_stream(running, lines, threading.Event())
    running.process.send_signal(signal.SIGUSR1)
    reader.join(60)
    assert json.loads(lines[-2])["error"]["message"].startswith("EngineCore encountered an issue.")
    assert lines[-1] == "[DONE]"
    assert running.process.wait(60) == 0


@pytest.mark.parametrize("drafter", ["no flags", "missing"])
def test_a_drafter_that_does_not_load_gives_exit_status_1(start: Start, drafters: dict[str, Path], drafter: str) -> None:
    path = str(drafters.get(drafter, "/nowhere/drafter"))
    config = {"method": "eagle3", "model": path, "num_speculative_tokens": 3}
    running = start("--speculative-config", json.dumps(config), wait=False)
    assert running.process.wait(60) == 1
    message = running.last_words()
    assert ("'fc_norm'" if drafter == "no flags" else "/nowhere/drafter") in message


def test_unknown_flags_and_options_give_exit_status_2(start: Start) -> None:
    assert start("--no-such-flag", wait=False).process.wait(60) == 2
    running = start(options={"startup": 1}, wait=False)
    assert running.process.wait(60) == 2
    assert "unknown field 'startup'" in running.last_words()


def test_a_start_takes_its_load_time_and_can_be_ended(start: Start) -> None:
    running = start(options={"startup_seconds": 30.0}, wait=False)
    with pytest.raises(httpx.TransportError):
        running.client.get("/health")
    began = time.monotonic()
    while not has_signal_handler(running.process.pid, signal.SIGTERM):
        assert time.monotonic() - began < 60
    assert running.end() == 0


def has_signal_handler(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(caught >> (number - 1) & 1)


@pytest.mark.slow
def test_own_requests_fit_the_context(start: Start) -> None:
    """Chats grow, and a request beyond the context ended them all."""
    running = start(*NGRAM, "--max-model-len", "256", options={"own_requests_per_second": 100.0})
    began = time.monotonic()
    while running.metric("vllm:request_success_total") < 100:
        assert time.monotonic() < began + 120
        time.sleep(0.05)
