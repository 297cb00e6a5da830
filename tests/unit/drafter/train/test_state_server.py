"""Hidden states from a server that extracts them as vLLM does: checks, retries, files, and training on demand."""

from __future__ import annotations

import fcntl
import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from aerie_drafter.cli import run_cli
from aerie_drafter.errors import CheckpointError, ConfigError, DataError, DrafterError, TargetError
from aerie_drafter.train import state_server
from aerie_drafter.train.settings import parse_settings
from aerie_drafter.train.setup import build_trainer
from aerie_drafter.train.state_server import HiddenStateServer, write_state_files
from aerie_drafter.train.states import InProcessTarget, StateLayout, extract_target_parts
from aerie_drafter.train.trainer import NullReporter, StepReport

LAYERS = (2, 3, 6)
TEXT = torch.arange(3, 14)


class Server:
    """A server that writes a file for each request, as vLLM's connector does: locked until it is complete."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.requests = 0
        self.statuses: list[int] = []
        self.change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None
        self.change_answer: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.lock = threading.Lock()

    def handle(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.requests += 1
            number = self.requests
            if self.statuses:
                return self.statuses.pop(0), {"error": "no"}
            tokens = torch.tensor(body["prompt"])
            states = InProcessTarget(self.model, LAYERS).fetch_hidden_states(tokens.unsqueeze(0))
            with torch.no_grad():
                best = int(self.model(input_ids=tokens.unsqueeze(0)).logits[0, -1].argmax())
        tensors = {
            "token_ids": tokens,
            "hidden_states": states.aux_hidden_states[0].view(len(tokens), len(LAYERS), -1).contiguous(),
        }
        self.change(tensors)
        path = self.folder / f"cmpl-{number}.safetensors"
        stream = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(stream, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(0.02)
            save_file(tensors, path)
            stream.close()

        threading.Thread(target=write).start()
        choice = {"index": 0, "text": "", "token_ids": [best]}
        answer = {"choices": [choice], "kv_transfer_params": {"hidden_states_path": f"/server{path}"}}
        return 200, self.change_answer(answer)


@pytest.fixture
def server(tmp_path: Path, target_of: Callable[..., Any]) -> Iterator[tuple[Server, str]]:
    """Yield a server and its address."""
    folder = tmp_path / "shared"
    folder.mkdir()
    model = target_of(initializer_range=0.3)
    model.model.norm.weight.data.uniform_(0.5, 2.0)
    state = Server(model, folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, answer = state.handle(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    class DaemonServer(ThreadingHTTPServer):
        daemon_threads = True

    http = DaemonServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    yield state, f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    thread.join()
    http.server_close()


def connect(state: Server, url: str, **arguments: Any) -> HiddenStateServer:
    arguments = {"shared_folder": state.folder, "attempts": 3, "first_pause_seconds": 0.01, **arguments}
    return HiddenStateServer(url, "target", extract_target_parts(state.model), StateLayout(LAYERS, 32), **arguments)


def test_states_are_read_when_they_are_complete_and_their_file_is_removed(server: tuple[Server, str]) -> None:
    state, url = server
    state.statuses = [503, 429]
    expected = InProcessTarget(state.model, LAYERS).fetch_hidden_states(TEXT.unsqueeze(0)).aux_hidden_states[0].view(11, 3, 32)
    assert torch.equal(connect(state, url).extract(TEXT), expected)
    assert list(state.folder.iterdir()) == []


def change_tokens(tensors: dict[str, torch.Tensor]) -> None:
    tensors["token_ids"] = tensors["token_ids"] + 1


def remove_layer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"] = tensors["hidden_states"][:, 1:].contiguous()


def swap_layers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"] = tensors["hidden_states"].flip(1).contiguous()


def overflow(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"][4, 0, 0] = float("inf")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (change_tokens, DataError, "its 11 tokens are not those of the conversation of 11"),
        (remove_layer, DataError, "hidden_states is 11 x 2 x 32; expected: tokens x 3 x 32"),
        (swap_layers, TargetError, "they are different targets, or the layer ids differ"),
        (overflow, TargetError, "hidden states are not finite"),
    ],
)
def test_invalid_states_are_rejected(
    server: tuple[Server, str], change: Callable[[dict[str, torch.Tensor]], None], kind: type[DrafterError], message: str
) -> None:
    state, url = server
    state.change = change
    connection = connect(state, url)
    with pytest.raises(kind, match=message):  # the next token of some texts is the same after a wrong state
        list(map(connection.extract, [TEXT + first for first in range(10)]))
    assert list(state.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda _: b"<html>", DataError, "the answer is no JSON object, so no vLLM listens there: '<html>'"),
        (lambda answer: [answer], DataError, "the answer is no JSON object"),
        (lambda answer: answer | {"kv_transfer_params": None}, DataError, "the answer has no path of hidden states"),
        (lambda answer: answer | {"kv_transfer_params": ["a"]}, DataError, "the answer has no path of hidden states"),
        (lambda answer: answer | {"kv_transfer_params": {"hidden_states_path": 1}}, DataError, "has no path of hidden states"),
        (lambda answer: answer | {"choices": [{"text": ""}]}, DataError, "it needs a vLLM with return_token_ids"),
        (lambda answer: answer | {"choices": [{"token_ids": None}]}, DataError, "it needs a vLLM with return_token_ids"),
        (lambda answer: answer | {"choices": [{"token_ids": []}]}, DataError, "it needs a vLLM with return_token_ids"),
        (
            lambda answer: answer | {"choices": [{"token_ids": [151000]}]},
            TargetError,
            "continues with token 151000, and target.model has 264 tokens: they are different targets",
        ),
    ],
)
def test_answers_of_other_servers_are_rejected(
    server: tuple[Server, str], change: Callable[[dict[str, Any]], Any], kind: type[DrafterError], message: str
) -> None:
    state, url = server
    state.change_answer = change
    with pytest.raises(kind, match=message):
        connect(state, url).extract(TEXT)


def test_no_other_file_is_removed(server: tuple[Server, str], tmp_path: Path) -> None:
    """A wrong or hostile server can name any file."""
    state, url = server
    text, others = tmp_path / "thesis.txt", tmp_path / "model.safetensors"
    states = tmp_path / "states.safetensors"
    text.write_text("years of work")
    save_file({"weight": torch.zeros(3)}, others)
    save_file({"token_ids": TEXT + 1, "hidden_states": torch.zeros(11, 3, 32)}, states)
    for path in (text, others, states):
        path.with_name(f"{path.name}.lock").write_text("")
        parameters = {"kv_transfer_params": {"hidden_states_path": str(path)}}
        state.change_answer = parameters.__ror__
        with pytest.raises(DataError):
            connect(state, url, shared_folder=None).extract(TEXT)
        assert path.exists()
        assert path.with_name(f"{path.name}.lock").exists()
    save_file({"token_ids": TEXT, "hidden_states": torch.zeros(11, 2, 32)}, states)
    with pytest.raises(DataError, match="hidden_states is 11 x 2 x 32"):
        connect(state, url, shared_folder=None).extract(TEXT)
    assert not states.exists()


def test_an_address_that_is_none_is_rejected(server: tuple[Server, str]) -> None:
    with pytest.raises(ConfigError, match="http://host:port: not an address of a server"):
        connect(server[0], "http://host:port")


def test_a_full_disk_is_named(server: tuple[Server, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system limits the size of this file, as if the disk were full."""
    state, url = server
    original = save_file

    def save_with_a_limit(tensors: dict[str, torch.Tensor], path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            original(tensors, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(state_server, "save_file", save_with_a_limit)
    folder = tmp_path / "states"
    with pytest.raises(CheckpointError, match=r"safetensors: cannot be written \(.*File too large"):
        write_state_files(connect(state, url), folder, [TEXT], "sha256:1")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["states.json"]


def test_another_target_is_noticed_by_the_next_token(server: tuple[Server, str], target_of: Callable[..., Any]) -> None:
    state, url = server
    other = HiddenStateServer(
        url,
        "target",
        extract_target_parts(target_of(seed=1, initializer_range=0.3)),
        StateLayout(LAYERS, 32),
        shared_folder=state.folder,
    )
    with pytest.raises(
        TargetError, match=r"the server continues with token \d+, and target.model with \d+ after the same states"
    ):
        list(map(other.extract, [TEXT + first for first in range(10)]))


def test_failures_of_the_server_are_reported(server: tuple[Server, str], tmp_path: Path) -> None:
    state, url = server
    state.statuses = [500] * 3
    with pytest.raises(DataError, match="/v1/completions: status 500"):
        connect(state, url).extract(TEXT)
    state.statuses = [400]
    with pytest.raises(DataError, match="/v1/completions: status 400"):
        connect(state, url).extract(TEXT)
    with pytest.raises(DataError, match="shared_storage_path is mounted"):
        connect(state, url, shared_folder=tmp_path / "elsewhere").extract(TEXT)


def test_files_are_written_once_and_missing_ones_later(server: tuple[Server, str], tmp_path: Path) -> None:
    state, url = server
    texts = [torch.arange(3, length) for length in range(6, 26)]
    folder = tmp_path / "states"
    done: list[int] = []
    state.statuses = [400]
    with pytest.raises(DataError, match="status 400"):
        write_state_files(connect(state, url), folder, texts, "sha256:1", concurrency=4)
    requests = state.requests
    assert 0 < requests < 20
    rest = write_state_files(connect(state, url), folder, [*texts, *texts], "sha256:1", concurrency=4, on_progress=done.append)
    assert state.requests == requests + rest
    assert (done[0], done[-1]) == (20 - rest, 20)
    assert len(list(folder.glob("??/*.safetensors"))) == 20
    assert write_state_files(connect(state, url), folder, texts, "sha256:1") == 0
    with pytest.raises(TargetError, match="the states are of the target sha256:1, and the target is sha256:2"):
        write_state_files(connect(state, url), folder, texts, "sha256:2")
    with pytest.raises(DataError, match=r"has files, but no states.json: choose a new folder"):
        write_state_files(connect(state, url), tmp_path, texts, "sha256:1")


class RecordingReporter(NullReporter):
    """A reporter that records the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, step: StepReport) -> None:
        self.losses.append(step.loss)


def test_training_from_a_server_equals_training_from_the_target(
    server: tuple[Server, str],
    tmp_path: Path,
    tokenizer_of: Callable[..., Any],
    write_conversations: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also with files of `aerie-drafter states`, all of them or a part."""
    state, url = server
    target = tmp_path / "target"
    state.model.save_pretrained(target)
    tokenizer_of().save_pretrained(target)
    raw: dict[str, Any] = {
        "target": {"model": str(target)},
        "drafter": {"draft_vocab_size": 48},
        "data": {"train": [str(write_conversations(24))], "held_out_share": 0.2},
        "loss": {"horizon": 3},
        "optimizer": {"epochs": 1, "batch_size_per_process": 2},
        "output": {"folder": str(tmp_path / "out")},
    }
    stored, served = (
        {"hidden_states": str(tmp_path / "states")},
        {"hidden_states_endpoint": url, "hidden_states_shared_folder": str(state.folder)},
    )

    def train(name: str, **fields: Any) -> list[float]:
        settings = {**raw, "target": {**raw["target"], **fields}, "output": {"folder": str(tmp_path / name)}}
        reporter = RecordingReporter()
        build_trainer(parse_settings(settings, "test"), reporter=reporter).run()
        return reporter.losses

    expected = train("here")
    assert train("streamed", **served) == pytest.approx(expected, rel=1e-4)
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump({**raw, "target": {**raw["target"], **stored}}))
    before = state.requests
    command = ["states", str(file), "--endpoint", url, "--model", "target", "--shared-folder", str(state.folder)]
    assert run_cli(command) == 0
    assert "states of 24 conversations, 24 files of them new" in capsys.readouterr().out
    assert train("files", **stored) == pytest.approx(expected, rel=1e-4)
    assert state.requests == before + 24
    for path in list((tmp_path / "states").glob("??/*.safetensors"))[:5]:
        path.unlink()
    assert train("both", **stored, **served) == pytest.approx(expected, rel=1e-4)
    assert before + 24 < state.requests <= before + 24 + 2 * 5
