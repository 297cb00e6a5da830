"""The plugin's endpoint in front of a simulated engine: real files, a real server, and requests while the drafter changes."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aerie_drafter.bundle import find_bundle_path
from aerie_lab.hub.checkpoints import load_repositories
from aerie_lab.hub.server import create_hub_server

from .conftest import PLAIN, Running, Start, write_drafter

TOKEN = "a-token-of-32-characters-at-least"
PLUGIN = (
    *("--middleware", "aerie_vllm.endpoint.DrafterEndpoint"),
    *("--worker-extension-cls", "aerie_vllm.worker.DrafterWorker"),
)
ACCEPTED, DRAFTS = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"
OPTIONS = {"acceptance": {"chat": {"rates": [0.9, 0.8, 0.7]}}}
MIN_WINDOW_DRAFTS = 500
"""Drafts of a window from which its acceptance is measured to 0.2: five standard errors."""


def files_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the drafter's files."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir()) if path.suffix != ".md"}


@dataclass
class Endpoint:
    """The endpoint of one engine."""

    running: Running

    def call(self, method: str, path: str = "/aerie/drafter", body: object = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return self.running.client.request(method, path, headers=headers, json=body)

    def state(self, query: str = "") -> dict[str, Any]:
        answer = self.call("GET", f"/aerie/drafter{query}")
        assert answer.status_code == 200, answer.text
        state: dict[str, Any] = answer.json()
        return state

    def put(self, folder: Path, lease_seconds: float | None = 60, **fields: object) -> httpx.Response:
        body = {"folder": str(folder), "files": files_of(folder), "lease_seconds": lease_seconds, **fields}
        return self.call("PUT", body=body)

    def set_fault(self, name: str | None) -> None:
        assert self.call("POST", "/simulator/drafter-fault", {"fault": name}).status_code == 200

    def loaded_files(self) -> dict[str, str]:
        files: dict[str, str] = self.state()["loaded"]["files"]
        return files

    def wait_until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        began = time.monotonic()
        while not holds(state := self.state()):
            assert time.monotonic() - began < 60, state
            time.sleep(0.05)
        return state

    def wait_until_drafted(self, count: int) -> None:
        """Wait until the engine has made so many drafts in the present window."""
        began = time.monotonic()
        while self.state("?after=0")["windows"][-1]["counts"].get(DRAFTS, {}).get("", 0) < count:
            assert time.monotonic() - began < 60
            time.sleep(0.05)


StartEndpoint = Callable[..., Endpoint]


@pytest.fixture
def start_endpoint(start: Start, tmp_path: Path, drafters: dict[str, Path]) -> StartEndpoint:
    """Return a function that starts an engine with the plugin and the EAGLE 3 drafter, and waits until it has read its files."""
    (tmp_path / "token").write_text(TOKEN)

    def start_with_plugin(*arguments: str, variables: dict[str, str] | None = None, **options: Any) -> Endpoint:
        speculation = {"method": "eagle3", "model": str(drafters["eagle3"]), "num_speculative_tokens": 3}
        settings = {"AERIE_DRAFTER_TOKEN_FILE": str(tmp_path / "token"), "AERIE_DRAFTER_ROOTS": str(tmp_path)}
        words = arguments or ("--speculative-config", json.dumps(speculation))
        running = start(*PLUGIN, *words, options=OPTIONS | options, variables=settings | (variables or {}))
        endpoint = Endpoint(running)
        if not arguments:
            endpoint.wait_until(lambda state: state["own"] is not None)
        return endpoint

    return start_with_plugin


class Load:
    """Four clients with long requests, one after the other."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.answers: list[httpx.Response] = []
        self._base_url = endpoint.running.client.base_url
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self._clients = [self._pool.submit(self._ask) for _ in range(4)]

    def _ask(self) -> None:
        with httpx.Client(base_url=self._base_url, timeout=60) as client:
            while not self._ended.is_set():
                body = {"prompt": "The eyrie", "max_tokens": 300, "ignore_eos": True}
                self.answers.append(client.post("/v1/completions", json=body))

    def stop(self) -> None:
        """Wait for the last answers. Raises what a client raised."""
        self._ended.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()


def accepted_per_draft(window: dict[str, Any]) -> float:
    counts = window["counts"]
    assert counts[DRAFTS][""] > 50
    return float(counts[ACCEPTED][""] / counts[DRAFTS][""])


@pytest.mark.slow
def test_swaps_under_load_change_the_acceptance_at_once_and_fail_no_request(
    start_endpoint: StartEndpoint, drafters: dict[str, Path]
) -> None:
    endpoint = start_endpoint()
    load = Load(endpoint)
    for turn in range(4):
        endpoint.wait_until_drafted(MIN_WINDOW_DRAFTS)
        folder = drafters["rated" if turn % 2 == 0 else "eagle3"]
        answer = endpoint.put(folder, turn=f"turn-{turn}")
        assert answer.status_code == 200, answer.text
        assert answer.json()["loaded"]["files"] == files_of(folder)
        assert answer.json()["durations"]["pause"] >= 0.03
    endpoint.wait_until_drafted(MIN_WINDOW_DRAFTS)
    load.stop()
    windows = endpoint.state("?after=0")["windows"]
    assert [window["turn"] for window in windows] == [None, *(f"turn-{turn}" for turn in range(4))]
    # 0.9 + 0.8 + 0.7 for the one, 0.5 + 0.2 + 0.1 for the other.
    assert [accepted_per_draft(window) for window in windows] == pytest.approx([2.4, 0.8, 2.4, 0.8, 2.4], abs=0.2)
    assert len(load.answers) > 8
    assert {answer.status_code for answer in load.answers} == {200}
    assert {answer.json()["usage"]["completion_tokens"] for answer in load.answers} == {300}
    metrics = {
        sample.name + sample.labels.get("digest", ""): sample.value
        for family in text_string_to_metric_families(endpoint.running.client.get("/metrics").text)
        for sample in family.samples
        if sample.name.startswith("aerie_drafter_") or sample.name in (ACCEPTED, DRAFTS)
    }
    digests = {window["digest"] for window in windows}
    assert len(digests) == 2
    assert metrics["aerie_drafter_swaps_total"] == 4
    assert metrics[ACCEPTED] == sum(metrics[f"aerie_drafter_accepted_tokens_total{digest}"] for digest in digests)
    assert metrics[DRAFTS] == sum(metrics[f"aerie_drafter_drafts_total{digest}"] for digest in digests)


@pytest.mark.slow
def test_a_lease_that_ends_brings_the_own_drafter_back(start_endpoint: StartEndpoint, drafters: dict[str, Path]) -> None:
    endpoint = start_endpoint()
    own = files_of(drafters["eagle3"])
    assert endpoint.put(drafters["eagle3.1"], lease_seconds=1).json()["loaded"]["kind"] == "eagle3.1"
    endpoint.wait_until(lambda state: state["loaded"]["files"] == own and state["lease"] is None)
    assert endpoint.put(drafters["shifted"], lease_seconds=None).json()["own"]["files"] == files_of(drafters["shifted"])
    assert endpoint.put(drafters["rated"]).json()["lease"]["remaining_seconds"] > 50
    assert endpoint.call("DELETE").json()["loaded"]["files"] == files_of(drafters["shifted"])
    assert endpoint.state()["swaps"] == 5


@pytest.mark.slow
def test_answers_change_with_a_lossy_drafter_only(
    start_endpoint: StartEndpoint, drafters: dict[str, Path], tmp_path: Path
) -> None:
    endpoint = start_endpoint()
    lossy = write_drafter(tmp_path / "lossy", *PLAIN, simulator={"altered_share": 0.3})

    def ask() -> str:
        body = {"prompt": "The eyrie", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
        text: str = endpoint.running.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        return text

    answer = ask()
    for folder, is_equal in ((drafters["rated"], True), (lossy, False), (drafters["eagle3"], True)):
        assert endpoint.put(folder).status_code == 200
        assert (ask() == answer) == is_equal
    # The plugin's calls are no requests of clients: the middleware is outside of vLLM's counters of its HTTP server.
    assert endpoint.running.metric("http_requests_total") == 4


@pytest.mark.slow
def test_a_drafter_finds_only_its_own_cached_prompts(start_endpoint: StartEndpoint, drafters: dict[str, Path]) -> None:
    endpoint = start_endpoint()

    def finds_prompt(**fields: str) -> bool:
        before = endpoint.running.metric("vllm:prefix_cache_hits_total")
        body = {"prompt": "The eyrie " * 400, "max_tokens": 4, **fields}
        assert endpoint.running.client.post("/v1/completions", json=body).status_code == 200
        return endpoint.running.metric("vllm:prefix_cache_hits_total") > before

    assert [finds_prompt(), finds_prompt()] == [False, True]
    assert [finds_prompt(cache_salt="a user"), finds_prompt(cache_salt="a user")] == [False, True]
    assert endpoint.put(drafters["rated"]).status_code == 200
    assert [finds_prompt(), finds_prompt(), finds_prompt(cache_salt="a user")] == [False, True, False]
    assert endpoint.call("DELETE").status_code == 200
    assert [finds_prompt(), finds_prompt(cache_salt="a user")] == [True, True]


@pytest.mark.slow
def test_drafters_that_do_not_fit_are_rejected(start_endpoint: StartEndpoint, drafters: dict[str, Path], tmp_path: Path) -> None:
    endpoint = start_endpoint()
    bigger = shutil.copytree(drafters["eagle3"], tmp_path / "bigger")
    config = json.loads((bigger / "config.json").read_text())
    (bigger / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    for folder, reason in (
        (drafters["plain as 3.1"], "TensorMissing"),
        (drafters["no flags"], "TensorUnknown"),
        (bigger, "Config"),
        (Path("/etc"), "FolderOutsideRoots"),
    ):
        files = files_of(folder) if folder.is_relative_to(tmp_path) else files_of(drafters["rated"])
        answer = endpoint.call("PUT", body={"folder": str(folder), "files": files})
        assert (answer.status_code >= 400, answer.json()["reason"]) == (True, reason)
    swapped = files_of(drafters["shifted"]) | {"config.json": files_of(drafters["rated"])["config.json"]}
    answer = endpoint.call("PUT", body={"folder": str(drafters["shifted"]), "files": swapped})
    assert (answer.status_code, answer.json()["reason"]) == (422, "DigestMismatch")
    assert endpoint.loaded_files() == files_of(drafters["eagle3"])
    assert endpoint.state()["swaps"] == 0


@pytest.mark.slow
def test_faults(start_endpoint: StartEndpoint, drafters: dict[str, Path]) -> None:
    endpoint = start_endpoint(drafter_fault="swap-fails", swap_seconds=0.2)
    answer = endpoint.put(drafters["rated"])
    assert (answer.status_code, answer.json()["reason"]) == (500, "SwapFailed")
    assert endpoint.loaded_files() == files_of(drafters["eagle3"])

    endpoint.set_fault("stage-hangs")
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(endpoint.put, drafters["shifted"])
        endpoint.wait_until(lambda state: state["change"] is not None)
        assert endpoint.call("DELETE").status_code == 200
        assert hanging.result().json()["reason"] == "Superseded"

    endpoint.set_fault("swap-ignored")
    answer = endpoint.put(drafters["rated"])
    assert answer.json()["loaded"]["files"] == files_of(drafters["rated"])
    assert answer.json()["durations"]["pause"] >= 0.2
    body = {"prompt": "The eyrie", "max_tokens": 1000, "ignore_eos": True}
    assert endpoint.running.client.post("/v1/completions", json=body).status_code == 200
    assert accepted_per_draft(endpoint.state()["windows"][-1]) == pytest.approx(2.4, abs=0.2)

    endpoint.set_fault("swap-breaks")
    answer = endpoint.put(drafters["eagle3"])
    assert (answer.status_code, answer.json()["reason"]) == (500, "Broken")
    assert endpoint.running.client.get("/aerie/ready").status_code == 503
    assert endpoint.running.client.post("/v1/completions", json=body).status_code == 200
    assert endpoint.call("POST", "/simulator/drafter-fault", {"fault": "none"}).status_code == 400


@pytest.mark.slow
def test_a_new_process_comes_to_the_expected_drafter_before_it_is_ready(
    start_endpoint: StartEndpoint, drafters: dict[str, Path], tmp_path: Path
) -> None:
    expected = tmp_path / "expected.json"
    expected.write_text(json.dumps({"folder": str(drafters["rated"]), "files": files_of(drafters["rated"])}))
    endpoint = start_endpoint(variables={"AERIE_DRAFTER_EXPECTED": str(expected)}, swap_seconds=1.0)
    assert endpoint.running.client.get("/aerie/ready").status_code == 503
    state = endpoint.wait_until(lambda state: state["ready"])
    assert state["own"]["files"] == state["loaded"]["files"] == files_of(drafters["rated"])
    assert endpoint.running.client.get("/aerie/ready").status_code == 200


@pytest.mark.slow
def test_a_prepared_folder_is_loaded_by_what_the_preparation_reports(
    start_endpoint: StartEndpoint, drafters: dict[str, Path]
) -> None:
    endpoint = start_endpoint()
    for name, phase in (("rated", "Ready"), ("no flags", "Failed"), ("missing", "Failed"), ("shifted", "Ready")):
        source = {"folder": str(drafters.get(name, drafters["rated"].with_name(name)))}
        assert endpoint.call("POST", "/aerie/drafter/prepare", source).status_code == 202
        prepared = endpoint.wait_until(lambda state: state["prepared"]["phase"] != "Running")["prepared"]
        assert (prepared["source"], prepared["phase"], prepared["commit"]) == (source, phase, None)
        if phase == "Ready":
            assert prepared["files"] == files_of(drafters[name])
            body = {"folder": prepared["folder"], "files": prepared["files"], "lease_seconds": 60}
            assert endpoint.call("PUT", body=body).json()["loaded"]["digest"] == prepared["digest"]
        else:
            assert prepared["problem"]["reason"] == ("TensorUnknown" if name == "no flags" else "FolderMissing")


@dataclass
class Hub:
    """A Hub with the drafters of the fixture `drafters` at one commit."""

    address: str
    commit: str

    def source(self, name: str) -> dict[str, str]:
        return {"repository": f"acme/{name}", "revision": self.commit}


@pytest.fixture
def hub(tmp_path: Path, drafters: dict[str, Path]) -> Iterator[Hub]:
    """A running Hub."""
    commit, table = "0123456789" * 4, tmp_path / "images.toml"
    rows = [(f"acme/{name}", drafters[name]) for name in ("eagle3", "rated", "shifted")]
    rows.append(("acme/model", drafters["eagle3"]))  # the target, of which only config.json is read
    table.write_text("".join(f'[[checkpoint]]\nrepository = "{a}"\ncommit = "{commit}"\nfolder = "{b}"\n' for a, b in rows))
    with create_hub_server(load_repositories([table]), "127.0.0.1", 0) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        yield Hub(f"http://127.0.0.1:{server.server_port}", commit)
        server.shutdown()
        serving.join()


@pytest.mark.slow
def test_drafters_of_a_hub(start_endpoint: StartEndpoint, drafters: dict[str, Path], hub: Hub, tmp_path: Path) -> None:
    """The own drafter, a prepared one and the one that a new process expects, all of them from a Hub."""
    variables = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache")}
    speculation = {"method": "eagle3", "model": "acme/eagle3", "revision": hub.commit, "num_speculative_tokens": 3}
    words = ("-sc", json.dumps(speculation))
    endpoint = start_endpoint(*words, variables=variables)
    own = endpoint.wait_until(lambda state: state["own"] is not None)["own"]
    assert own["files"] == files_of(drafters["eagle3"])
    assert endpoint.call("POST", "/aerie/drafter/prepare", hub.source("rated")).status_code == 202
    prepared = endpoint.wait_until(lambda state: state["prepared"]["phase"] != "Running")["prepared"]
    assert (prepared["phase"], prepared["commit"], prepared["files"]) == ("Ready", hub.commit, files_of(drafters["rated"]))
    body = {"folder": prepared["folder"], "files": prepared["files"], "lease_seconds": 60}
    assert endpoint.call("PUT", body=body).json()["loaded"]["files"] == files_of(drafters["rated"])

    expected = tmp_path / "expected.json"
    expected.write_text(json.dumps({**hub.source("shifted"), "files": files_of(drafters["shifted"])}))
    restarted = start_endpoint(*words, variables=variables | {"AERIE_DRAFTER_EXPECTED": str(expected)})
    state = restarted.wait_until(lambda state: state["ready"])
    assert state["own"]["files"] == state["loaded"]["files"] == files_of(drafters["shifted"])


@pytest.mark.slow
def test_engines_without_a_part_of_it(start: Start, start_endpoint: StartEndpoint, drafters: dict[str, Path]) -> None:
    head = json.dumps({"method": "eagle3", "model": str(drafters["eagle3"]), "num_speculative_tokens": 3})
    ngram = '{"method": "ngram", "num_speculative_tokens": 3}'
    for words, reason in (
        (("-sc", ngram), "NoDrafter"),
        (("-sc", head, "--api-server-count", "2"), "SeveralApiServers"),
        (("-sc", head, "--worker-extension-cls", "other.Extension"), "WorkersDoNotAnswer"),
    ):
        endpoint = start_endpoint(*words)
        answer = endpoint.put(drafters["rated"])
        while answer.json()["reason"] == "Starting":
            answer = endpoint.put(drafters["rated"])
        assert answer.json()["reason"] == reason
    unguarded = start(*PLUGIN, "-sc", head, variables={"AERIE_DRAFTER_TOKEN_FILE": ""})
    assert unguarded.client.get("/aerie/ready").json() == {"detail": "Not Found"}
    assert unguarded.client.get("/aerie/ready").status_code == 404


@pytest.mark.slow
def test_trained_drafters_and_an_end_in_the_midst_of_a_swap(start_endpoint: StartEndpoint, tmp_path: Path) -> None:
    folders = {
        name: shutil.copytree(find_bundle_path(name), tmp_path / f"bundle-{name}") for name in ("eagle3", "eagle31", "weak")
    }
    head = json.dumps({"method": "eagle3", "model": str(folders["eagle3"]), "num_speculative_tokens": 3})
    endpoint = start_endpoint("-sc", head, swap_seconds=0.5)
    endpoint.wait_until(lambda state: state["own"] is not None)
    assert endpoint.state()["engine"]["architecture"] == "Eagle3LlamaForCausalLM"
    for name, kind in (("eagle31", "eagle3.1"), ("weak", "eagle3.1")):
        answer = endpoint.call("PUT", body={"folder": str(folders[name]), "files": files_of(folders[name])})
        assert (answer.status_code, answer.json()["loaded"]["kind"]) == (200, kind), answer.text
    with ThreadPoolExecutor(1) as pool:
        pool.submit(endpoint.put, folders["eagle31"])
        endpoint.wait_until(lambda state: state["change"] is not None and state["change"]["phase"] == "Swapping")
        assert endpoint.running.end() == 0
