"""Engines without a server, for tests of the plugin's worker: programs of vLLM's Python (inplace_worker_program.py)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aerie_drafter.bundle import find_bundle_path
from aerie_vllm.worker_protocol import DESCRIBE, STAGE, SWAP
from tests.vllm.drafter.conftest import ENVIRONMENT
from tests.vllm.inplace_server import hash_files, write_plugin
from tests.vllm.inplace_worker_program import ANSWER, WITHOUT_REPACKING

PROGRAM = Path(__file__).with_name("inplace_worker_program.py")
PROMPTS = 16
STAGE_TIMEOUT_SECONDS = 60.0


@dataclass
class OfflineEngine:
    """A running program."""

    process: subprocess.Popen[str]

    def read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise AssertionError("the engine ended")

    def send(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
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


@contextlib.contextmanager
def start_engine(
    vllm: Path,
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
        vllm: folder of vLLM's programs.
        folder: empty or absent.
        drafter: folder of its files.
        method: vLLM's name of the drafter's method.
        compiled: whether vLLM compiles the models.
        plugin: whether the engine has the plugin.
        repacks: whether vLLM packs the weights of linear layers, as it does on CPU alone.
    """
    settings = {
        "target": str(find_bundle_path("target")),
        "drafter": str(drafter),
        "method": method,
        "prompts": str(find_bundle_path("prompts.jsonl")),
        "compiled": compiled,
        "plugin": plugin,
    }
    path = folder / "path"
    path.mkdir(parents=True)
    shutil.copy(PROGRAM, path)  # the worker imports its class
    if plugin:
        write_plugin(path)
    log = folder / "engine.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(vllm / "python"), str(path / PROGRAM.name), json.dumps(settings)],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(path), WITHOUT_REPACKING: "" if repacks else "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    engine = OfflineEngine(process)
    try:
        assert engine.read() == "ready"
        yield engine
    except Exception as error:
        error.add_note(f"The engine's log ends with:\n{log.read_text()[-4000:]}")
        raise
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.read()  # vLLM still logs
        process.stdout.close()
        process.wait(60)
