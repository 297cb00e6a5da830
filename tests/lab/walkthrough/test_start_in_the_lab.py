"""The commands of docs/start/in-the-lab.md: a lab, the chart, an answer through the gateway, a promoted drafter, a complete
clean-up."""

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
PAGE = ROOT / "docs" / "start" / "in-the-lab.md"
ON_YOUR_CLUSTER = ROOT / "docs" / "start" / "on-your-cluster.md"
FIRST_CANARY = ROOT / "docs" / "tutorials" / "first-canary.md"
NAME = f"start-{os.getpid()}"
LAB = ".venv/bin/aerie-lab "


def commands(text: str) -> list[str]:
    """Return the commands of a page or section, with continued lines joined."""
    blocks = re.findall(r"^ *```\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for line in "".join(blocks).replace("\\\n", " ").splitlines()]


class Walkthrough:
    """The page's remaining commands; each is removed from the list when it is run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Folder in place of the checkout: what the commands write is not left in it."""
        for name in ("charts", "examples"):
            (folder / name).symlink_to(ROOT / name)
        self.remaining = commands(PAGE.read_text().partition("## By hand")[2].partition("\n## ")[0])
        self.last_command = ""
        self.environment: Mapping[str, str] = {**os.environ, "AERIE_LAB_NAME": NAME}

    @property
    def options(self) -> dict[str, Any]:
        """Options of a process that runs a command."""
        return {"cwd": self.folder, "env": self.environment, "text": True}

    def run(self, beginning: str) -> str:
        """Run the next command, which must have this beginning, and return its output."""
        return self._run(self.take_next(beginning))

    def run_from(self, page: Path, command: str) -> str:
        """Run a command of another page, and return its output."""
        assert command in commands(page.read_text())
        return self._run(command)

    def _run(self, text: str) -> str:
        command = ["bash", "-c", text]
        done: subprocess.CompletedProcess[str] = subprocess.run(command, capture_output=True, check=False, **self.options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def take_next(self, beginning: str) -> str:
        """Return the next command without running it. This interpreter's folder replaces .venv/bin."""
        command = self.remaining.pop(0)
        assert command.startswith(beginning), f"the page goes on with: {command}"
        self.last_command = command.replace(".venv/bin/", f"{shlex.quote(str(Path(sys.executable).parent))}/")
        return self.last_command

    def enter_shell(self, beginning: str) -> None:
        """Take over the environment of the shell that the next command opens."""
        command = [*shlex.split(self.take_next(beginning)), "env", "-0"]
        done = subprocess.run(command, capture_output=True, check=True, **self.options)
        self.environment = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)

    def run_again(self) -> bool:
        """Run the last command again, and return whether it succeeded."""
        done = subprocess.run(["bash", "-c", self.last_command], capture_output=True, check=False, **self.options)
        return done.returncode == 0


@pytest.fixture
def walkthrough(tmp_path: Path) -> Iterator[Walkthrough]:
    """Yield a walkthrough at its beginning; its lab is removed at the end, whatever happens."""
    try:
        yield Walkthrough(tmp_path)
    finally:
        take_down_lab(NAME)


@pytest.mark.nightly  # tests/lab/chart and tests/lab/operator have the effect of each command
def test_the_commands_of_the_page_work(walkthrough: Walkthrough) -> None:
    walkthrough.run(f"{LAB}up --simulated-vllm")
    lab = Lab.find(NAME)
    walkthrough.enter_shell(f"{LAB}shell")

    walkthrough.run("helm install aerie charts/aerie")
    walkthrough.run_from(ON_YOUR_CLUSTER, "kubectl aerie doctor")
    walkthrough.run("kubectl create secret generic hugging-face")
    walkthrough.run("kubectl apply -f examples/speculativedeployment.yaml")
    walkthrough.run("kubectl aerie wait chat --for ready")
    shown = read_columns(lab)
    assert (shown["PHASE"], shown["K"], shown["READY"]) == ("Ready", "3", "4")
    assert shown["DRAFTER"] == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B@ada412b6"
    before = list_ready_pods(lab)
    assert len(before) == 4

    walkthrough.run("kubectl apply -f examples/gateway.yaml")
    answer = request_answer(walkthrough)
    assert answer["model"] == "chat"
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["message"]["content"]
    assert list_ready_pods(lab) == before, "another way to the pods is no other pods"
    # By default an idle engine is scraped once a minute, and the value needs two scrapes.
    lab.kubectl("patch", "specdep", "chat", "--type=merge", "--patch", '{"spec": {"metrics": {"scrapeInterval": "1s"}}}')
    wait_until(
        lambda: walkthrough.run_again() and read_columns(lab)["AL"],
        "the acceptance length is shown after some traffic",
        timeout_seconds=240,
        interval_seconds=1,
    )
    assert 1 < float(read_columns(lab)["AL"]) <= 4

    # Preflight read the real tensor shapes of both.
    status = json.loads(lab.kubectl("get", "specdep", "chat", "-o", "json"))["status"]
    (passed,) = [condition for condition in status["conditions"] if condition["type"] == "PreflightPassed"]
    assert passed["status"] == "True"
    assert "eagle_aux_hidden_state_layer_ids" in passed["message"]

    plan = walkthrough.run_from(FIRST_CANARY, "kubectl aerie plan -f examples/lab/new-drafter.yaml")
    assert "Llama-3.1-8B-Instruct-EAGLE3.1" in plan
    send_requests = f"exec {walkthrough.take_next('aerie-lab traffic').removesuffix('&')}"
    with subprocess.Popen(["bash", "-c", send_requests], **walkthrough.options) as traffic:
        walkthrough.run("kubectl apply -f examples/lab/new-drafter.yaml")
        watch_until_promoted(walkthrough)
        traffic.terminate()
    assert "Promoted" in walkthrough.run("kubectl aerie history chat")
    assert "tokens per step" in walkthrough.run_from(FIRST_CANARY, "kubectl aerie explain chat")
    walkthrough.run("kubectl aerie report chat -o report.html")
    report = walkthrough.folder / "report.html"
    assert "Llama-3.1-8B-Instruct-EAGLE3.1" in report.read_text()
    assert "tokens per step" in report.read_text()
    before = list_ready_pods(lab)
    assert len(before) == 4

    # The chart's README: uninstalling leaves the definition and the serving pods.
    walkthrough.run_from(ON_YOUR_CLUSTER, "helm uninstall aerie --namespace aerie-system")
    assert list_ready_pods(lab) == before
    walkthrough.run_from(ON_YOUR_CLUSTER, "kubectl delete specdep chat")
    walkthrough.take_next("exit")
    walkthrough.run(f"{LAB}down")
    assert walkthrough.remaining == []


def watch_until_promoted(walkthrough: Walkthrough) -> None:
    """Watch with the page's command until the new drafter serves alone."""
    command = walkthrough.take_next("kubectl aerie status chat --watch")
    deadline, text = time.monotonic() + 600, ""
    with subprocess.Popen(["bash", "-c", f"exec {command}"], stdout=subprocess.PIPE, **walkthrough.options) as watching:
        assert watching.stdout is not None
        os.set_blocking(watching.stdout.fileno(), False)
        try:
            while "Ramping" not in text or not re.search(
                r"^(Monitoring|Ready)\b", text.rpartition("default/chat")[2], re.MULTILINE
            ):
                assert time.monotonic() < deadline, text[-5000:]
                with contextlib.suppress(TypeError):  # nothing to read
                    text += watching.stdout.read()
                time.sleep(0.1)
        finally:
            watching.terminate()


def read_columns(lab: Lab) -> dict[str, str]:
    """Return the columns of `kubectl get` by heading: a column begins where its heading does."""
    heading, line = lab.kubectl("get", "specdep", "chat").splitlines()
    headings = [(match[0], match.start()) for match in re.finditer(r"\S+", heading)]
    ends = [start for _, start in headings[1:]] + [len(line)]
    return {name: line[start:end].strip() for (name, start), end in zip(headings, ends, strict=True)}


def list_ready_pods(lab: Lab) -> set[str]:
    """Return the names of the engines' pods that are Ready."""
    pods = json.loads(lab.kubectl("get", "pods", "-l", "aerie.dev/name=chat", "-o", "json"))["items"]
    return {
        pod["metadata"]["name"]
        for pod in pods
        if any(
            condition["type"] == "Ready" and condition["status"] == "True" for condition in pod["status"].get("conditions") or []
        )
    }


def request_answer(walkthrough: Walkthrough) -> dict[str, Any]:
    """Return the answer to the page's request, which curl repeats until the route has reached Envoy."""
    response: dict[str, Any] = json.loads(walkthrough.run('curl "$GATEWAY/v1/chat/completions"'))
    return response
