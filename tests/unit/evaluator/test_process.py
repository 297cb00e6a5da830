"""The process: its command line, its cost, and its end at any time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from aerie.evaluator.requests import CHAT_PATH
from tests.unit.evaluator.fake_engine import AUTHORIZATION, TOKEN, FakeEngine, build_answer, run
from tests.unit.evaluator.test_batches import Operator

pytestmark = pytest.mark.slow

MAX_MEBIBYTES = 100
MAX_CPU_SECONDS = 0.05 / 20
"""Seconds of a core for a request: 5 % of a core at 20 a second."""


class Process:
    """A running `aerie evaluator`. Its output goes to a file."""

    def __init__(self, command: list[str], url: str, output: Path, client: aiohttp.ClientSession) -> None:
        self.url, self.client, self._command, self._output = url, client, command, output
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as stream:
            return subprocess.Popen(self._command, stdout=stream, stderr=subprocess.STDOUT)

    def kill_and_restart(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    async def wait_ready(self) -> None:
        """Return when the process serves."""
        while self.process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with self.client.get(self.url + "/healthz") as response:
                    assert response.status == 200
                    return
            await asyncio.sleep(0.05)
        raise AssertionError(self._output.read_text())

    async def send(self, body: bytes) -> None:
        async with self.client.post(self.url + CHAT_PATH, data=body) as response:
            assert response.status == 202

    async def metric(self, name: str) -> float:
        async with self.client.get(self.url + "/metrics") as response:
            return float(re.search(rf"^{name} (\S+)$", await response.text(), re.MULTILINE)[1])  # type: ignore[index]

    async def wait_for_pairs(self, count: int) -> None:
        """Return when the process has counted as many pairs."""
        while await self.metric("aerie_evaluator_pairs_total") < count:
            await asyncio.sleep(0.02)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mebibytes(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


@contextlib.asynccontextmanager
async def run_process(folder: Path, engine: FakeEngine, *flags: str) -> AsyncIterator[Process]:
    """Run the command line between one fake engine for both arms and the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = folder / "token"
    token.write_text(TOKEN + "\n")
    async with engine.serve() as engine_url, aiohttp.ClientSession() as client:
        command = [sys.executable, "-m", "aerie.cli", "evaluator", f"--canary={engine_url}", f"--control={engine_url}"]
        command += [f"--token-file={token}", f"--port={port}", "--log-level=DEBUG", *flags]
        running = Process(command, f"http://127.0.0.1:{port}", folder / "output", client)
        try:
            await running.wait_ready()
            yield running
        finally:
            running.process.kill()
            running.process.wait()


def chat(text: str) -> bytes:
    return b'{"messages": [{"role": "user", "content": "%s"}], "temperature": 1}' % text.encode()


def test_cost_of_requests_of_which_nine_in_ten_are_dropped(tmp_path: Path) -> None:
    async def work() -> None:
        engine = FakeEngine(lambda path, _: build_answer(path, tokens=256))
        async with run_process(tmp_path, engine, "--in-flight=2", "--waiting=2", "--neutral-defaults") as evaluator:
            await evaluator.send(chat("warm-up"))
            await evaluator.wait_for_pairs(1)
            costs: list[float] = []
            # Other work on the machine adds to the cost, to some of the rounds more than to others: one without it decides.
            while not costs or (min(costs) >= MAX_CPU_SECONDS and len(costs) < 8):
                before = evaluator.cpu_seconds()
                engine.is_open.clear()
                for _ in range(40):  # 4 of 40 requests are admitted each time, with 50 kB each
                    await evaluator.send(chat("x" * 50_000))
                engine.is_open.set()
                await evaluator.wait_for_pairs(1 + 4 * (len(costs) + 1))
                costs.append((evaluator.cpu_seconds() - before) / 40)
            assert await evaluator.metric("aerie_evaluator_requests_dropped_total") == len(costs) * 36
            assert min(costs) < MAX_CPU_SECONDS
            assert evaluator.peak_mebibytes() < MAX_MEBIBYTES

    run(work)


def test_memory_with_the_largest_requests(tmp_path: Path) -> None:
    async def work() -> None:
        engine = FakeEngine()
        async with run_process(tmp_path, engine, "--in-flight=16", "--waiting=4") as evaluator:
            engine.is_open.clear()
            numbers = b",".join([b"1"] * 500_000)  # costs the most to parse
            await asyncio.gather(*(evaluator.send(b'{"messages": [{"content": [%s]}]}' % numbers) for _ in range(20)))
            assert evaluator.peak_mebibytes() < MAX_MEBIBYTES
            engine.is_open.set()

    run(work)


def test_kills_lose_pairs_and_count_none_twice(tmp_path: Path) -> None:
    async def work() -> None:
        engine, operator = FakeEngine(), Operator()
        async with run_process(tmp_path, engine) as evaluator:

            async def fetch(*, is_answer_lost: bool = False) -> None:
                query = {"process": operator.process, "after": str(operator.number)}
                async with evaluator.client.get(evaluator.url + "/aerie/pairs", params=query, headers=AUTHORIZATION) as response:
                    operator.count(await response.json(), is_answer_lost=is_answer_lost)

            async def send_pairs(count: int, total: int) -> None:
                for number in range(count):
                    await evaluator.send(chat("x"))
                    await evaluator.wait_for_pairs(total + number + 1)

            await send_pairs(3, 0)
            await fetch()
            await send_pairs(2, 3)
            await fetch(is_answer_lost=True)
            await fetch()
            assert operator.pairs == 5
            await send_pairs(1, 5)
            engine.is_open.clear()
            await evaluator.send(chat("in progress"))
            evaluator.kill_and_restart()
            engine.is_open.set()
            await evaluator.wait_ready()
            await fetch()
            assert operator.pairs == 5  # two are lost
            await send_pairs(4, 0)
            await fetch()
            await fetch()
            assert operator.pairs == 9

    run(work)


def test_sigterm_ends_it_with_status_0(tmp_path: Path) -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.is_open.clear()
        async with run_process(tmp_path, engine) as evaluator:
            await evaluator.send(chat("a-secret-prompt"))
            await engine.arrivals.get()
            evaluator.process.send_signal(signal.SIGTERM)
            while evaluator.process.poll() is None:
                await asyncio.sleep(0.02)
            assert evaluator.process.returncode == 0
            engine.is_open.set()

    run(work)
    output = (tmp_path / "output").read_text()
    assert "it evaluates mirrored requests" in output
    assert "a-secret-prompt" not in output


def test_a_file_of_prompts_is_evaluated_without_mirrored_requests(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a-secret-prompt", "temperature": 0}\n')

    async def work() -> None:
        async with run_process(tmp_path, FakeEngine(), f"--prompts={prompts}") as evaluator:
            await evaluator.wait_for_pairs(20)
            async with evaluator.client.post(evaluator.url + CHAT_PATH, data=chat("x")) as response:
                assert response.status == 404

    run(work)
    output = (tmp_path / "output").read_text()
    assert f"it evaluates {prompts}" in output
    assert "a-secret-prompt" not in output


def test_the_command_imports_no_other_command(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv[1:] = ['evaluator', '--help']\n"
        "from aerie.cli import _load_command\n"
        "assert _load_command()() == 0\n"
        "import aerie.evaluator.process\n"
        "print(sorted(sys.modules.keys() & {'aerie.api', 'aerie.cli.app', 'kopf', 'kubernetes', 'numpy', 'httpx'}))\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert output.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--canary=engine:8000"],
            "error: --canary is engine:8000: use the form http://HOST:PORT, without user, query and fragment.",
        ),
        (
            ["--canary=http://a@b"],
            "error: --canary is http://a@b: use the form http://HOST:PORT, without user, query and fragment.",
        ),
        (["--token-file=missing"], "error: --token-file is missing, which cannot be read (No such file or directory): mount the"),
        (["--token-file=short"], "error: --token-file is short, with 5 characters: write 32 or more printable ASCII characters."),
        (
            ["--prompts=missing"],
            "error: missing cannot be read (No such file or directory): mount the file, or correct --prompts.",
        ),
        (["--log-level=LOUD"], "error: --log-level is LOUD: set DEBUG, INFO, WARNING or ERROR."),
    ],
)
def test_wrong_options_are_named_with_the_fix(tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "short").write_text("short")
    command = [sys.executable, "-m", "aerie.cli", "evaluator", "--control=http://b:1", "--port=0"]
    defaults = {"--canary": "http://a:1", "--token-file": "token"} | dict(flag.split("=", 1) for flag in flags)
    command += [f"{name}={value}" for name, value in defaults.items()]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 2
    assert " ".join(result.stderr.split()).startswith(message)
    assert "short" not in result.stderr.replace("--token-file is short", "")
