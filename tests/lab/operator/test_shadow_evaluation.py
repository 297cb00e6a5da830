"""Shadow evaluations on a real API server, with simulated engines and the real evaluator: no user meets a worse drafter.

    better    is accepted on equal requests in an isolated pod, and is then on trial under the traffic of users
    worse     is rolled back by the same requests

Both at once in one namespace. The engines have no requests of their own, so that an isolated pod has none left to finish.
Evaluators and operator are killed (SIGKILL) twice, before windows begin and as soon as they have begun: no pair counts twice, and
the end is the same. What follows a verdict has no evaluator: test_in_place_kills.py has its kills.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from aerie.analysis.measurement import codec
from aerie.manifests import evaluator
from aerie_lab.errors import LabError
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
from tests.lab.operator.markers import create_marker, find_in_files, find_in_objects
from tests.lab.operator.test_in_place_rollouts import find_condition, wait_for
from tests.lab.operator.test_operator import is_ready

pytestmark = pytest.mark.timeout(1200)
Object = dict[str, Any]
MARKER = create_marker("heliotrope")
"""Word of the prompts, which must be nowhere but in the ConfigMap with the prompts."""
PROMPTS = "\n".join(json.dumps({"prompt": f"{MARKER} {number}", "max_tokens": 40}) for number in range(20))
SHADOW = {"source": "Prompts", "prompts": {"configMap": "prompts"}, "maxDuration": "10m"}


@pytest.fixture
def models(namespace: Namespace, tmp_path: Path) -> Iterator[Path]:
    """The folder behind a claim with the models."""
    with create_model_claim(namespace, tmp_path / "models"):
        yield tmp_path / "models"


def shadowed(name: str, drafter: str) -> Object:
    document = resource(name, drafter, replicas=2, options={"own_requests_per_second": 0})
    document["spec"]["rollout"]["analysis"]["shadow"] = SHADOW
    return document


def is_pod_ready(pod: Object) -> bool:
    return bool(find_condition(pod["status"], "Ready").get("status") == "True")


def list_evaluators(namespace: Namespace, name: str) -> list[Object]:
    return namespace.list_all("pods", f"{evaluator.EVALUATOR_LABEL}={name}")


def read_evaluator_pod(namespace: Namespace, name: str) -> Object:
    """Return the evaluator's pod. Raises LabError without one."""
    for pod in list_evaluators(namespace, name):
        if pod["status"].get("containerStatuses"):
            return pod
    raise LabError(f"{name} has no evaluator.")


def check_verdicts(namespace: Namespace, names: Sequence[str], old: str, before: Mapping[str, Mapping[str, int]]) -> None:
    """Wait for the verdicts, and check what they leave: pods that serve users with `old` again, and no evaluator.

    `before`: restarts of the pods of each resource before its evaluation.
    """
    status = wait_for(namespace, "worse", lambda s: has_ended(s, "RolledBack"), "it is rolled back")
    assert status["rolloutHistory"][0]["result"] == "RolledBack"
    assert "tokens per step is significantly below" in status["rolloutHistory"][0]["message"]
    status = wait_for(namespace, "better", lambda s: has_ended(s, "Analyzing"), "its trial begins")
    assert status["inPlaceRollout"]["evaluation"]["result"] == "Accepted", status["inPlaceRollout"]["evaluation"]

    wait_until(lambda: all(map(is_pod_ready, list_engine_pods(namespace, "worse"))), "all pods serve users again")
    assert all(serves_alone(state, old) for state in read_drafter_states(namespace, "worse").values())
    for name in names:
        assert restart_counts(list_engine_pods(namespace, name)) == before[name]
        wait_until(lambda name=name: not list_evaluators(namespace, name), "the evaluator is removed")  # type: ignore[misc]


def restart_evaluators(namespace: Namespace, names: Iterable[str], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Kill the evaluators (SIGKILL) as soon as they are ready, and wait until the next processes are. `meanwhile`: called after
    the kills."""
    restarts: dict[str, int] = {}
    for name in names:
        wait_until(lambda name=name: is_pod_ready(read_evaluator_pod(namespace, name)), f"the evaluator of {name} is ready")  # type: ignore[misc]
        pod = read_evaluator_pod(namespace, name)
        restarts[name] = pod["status"]["containerStatuses"][0]["restartCount"]
        namespace.faults.kill(pod["metadata"]["name"], "evaluator", namespace=namespace.name)
    meanwhile()

    def is_restarted(name: str) -> bool:
        pod = read_evaluator_pod(namespace, name)
        return pod["status"]["containerStatuses"][0]["restartCount"] > restarts[name] and is_pod_ready(pod)

    for name in names:
        wait_until(lambda name=name: is_restarted(name), f"the next evaluator of {name} is ready")  # type: ignore[misc]


def has_ended(status: Object, phase: str) -> bool:
    """Return whether an evaluation has led to this phase. Check that no pair of its windows was counted twice."""
    rollout = status.get("inPlaceRollout") or {}
    if rollout.get("phase") == "Evaluating" and rollout.get("state"):
        state = codec.unpack(rollout["state"])
        pairs = sum(int(state[key]) for key in ("counted_pairs", "lost_pairs", "late_pairs"))
        assert pairs <= state["closed_pair_count"], state
    return bool(status["phase"] == phase)


def test_a_drafter_is_evaluated_before_users_meet_it(
    namespace: Namespace, models: Path, inner_operator: LabNetworkOperator, tmp_path: Path
) -> None:
    old = compute_model_digest(models, "eagle3")
    namespace.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "prompts"}, "data": {"prompts.jsonl": PROMPTS}}
    )
    names = ("better", "worse")
    namespace.apply(*(shadowed(name, "eagle3") for name in names))
    for name in names:
        wait_for(namespace, name, is_ready, "it is Ready")
    before = {name: restart_counts(list_engine_pods(namespace, name)) for name in names}

    namespace.apply(*(shadowed(name, name) for name in names))
    restart_evaluators(namespace, names, inner_operator.kill_and_replace)
    for name in names:
        status = wait_for(
            namespace, name, lambda s: s["phase"] == "Evaluating" and (s["inPlaceRollout"].get("trialStartTime")), "windows begin"
        )
        (trial_pod,) = status["inPlaceRollout"]["pods"]
        unready = [pod["metadata"]["name"] for pod in list_engine_pods(namespace, name) if not is_pod_ready(pod)]
        assert unready == [trial_pod["name"]], "users reach the other pod alone"
        ready = find_condition(status, "Ready")
        assert (ready["status"], ready["reason"]) == ("True", "PodIsolated")
    restart_evaluators(namespace, names, inner_operator.kill_and_replace)

    check_verdicts(namespace, names, old, before)
    assert find_in_objects(namespace, [MARKER], lambda item: item["kind"] != "ConfigMap") == []
    assert find_in_objects(namespace, [MARKER], lambda item: item["kind"] == "ConfigMap") == ["ConfigMap/prompts"]
    etcd = namespace.lab.folder / "etcd"
    searched = find_in_files([namespace.lab.folder, tmp_path], [MARKER], lambda path: not path.is_relative_to(etcd))
    assert searched == [], "but for the ConfigMap in the database"
