"""The endpoint of the plugin on real vLLM: hostile calls, swaps and leases, while users are served.

One server for all tests here, because a start takes most of a minute.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie_drafter.bundle import find_bundle_path
from tests.vllm.inplace_server import API_KEY, TOKEN, InPlaceServer, Users, hash_files, serve_in_place, users_of

pytestmark = pytest.mark.timeout(2400)  # the first test may have to install vLLM

SHA = "0" * 64
PROMPTS = [json.loads(line)["messages"] for line in find_bundle_path("prompts.jsonl").read_text().splitlines()][:12]
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"


USER_MIDDLEWARE = """
class Greedy:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"].startswith("/aerie/"):
            await send({"type": "http.response.start", "status": 418, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self.app(scope, receive, send)


async def answer_all(request, call_next):
    if request.url.path.startswith("/aerie/"):
        raise AssertionError("the request and its token have reached the user's middleware")
    return await call_next(request)
"""


@pytest.fixture(scope="module")
def server(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InPlaceServer]:
    """A server whose own drafter is the bundle's of EAGLE 3.1, with middleware of the user that would answer the calls, a key for
    vLLM's own paths, and other options of the server that must make no difference."""
    folder, modules = tmp_path_factory.mktemp("inplace"), tmp_path_factory.mktemp("modules")
    (modules / "user_middleware.py").write_text(USER_MIDDLEWARE)
    flags = ["--middleware=user_middleware.answer_all", "--middleware=user_middleware.Greedy"]
    flags += ["--root-path=/chat", "--disable-fastapi-docs", "--enable-request-id-headers"]
    environment = {"VLLM_API_KEY": API_KEY}
    with serve_in_place(vllm, folder, "eagle31", *flags, environment=environment, modules=[modules]) as running:
        yield running


@pytest.fixture(scope="module")
def users(server: InPlaceServer) -> Iterator[Users]:
    """Two users without pause."""
    with users_of(server, PROMPTS, count=2, max_tokens=64) as active_users:
        yield active_users


# ------------------------------------------------------------------------------------------------------------ hostile calls
Call = Callable[[InPlaceServer], httpx.Response]
Edit = Callable[[Path], None]


def without_token(server: InPlaceServer) -> httpx.Response:
    return server.client.put("/aerie/drafter", json={})


def with_two_tokens(server: InPlaceServer) -> httpx.Response:
    headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer other")]
    return server.client.request("DELETE", "/aerie/drafter", headers=headers)


def with_authorization(value: str) -> Call:
    return lambda server: server.call("PUT", json={}, headers={"Authorization": value})


def with_body(content: bytes) -> Call:
    return lambda server: server.call("PUT", content=content)


def with_endless_body(server: InPlaceServer) -> httpx.Response:
    def parts() -> Iterator[bytes]:
        while True:
            yield b" " * 10_000

    try:
        return server.call("PUT", content=parts())
    except httpx.TransportError:  # the server answers and closes the connection while the client still sends
        return httpx.Response(413)


def with_fields(**fields: Any) -> Call:
    return lambda server: server.put("eagle3", **fields)


def with_path(method: str, path: str) -> Call:
    return lambda server: server.call(method, path)


def with_edited(edit: Edit, name: str = "eagle3") -> Call:
    """Return a call that loads a copy of a drafter whose files were edited before they were hashed."""

    def call(server: InPlaceServer) -> httpx.Response:
        copy = f"hostile-{time.monotonic_ns()}"
        edit(server.add_drafter(copy, find_bundle_path(name)))
        return server.put(copy)

    return call


def with_replaced(edit: Edit) -> Call:
    """Return a call that loads a copy of a drafter whose files were edited after they were hashed."""

    def call(server: InPlaceServer) -> httpx.Response:
        copy = f"hostile-{time.monotonic_ns()}"
        folder = server.add_drafter(copy, find_bundle_path("eagle3"))
        files = hash_files(folder)
        edit(folder)
        return server.put(copy, files=files)

    return call


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return edit


def edit_config(**fields: Any) -> Edit:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return edit


def write_file(name: str, content: bytes) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return edit


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1_000_000)


def flip_a_bit(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def link_to(target: str, name: str = "model.safetensors") -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return edit


def make_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def make_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def scale(name: str, tensors: dict[str, torch.Tensor]) -> None:
    tensors[name] = tensors[name].repeat(*(2 if axis == 0 else 1 for axis in range(tensors[name].dim())))


def first_matrix(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(tensors) if "fc" in name and tensors[name].dim() == 2)


def set_map_beyond_target(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = torch.full_like(tensors["d2t"], 10**6)


def pickle_weights(folder: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {folder / 'executed'}",)

    (folder / "model.safetensors").write_bytes(pickle.dumps(Payload()))


HOSTILE_CALLS: dict[str, tuple[Call, set[int]]] = {
    "no token": (without_token, {401}),
    "two tokens": (with_two_tokens, {401}),
    "wrong token": (with_authorization(f"Bearer {TOKEN}x"), {401}),
    "short token": (with_authorization("Bearer a"), {401}),
    "basic": (with_authorization("Basic dXNlcjpwYXNz"), {401}),
    "other method": (with_path("POST", "/aerie/drafter"), {405}),
    "other path": (with_path("GET", "/aerie/%2e%2e/drafter"), {404}),
    "renewal of no lease": (
        lambda server: server.call("POST", "/aerie/drafter/lease", json={"digest": SHA, "lease_seconds": 60}),
        {409},
    ),
    "renewal of a text": (lambda server: server.call("POST", "/aerie/drafter/lease", json="own"), {400}),
    "empty body": (with_body(b""), {400}),
    "no JSON": (with_body(b"\x80\x04}"), {400}),
    "nested JSON": (with_body(b"[" * 65_000), {400}),
    "huge body": (with_body(b" " * 5_000_000), {413}),
    "endless body": (with_endless_body, {413}),
    "field twice": (with_body(b'{"files": {}, "files": {}}'), {400}),
    "unknown field": (with_fields(weights="/etc/passwd"), {400}),
    "files as list": (with_fields(files=["config.json"]), {400}),
    "file in another folder": (with_fields(files={"config.json": SHA, "../eagle31/model.safetensors": SHA}), {400}),
    "pickle's name": (with_fields(files={"config.json": SHA, "pytorch_model.bin": SHA}), {400}),
    "endless lease": (with_fields(lease_seconds=1e18), {400}),
    "lease as text": (with_fields(lease_seconds="60"), {400}),
    "relative folder": (with_fields(folder="drafters/eagle3"), {400}),
    "folder outside": (with_fields(folder=str(find_bundle_path("eagle3"))), {403}),
    "folder by dots": (lambda server: server.put("eagle3", folder=f"{server.root}/../../eagle3"), {403}),
    "missing folder": (lambda server: server.put("eagle3", folder=f"{server.root}/missing"), {422}),
    "not held": (with_fields(folder=None), {422}),
    "another is loaded": (with_fields(expected_digest=SHA), {409}),
    "link to a device": (with_replaced(link_to("/dev/zero")), {403}),
    "link to a secret": (with_replaced(link_to("/etc/hostname", "config.json")), {403}),
    "pipe": (with_replaced(make_pipe), {422}),
    "folder as file": (with_replaced(make_folder), {422}),
    "swapped file": (with_replaced(flip_a_bit), {422}),
    "swapped config": (with_replaced(edit_config(norm_output=True)), {422}),
    "truncated after hashing": (with_replaced(truncate), {422}),
    "truncated": (with_edited(truncate), {422}),
    "empty file": (with_edited(write_file("model.safetensors", b"")), {422}),
    "huge header": (with_edited(write_file("model.safetensors", (2**62).to_bytes(8, "little") + b"{}")), {422}),
    "no header": (with_edited(write_file("model.safetensors", os.urandom(100_000))), {422}),
    "pickle": (with_edited(pickle_weights), {422}),
    "config of no JSON": (with_edited(write_file("config.json", b"{")), {422}),
    "config as list": (with_edited(write_file("config.json", b"[]")), {422}),
    "file that is not named": (with_replaced(write_file("more.safetensors", b"")), {422}),
    "wrong shape": (with_edited(edit_tensors(lambda tensors: scale(first_matrix(tensors), tensors))), {422}),
    "missing tensor": (with_edited(edit_tensors(lambda tensors: tensors.pop(first_matrix(tensors)))), {422}),
    "unknown tensor": (with_edited(edit_tensors(lambda tensors: tensors.update(other=torch.zeros(4)))), {422}),
    "wrong type": (
        with_edited(edit_tensors(lambda tensors: tensors.update({(n := first_matrix(tensors)): tensors[n].to(torch.int32)}))),
        {422},
    ),
    "vocabulary map beyond the target": (with_edited(edit_tensors(set_map_beyond_target)), {422}),
    "other vocabulary": (with_edited(edit_config(vocab_size=32_000)), {422}),
    "other hidden size": (with_edited(edit_config(hidden_size=4096)), {422}),
    "more layers": (with_edited(edit_config(num_hidden_layers=2)), {422}),
    "other architecture": (with_edited(edit_config(architectures=["Eagle3DeepseekV2ForCausalLM"])), {422}),
    "quantised": (with_edited(edit_config(quantization_config={"quant_method": "awq", "bits": 4})), {422}),
}


@pytest.mark.parametrize("name", HOSTILE_CALLS)
def test_a_hostile_call_changes_nothing(server: InPlaceServer, users: Users, name: str) -> None:
    call, statuses = HOSTILE_CALLS[name]
    before = server.state()
    response = call(server)
    assert response.status_code in statuses, response.text
    if response.content:
        body = response.json()
        assert body["reason"]
        assert len(body["message"]) > 20
        print(f"{name}: {response.status_code} {body['reason']}: {body['message']}")  # noqa: T201 - to read the messages
    after = server.state()
    for field in ("loaded", "own", "lease", "since", "swaps", "failures", "process"):
        assert after[field] == before[field]
    assert after["windows"][0]["number"] == before["windows"][0]["number"]
    assert server.client.get("/health").status_code == server.client.get("/aerie/ready").status_code == 200
    assert users.failures == []
    assert not list(server.root.glob("*/executed"))


def prepare(server: InPlaceServer, folder: Path) -> dict[str, Any]:
    """Prepare a drafter, and return the result."""
    assert server.call("POST", "/aerie/drafter/prepare", json={"folder": str(folder)}).status_code == 202
    deadline = time.monotonic() + 120
    while (prepared := server.state()["prepared"])["phase"] == "Running":
        assert time.monotonic() < deadline, prepared
        time.sleep(0.1)
    assert isinstance(prepared, dict)
    return prepared


def test_a_preparation_finds_the_files_and_a_change_then_needs_no_disk(server: InPlaceServer, users: Users) -> None:
    before = server.state()
    prepared = prepare(server, server.root / "eagle3")
    assert (prepared["phase"], prepared["kind"], prepared["commit"]) == ("Ready", "eagle3", None)
    assert prepared["files"] == hash_files(server.root / "eagle3")
    after = server.state()
    for field in ("loaded", "own", "lease", "since", "swaps", "failures", "change"):
        assert after[field] == before[field]
    body = {"folder": prepared["folder"], "files": prepared["files"], "lease_seconds": 60}
    response = server.call("PUT", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["loaded"]["digest"] == prepared["digest"]
    assert response.json()["durations"]["staging"] < 1.0
    assert server.call("DELETE").status_code == 200
    assert users.failures == []


def test_a_preparation_makes_the_checks_of_a_change(server: InPlaceServer, users: Users) -> None:
    wrong = server.add_drafter("wrong-shape", find_bundle_path("eagle3"))
    edit_tensors(lambda tensors: scale(first_matrix(tensors), tensors))(wrong)
    other_map = server.add_drafter("other-map", find_bundle_path("eagle3"))
    edit_tensors(set_map_beyond_target)(other_map)
    for folder, reason in (
        (wrong, "Shape"),
        (other_map, "VocabularyMap"),
        (server.root / "missing", "FolderMissing"),
        (Path("/etc"), "FolderOutsideRoots"),
    ):
        prepared = prepare(server, folder)
        assert (prepared["phase"], prepared["problem"]["reason"], prepared["files"]) == ("Failed", reason, None)
    assert server.client.get("/aerie/ready").status_code == 200
    assert users.failures == []


def test_concurrent_changes(server: InPlaceServer, users: Users) -> None:
    """One change is made at a time; all others are rejected, and a return wins."""
    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(lambda _: server.put("weak", lease_seconds=30), range(8)))
    statuses = sorted(response.status_code for response in responses)
    assert statuses[0] == 200
    # A later call may come when the drafter is loaded, and then only renews its lease.
    assert set(statuses) <= {200, 409}
    rejected = {response.json()["reason"] for response in responses if response.status_code == 409}
    assert rejected <= {"ChangeInProgress", "LoadedChanged"}
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(server.put, "eagle3", 30) if index % 2 else pool.submit(server.call, "DELETE") for index in range(8)]
        assert {call.result().status_code for call in calls} <= {200, 409}
    assert server.call("DELETE").status_code == 200
    state = server.state()
    assert state["loaded"] == state["own"]
    assert users.failures == []


def renew_lease(server: InPlaceServer, digest: str, seconds: float) -> None:
    response = server.call("POST", "/aerie/drafter/lease", json={"digest": digest, "lease_seconds": seconds})
    assert response.status_code == 200, response.text


def test_a_lease_that_ends(server: InPlaceServer, users: Users) -> None:
    response = server.put("weak", lease_seconds=60, turn="trial")
    assert response.status_code == 200, response.text
    state = response.json()
    assert state["loaded"]["files"] == hash_files(server.root / "weak")
    assert state["lease"]["digest"] == state["loaded"]["digest"] != state["own"]["digest"]
    digest = state["loaded"]["digest"]
    renew_lease(server, digest, 120)
    renewed = server.state()
    assert (renewed["loaded"], renewed["lease"]["digest"]) == (state["loaded"], digest)
    assert 60 < renewed["lease"]["remaining_seconds"] <= 120
    renew_lease(server, digest, 2)
    deadline = time.monotonic() + 20
    while server.state()["loaded"] != state["own"]:
        assert time.monotonic() < deadline, server.state()
        time.sleep(0.2)
    state = server.state(after=state["windows"][0]["number"] - 1)
    assert state["lease"] is None
    (trial, after) = state["windows"]
    assert (trial["turn"], after["turn"], after["digest"]) == ("trial", None, state["own"]["digest"])
    assert users.failures == []


def acceptance_length(windows: list[dict[str, Any]]) -> float:
    drafts, accepted = (sum(window["counts"][name][""] for window in windows) for name in (DRAFTS, ACCEPTED))
    return float(1 + accepted / drafts)


def read_total(server: InPlaceServer, name: str) -> float:
    """Return the sum of a metric's series."""
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def test_turns_are_counted_apart(server: InPlaceServer, users: Users) -> None:
    """The windows' counts add up to vLLM's own, and tell a weak drafter from a good one."""
    first = server.state()["windows"][0]["number"]
    completed = users.completed
    for turn in range(6):
        response = server.put(("weak", "eagle31")[turn % 2], lease_seconds=60, turn=str(turn), settle_seconds=1)
        assert response.status_code == 200, response.text
        time.sleep(6)
    assert server.call("DELETE").status_code == 200
    windows = [window for window in server.state(after=first)["windows"] if window["turn"] is not None]
    assert [window["turn"] for window in windows] == list("012345")
    weak, own = (acceptance_length(windows[start::2]) for start in (0, 1))
    assert weak < 1.6 < 2.0 < own
    assert users.completed > completed + 10
    counted = sum(
        window["counts"][DRAFTS][""] + window["settling_counts"][DRAFTS][""] for window in server.state(after=0)["windows"]
    )
    # Users continue, and one scrape reads the two counters one after the other.
    total_before, attributed, total_after = (read_total(server, name) for name in (DRAFTS, "aerie_drafter_drafts_total", DRAFTS))
    assert total_before <= attributed + 200, "200: what was drafted before the first window"
    assert counted <= attributed <= total_after
    assert users.failures == []


def test_an_isolated_pod_is_not_ready_and_serves(server: InPlaceServer, users: Users) -> None:
    """The users here know the address, so that the engine has requests that are not finished."""
    assert server.put("weak", lease_seconds=60, isolated=True).json()["reason"] == "NotIsolated"
    deadline = time.monotonic() + 120
    unfinished = 0
    while unfinished == 0:  # between two requests of a user the engine has none
        assert time.monotonic() < deadline
        isolated = server.call("POST", "/aerie/isolation", json={"lease_seconds": 60})
        assert isolated.status_code == 200, isolated.text
        unfinished = isolated.json()["isolation"]["unfinished_requests"]
    assert unfinished <= 2
    completed = users.completed
    for turn, name in (("1/0", "weak"), ("1/1", "eagle31")):
        response = server.put(name, lease_seconds=60, turn=turn, isolated=True)
        assert response.status_code == 200, response.text
        ready = server.client.get("/aerie/ready")
        assert (ready.status_code, ready.json()) == (503, {"ready": False, "reason": "Isolated", "turn": turn})
    deadline = time.monotonic() + 120
    while users.completed < completed + 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert server.call("DELETE").status_code == 200
    assert server.client.get("/aerie/ready").status_code == 200
    state = server.state()
    assert (state["loaded"], state["isolation"]) == (state["own"], None)
    assert users.failures == []


def test_no_request_failed_and_no_answer_differs(server: InPlaceServer, users: Users) -> None:
    state = server.state()
    assert state["swaps"] >= 8
    assert state["failures"] == 0
    assert (users.failures, users.different) == ([], [])
    assert users.completed > 30
