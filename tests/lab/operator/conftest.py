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
DEFINITION = Path(__file__).resolve().parents[3] / "crds" / "aerie.dev_speculativedeployments.yaml"


@pytest.fixture(scope="module", autouse=True)
def definition(lab: Lab) -> Iterator[None]:
    """The resource's definition, established; taken away again, so that the lab is as it was."""
    document = yaml.safe_load(DEFINITION.read_text())
    name = document["metadata"]["name"]
    lab.apply(document)
    # It fails at once for as long as the definition has no conditions at all.
    wait = ("wait", "--for=condition=Established", f"crd/{name}", "--timeout=180s")
    wait_until(lambda: lab.kubectl(*wait), "the definition is established", timeout_seconds=180)
    yield
    lab.kubectl("delete", "crd", name)


class Operator:
    """The operator as a process of this machine, working in one namespace.

    Where it ends because it could not renew its lease, on a machine that has no time for it, it is started again, as its pod is.
    """

    def __init__(self, namespace: Namespace, log: Path) -> None:
        self.namespace, self.log = namespace, log
        self.process: subprocess.Popen[bytes] | None = None
        self._changes = threading.Lock()

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
        threading.Thread(target=self._keep, args=(self.process,), name="keep", daemon=True).start()

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with self._changes:
            if self.process is process and "is no longer the leader" in self.log.read_text(errors="replace")[-5000:]:
                self.start()

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit status."""
        with self._changes:
            process, self.process = self.process, None
        assert process is not None
        process.send_signal(number)
        return process.wait(60)


class Inside(Operator):
    """The operator in the lab's own network, as its pod would be: it reaches the pods' addresses."""

    PORT = "18080"

    def _enter(self) -> list[str]:
        lab = process.find_lab_pid(self.namespace.lab.folder)
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
        tried = re.findall(r"^aerie_scrape_duration_seconds_count (\S+)", done.stdout, re.MULTILINE)
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

    def wait(look: Callable[[dict[str, Any]], object], what: str, within: float = 240) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            document: dict[str, Any] = namespace.get("specdep", "chat")
            return document if look(document.get("status") or {}) else None

        document = wait_until(found, what, timeout_seconds=within, interval_seconds=0.3)
        assert document is not None
        return document

    return wait


class Living:
    """An operator of the nursery."""

    def __init__(self, process: int, log: Path) -> None:
        self.process, self.log = process, log
        self._handle = os.pidfd_open(process)
        self._end = select.poll()
        self._end.register(self._handle, select.POLLIN)

    def alive(self) -> bool:
        """Whether it has not ended."""
        return not self._end.poll(0)

    def kill(self) -> None:
        """SIGKILL, at once."""
        self._send(signal.SIGKILL)

    def end(self, within: float = 120) -> None:
        """End it as its pod would be ended."""
        self._send(signal.SIGTERM)
        if not self._end.poll(within * 1000):
            raise AssertionError(f"not within {within:g} s: the operator ends\n{self.said()}")

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-5000:]

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        """Forget it."""
        self.kill()
        os.close(self._handle)


class Kept:
    """An operator that is started again whenever it ends, as its pod would be; ended as its pod would be at the end of the block.

    It ends by itself where it cannot renew its lease: without an API server, or on a machine that has no time for it.
    """

    def __init__(self, start: Callable[[], Living]) -> None:
        self._start, self._stop = start, threading.Event()
        self._lives: list[Living] = []
        self._thread = threading.Thread(target=self._live, name="kept", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def starts(self) -> int:
        """How often it was started."""
        return len(self._lives)

    def said(self) -> str:
        """All its logs."""
        return "".join(living.log.read_text(errors="replace") for living in self._lives if living.log.exists())

    def _live(self) -> None:
        while not self._stop.is_set():
            operator = self._start()
            self._lives.append(operator)
            while operator.alive() and not self._stop.wait(0.2):
                pass
            operator.end()


class Nursery:
    """Starts operators quickly, see nursery.py. All that it started end with it."""

    def __init__(self, lab: Lab, logs: Path, *, inside: bool = False) -> None:
        """`inside`: the operators are in the lab's own network, so that they reach the pods' addresses."""
        self._kubeconfig, self._logs = lab.folder / "components" / "admin.kubeconfig" if inside else lab.kubeconfig, logs
        command = [sys.executable, str(Path(__file__).with_name("nursery.py"))]
        if inside:
            network = ["--network", str(process.find_lab_pid(lab.folder))]
            command = [sys.executable, "-m", "aerie_lab.sandbox.inside", *network, *command]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._turn, self._count = threading.Lock(), itertools.count(1)
        self.started: list[Living] = []

    def start(
        self, namespace: str, *, everywhere: bool = False, lease: str = "operator", notify: str = "", **ways: Path
    ) -> Living:
        """One that works in the namespace, or everywhere; its lease is there. `notify`: where its notices go; `ways`: kubeconfig,
        clock (see nursery.py)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arguments = [] if everywhere else ["--namespace", namespace]
        arguments += ["--lease-namespace", namespace, "--lease-name", lease, "--health-port=0", "--metrics-port=0"]
        arguments += ["--preflight-image", "aerie.dev/test/passes", *(["--notify-url", notify] if notify else [])]
        with self._turn:
            log = self._logs / f"{next(self._count)}-{namespace}.log"
            kubeconfig, clock = str(ways.get("kubeconfig", self._kubeconfig)), ways.get("clock")
            order = {"arguments": arguments, "kubeconfig": kubeconfig, "log": str(log), "clock": clock and str(clock)}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            living = Living(int(self._process.stdout.readline()), log)
            self.started.append(living)
        return living

    def keep(self, namespace: str, *, first: Callable[[], object] = lambda: None, **how: Any) -> Kept:
        """The same, kept running; `first` is called before each start."""

        def start() -> Living:
            first()
            return self.start(namespace, **how)

        return Kept(start)

    def share(self) -> Nursery:
        """The same nursery for somebody who ends what is started by it, and nothing else."""
        share = copy.copy(self)
        share.started = []
        return share

    def end_all(self) -> list[Path]:
        """Kill all that it has started; their logs."""
        for living in self.started:
            living.close()
        logs = [living.log for living in self.started]
        self.started.clear()
        return logs

    def close(self) -> None:
        """End it with all that it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self.end_all()


@pytest.fixture(scope="module")
def operators(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The nursery, which takes a moment to start."""
    found = Nursery(lab, tmp_path_factory.mktemp("operators"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def inner_operators(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The nursery in the lab's own network."""
    found = Nursery(lab, tmp_path_factory.mktemp("operators"), inside=True)
    yield found
    found.close()


@pytest.fixture
def nursery(operators: Nursery) -> Iterator[Nursery]:
    """Operators in numbers; they end with the test, and the logs of the last ones are shown when it fails."""
    share = operators.share()
    yield share
    for log in share.end_all()[-3:]:
        print(f"{log.name}: {log.read_text(errors='replace')[-4000:]}")  # noqa: T201


@pytest.fixture(scope="module")
def proxy(lab: Lab) -> Iterator[ApiServerProxy]:
    """Doors to the API server at which things go wrong."""
    with ApiServerProxy(lab) as found:
        yield found


def accepted(document: dict[str, Any]) -> dict[str, Any]:
    """The resource, with a person's word beforehand that the canary of this very revision is to be promoted."""
    revision = resolve_desired_revision(SpeculativeDeployment.from_dict(document)).revision
    return {**document, "metadata": {**document["metadata"], "annotations": {PROMOTE_ANNOTATION: revision}}}


@pytest.fixture(scope="session")
def light() -> Callable[..., dict[str, Any]]:
    """A resource whose pods are Ready at once and run nothing, and whose preflight passes at once in the nursery's operators.

    Nothing is measured on such pods, so a person has said beforehand that its canary is to be promoted, once it serves.
    """

    def make(drafter: str = "eagle31", *, name: str = "chat", gates: Sequence[str] = (), **spec: Any) -> dict[str, Any]:
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
                "rollout": {"canary": {"stepWeights": [], "scaleDownDelay": "0s"}},
                **spec,
            },
        }
        return accepted(document)

    return make


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
ONE_EACH = ("deployments", "replicasets", "services", "poddisruptionbudgets", "jobs", "configmaps")
OF_THE_MOMENT = re.compile(
    r"uid|resourceVersion|creationTimestamp|generation|managedFields|clusterIPs?|.*Time|(started|ended)At|.*[/-]uid|aerie\.dev/applied"
)

RECORDED_JOB = re.compile(r'(?<=\\"job\\": \\")[0-9a-f-]{36}(?=\\")')
"""In the JSON of a record's verdict, the uid of the Job that came to it."""


def everything(lab: Lab, namespace: str | None = None) -> dict[str, State]:
    """All that there is of the namespace, or of each, without names and times of the moment."""

    async def ask() -> list[Any]:
        async with lab.client() as client:
            return [await client.get(resource_path(version, plural, namespace)) for version, plural in KINDS]

    found: dict[str, State] = collections.defaultdict(dict)
    for (_, plural), listed in zip(KINDS, asyncio.run(ask()), strict=True):
        for item in listed["items"]:
            where, name = item["metadata"]["namespace"], item["metadata"]["name"]
            if name == "kube-root-ca.crt" or item["metadata"].get("deletionTimestamp"):
                continue
            if plural == "pods":  # by its labels: the end of its name is drawn by lot
                labels = " ".join(
                    f"{key}={value}" for key, value in sorted(item["metadata"]["labels"].items()) if "uid" not in key
                )
                name = f"{labels} {item['status'].get('phase')}"
                found[where][f"pods {name}"] = found[where].get(f"pods {name}", 0) + 1
                continue
            if plural != "speculativedeployments":
                counts = ("replicas", "readyReplicas", "succeeded")
                item["status"] = {key: item["status"][key] for key in counts if key in item.get("status", {})}
            lasting = RECORDED_JOB.sub("UID", json.dumps(_lasting(item)))
            found[where][f"{plural} {name}"] = json.loads(lasting.replace(where, "NAMESPACE"))
    return found


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(below) for key, below in value.items() if not OF_THE_MOMENT.fullmatch(key)}
    return [_lasting(below) for below in value] if isinstance(value, list) else value


@pytest.fixture(scope="session")
def states(lab: Lab) -> Callable[..., dict[str, State]]:
    """All that there is of a namespace, or of each, without names and times of the moment."""
    return functools.partial(everything, lab)


@pytest.fixture(scope="session")
def settled(states: Callable[..., dict[str, State]]) -> Callable[..., State]:
    """Waits until the rollout of a drafter is over in every respect, with nothing left of another; the state."""

    def wait(namespace: str, drafter: str, *, replicas: int = 2) -> State:
        def look() -> State | None:
            found = states(namespace)[namespace]
            status = found.get("speculativedeployments chat", {}).get("status") or {}
            over = status.get("phase") == "Ready" and status["stable"]["drafter"].endswith(f"/{drafter}")
            each = [sum(key.startswith(f"{plural} ") for key in found) for plural in ONE_EACH]
            pods = sum(
                count
                for key, count in found.items()
                if key.startswith("pods ") and "aerie.dev/revision" in key and "preflight" not in key
            )
            # Kubernetes' own controllers count for themselves, and may be later than the operator.
            ready = {
                one["status"].get("readyReplicas")
                for key, one in found.items()
                if key.startswith(("deployments ", "replicasets "))
            }
            alone = over and each == [1] * len(ONE_EACH) and ready == {replicas}
            return found if alone and status["readyReplicas"] == pods == replicas else None

        found = wait_until(look, f"the rollout of {drafter} is over", timeout_seconds=240, interval_seconds=0.3)
        assert found is not None
        return found

    return wait
