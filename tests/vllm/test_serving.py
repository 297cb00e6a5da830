"""Real vLLM in a pod: a pod spec for vllm/vllm-openai in the lab, from start to end.

One server for all tests here, because a start takes most of a minute; the last test ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from aerie_lab.cluster import Lab, process
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.model import Shape, write_tiny_llama
from aerie_lab.testing.plugin import new_namespace

# Most of the timeout is for a first installation of vLLM.
pytestmark = pytest.mark.timeout(2400)

START = 300.0
"""Seconds for a start: 30 on an idle machine with two cores, several times that on a busy one."""

ANSWER, DRAIN, GRACE = 10, 300, 330
"""Seconds: of the response that is open at the deletion, for open responses after it, and from the deletion to the kill."""

IDLE = 9
"""Seconds after which the server closes an idle connection. The default is 5."""

LONGEST = 32768
"""Tokens of the longest prompt and answer together."""

MANIFESTS = """
apiVersion: v1
kind: Pod
metadata:
  name: tiny
  labels: {{app: tiny}}
  finalizers: [aerie.dev/test]  # keeps the last status of the pod readable
spec:
  terminationGracePeriodSeconds: {grace}
  containers:
  - name: vllm
    image: vllm/vllm-openai:v0.32.0
    args:
    - --model=/models/tiny
    - --served-model-name=tiny
    - --port=8000
    - --max-model-len={longest}
    - --max-num-seqs=8
    - --shutdown-timeout={drain}
    # What a CPU needs beyond that:
    - --dtype=float32
    - --enforce-eager
    - --kv-cache-memory-bytes=67108864
    env:
    - {{name: VLLM_HTTP_TIMEOUT_KEEP_ALIVE, value: "{idle}"}}
    ports: [{{name: http, containerPort: 8000}}]
    startupProbe: {{httpGet: {{path: /health, port: http}}, periodSeconds: 1, failureThreshold: 600, timeoutSeconds: 10}}
    readinessProbe: {{httpGet: {{path: /health, port: http}}, periodSeconds: 5, timeoutSeconds: 10, failureThreshold: 6}}
    volumeMounts:
    - {{name: model, mountPath: /models/tiny, readOnly: true}}
    - {{name: shm, mountPath: /dev/shm}}
  volumes:
  - {{name: model, hostPath: {{path: {model}, type: Directory}}}}
  - {{name: shm, emptyDir: {{medium: Memory, sizeLimit: 512Mi}}}}  # vLLM wants 400 MiB, and a pod has 64
---
apiVersion: v1
kind: Service
metadata: {{name: tiny}}
spec: {{selector: {{app: tiny}}, ports: [{{port: 80, targetPort: http}}]}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: tiny}}
spec:
  parentRefs: [{{name: lab, namespace: projectcontour}}]
  hostnames: [{host}]
  rules:
  - backendRefs: [{{name: tiny, port: 80}}]
    timeouts: {{request: 0s}}  # Envoy would cut an answer off after 15 s
"""


@dataclass
class ServedPod:
    """The running server, and a client of it through the gateway."""

    namespace: Namespace
    client: httpx.Client


@pytest.fixture(scope="module")
def served(lab: Lab, vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPod]:
    """A pod with vLLM behind a Service and an HTTPRoute, Ready and reachable from the host."""
    model = write_tiny_llama(tmp_path_factory.mktemp("serving") / "tiny", Shape(positions=LONGEST))
    assert vllm.is_dir()
    assert lab.gateway_url is not None
    with new_namespace(lab, "vllm-serving") as namespace:
        host = f"{namespace.name}.example"
        namespace.apply(MANIFESTS.format(model=model, longest=LONGEST, host=host, drain=DRAIN, grace=GRACE, idle=IDLE))
        try:
            namespace.wait_until_ready("tiny", timeout_seconds=START)
            with httpx.Client(base_url=lab.gateway_url, headers={"Host": host}, timeout=120) as client:
                wait_until(lambda: healthy(client), "the route is served")
                yield ServedPod(namespace, client)
        finally:
            remove_finalizer(namespace)


def healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False  # Envoy opens its port with the first route


def remove_finalizer(namespace: Namespace) -> None:
    """Remove the finalizer of the pod, if it still exists."""
    if namespace.exists("pod", "tiny"):
        namespace.kubectl("patch", "pod", "tiny", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')


def completion_body(tokens: int, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "The eyrie", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


def sum_metric(served: ServedPod, name: str) -> float:
    lines = served.client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def run_in_lab(lab: Lab, *command: str) -> str:
    """Run a command in the lab's namespaces, and return its output."""
    arguments = [sys.executable, "-m", "aerie_lab.sandbox.inside", str(process.find_lab_pid(lab.folder)), *command]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300).stdout.strip()


def list_container_processes(lab: Lab, namespace: str) -> set[int]:
    """Return the host's ids of the processes in the PID namespace of the container of pod `tiny`."""
    (container,) = [c for c in lab.call_agent("containers") if c["namespace"] == namespace]
    namespace_link = run_in_lab(lab, "readlink", f"/proc/{container['pid']}/ns/pid")
    members = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == namespace_link:
                members.add(int(entry.name))
    return members


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop the process until the end of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_completions_are_answered_through_the_gateway(served: ServedPod) -> None:
    models = served.client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    responses = [served.client.post("/v1/completions", json=completion_body(24)).json() for _ in range(2)]
    assert responses[0]["usage"] == responses[1]["usage"]
    assert responses[0]["usage"]["completion_tokens"] == 24
    assert responses[0]["usage"]["prompt_tokens"] == len("The eyrie")
    assert responses[0]["choices"][0]["text"] == responses[1]["choices"][0]["text"] != ""


def test_metrics_count_what_was_generated(served: ServedPod) -> None:
    before = sum_metric(served, "vllm:generation_tokens_total")
    assert served.client.post("/v1/completions", json=completion_body(16)).status_code == 200
    wait_until(lambda: sum_metric(served, "vllm:generation_tokens_total") == before + 16, "16 more tokens are counted")


def test_an_idle_connection_is_kept_for_the_configured_time(served: ServedPod) -> None:
    """A gateway relies on it not to use a closing connection (aerie.manifests.pod.engine_pod.KEEP_ALIVE)."""
    address = served.namespace.get("pod", "tiny")["status"]["podIP"]
    lines = [
        "import http.client, time",
        f"server = http.client.HTTPConnection('{address}', 8000, timeout=120)",
        "server.request('GET', '/version')",
        "server.getresponse().read()",
        "started = time.monotonic()",
        "assert server.sock.recv(1) == b''",
        "print(time.monotonic() - started)",
    ]
    assert float(run_in_lab(served.namespace.lab, sys.executable, "-c", "\n".join(lines))) >= IDLE - 1


def test_logs_are_those_of_the_server(served: ServedPod) -> None:
    log = served.namespace.kubectl("logs", "tiny")
    assert "Initializing a V1 LLM engine (v0.32.0)" in log
    assert "VLLM_CPU_OMP_THREADS_BIND='nobind'" in log


def test_status_of_the_pod(served: ServedPod) -> None:
    (status,) = served.namespace.get("pod", "tiny")["status"]["containerStatuses"]
    assert (status["ready"], status["restartCount"], status["image"]) == (True, 0, "vllm/vllm-openai:v0.32.0")


def test_deletion_drains_and_leaves_no_process(served: ServedPod) -> None:
    namespace = served.namespace
    processes = list_container_processes(namespace.lab, namespace.name)
    assert len(processes) >= 3, "the API server, the engine and its worker"
    (engine,) = [pid for pid in processes if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    started = time.monotonic()
    assert served.client.post("/v1/completions", json=completion_body(500)).status_code == 200
    # Far from its end when its first token arrives, and far from the end of the drain.
    tokens = min(LONGEST - 100, round(500 * ANSWER / (time.monotonic() - started)))
    body = completion_body(tokens, stream=True, stream_options={"include_usage": True})
    with served.client.stream("POST", "/v1/completions", json=body, timeout=GRACE) as response:
        events = (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: {"))
        first = next(events)
        with stopped(engine):
            namespace.kubectl("delete", "pod", "tiny", "--wait=false")
            wait_until(lambda: "stopping engine client mode=drain" in namespace.kubectl("logs", "tiny"), "the API server drains")
            assert namespace.get("pod", "tiny")["metadata"]["deletionGracePeriodSeconds"] == GRACE
        *_, last, usage = [first, *events]
    assert (last["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]) == ("length", tokens)

    def ended(pod: dict[str, object]) -> bool:
        status = pod["status"]
        assert isinstance(status, dict)
        return "terminated" in status["containerStatuses"][0]["state"]

    (status,) = namespace.wait_until("pod", "tiny", ended, "the container has ended", timeout_seconds=GRACE)["status"][
        "containerStatuses"
    ]
    assert (status["state"]["terminated"]["exitCode"], status["state"]["terminated"]["reason"]) == (0, "Completed")
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    remove_finalizer(namespace)
    namespace.wait_until_deleted("pod", "tiny")
