"""Real vLLM with the plugin, as a pod gets it: found by PYTHONPATH, without an image or a development mode of its own."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from aerie_drafter.bundle import find_bundle_path
from aerie_lab.testing.vllm_start import build_environment
from tests.vllm.drafter.conftest import FLAGS, StartError, stop_process

START_SECONDS = 900.0
"""Longest start: 30 s on an idle machine with two cores, and many times that with a low priority on a busy one."""
PLUGIN_FOLDER = Path(__file__).resolve().parents[2] / "plugin"
TOKEN = "a-token-of-32-characters-at-least"
API_KEY = "a-key-of-the-users"
"""The key of users' requests, where a server asks for vLLM's own (VLLM_API_KEY)."""


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of a drafter's files by name, as a change names them."""
    names = ["config.json", *(path.name for path in folder.glob("*.safetensors"))]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sorted(names)}


def write_plugin(folder: Path) -> Path:
    """Write the plugin as it is mounted: the package, and the metadata with its entry point."""
    shutil.copytree(PLUGIN_FOLDER / "aerie_vllm", folder / "aerie_vllm", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = folder / "aerie_vllm-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: aerie-vllm\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\naerie_vllm = aerie_vllm.registration:register\n")
    return folder


@dataclass
class InPlaceServer:
    """A running server whose drafter may change."""

    client: httpx.Client
    root: Path
    """Folder of the drafters that it may load."""
    log: Path

    def call(self, method: str, path: str = "/aerie/drafter", **arguments: Any) -> httpx.Response:
        """Call the endpoint with the token."""
        headers = {"Authorization": f"Bearer {TOKEN}", **arguments.pop("headers", {})}
        return self.client.request(method, path, headers=headers, **arguments)

    def state(self, after: int | None = None) -> dict[str, Any]:
        """Return what the endpoint reports."""
        response = self.call("GET", params={} if after is None else {"after": after})
        assert response.status_code == 200, response.text
        body = response.json()
        assert isinstance(body, dict)
        return body

    def put(self, name: str, lease_seconds: float | None = 60.0, **fields: Any) -> httpx.Response:
        """Load the drafter in the folder with this name."""
        folder = self.root / name
        body = {"folder": str(folder), "lease_seconds": lease_seconds, **fields}
        if "files" not in body:
            body["files"] = hash_files(folder)
        return self.call("PUT", json=body)

    def add_drafter(self, name: str, source: Path) -> Path:
        """Copy a drafter into the root."""
        return Path(shutil.copytree(source, self.root / name))


@contextlib.contextmanager
def serve_in_place(
    vllm: Path,
    folder: Path,
    drafter: str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    modules: Sequence[Path] = (),
) -> Iterator[InPlaceServer]:
    """Start vLLM with the bundle's target and one of its drafters, with all of its drafters below the root.

    The server can import from the folders `modules`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root, token_file, log = folder / "drafters", folder / "token", folder / "server.log"
    for name in ("eagle3", "eagle31", "weak"):
        shutil.copytree(find_bundle_path(name), root / name)
    token_file.write_text(TOKEN)
    speculation = {"method": "eagle3", "model": str(root / drafter), "num_speculative_tokens": 3}
    command = [
        *(str(vllm / "vllm"), "serve", str(find_bundle_path("target")), "--served-model-name=target", f"--port={port}", *FLAGS),
        *("--max-model-len=2048", f"--speculative-config={json.dumps(speculation)}"),
        *flags,
        # Last, as in the operator's pods: the last middleware is the outermost.
        *("--middleware=aerie_vllm.endpoint.DrafterEndpoint", "--worker-extension-cls=aerie_vllm.worker.DrafterWorker"),
    ]
    variables = {
        **build_environment(*modules, write_plugin(folder / "plugin")),
        "AERIE_DRAFTER_TOKEN_FILE": str(token_file),
        "AERIE_DRAFTER_ROOTS": str(root),
    }
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            env={**variables, **(environment or {})},
            stdout=stream,
            stderr=subprocess.STDOUT,
            process_group=0,  # which can be ended whole; its session, and so its share of the processors, is the tests'
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            running = InPlaceServer(client, root, log)
            wait_until_known(running, process)
            yield running
    finally:
        stop_process(process)


def wait_until_known(server: InPlaceServer, process: subprocess.Popen[bytes]) -> None:
    """Return when the server reports its drafter. Raises StartError when it ends, or does not report in time."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartError(server.log.read_text())
        with contextlib.suppress(httpx.TransportError):
            if server.state()["loaded"] is not None:
                return
        time.sleep(0.5)
    raise StartError(f"no drafter is reported within {START_SECONDS:.0f} s\n{server.log.read_text()}")


@dataclass
class Users:
    """Users that send prompts all the time, one after the other each, and compare the greedy answers."""

    answers: dict[int, str] = field(default_factory=dict)
    """The first answer by the prompt's number."""
    completed: int = 0
    failures: list[str] = field(default_factory=list)
    different: list[int] = field(default_factory=list)


@contextlib.contextmanager
def users_of(
    server: InPlaceServer, prompts: Sequence[Sequence[Mapping[str, str]]], count: int, max_tokens: int
) -> Iterator[Users]:
    """Send prompts until the end of the block, by `count` users at a time."""
    users, end, lock = Users(), threading.Event(), threading.Lock()
    numbers = itertools.cycle(range(len(prompts)))

    def send_requests() -> None:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        with httpx.Client(base_url=server.client.base_url, headers=headers, timeout=120) as client:
            while not end.is_set():
                with lock:
                    number = next(numbers)
                body = {"model": "target", "messages": prompts[number], "temperature": 0, "max_tokens": max_tokens}
                try:
                    response = client.post("/v1/chat/completions", json=body)
                    text = response.json()["choices"][0]["message"]["content"] if response.status_code == 200 else None
                    problem = response.text
                except (httpx.HTTPError, ValueError) as error:
                    text, problem = None, repr(error)
                with lock:
                    if text is None:
                        users.failures.append(problem)
                        continue
                    users.completed += 1
                    if users.answers.setdefault(number, text) != text:
                        users.different.append(number)

    threads = [threading.Thread(target=send_requests) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield users
    finally:
        end.set()
        for thread in threads:
            thread.join()
