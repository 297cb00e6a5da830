"""The process: its command line, its memory, and its end at any time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from aerie.recorder.settings import SettingsError, parse_redaction, read_bucket
from tests.unit.recorder.running_recorder import free_port, read_records

pytestmark = pytest.mark.slow
MAX_MEBIBYTES = 200
"""Limit of the peak memory with the largest requests, below the 256 MiB of the pod."""


class Process:
    """A running `aerie recorder` of all requests."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "aerie.cli", "recorder", f"--folder={folder}", f"--port={self.port}", "--rate=1"]
        with (folder.parent / "output").open("ab") as output:
            self.process = subprocess.Popen([*command, "--max-per-minute=100000", *flags], stdout=output, stderr=output)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/healthz").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError("it does not become ready")

    def send(self, body: bytes) -> None:
        assert self.client.post("/v1/chat/completions", content=body).status_code == 202

    def metric(self, name: str) -> float:
        match = re.search(rf"^{re.escape(name)} (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        assert match is not None
        return float(match[1])

    def peak_mebibytes(self) -> float:
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert match is not None
        return int(match[1]) / 1024


@contextlib.contextmanager
def run_process(folder: Path, *flags: str) -> Iterator[Process]:
    running = Process(folder, *flags)
    try:
        running.wait_ready()
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running.client.close()


def chat(content: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def test_memory_with_the_largest_requests(tmp_path: Path) -> None:
    patterns = [{"pattern": f"[{digit}]", "replacement": "#"} for digit in range(8)]
    with run_process(tmp_path / "prompts", f"--redact={json.dumps(patterns)}") as recorder, ThreadPoolExecutor(24) as threads:
        bodies = [chat("0 a" * 340_000), b'{"messages": [%s]}' % b",".join([b'{"role":"user","content":"a"}'] * 34_000)]
        list(threads.map(recorder.send, bodies * 24))
        while recorder.metric("aerie_recorder_requests_recorded_total") == 0:
            time.sleep(0.1)
        assert recorder.peak_mebibytes() < MAX_MEBIBYTES


def test_memory_with_a_thousand_connections(tmp_path: Path) -> None:
    """They send large requests at the same time, of which almost none is recorded."""
    body = chat("x" * 200_000)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def send(port: int) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + body)
            await asyncio.wait_for(reader.readline(), 60)
            writer.close()

    async def send_all(port: int) -> None:
        await asyncio.gather(*(send(port) for _ in range(1000)))

    with run_process(tmp_path / "prompts", "--rate=0.01") as recorder:
        asyncio.run(send_all(recorder.port))
        assert recorder.metric("aerie_recorder_requests_received_total") > 500
        assert recorder.peak_mebibytes() < MAX_MEBIBYTES


def test_sigkill_loses_no_recorded_prompt(tmp_path: Path) -> None:
    folder, recorded = tmp_path / "prompts", 0
    for _ in range(3):
        with run_process(folder) as recorder:
            for number in range(20):
                recorder.send(chat(f"{number} " * 500))
            while recorder.metric("aerie_recorder_requests_recorded_total") < 10:
                time.sleep(0.01)
            recorded += int(recorder.metric("aerie_recorder_requests_recorded_total"))
            recorder.process.send_signal(signal.SIGKILL)
            recorder.process.wait()
    with run_process(folder):
        records = read_records(folder)
        assert not list(folder.glob("*.open"))
    assert recorded <= len(records) <= 60


def test_sigterm_completes_the_file_and_ends_it_with_status_0(tmp_path: Path) -> None:
    with run_process(tmp_path / "prompts", '--redact=[{"pattern": "secret", "replacement": "-"}]') as recorder:
        recorder.send(chat("a-secret-prompt"))
        recorder.process.send_signal(signal.SIGTERM)
        assert recorder.process.wait(30) == 0
    (path,) = (tmp_path / "prompts").iterdir()
    assert path.suffix == ".jsonl"
    assert json.loads(path.read_text())["messages"] == [{"role": "user", "content": "a---prompt"}]
    assert "prompt" not in (tmp_path / "output").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--redact={}"], ""),
        (["--redact=["], "--redact is no list of patterns"),
        (['--redact=[{"pattern": "(a", "replacement": ""}]'], "--redact: The pattern '(a' is no RE2 expression"),
        (["--bucket=prompts"], "AWS_ACCESS_KEY_ID is missing: set it to the credentials of the bucket prompts."),
    ],
)
def test_wrong_calls(tmp_path: Path, flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "aerie.cli", "recorder", f"--folder={tmp_path / 'prompts'}", "--port=0", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    if not message:
        with pytest.raises(subprocess.TimeoutExpired):  # it runs
            subprocess.run(command, env=environment, timeout=3, capture_output=True, check=False)
        return
    done = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_settings_name_the_option() -> None:
    with pytest.raises(SettingsError, match="write JSON such as"):
        parse_redaction("--redact", "[1]")
    with pytest.raises(SettingsError, match="AWS_SECRET_ACCESS_KEY is missing"):
        read_bucket("b", "", "us-east-1", None, {"AWS_ACCESS_KEY_ID": "a"})
    bucket = read_bucket("b", "p", "us-east-1", None, {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "very-secret"})
    assert "very-secret" not in repr(bucket)
