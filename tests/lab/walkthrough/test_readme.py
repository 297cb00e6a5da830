"""What the README tells to type, typed: a lab, the chart, the examples, an answer through the gateway, and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aerie_lab.cluster import Lab, take_down_lab
from aerie_lab.testing import wait_until

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[3]
NAME = f"readme-{os.getpid()}"
LAB = ".venv/bin/aerie-lab "


def commands() -> list[str]:
    """The README's commands by hand, with continued lines joined."""
    readme = (ROOT / "README.md").read_text()
    (block,) = [text for text in re.findall(r"^```\n(.*?)^```", readme, re.MULTILINE | re.DOTALL) if "helm install" in text]
    return [line.strip() for line in block.replace("\\\n", " ").splitlines()]


class Walk:
    """The README's commands, one after the other; each is taken off the list as it is run."""

    def __init__(self) -> None:
        self.left = commands()
        self.last = ""
        self.environment: Mapping[str, str] = {**os.environ, "AERIE_LAB_NAME": NAME}

    def on(self, beginning: str) -> str:
        """Run the next command, which begins so; its output."""
        done = subprocess.run(
            ["bash", "-c", self.next(beginning)], cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def next(self, beginning: str) -> str:
        """The next command, for whoever runs it otherwise. This interpreter's folder stands for .venv/bin."""
        command = self.left.pop(0)
        assert command.startswith(beginning), f"the README goes on with: {command}"
        self.last = command.replace(".venv/bin/", f"{shlex.quote(str(Path(sys.executable).parent))}/")
        return self.last

    def enter(self, beginning: str) -> None:
        """Be in the shell that the next command opens, as far as its environment goes."""
        command = [*shlex.split(self.next(beginning)), "env", "-0"]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=True)
        self.environment = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)

    def run_again(self) -> bool:
        """Run the last command once more; whether it went well."""
        done = subprocess.run(["bash", "-c", self.last], env=self.environment, capture_output=True, check=False)
        return done.returncode == 0


@pytest.fixture
def walk() -> Iterator[Walk]:
    """A walk at its beginning; its lab is removed at the end, whatever happens."""
    try:
        yield Walk()
    finally:
        take_down_lab(NAME)


def test_the_readme_by_hand(walk: Walk) -> None:
    walk.on(f"{LAB}up --simulated-vllm")
    lab = Lab.find(NAME)
    walk.enter(f"{LAB}shell")

    walk.on("helm install aerie charts/aerie")
    walk.on("kubectl create secret generic hugging-face")
    walk.on("kubectl apply -f examples/speculativedeployment.yaml")
    watched(walk)
    shown = columns(lab)
    assert (shown["PHASE"], shown["K"], shown["READY"]) == ("Ready", "3", "4")
    assert shown["DRAFTER"] == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B@ada412b6"
    before = serving(lab)
    assert len(before) == 4

    walk.on("kubectl apply -f examples/gateway.yaml")
    answer = answered(walk)
    assert answer["model"] == "chat"
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["message"]["content"]
    assert serving(lab) == before, "another way to the pods is no other pods"
    # By default an engine at rest is read once a minute, and it takes two readings.
    lab.kubectl("patch", "specdep", "chat", "--type=merge", "--patch", '{"spec": {"metrics": {"scrapeInterval": "1s"}}}')
    wait_until(
        lambda: walk.run_again() and columns(lab)["AL"],
        "the acceptance length is shown after some traffic",
        timeout_seconds=240,
        interval_seconds=1,
    )
    assert 1 < float(columns(lab)["AL"]) <= 4

    # Preflight looked at the true shapes of both.
    status = json.loads(lab.kubectl("get", "specdep", "chat", "-o", "json"))["status"]
    (passed,) = [condition for condition in status["conditions"] if condition["type"] == "PreflightPassed"]
    assert passed["status"] == "True"
    assert "eagle_aux_hidden_state_layer_ids" in passed["message"]

    # The chart's README: uninstalling leaves the definition and the serving pods.
    lab.helm("uninstall", "aerie", "--namespace", "aerie-system", "--wait")
    assert serving(lab) == before
    lab.kubectl("delete", "specdep", "chat")
    walk.next("exit")
    walk.on(f"{LAB}down")
    assert walk.left == []


def watched(walk: Walk) -> None:
    """Watch as the README does until the phase is Ready."""
    command = walk.next("kubectl get specdep chat --watch")
    deadline, text = time.monotonic() + 300, ""
    with subprocess.Popen(["bash", "-c", f"exec {command}"], env=walk.environment, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        os.set_blocking(watching.stdout.fileno(), False)
        try:
            while not any(line.split()[:2] == ["chat", "Ready"] for line in text.splitlines()):
                assert time.monotonic() < deadline, text
                with contextlib.suppress(TypeError):  # nothing to read
                    text += watching.stdout.read()
                time.sleep(0.1)
        finally:
            watching.terminate()


def columns(lab: Lab) -> dict[str, str]:
    """What `kubectl get` shows of the resource, by heading: a column begins where its heading does."""
    heading, line = lab.kubectl("get", "specdep", "chat").splitlines()
    headings = [(match[0], match.start()) for match in re.finditer(r"\S+", heading)]
    ends = [start for _, start in headings[1:]] + [len(line)]
    return {name: line[start:end].strip() for (name, start), end in zip(headings, ends, strict=True)}


def serving(lab: Lab) -> set[str]:
    """The engines' pods that are Ready."""
    pods = json.loads(lab.kubectl("get", "pods", "-l", "aerie.dev/name=chat", "-o", "json"))["items"]
    return {
        pod["metadata"]["name"]
        for pod in pods
        if any(
            condition["type"] == "Ready" and condition["status"] == "True" for condition in pod["status"].get("conditions") or []
        )
    }


def answered(walk: Walk) -> dict[str, Any]:
    """The answer to the README's request, as soon as the route has reached Envoy."""
    command = walk.next('curl "$GATEWAY/v1/chat/completions"')

    def ask() -> dict[str, Any] | None:
        done = subprocess.run(["bash", "-c", command], env=walk.environment, capture_output=True, text=True, check=False)
        try:
            response: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            return None
        return response if "choices" in response else None

    response = wait_until(ask, "the gateway answers")
    assert response is not None
    return response
