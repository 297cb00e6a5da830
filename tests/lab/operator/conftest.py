"""The operator as a process beside the lab, working in the namespace of the test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie_lab.cluster import Lab, process
from aerie_lab.testing import Namespace, until

DEFINITION = Path(__file__).resolve().parents[3] / "crds" / "aerie.dev_speculativedeployments.yaml"


@pytest.fixture(scope="module", autouse=True)
def definition(lab: Lab) -> Iterator[None]:
    """The resource's definition, established; taken away again, so that the lab is as it was."""
    document = yaml.safe_load(DEFINITION.read_text())
    name = document["metadata"]["name"]
    lab.apply(document)
    lab.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=180s")
    yield
    lab.kubectl("delete", "crd", name)


class Operator:
    """The operator as a process of this machine, working in one namespace."""

    def __init__(self, namespace: Namespace, log: Path) -> None:
        self.namespace, self.log = namespace, log
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """What starts it."""
        command = [sys.executable, "-m", "aerie.cli", "operator", "--namespace", self.namespace.name]
        command += ["--lease-namespace", self.namespace.name, "--preflight-image", "aerie.dev/aerie:test"]
        return [*command, "--health-port", "0", "--metrics-port", "0"]

    def kubeconfig(self) -> Path:
        """The API server as it sees it."""
        return self.namespace.lab.folder / "kubeconfig"

    def start(self) -> None:
        """Start it."""
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig())}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.command(), stdout=output, stderr=output, env=environment)

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(60)
        self.process = None
        return status


class Inside(Operator):
    """The operator in the lab's own network, as its pod would be: it reaches the pods' addresses."""

    PORT = "18080"

    def _enter(self) -> list[str]:
        lab = process.living(self.namespace.lab.folder)
        return [sys.executable, "-m", "aerie_lab.sandbox.inside", "--network", str(lab)]

    def command(self) -> list[str]:
        """What starts it."""
        return [*self._enter(), *super().command(), "--metrics-port", self.PORT]

    def kubeconfig(self) -> Path:
        """The API server as it sees it."""
        return self.namespace.lab.folder / "components" / "admin.kubeconfig"

    def scrapes(self) -> int:
        """How many metrics pages it has read."""
        code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{self.PORT}/metrics').read().decode())"
        done = subprocess.run([*self._enter(), sys.executable, "-c", code], capture_output=True, text=True, check=False)
        tried = re.findall(r"^aerie_scrape_seconds_count (\S+)", done.stdout, re.MULTILINE)
        failed = re.findall(r"^aerie_scrape_failures_total{.*} (\S+)", done.stdout, re.MULTILINE)
        return int(sum(map(float, tried)) - sum(map(float, failed)))


@pytest.fixture
def stopped(namespace: Namespace, tmp_path: Path) -> Iterator[Operator]:
    """An operator that the test starts; its log is shown when the test fails."""
    operator = Operator(namespace, tmp_path / "operator.log")
    yield operator
    if operator.process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            operator.end()
    print(operator.log.read_text(errors="replace")[-5000:] if operator.log.exists() else "")  # noqa: T201


@pytest.fixture
def operator(stopped: Operator) -> Operator:
    """A running operator."""
    stopped.start()
    return stopped


@pytest.fixture
def inside(namespace: Namespace, tmp_path: Path) -> Iterator[Inside]:
    """A running operator in the lab's own network; its log is shown when the test fails."""
    operator = Inside(namespace, tmp_path / "operator.log")
    operator.start()
    yield operator
    if operator.process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            operator.end()
    print(operator.log.read_text(errors="replace")[-5000:])  # noqa: T201


@pytest.fixture
def specdep(namespace: Namespace) -> Callable[..., dict[str, Any]]:
    """Waits until the resource's status is as `look` wants it; the resource."""

    def wait(look: Callable[[dict[str, Any]], object], what: str, within: float = 120) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            document: dict[str, Any] = namespace.get("specdep", "chat")
            return document if look(document.get("status") or {}) else None

        document = until(found, what, within=within, every=0.3)
        assert document is not None
        return document

    return wait
