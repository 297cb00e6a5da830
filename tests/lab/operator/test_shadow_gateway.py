"""Shadow evaluations by copies of users' requests, through the lab's real gateway: kills change nothing of how they end, and no
word of a user is left anywhere.

    better    is accepted, and is then on trial under the traffic of users
    worse     is rolled back, and no user has met it

Both at once, while users send requests through Envoy. SIGKILL, in each phase up to the verdict:

    Staging                       the operator and the gateway, while a disk hangs; there is no evaluator yet
    Evaluating, before windows    the evaluators, as soon as they are ready
    Evaluating, in the windows    the evaluators, the gateway and the operator

What follows a verdict has no evaluator: test_in_place_kills.py has its kills. The engines require an API key of a Secret, which
the users send and the evaluators have from the Secret. A second test leaks a word: the search is able to find some.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from aerie.manifests import evaluator, naming
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.conftest import LabNetworkOperator
from tests.lab.operator.in_place_resources import (
    compute_model_digest,
    create_model_claim,
    list_engine_pods,
    resource,
    restart_counts,
)
from tests.lab.operator.markers import create_marker, fetch_in_lab, find_in_files, find_in_objects
from tests.lab.operator.test_in_place_rollouts import wait_for
from tests.lab.operator.test_operator import is_ready
from tests.lab.operator.test_shadow_evaluation import (
    check_verdicts,
    list_evaluators,
    restart_evaluators,
)

pytestmark = pytest.mark.timeout(1800)
Object = dict[str, Any]
NAMES = ("better", "worse")
PROMPT, USER, SESSION, API_KEY = (create_marker(prefix) for prefix in ("prompt", "user", "session", "key"))
CLIENTS = 4
"""Clients of each resource. A request takes about a second."""
KILL_TIMEOUT_SECONDS = 300.0


class Users:
    """Clients that send requests through the gateway until the end of a block, one after another each."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self.statuses: Counter[int | None] = Counter()
        """Answers by status; None: no answer."""
        self._url, self._host = namespace.lab.gateway_url or "", host_of(namespace, name)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(number,), daemon=True) for number in range(CLIENTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _send(self, client_number: int) -> None:
        headers = {"Host": self._host, "Authorization": f"Bearer {API_KEY}", "X-Session-ID": f"{SESSION}-{client_number}"}
        with httpx.Client(base_url=self._url, headers=headers, timeout=60) as client:
            for number in itertools.count():
                if self._stop.is_set():
                    return
                content = f"{PROMPT} {client_number} {number}"
                body: Object = {"messages": [{"role": "user", "content": content}], "user": USER, "max_tokens": 40}
                body |= {"stream": True} if number % 2 else {}
                try:
                    status = client.post("/v1/chat/completions", json=body).status_code
                except httpx.TransportError:
                    status = None
                self.statuses[status] += 1
                if status != 200:
                    self._stop.wait(0.5)


@pytest.fixture
def models(namespace: Namespace, tmp_path: Path) -> Iterator[Path]:
    """The folder behind a claim with the models."""
    with create_model_claim(namespace, tmp_path / "models"):
        yield tmp_path / "models"


def host_of(namespace: Namespace, name: str) -> str:
    return f"{name}.{namespace.name}.example"


def shadowed(namespace: Namespace, name: str, drafter: str) -> Object:
    gateway = {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host_of(namespace, name)]}
    options = {"own_requests_per_second": 0}
    document = resource(name, drafter, replicas=2, options=options, traffic={"mode": "Gateway", "gateway": gateway})
    document["spec"]["rollout"]["analysis"]["shadow"] = {"source": "Mirror", "maxDuration": "20m"}
    key = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "engine"}}}
    document["spec"]["engine"]["env"].append(key)
    return document


def list_filters(namespace: Namespace, name: str) -> list[Object]:
    (rule,) = namespace.get("httproute", name)["spec"]["rules"]
    filters: list[Object] = rule.get("filters") or []
    return filters


def read_evaluator_metrics(namespace: Namespace, name: str) -> str:
    """Return the metrics of a running evaluator. Raises LabError without one."""
    addresses = [f"http://{pod['status'].get('podIP')}:8000/metrics" for pod in list_evaluators(namespace, name)]
    return "".join(fetch_in_lab(namespace, addresses).values())


def count_received(namespace: Namespace, name: str) -> float:
    lines = read_evaluator_metrics(namespace, name).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("aerie_evaluator_requests_received_total"))


def kill_gateway(namespace: Namespace) -> None:
    """Kill Envoy."""
    envoys = namespace.lab.kubectl("-n", "projectcontour", "get", "pods", "-l", "app=envoy", "-o", "json")
    (envoy,) = json.loads(envoys)["items"]
    namespace.faults.kill(envoy["metadata"]["name"], "envoy", namespace="projectcontour")


def wait_for_answers(*all_users: Users) -> None:
    """Wait until the users of all resources get further answers."""
    for users in all_users:
        answered = users.statuses[200]
        wait_until(
            lambda users=users, answered=answered: users.statuses[200] > answered + 2 * CLIENTS,  # type: ignore[misc]
            "users are answered",
            timeout_seconds=KILL_TIMEOUT_SECONDS,
        )


def wait_for_copies(namespace: Namespace, name: str) -> None:
    """Wait until the evaluator's process has received copies of requests."""
    description = f"copies of requests to {name} arrive"
    wait_until(lambda: count_received(namespace, name) > 0, description, timeout_seconds=KILL_TIMEOUT_SECONDS)


@contextlib.contextmanager
def kept_in_staging(namespace: Namespace) -> Iterator[None]:
    """Let the pods of all resources read no drafter to its end in the block."""
    with contextlib.ExitStack() as faults:
        for name in NAMES:
            for pod in list_engine_pods(namespace, name):
                fault = namespace.faults.fail_drafter(pod["metadata"]["name"], "stage-hangs", namespace=namespace.name)
                faults.enter_context(fault)
        yield


def has_windows(status: Object) -> bool:
    """Return whether the windows of an evaluation have begun."""
    return bool(status["phase"] == "Evaluating" and status["inPlaceRollout"].get("trialStartTime"))


@pytest.mark.nightly  # test_shadow_pods.py and test_shadow_evaluation.py kill, test_capture.py has copies by the gateway
def test_mirrored_requests_decide_whatever_is_killed(
    namespace: Namespace, models: Path, inner_operator: LabNetworkOperator, tmp_path: Path
) -> None:
    old = compute_model_digest(models, "eagle3")
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "keys"},
            "data": {"engine": base64.b64encode(API_KEY.encode()).decode()},
        },
        *(shadowed(namespace, name, "eagle3") for name in NAMES),
    )
    for name in NAMES:
        wait_for(namespace, name, is_ready, "it is Ready")
    before = {name: restart_counts(list_engine_pods(namespace, name)) for name in NAMES}

    metrics: list[str] = []
    with Users(namespace, "better") as better_users, Users(namespace, "worse") as worse_users:
        wait_for_answers(better_users, worse_users)
        with kept_in_staging(namespace):
            namespace.apply(*(shadowed(namespace, name, name) for name in NAMES))
            for name in NAMES:
                wait_for(namespace, name, lambda s: s["phase"] == "Staging", "it reads the drafter")
            kill_gateway(namespace)
            inner_operator.kill_and_replace()
            wait_for_answers(better_users, worse_users)
        restart_evaluators(namespace, NAMES)
        for name in NAMES:
            wait_for(namespace, name, has_windows, "windows begin")
            assert [item["type"] for item in list_filters(namespace, name)] == ["RequestMirror"]
            wait_for_copies(namespace, name)
        metrics += [read_evaluator_metrics(namespace, name) for name in NAMES]

        def kill_the_others() -> None:
            kill_gateway(namespace)
            inner_operator.kill_and_replace()

        restart_evaluators(namespace, NAMES, kill_the_others)
        for name in NAMES:
            wait_for_copies(namespace, name)
        metrics += [read_evaluator_metrics(namespace, name) for name in NAMES]
        wait_for_answers(better_users, worse_users)

        check_verdicts(namespace, NAMES, old, before)
        for name in NAMES:
            wait_until(lambda name=name: not list_filters(namespace, name), "nothing is mirrored any more")  # type: ignore[misc]
            assert not namespace.exists("service", evaluator.evaluator_name(name))
        pods = [pod for name in NAMES for pod in list_engine_pods(namespace, name)]
        addresses = [f"http://{pod['status']['podIP']}:{naming.ENGINE_PORT}/metrics" for pod in pods]
        metrics += fetch_in_lab(namespace, [*addresses, f"http://127.0.0.1:{inner_operator.PORT}/metrics"]).values()
    for users in (better_users, worse_users):
        assert users.statuses[200] > 0.8 * users.statuses.total(), users.statuses

    markers = (PROMPT, USER, SESSION)
    assert not [text for text in metrics for marker in (*markers, API_KEY) if marker in text]
    assert find_in_objects(namespace, markers, lambda _: True) == []
    assert find_in_objects(namespace, [API_KEY], lambda _: True) == []
    assert find_in_files([namespace.lab.folder, tmp_path], markers, lambda _: True) == []
    assert find_in_files([namespace.lab.folder, tmp_path], [API_KEY], lambda path: path.suffix == ".log") == []


@pytest.mark.nightly  # a check of the search above
def test_a_leak_is_found(namespace: Namespace, tmp_path: Path) -> None:
    marker = create_marker("leak")
    halves = [marker[:8], marker[8:]]  # the object alone does not have the word
    container = {"name": "leak", "image": "aerie.dev/test/passes", "command": ["/bin/sh", "-c", 'echo "$0$1"', *halves]}
    pod: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "leak"}}
    namespace.apply(pod | {"spec": {"restartPolicy": "Never", "containers": [container]}})
    namespace.wait_until_phase("leak", "Succeeded")

    folder = namespace.lab.folder
    assert find_in_objects(namespace, [marker], lambda _: True) == []
    (log,) = wait_until(lambda: find_in_files([folder], [marker], lambda _: True), "the log has the word")
    assert log.endswith(".log")

    namespace.kubectl("annotate", "pod", "leak", f"example.com/leak={marker}")
    assert find_in_objects(namespace, [marker], lambda _: True) == ["Pod/leak"]
    wait_until(lambda: len(find_in_files([folder / "etcd"], [marker], lambda _: True)) > 0, "the database has the word")

    (tmp_path / "leak").write_text(f"before {marker} after")
    assert find_in_files([tmp_path], ["nowhere", marker], lambda _: True) == [str(tmp_path / "leak")]
