"""Simulated engines as processes, on free ports, ended with the test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

FAST = {
    "startup_seconds": 0.0,
    "step_time": {"formula": {"base_seconds": 2e-3, "seconds_per_token": 1e-5, "seconds_per_prompt_token": 1e-6}},
}


@dataclass
class Running:
    """One process."""

    process: subprocess.Popen[str]
    client: httpx.Client

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a family's samples with these labels."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def last_words(self) -> str:
        """Return what an ended process has written to its standard error."""
        return self.process.communicate()[1]

    def end(self, number: int = signal.SIGTERM, within: float = 60) -> int:
        """Send the signal, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(within)


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a simulator with arguments after MODEL.

    `options` are the value of AERIE_SIMULATOR, `variables` other environment variables.
    """
    running: list[Running] = []

    def start_simulator(
        *arguments: str,
        model: str = "acme/model",
        options: dict[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Running:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # Five seconds by default, as long as httpx keeps one: on busy cores a request would meet a connection that is closing.
        keep_alive = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3900"}
        environment = {**os.environ, "AERIE_SIMULATOR": json.dumps(FAST | (options or {})), **keep_alive, **(variables or {})}
        command = [sys.executable, "-m", "aerie_lab.engine", model, "--host", "127.0.0.1", "--port", str(port), *arguments]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        running.append(Running(process, client))
        began = time.monotonic()
        while wait and not _healthy(client):
            assert process.poll() is None, running[-1].last_words()
            assert time.monotonic() - began < 120
            time.sleep(0.02)
        return running[-1]

    yield start_simulator
    for each in running:
        each.client.close()
        if each.process.poll() is None:
            each.process.kill()
        if each.process.stderr is not None and not each.process.stderr.closed:
            each.process.communicate()


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def write_drafter(folder: Path, *tensors: str, **config: Any) -> Path:
    """Write a folder with a drafter's config and the header of its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], **config}))
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in tensors}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


PLAIN = ("fc.weight", "norm.weight", "midlayer.hidden_norm.weight", "lm_head.weight")
NORMED = (*PLAIN, "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight")


@pytest.fixture
def drafters(tmp_path: Path) -> dict[str, Path]:
    """Return EAGLE 3 and 3.1 drafters, and every wrong combination of the two."""
    return {
        "eagle3": write_drafter(tmp_path / "eagle3", *PLAIN),
        "eagle3.1": write_drafter(tmp_path / "eagle31", *NORMED, fc_norm=True, norm_output=True),
        "no norm_output": write_drafter(tmp_path / "no-output", *NORMED, fc_norm=True),
        "no flags": write_drafter(tmp_path / "no-flags", *NORMED),
        "plain as 3.1": write_drafter(tmp_path / "plain-as-31", *PLAIN, fc_norm=True, norm_output=True),
        "shifted": write_drafter(tmp_path / "shifted", *PLAIN, simulator={"logit_shift": -1.0}),
        "rated": write_drafter(tmp_path / "rated", *PLAIN, simulator={"acceptance_rates": [0.5, 0.2, 0.1]}),
    }
