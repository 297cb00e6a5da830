"""Engines without a server, for tests of the plugin's worker: forks of a program of vLLM's Python (inplace_worker_program.py)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aerie_drafter.bundle import find_bundle_path
from aerie_lab.testing.vllm_start import ENVIRONMENT
from aerie_vllm.worker_protocol import DESCRIBE, STAGE, SWAP
from tests.vllm.inplace_server import hash_files, write_plugin

PROGRAM = Path(__file__).with_name("inplace_worker_program.py")
PROMPTS = 16
CONNECT_TIMEOUT_SECONDS = 300.0
"""Longest import of vLLM, before which no engine connects: 8 s on an idle machine, and many times that on a busy one."""
ANSWER_TIMEOUT_SECONDS = 900.0
"""Longest start of an engine, or answer of it: seconds on an idle machine, and a minute with compilation."""
STAGE_TIMEOUT_SECONDS = 60.0


@dataclass
class OfflineEngine:
    """A running engine."""

    stream: IO[str]
    """Its connection."""

    def read(self) -> Any:
        line = self.stream.readline()
        if not line:
            raise AssertionError("the engine ended")
        return json.loads(line)

    def send(self, **request: Any) -> Any:
        self.stream.write(json.dumps(request) + "\n")
        self.stream.flush()
        return self.read()

    def call(self, method: str, *arguments: Any) -> Any:
        return self.send(command="call", method=method, arguments=arguments)

    def generate(self) -> Any:
        """Return drafts, accepted draft tokens and greedy answers of the first prompts."""
        return self.send(command="generate", prompts=PROMPTS)

    def stage(self, folder: Path, files: dict[str, str] | None = None, keep: tuple[str, ...] = ()) -> Any:
        """Return the report after the stage has ended."""
        report = self.call(STAGE, str(folder), hash_files(folder) if files is None else files, keep)
        deadline = time.monotonic() + STAGE_TIMEOUT_SECONDS
        while report["staging"]["state"] == "Reading":
            assert time.monotonic() < deadline, report
            time.sleep(0.05)
            report = self.call(DESCRIBE)
        return report

    def change(self, folder: Path) -> Any:
        """Stage a drafter, and draft with it. Returns the swap's report."""
        report = self.stage(folder)
        assert report["staging"]["state"] == "Staged", report
        return self.call(SWAP, report["staging"]["digest"])


@dataclass(frozen=True)
class PreloadedVllm:
    """A process that has imported vLLM, and from which engines are forked."""

    process: subprocess.Popen[str]

    @contextlib.contextmanager
    def start_engine(
        self,
        folder: Path,
        drafter: Path,
        *,
        method: str = "eagle3",
        compiled: bool = False,
        plugin: bool = True,
        repacks: bool = True,
    ) -> Iterator[OfflineEngine]:
        """Start an engine with the bundle's target and a drafter; it ends with the block.

        Args:
            folder: empty or absent.
            drafter: folder of its files.
            method: vLLM's name of the drafter's method.
            compiled: whether vLLM compiles the models.
            plugin: whether the engine has the plugin.
            repacks: whether vLLM packs the weights of linear layers, as it does on CPU alone.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "engine.log"
        log.touch()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(CONNECT_TIMEOUT_SECONDS)
            settings = {
                "port": server.getsockname()[1],
                "target": str(find_bundle_path("target")),
                "drafter": str(drafter),
                "method": method,
                "prompts": str(find_bundle_path("prompts.jsonl")),
                "path": [str(write_plugin(folder / "path"))] if plugin else [],
                "log": str(log),
                "compiled": compiled,
                "plugin": plugin,
                "repacks": repacks,
            }
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(settings) + "\n")
            self.process.stdin.flush()
            connection, _ = server.accept()
        try:
            with connection, connection.makefile("rw") as stream:
                connection.settimeout(ANSWER_TIMEOUT_SECONDS)
                engine = OfflineEngine(stream)
                assert engine.read() == "ready"
                yield engine
                connection.shutdown(socket.SHUT_WR)
                assert not stream.readline(), "the engine closes the connection at its end"
        except Exception as error:
            error.add_note(f"The engine's log ends with:\n{log.read_text()[-4000:]}")
            raise


@contextlib.contextmanager
def preload_vllm(vllm: Path, folder: Path) -> Iterator[PreloadedVllm]:
    """Import vLLM of a folder of programs in a process, which ends with the block. `folder` gets its program."""
    program = Path(shutil.copy(PROGRAM, folder))  # the worker imports its class, and must not find the tests beside it
    variables = {
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # vLLM's own setting on CPU, which torch reads when it is imported
    }
    with subprocess.Popen(
        [str(vllm / "python"), str(program)], env={**os.environ, **variables, "PYTHONPATH": ""}, stdin=subprocess.PIPE, text=True
    ) as process:
        yield PreloadedVllm(process)
