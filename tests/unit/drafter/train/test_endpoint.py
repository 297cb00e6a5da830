"""Answers from a server with vLLM's OpenAI interface: exact tokens, limits, retries, and runs that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, tzinfo
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from aerie_drafter.chat_template import TemplateArguments
from aerie_drafter.cli import run_cli
from aerie_drafter.errors import ConfigError, DataError
from aerie_drafter.train import endpoint
from aerie_drafter.train.answers import GenerationParameters, TemperatureMix
from aerie_drafter.train.data import load_corpus
from aerie_drafter.train.endpoint import EndpointAnswers, EndpointOptions, generate_from_endpoint

OPTIONS = EndpointOptions(concurrency=4, retry_timeout_seconds=0.3, first_pause_seconds=0.01)


class Server:
    """A server that answers `TOKENS of a question` by vLLM's protocol, or as `respond` says."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.respond: Callable[[dict[str, Any]], dict[str, Any] | int] = self.answer
        self.delay_seconds = 0.0
        self.headers: dict[str, str] = {}
        self.open, self.most_open = 0, 0
        self.lock = threading.Lock()

    @staticmethod
    def answer(body: dict[str, Any], **message: Any) -> dict[str, Any]:
        """Return a response whose tokens are no text: a special token, a byte that is no UTF-8, and the end."""
        prompt = [ord(letter) % 256 for entry in body["messages"] for letter in entry["role"][0] + str(entry["content"])]
        answer = {"role": "assistant", "content": "text", "refusal": None, "reasoning": None, **message}
        choice = {"index": 0, "message": answer, "finish_reason": "stop", "token_ids": [257, 255, len(prompt) % 256, 256]}
        return {"id": "1", "choices": [choice], "prompt_token_ids": prompt}

    def handle(self, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "target", "root": "/models/target"}]}
        assert path == "/v1/chat/completions"
        assert body is not None
        with self.lock:
            self.requests.append(body)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        time.sleep(self.delay_seconds)
        with self.lock:
            self.open -= 1
        response = self.respond(body)
        return (response, {"error": "no"}) if isinstance(response, int) else (200, response)


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    """Yield a server and its address."""
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            status, answer = state.handle(self.path, json.loads(self.rfile.read(length)) if length else None)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for name, value in state.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _reply  # noqa: N815 (names of http.server)

        def log_message(self, *_: object) -> None:
            return

    class QuietServer(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            return  # a killed client

    http = QuietServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    yield state, f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {index}"}) + "\n" for index in range(40)))
    return path


def generate(url: str, source: Path, output: Path, **arguments: Any) -> int:
    return run(url, source, output, **arguments).written


def run(url: str, source: Path, output: Path, **arguments: Any) -> EndpointAnswers:
    arguments = {"parameters": GenerationParameters(8), "options": OPTIONS, **arguments}
    return asyncio.run(generate_from_endpoint(url, "target", source, output, **arguments))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_have_the_order_of_the_source_and_exact_tokens(
    server: tuple[Server, str], source: Path, tmp_path: Path, tokenizer_of: Callable[..., Any]
) -> None:
    state, url = server
    state.delay_seconds = 0.02
    output = tmp_path / "answers.jsonl"
    assert generate(f"{url}/v1/", source, output) == 40
    assert [record["messages"][0]["content"] for record in read(output)] == [f"say {index}" for index in range(40)]
    assert 1 < state.most_open <= OPTIONS.concurrency
    corpus = load_corpus([output], tokenizer_of(), max_length=50)
    for index, record in enumerate(read(output)):
        tokens, mask = corpus[index]
        expected = Server.answer({"messages": record["messages"][:1]})
        assert tokens.tolist() == expected["prompt_token_ids"] + expected["choices"][0]["token_ids"]
        assert tokens[mask].tolist() == expected["choices"][0]["token_ids"]
    assert generate(url, source, output) == 0


def test_requests_have_seeds_temperatures_and_template_arguments(
    server: tuple[Server, str], source: Path, tmp_path: Path
) -> None:
    state, url = server
    tools = [{"type": "function", "function": {"name": "f"}}]
    parameters = GenerationParameters(8, TemperatureMix.parse("0:0.5,1:0.5"), 0.9, seed=5)
    template = TemplateArguments(tuple(tools), {"enable_thinking": False})
    output = tmp_path / "answers.jsonl"
    generate(url, source, output, parameters=parameters, template=template)
    first = state.requests[0]
    assert (first["model"], first["max_tokens"], first["top_p"], first["return_token_ids"]) == ("target", 8, 0.9, True)
    assert (first["tools"], first["chat_template_kwargs"]) == (tools, {"enable_thinking": False})
    assert len({request["seed"] for request in state.requests}) == 40
    temperatures = [record["temperature"] for record in read(output)]
    assert 8 < temperatures.count(1.0) < 32
    sent = {request["messages"][0]["content"]: (request["temperature"], request["seed"]) for request in state.requests}
    assert [sent[record["messages"][0]["content"]][0] for record in read(output)] == temperatures
    assert read(output)[0]["tools"] == tools
    state.requests.clear()
    generate(url, source, tmp_path / "again.jsonl", parameters=parameters, template=template)
    assert {request["messages"][0]["content"]: (request["temperature"], request["seed"]) for request in state.requests} == sent


def test_a_passing_failure_is_tried_again(server: tuple[Server, str], source: Path, tmp_path: Path) -> None:
    state, url = server
    failed: set[str] = set()

    def respond(body: dict[str, Any]) -> dict[str, Any] | int:
        question = body["messages"][0]["content"]
        if question in failed:
            return Server.answer(body)
        failed.add(question)
        return 503

    state.respond = respond
    assert generate(url, source, tmp_path / "answers.jsonl") == 40
    assert len(state.requests) == 80


def reject(*places: int) -> Callable[[dict[str, Any]], dict[str, Any] | int]:
    questions = {f"say {place}" for place in places}
    return lambda body: 400 if body["messages"][0]["content"] in questions else Server.answer(body)


def test_a_rejected_conversation_is_recorded_and_not_requested_again(
    server: tuple[Server, str], source: Path, tmp_path: Path
) -> None:
    state, url = server
    state.respond = reject(7, 3)
    output, record = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.rejected.jsonl"
    for _ in range(2):
        answers = run(url, source, output)
        assert [(each.index, each.location) for each in answers.rejected] == [(3, f"{source}:4"), (7, f"{source}:8")]
        assert answers.rejected[0].reason.startswith("status 400: ")
        assert [line["source_index"] for line in read(output)] == [each for each in range(40) if each not in (3, 7)]
        assert len(state.requests) == 40
        record.write_bytes(record.read_bytes() + b'{"source_ind')  # what a kill in the middle of a write leaves
    options = EndpointOptions(4, retry_rejected=True)
    state.respond = reject(3)
    assert generate(url, source, output, options=options) == 1
    source.write_text(source.read_text().replace('"say 3"', '"speak"'))
    answers = run(url, source, output)
    assert (answers.written, answers.rejected) == (1, ())
    assert len(read(output)) == 40
    assert not record.exists()


def test_too_many_rejected_conversations_end_the_command(server: tuple[Server, str], source: Path, tmp_path: Path) -> None:
    """A repeat asks for none of them again, and a larger share accepts them."""
    state, url = server
    state.respond = reject(7, 8, 9)
    output = tmp_path / "answers.jsonl"
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"rejects 3 of 40 .*, with 37 answered; allowed: 5.0%. The first is .*:8: status 400"
        ):
            generate(url, source, output)
    assert len(state.requests) == 40
    assert len(run(url, source, output, options=EndpointOptions(4, max_rejected_share=0.1)).rejected) == 3


def test_a_server_that_rejects_everything_ends_the_run_soon(server: tuple[Server, str], source: Path, tmp_path: Path) -> None:
    """The same command requests all of them when the server was corrected."""
    state, url = server
    state.respond = lambda _: 400
    source.write_text(source.read_text() * 20)
    with pytest.raises(DataError, match=r"rejects 21 of 800 conversations, with 0 answered"):
        generate(url, source, tmp_path / "answers.jsonl")
    assert len(state.requests) <= 21 + 4
    state.respond = Server.answer
    assert generate(url, source, tmp_path / "answers.jsonl") == 800


def test_a_server_that_is_away_for_a_while_is_waited_for(server: tuple[Server, str], source: Path, tmp_path: Path) -> None:
    """Also for longer than all workers together need for many attempts, and its Retry-After is honoured."""
    state, url = server
    back_at = time.monotonic() + 1.2
    state.respond = lambda body: 429 if time.monotonic() < back_at else Server.answer(body)
    options = EndpointOptions(4, retry_timeout_seconds=30, first_pause_seconds=0.01)
    assert generate(url, source, tmp_path / "a.jsonl", options=options) == 40
    state.requests.clear()
    state.headers = {"Retry-After": "1"}
    back_at = time.monotonic() + 0.5
    assert generate(url, source, tmp_path / "b.jsonl", options=options) == 40
    assert len(state.requests) == 40 + 4


@pytest.mark.parametrize(("value", "seconds"), [("7", 7), ("", 0), ("soon", 0), ("-3", 0), ("Fri, 01 Jan 2027 00:00:10 GMT", 10)])
def test_retry_after_has_seconds_or_a_date(monkeypatch: pytest.MonkeyPatch, value: str, seconds: float) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls(2027, 1, 1, tzinfo=tz)

    monkeypatch.setattr(endpoint, "datetime", Clock)
    assert endpoint._parse_retry_after(value) == seconds


def test_a_conversation_that_keeps_failing_alone_is_tried_by_the_next_run(
    server: tuple[Server, str], source: Path, tmp_path: Path
) -> None:
    state, url = server
    state.delay_seconds = 0.05

    def respond(body: dict[str, Any]) -> dict[str, Any] | int:
        return 500 if body["messages"][0]["content"] == "say 0" else Server.answer(body)

    state.respond = respond
    output = tmp_path / "answers.jsonl"
    with pytest.raises(DataError, match=r"1 of 40 conversations have no answer; the first is .*prompts.jsonl:1: status 500"):
        generate(url, source, output)
    assert [line["source_index"] for line in read(output)] == [*range(1, 40)]
    state.respond = Server.answer
    assert generate(url, source, output) == 1


@pytest.mark.parametrize(
    ("response", "message", "most_requests"),
    [
        (500, r"/v1/chat/completions: no request has succeeded for \d+ s; the last failure: status 500: ", 4 * 12),
        (401, r"/v1/chat/completions: status 401", 4),
        (302, r"/v1/chat/completions: status 302", 4),
        ({"choices": [{"message": {"content": "x"}, "token_ids": None}]}, "the answer has no token ids", 4),
    ],
)
def test_a_server_that_cannot_answer_ends_the_run(
    server: tuple[Server, str], source: Path, tmp_path: Path, response: Any, message: str, most_requests: int
) -> None:
    state, url = server
    state.respond = lambda _: response
    with pytest.raises(DataError, match=message):
        generate(url, source, tmp_path / "answers.jsonl")
    assert len(state.requests) <= most_requests


def test_a_wrong_model_or_address_is_reported(server: tuple[Server, str], source: Path, tmp_path: Path) -> None:
    _, url = server
    with pytest.raises(DataError, match="no model 'other'; its models are target"):
        asyncio.run(generate_from_endpoint(url, "other", source, tmp_path / "a", parameters=GenerationParameters()))
    with pytest.raises(DataError, match=r"http://127.0.0.1:9/v1/models: no request has .*: no response \(ConnectError"):
        generate("http://127.0.0.1:9", source, tmp_path / "a")
    for address in ("http://host:port", "ftp://host", "localhost:8000", "http://"):
        with pytest.raises(ConfigError, match=r"expected: an address such as http://localhost:8000\.$"):
            generate(address, source, tmp_path / "a")


def test_a_run_is_not_continued_with_other_inputs(server: tuple[Server, str], source: Path, tmp_path: Path) -> None:
    _, url = server
    output = tmp_path / "answers.jsonl"
    generate(url, source, output)
    with pytest.raises(DataError, match=r"answers were generated with temperature '0', and now it is '1'"):
        generate(url, source, output, parameters=GenerationParameters(8, TemperatureMix.constant(1.0)))
    with pytest.raises(DataError, match=r"answers were generated with template_arguments"):
        generate(url, source, output, template=TemplateArguments((), {"x": 1}))
    source.write_text(source.read_text().replace("say 3", "said 3"))
    with pytest.raises(DataError, match=r"answers.jsonl:4: answers another conversation than .*prompts.jsonl:4"):
        generate(url, source, output)


def call(name: str, **message: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": name, "type": "function", "function": {"name": "f"}}],
        **message,
    }


def test_tool_results_follow_the_calls_that_the_target_makes(server: tuple[Server, str], tmp_path: Path) -> None:
    """The recorded result answers the new call. Where the target makes no call, or more, the conversation ends."""
    state, url = server
    question, result = {"role": "user", "content": "q"}, {"role": "tool", "content": "r", "tool_call_id": "old"}
    source, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text(json.dumps({"messages": [question, call("old"), result, {"role": "assistant", "content": "a"}]}) + "\n")

    def respond(body: dict[str, Any]) -> dict[str, Any]:
        if len(body["messages"]) == 1:
            return Server.answer(body, content=None, tool_calls=call("new")["tool_calls"] * calls, reasoning="hm")
        return Server.answer(body)

    state.respond = respond
    calls = 1
    generate(url, source, output)
    (record,) = read(output)
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert record["messages"][2] == {"role": "tool", "content": "r", "tool_call_id": "new"}
    assert record["messages"][1]["reasoning"] == "hm"
    assert len(record["sequences"]) == 2  # this server's prompts do not begin with the earlier answer's tokens
    assert generate(url, source, output) == 0
    source.write_text(json.dumps({"messages": [question, result]}) + "\n")
    with pytest.raises(DataError, match="a tool's result comes before any answer"):
        generate(url, source, tmp_path / "alone.jsonl")
    source.write_text(json.dumps({"messages": [question, call("old"), result, question]}) + "\n")
    for number in (0, 2):
        calls = number
        generate(url, source, tmp_path / f"{number}.jsonl")
        (record,) = read(tmp_path / f"{number}.jsonl")
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"]


def test_a_killed_run_continues_line_by_line(server: tuple[Server, str], source: Path, tmp_path: Path) -> None:
    state, url = server
    state.delay_seconds = 0.1
    output = tmp_path / "answers.jsonl"
    command = ["generate", str(source), str(output), "--endpoint", url, "--model", "target", "--concurrency", "4"]
    process = subprocess.Popen([sys.executable, "-m", "aerie_drafter.cli", *command], env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while len(state.requests) < 16:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    written = output.read_bytes()
    lines = written.count(b"\n")
    assert 16 - 2 * 4 <= lines < 36  # those of all responses are there, except for the open requests
    output.write_bytes(written + b'{"source_index": 39, "mess')  # what a kill in the middle of a write leaves
    state.delay_seconds, before = 0.0, len(state.requests)
    assert run_cli(command) == 0
    assert len(state.requests) - before == 40 - lines
    records = read(output)
    assert [record["source_index"] for record in records] == [*range(40)]
    assert all(line in output.read_bytes().splitlines() for line in written.splitlines())
    assert not list(tmp_path.glob(".*.writing"))
