"""Real vLLM as a plain process, for tests that need no cluster: of a drafter, its counters and its answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from aerie_lab.testing.vllm_start import build_environment

START = 300.0
"""Seconds for a start: 30 on an idle machine with two cores, several times that on a busy one."""

FLAGS = ["--host=127.0.0.1", "--dtype=float32", "--enforce-eager", "--kv-cache-memory-bytes=67108864", "--max-num-seqs=16"]


class StartError(Exception):
    """The server ended before it was ready; the message is its log."""


@dataclass(frozen=True)
class Server:
    """A running server and a client of it."""

    client: httpx.Client

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Return greedy answers as token ids, with sixteen prompts at a time."""

        def send_request(prompt: Sequence[int]) -> list[int]:
            body = {
                "model": "target",
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "return_token_ids": True,
            }
            response = self.client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            return list(choice["token_ids"])

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(send_request, prompts))

    def counters(self) -> dict[str, float]:
        """Return vLLM's counters of speculation: `drafts`, and `0`, `1`, ... for accepted tokens per position."""
        counters: dict[str, float] = {}
        for line in self.client.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("vllm:spec_decode_num_drafts_total{"):
                counters["drafts"] = float(value)
            elif name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{"):
                counters[name.split('position="')[1].split('"')[0]] = float(value)
        return counters


Serve = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def serve(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Return `serve(target, speculation, *flags)`, a context manager that yields a Server. `speculation` None turns it off.

    The server can import the modules of this folder.
    """
    logs = tmp_path_factory.mktemp("servers")

    @contextlib.contextmanager
    def start(target: Path, speculation: Mapping[str, Any] | None, *flags: str) -> Iterator[Server]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [str(vllm / "vllm"), "serve", str(target), "--served-model-name=target", f"--port={port}", *FLAGS, *flags]
        if speculation is not None:
            command.append(f"--speculative-config={json.dumps(speculation)}")
        log = logs / f"{port}.log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                command,
                env=build_environment(Path(__file__).parent),
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=0,  # which can be ended whole; its session, and so its share of the processors, is the tests'
            )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                wait_ready(client, process, log)
                yield Server(client)
        finally:
            stop_process(process)

    return start


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """End the server, and kill its remaining processes."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        for _ in range(30):  # the last process of the group removes the shared memory, if it has time
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def wait_ready(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server is healthy. Raises StartError when it ends, or is not healthy in time."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartError(log.read_text())
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.2)
    raise StartError(f"not healthy within {START:.0f} s\n{log.read_text()}")
