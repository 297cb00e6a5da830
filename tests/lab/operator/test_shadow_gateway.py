"""Shadow evaluations by copies of users' requests, through the lab's real gateway: kills change nothing of how they end, and no
word of a user is left anywhere.

    better    is accepted, and is then on trial under the traffic of users
    worse     is rolled back, and no user has met it

Both at once, while users send requests through Envoy. As soon as the windows have begun, the evaluators are killed (SIGKILL), and
then the gateway. The engines require an API key of a Secret, which the users send and the evaluators have from the Secret.
"""

from __future__ import annotations

import base64
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
    read_drafter_states,
    resource,
    restart_counts,
    serves_alone,
)
from tests.lab.operator.markers import create_marker, fetch_in_lab, find_in_files, find_in_objects
from tests.lab.operator.test_in_place_rollouts import wait_for
from tests.lab.operator.test_operator import is_ready
from tests.lab.operator.test_shadow_evaluation import is_pod_ready, list_evaluators

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
        self._url, self._host = namespace.lab.gateway_url, host_of(namespace, name)
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
        number = 0
        while not self._stop.is_set():
            number += 1
            content = f"{PROMPT} {client_number} {number}"
            body: Object = {"messages": [{"role": "user", "content": content}], "user": USER, "max_tokens": 40}
            body |= {"stream": True} if number % 2 else {}
            try:
                answer = httpx.post(f"{self._url}/v1/chat/completions", json=body, headers=headers, timeout=60)
                self.statuses[answer.status_code] += 1
                is_answered = answer.status_code == 200
            except httpx.TransportError:
                self.statuses[None] += 1
                is_answered = False
            if not is_answered:
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
    return float(next(line for line in lines if line.startswith("aerie_evaluator_requests_received_total")).split()[1])


def kill_evaluator(namespace: Namespace, name: str) -> None:
    """Kill an evaluator that has received requests, and wait until the next process receives some."""
    wait_until(lambda: count_received(namespace, name) > 0, f"{name} is mirrored", timeout_seconds=KILL_TIMEOUT_SECONDS)
    (pod,) = list_evaluators(namespace, name)
    namespace.faults.kill(pod["metadata"]["name"], "evaluator", namespace=namespace.name)

    def is_restarted() -> bool:
        (current,) = list_evaluators(namespace, name)
        return current["status"]["containerStatuses"][0]["restartCount"] > 0 and count_received(namespace, name) > 0

    wait_until(is_restarted, f"the next evaluator of {name} is mirrored", timeout_seconds=KILL_TIMEOUT_SECONDS)


def kill_gateway(namespace: Namespace, users: Users) -> None:
    """Kill Envoy, and wait until users are answered again."""
    lab = namespace.lab
    (envoy,) = json.loads(lab.kubectl("-n", "projectcontour", "get", "pods", "-l", "app=envoy", "-o", "json"))["items"]
    namespace.faults.kill(envoy["metadata"]["name"], "envoy", namespace="projectcontour")
    answered = users.statuses[200]
    wait_until(lambda: users.statuses[200] > answered + CLIENTS, "users are answered", timeout_seconds=KILL_TIMEOUT_SECONDS)


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
        for users in (better_users, worse_users):
            wait_until(lambda users=users: users.statuses[200] > 4 * CLIENTS, "users are answered")  # type: ignore[misc]
        namespace.apply(*(shadowed(namespace, name, name) for name in NAMES))
        for name in NAMES:
            wait_for(
                namespace,
                name,
                lambda s: s["phase"] == "Evaluating" and s["inPlaceRollout"].get("trialStartTime"),
                "windows begin",
            )
            assert [item["type"] for item in list_filters(namespace, name)] == ["RequestMirror"]
        for name in NAMES:
            kill_evaluator(namespace, name)
            metrics.append(read_evaluator_metrics(namespace, name))
        kill_gateway(namespace, worse_users)

        status = wait_for(namespace, "worse", lambda s: s["phase"] == "RolledBack", "it is rolled back")
        assert status["rolloutHistory"][0]["result"] == "RolledBack"
        assert "tokens per step is significantly below" in status["rolloutHistory"][0]["message"]
        status = wait_for(namespace, "better", lambda s: s["phase"] == "Analyzing", "its trial begins")
        assert status["inPlaceRollout"]["evaluation"]["result"] == "Accepted", status["inPlaceRollout"]["evaluation"]

        wait_until(lambda: all(map(is_pod_ready, list_engine_pods(namespace, "worse"))), "all pods serve users again")
        assert all(serves_alone(state, old) for state in read_drafter_states(namespace, "worse").values())
        for name in NAMES:
            assert restart_counts(list_engine_pods(namespace, name)) == before[name]
            wait_until(lambda name=name: not list_evaluators(namespace, name), "the evaluator is removed")  # type: ignore[misc]
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
