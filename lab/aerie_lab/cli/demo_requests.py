"""The requests of `aerie-lab demo`: from this process through the lab's gateway, or from a pod to the resource's Service.

Both have the same operations, so that the demo's steps are the same. Guarantee: each request and its answer is checked and
counted (aerie_lab.engine.load_generation.traffic). Not guaranteed by PodRequests: the last outcomes, if the pod's log ends before
its container.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import httpx

from aerie.terminal import sanitize_text
from aerie_lab.cli.console import out
from aerie_lab.cli.demo_tools import DemoTools
from aerie_lab.cli.scenarios import DemoScenario
from aerie_lab.engine.load_generation.background import BackgroundTraffic, IntervalReport
from aerie_lab.engine.load_generation.traffic import RequestOutcome, TrafficTarget
from aerie_lab.errors import LabError, StartError

TRAFFIC_MANIFEST = Path(__file__).with_name("demo-traffic-pod.yaml").resolve()
_ANSWER_TIMEOUT_SECONDS = 30.0
_LOG_END_TIMEOUT_SECONDS = 90.0
"""Longer than the timeout of a request, which the pod waits for."""


class DemoRequests(Protocol):
    """A way of requests to the engines."""

    receiver: str
    """What receives the requests, for the output."""

    def ask(self) -> str:
        """Print the scenario's question as a command, send it, and return the answer. Raises LabError."""

    def send(self) -> contextlib.AbstractContextManager[IntervalReport]:
        """Return a block in which the scenario's load is sent."""


class GatewayRequests:
    """Requests from this process through the lab's gateway."""

    receiver = "gateway"

    def __init__(self, scenario: DemoScenario, url: str) -> None:
        self._scenario, self._url = scenario, url

    def ask(self) -> str:
        """Ask until the gateway answers: Envoy receives the route with a delay."""
        scenario, url = self._scenario, self._url
        out.print(f"[cyan]$ curl {url}/v1/chat/completions --header 'Host: {scenario.host}' ...[/]")
        deadline = time.monotonic() + _ANSWER_TIMEOUT_SECONDS
        with httpx.Client(base_url=url, headers={"Host": scenario.host}, timeout=30) as client:
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):  # Envoy opens its port with the first route
                    answer = client.post("/v1/chat/completions", json=scenario.question_body)
                    if answer.status_code == 200:
                        return _read_answer(answer.text)
                time.sleep(0.2)
        raise StartError(f"the gateway did not answer within 30 s: see `aerie-lab kubectl describe httproute {scenario.name}`.")

    def send(self) -> BackgroundTraffic:
        scenario = self._scenario
        target = TrafficTarget(self._url, scenario.name, scenario.host, timeout_seconds=60, chats=scenario.chats)
        return BackgroundTraffic(target, scenario.load, scenario.classes)


class PodRequests:
    """Requests from a pod of the cluster to the resource's Service. The question goes through the API server."""

    receiver = "Service"

    def __init__(self, scenario: DemoScenario, tools: DemoTools) -> None:
        self._scenario, self._tools = scenario, tools

    def ask(self) -> str:
        path = f"/api/v1/namespaces/default/services/{self._scenario.name}:80/proxy/v1/chat/completions"
        out.print(f"[cyan]$ kubectl create --raw {path} --filename - ...[/]")
        body = json.dumps(self._scenario.question_body)
        return _read_answer(self._tools.run("kubectl", "create", "--raw", path, "--filename", "-", stdin=body))

    @contextlib.contextmanager
    def send(self) -> Iterator[IntervalReport]:
        tools = self._tools
        tools.show("kubectl", "apply", "-f", str(TRAFFIC_MANIFEST))
        tools.run("kubectl", "wait", "--for=condition=Ready", "pod/traffic", "--timeout=120s")
        traffic = _PodTraffic()
        with tools.start("kubectl", "logs", "--follow", "pod/traffic") as log:
            reader = threading.Thread(target=traffic.read, args=(log,), name="traffic log", daemon=True)
            reader.start()
            try:
                yield traffic
                if log.poll() is not None:
                    raise LabError("the pod with the requests has ended too early: see `kubectl logs traffic`.")
                tools.run("kubectl", "delete", "pod", "traffic", "--wait=false")  # SIGTERM: open requests get their answers
                reader.join(_LOG_END_TIMEOUT_SECONDS)
            finally:
                log.terminate()
        traffic.complete()


class _PodTraffic(IntervalReport):
    """What the pod's log says."""

    def read(self, log: subprocess.Popen[str]) -> None:
        assert log.stdout is not None
        for line in log.stdout:
            self.report.outcomes.append(RequestOutcome(**json.loads(line)))

    def complete(self) -> None:
        self._complete_last_interval()


def _read_answer(text: str) -> str:
    (choice,) = json.loads(text)["choices"]
    return sanitize_text(f"... {choice['message']['content'].strip()} ...")
