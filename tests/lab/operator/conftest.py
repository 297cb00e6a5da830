"""The operator as a process beside the lab, working in the namespace of the test."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import functools
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from aerie.api import SpeculativeDeployment
from aerie.rollout.canary.messages import PROMOTE_ANNOTATION
from aerie.rollout.revision.desired import resolve_desired_revision
from aerie_lab.cluster import Lab, process
from aerie_lab.kube.client import resource_path
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.proxy import ApiServerProxy

State = dict[str, Any]
CRD_FILE = Path(__file__).resolve().parents[3] / "crds" / "aerie.dev_speculativedeployments.yaml"


@pytest.fixture(scope="module", autouse=True)
def custom_resource_definition(lab: Lab) -> Iterator[None]:
    """Install the custom resource definition and wait until it is established; delete it at the end."""
    document = yaml.safe_load(CRD_FILE.read_text())
    name = document["metadata"]["name"]
    lab.apply(document)
    # kubectl fails immediately as long as the definition has no conditions at all.
    wait = ("wait", "--for=condition=Established", f"crd/{name}", "--timeout=180s")
    wait_until(lambda: lab.kubectl(*wait), "the definition is established", timeout_seconds=180)
    yield
    lab.kubectl("delete", "crd", name)


class Operator:
    """The operator as a process of this machine, for one namespace.

    If it ends because it could not renew its lease, on an overloaded machine, it is restarted, as its pod would be.
    """

    def __init__(self, namespace: Namespace, log: Path) -> None:
        self.namespace, self.log = namespace, log
        self.process: subprocess.Popen[bytes] | None = None
        self._changes = threading.Lock()

    def command(self) -> list[str]:
        """Return the command that starts it."""
        command = [sys.executable, "-m", "aerie.cli", "operator", "--namespace", self.namespace.name]
        command += ["--lease-namespace", self.namespace.name, "--preflight-image", "aerie.dev/aerie:test"]
        return [*command, "--health-port", "0", "--metrics-port", "0"]

    def kubeconfig(self) -> Path:
        """Return the kubeconfig of its API server."""
        return self.namespace.lab.folder / "kubeconfig"

    def start(self) -> None:
        """Start it."""
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig())}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.command(), stdout=output, stderr=output, env=environment)
        threading.Thread(target=self._restart_after_lost_lease, args=(self.process,), name="keep", daemon=True).start()

    def _restart_after_lost_lease(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with self._changes:
            if self.process is process and "is no longer the leader" in self.log.read_text(errors="replace")[-5000:]:
                self.start()

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it; return its exit status."""
        with self._changes:
            process, self.process = self.process, None
        assert process is not None
        process.send_signal(number)
        return process.wait(60)


class LabNetworkOperator(Operator):
    """The operator in the lab's own network, like its pod: it reaches the pods' addresses."""

    PORT = "18080"
    starts = 0

    def start(self) -> None:
        """Start it, with a Lease of its own: it does not wait until that of a killed operator expires."""
        self.starts += 1
        super().start()

    def kill_and_replace(self) -> None:
        """Kill it (SIGKILL), and start the next one."""
        self.end(signal.SIGKILL)
        self.start()

    def network_command(self) -> list[str]:
        """Return the beginning of a command that runs in the lab's network."""
        lab = process.find_lab_pid(self.namespace.lab.folder)
        return [sys.executable, "-m", "aerie_lab.sandbox.inside", "--network", str(lab)]

    def command(self) -> list[str]:
        """Return the command that starts it."""
        options = ["--metrics-port", self.PORT, "--lease-name", f"operator-{self.starts}"]
        return [*self.network_command(), *super().command(), *options]

    def kubeconfig(self) -> Path:
        """Return the kubeconfig of its API server."""
        return self.namespace.lab.folder / "components" / "admin.kubeconfig"

    def scrapes(self) -> int:
        """Return the number of metrics responses that it has read."""
        code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{self.PORT}/metrics').read().decode())"
        response = subprocess.run(
            [*self.network_command(), sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        attempts = re.findall(r"^aerie_scrape_duration_seconds_count (\S+)", response.stdout, re.MULTILINE)
        failed = re.findall(r"^aerie_scrape_failures_total{.*} (\S+)", response.stdout, re.MULTILINE)
        return int(sum(map(float, attempts)) - sum(map(float, failed)))


@pytest.fixture
def unstarted_operator(namespace: Namespace, tmp_path: Path) -> Iterator[Operator]:
    """An operator that the test starts; its log is printed for failed tests."""
    operator = Operator(namespace, tmp_path / "operator.log")
    yield operator
    if operator.process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            operator.end()
    print(operator.log.read_text(errors="replace")[-5000:] if operator.log.exists() else "")  # noqa: T201


@pytest.fixture
def operator(unstarted_operator: Operator) -> Operator:
    """A running operator."""
    unstarted_operator.start()
    return unstarted_operator


@pytest.fixture
def inner_operator(namespace: Namespace, tmp_path: Path) -> Iterator[LabNetworkOperator]:
    """A running operator in the lab's own network; its log is printed for failed tests."""
    operator = LabNetworkOperator(namespace, tmp_path / "operator.log")
    operator.start()
    yield operator
    if operator.process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            operator.end()
    print(operator.log.read_text(errors="replace")[-5000:])  # noqa: T201


@pytest.fixture
def wait_for_status(namespace: Namespace) -> Callable[..., dict[str, Any]]:
    """A function that waits until the resource's status satisfies a condition, and returns the resource."""

    def wait(condition: Callable[[dict[str, Any]], object], description: str, timeout: float = 240) -> dict[str, Any]:
        def matching_document() -> dict[str, Any] | None:
            document: dict[str, Any] = namespace.get("specdep", "chat")
            return document if condition(document.get("status") or {}) else None

        document = wait_until(matching_document, description, timeout_seconds=timeout, interval_seconds=0.3)
        assert document is not None
        return document

    return wait


class ForkedOperator:
    """An operator of the launcher."""

    def __init__(self, process: int, log: Path) -> None:
        self.process, self.log = process, log
        self._handle = os.pidfd_open(process)
        self._end = select.poll()
        self._end.register(self._handle, select.POLLIN)

    def alive(self) -> bool:
        """Return whether it is running."""
        return not self._end.poll(0)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def end(self, timeout: float = 120) -> None:
        """End it with SIGTERM, as its pod would be ended."""
        self._send(signal.SIGTERM)
        if not self._end.poll(timeout * 1000):
            raise AssertionError(f"not within {timeout:g} s: the operator ends\n{self.read_log()}")

    def read_log(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-5000:]

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        """Kill it and release its handle."""
        self.kill()
        os.close(self._handle)


class RestartedOperator:
    """An operator that is restarted whenever it ends, as its pod would be; it is ended at the end of the block.

    It exits if it cannot renew its lease: without an API server, or on an overloaded machine.
    """

    def __init__(self, start: Callable[[], ForkedOperator]) -> None:
        self._start, self._stop = start, threading.Event()
        self._runs: list[ForkedOperator] = []
        self._thread = threading.Thread(target=self._run, name="kept", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def starts(self) -> int:
        """Return the number of its starts."""
        return len(self._runs)

    def kill(self) -> None:
        """Kill it, and start no other one."""
        self._stop.set()
        self._runs[-1].kill()
        self._thread.join()

    def read_log(self) -> str:
        """Return all its logs."""
        return "".join(operator.log.read_text(errors="replace") for operator in self._runs if operator.log.exists())

    def _run(self) -> None:
        while not self._stop.is_set():
            operator = self._start()
            self._runs.append(operator)
            while operator.alive() and not self._stop.wait(0.2):
                pass
            operator.end()


class OperatorLauncher:
    """Starts operators quickly, see operator_launcher.py. All its operators end with it."""

    def __init__(self, lab: Lab, logs: Path, *, in_lab_network: bool = False) -> None:
        """Start the launcher; `in_lab_network`: its operators reach the pods' addresses."""
        self._kubeconfig, self._logs = lab.folder / "components" / "admin.kubeconfig" if in_lab_network else lab.kubeconfig, logs
        command = [sys.executable, str(Path(__file__).with_name("operator_launcher.py"))]
        if in_lab_network:
            network = ["--network", str(process.find_lab_pid(lab.folder))]
            command = [sys.executable, "-m", "aerie_lab.sandbox.inside", *network, *command]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._lock, self._count = threading.Lock(), itertools.count(1)
        self.started: list[ForkedOperator] = []

    def start(
        self, namespace: str, *, everywhere: bool = False, lease: str = "operator", notify: str = "", **paths: Path
    ) -> ForkedOperator:
        """Start an operator for the namespace, or everywhere; its lease is in the namespace. `notify`: URL of notifications;
        `paths`: kubeconfig, clock (see operator_launcher.py)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arguments = [] if everywhere else ["--namespace", namespace]
        arguments += ["--lease-namespace", namespace, "--lease-name", lease, "--health-port=0", "--metrics-port=0"]
        arguments += ["--preflight-image", "aerie.dev/test/passes", *(["--notify-url", notify] if notify else [])]
        with self._lock:
            log = self._logs / f"{next(self._count)}-{namespace}.log"
            kubeconfig, clock = str(paths.get("kubeconfig", self._kubeconfig)), paths.get("clock")
            request = {"arguments": arguments, "kubeconfig": kubeconfig, "log": str(log), "clock": clock and str(clock)}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            operator = ForkedOperator(int(self._process.stdout.readline()), log)
            self.started.append(operator)
        return operator

    def keep_running(self, namespace: str, *, first: Callable[[], object] = lambda: None, **options: Any) -> RestartedOperator:
        """Return an operator that is restarted whenever it ends; `first` is called before each start."""

        def start() -> ForkedOperator:
            first()
            return self.start(namespace, **options)

        return RestartedOperator(start)

    def share(self) -> OperatorLauncher:
        """Return the same launcher with a list of its own, for a user that ends only its own operators."""
        share = copy.copy(self)
        share.started = []
        return share

    def end_all(self) -> list[Path]:
        """Kill all its operators; return their logs."""
        for operator in self.started:
            operator.close()
        logs = [operator.log for operator in self.started]
        self.started.clear()
        return logs

    def close(self) -> None:
        """End it and all its operators."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self.end_all()


@pytest.fixture(scope="module")
def operators(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorLauncher]:
    """The launcher of the module's operators."""
    launcher = OperatorLauncher(lab, tmp_path_factory.mktemp("operators"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def inner_operators(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorLauncher]:
    """The launcher of operators in the lab's own network."""
    launcher = OperatorLauncher(lab, tmp_path_factory.mktemp("operators"), in_lab_network=True)
    yield launcher
    launcher.close()


@pytest.fixture
def launcher(operators: OperatorLauncher) -> Iterator[OperatorLauncher]:
    """A launcher whose operators end with the test; the logs of the last ones are printed for failed tests."""
    share = operators.share()
    yield share
    for log in share.end_all()[-3:]:
        print(f"{log.name}: {log.read_text(errors='replace')[-4000:]}")  # noqa: T201


@pytest.fixture(scope="module")
def proxy(lab: Lab) -> Iterator[ApiServerProxy]:
    """Endpoints of the API server with injected faults."""
    with ApiServerProxy(lab) as proxy:
        yield proxy


def with_manual_promotion(document: dict[str, Any]) -> dict[str, Any]:
    """Return the resource with a manual promotion of exactly this revision."""
    revision = resolve_desired_revision(SpeculativeDeployment.from_dict(document)).revision
    return {**document, "metadata": {**document["metadata"], "annotations": {PROMOTE_ANNOTATION: revision}}}


@pytest.fixture(scope="session")
def processless_resource() -> Callable[..., dict[str, Any]]:
    """A resource whose pods run nothing and are Ready immediately, and whose preflight passes immediately in the launcher's
    operators. Nothing is measured on such pods, so it has a manual promotion of its canary.
    """

    def build(drafter: str = "eagle31", *, name: str = "chat", gates: Sequence[str] = (), **spec: Any) -> dict[str, Any]:
        def image(folder: str) -> dict[str, Any]:
            return {"source": {"image": {"reference": f"models.example/{folder}@sha256:{'0' * 64}"}}}

        pods = {
            "metadata": {"annotations": {"lab.aerie.dev/processless": "true"}},
            "spec": {
                "terminationGracePeriodSeconds": 30,
                **({"schedulingGates": [{"name": gate} for gate in gates]} if gates else {}),
            },
        }
        engine = {"image": "aerie.dev/lab/engine:v0.33.0", "version": "0.33.0", "podTemplate": pods}
        document = {
            "apiVersion": "aerie.dev/v1alpha1",
            "kind": "SpeculativeDeployment",
            "metadata": {"name": name},
            "spec": {
                "replicas": 2,
                "model": image("target"),
                "drafter": image(drafter),
                "engine": engine,
                **spec,
                "rollout": {
                    "inPlace": {"mode": "Off"},
                    **spec.get("rollout", {"canary": {"stepWeights": [], "scaleDownDelay": "0s"}}),
                },
            },
        }
        return with_manual_promotion(document)

    return build


KINDS = (
    ("aerie.dev/v1alpha1", "speculativedeployments"),
    ("apps/v1", "deployments"),
    ("apps/v1", "replicasets"),
    ("batch/v1", "jobs"),
    ("policy/v1", "poddisruptionbudgets"),
    ("v1", "services"),
    ("v1", "configmaps"),
    ("v1", "pods"),
)
SINGLE_KINDS = ("deployments", "replicasets", "services", "poddisruptionbudgets", "jobs", "configmaps")
VOLATILE_KEYS = re.compile(
    r"uid|resourceVersion|creationTimestamp|generation|managedFields|clusterIPs?|.*Time|(started|ended)At|.*[/-]uid|aerie\.dev/applied"
)

RECORDED_JOB = re.compile(r'(?<=\\"job\\": \\")[0-9a-f-]{36}(?=\\")')
"""The uid of the Job in the JSON of a record's result."""


def read_state_by_namespace(lab: Lab, namespace: str | None = None) -> dict[str, State]:
    """Return all objects of the namespace, or of each namespace, without generated names and times."""

    async def list_objects() -> list[Any]:
        async with lab.client() as client:
            return [await client.get(resource_path(version, plural, namespace)) for version, plural in KINDS]

    state_by_namespace: dict[str, State] = collections.defaultdict(dict)
    for (_, plural), response in zip(KINDS, asyncio.run(list_objects()), strict=True):
        for item in response["items"]:
            namespace_name, name = item["metadata"]["namespace"], item["metadata"]["name"]
            if name == "kube-root-ca.crt" or item["metadata"].get("deletionTimestamp"):
                continue
            if plural == "configmaps" and name.endswith("-aerie-rollouts"):
                continue  # records of rollouts for reports: full of times, and no rollout depends on them
            if plural == "pods":  # by its labels: its name ends in random characters
                labels = " ".join(
                    f"{key}={value}" for key, value in sorted(item["metadata"]["labels"].items()) if "uid" not in key
                )
                name = f"{labels} {item['status'].get('phase')}"
                state_by_namespace[namespace_name][f"pods {name}"] = state_by_namespace[namespace_name].get(f"pods {name}", 0) + 1
                continue
            if plural != "speculativedeployments":
                counts = ("replicas", "readyReplicas", "succeeded")
                item["status"] = {key: item["status"][key] for key in counts if key in item.get("status", {})}
            stable_json = RECORDED_JOB.sub("UID", json.dumps(_without_volatile_keys(item)))
            state_by_namespace[namespace_name][f"{plural} {name}"] = json.loads(stable_json.replace(namespace_name, "NAMESPACE"))
    return state_by_namespace


def _without_volatile_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile_keys(child) for key, child in value.items() if not VOLATILE_KEYS.fullmatch(key)}
    return [_without_volatile_keys(child) for child in value] if isinstance(value, list) else value


@pytest.fixture(scope="session")
def states(lab: Lab) -> Callable[..., dict[str, State]]:
    """A function that returns all objects of a namespace, or of each namespace, without generated names and times."""
    return functools.partial(read_state_by_namespace, lab)


@pytest.fixture(scope="session")
def wait_until_settled(states: Callable[..., dict[str, State]]) -> Callable[..., State]:
    """A function that waits until the rollout of a drafter is complete, with no other objects left, and returns the state."""

    def wait(namespace: str, drafter: str, *, replicas: int = 2) -> State:
        def settled_state() -> State | None:
            state = states(namespace)[namespace]
            status = state.get("speculativedeployments chat", {}).get("status") or {}
            is_ready = status.get("phase") == "Ready" and status["stable"]["drafter"].endswith(f"/{drafter}")
            counts = [sum(key.startswith(f"{plural} ") for key in state) for plural in SINGLE_KINDS]
            pods = sum(
                count
                for key, count in state.items()
                if key.startswith("pods ") and "aerie.dev/revision" in key and "preflight" not in key
            )
            # Kubernetes' own controllers count independently, and may be later than the operator.
            ready = {
                item["status"].get("readyReplicas")
                for key, item in state.items()
                if key.startswith(("deployments ", "replicasets "))
            }
            is_alone = is_ready and counts == [1] * len(SINGLE_KINDS) and ready == {replicas}
            return state if is_alone and status["readyReplicas"] == pods == replicas else None

        state = wait_until(settled_state, f"the rollout of {drafter} is over", timeout_seconds=240, interval_seconds=0.3)
        assert state is not None
        return state

    return wait
