"""Shadow evaluations of rollouts by pods on a real API server, with simulated engines and the real evaluator.

    worse     is rolled back by the same requests
    better    is Accepted, although operator and evaluator are killed meanwhile, and promoted under the traffic of users

Both at once in one namespace, under traffic through a real gateway. Users have long prompts, and the evaluator has short ones. So
the engines' own histograms tell whose requests they have answered. The evaluator is killed while no operator runs that could
decide, and the promotion waits for approval: so operators may take any time to start. Only the first pairs have to be seen within
`MIN_ACCEPTANCE_SECONDS` of the evaluation.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest

from aerie.analysis.measurement import codec
from aerie.analysis.paired.state import PairedState
from aerie.manifests import naming
from aerie.rollout.canary.messages import PROMOTE_ANNOTATION
from aerie_lab.cluster import process
from aerie_lab.engine.load_generation.background import SHORT_TRAFFIC_CLASSES, BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget
from aerie_lab.engine.load_generation.workload import LengthDistribution
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.in_place_resources import list_engine_pods
from tests.lab.operator.resources import resource
from tests.lab.operator.test_in_place_kills import is_answered
from tests.lab.operator.test_in_place_rollouts import wait_for
from tests.lab.operator.test_operator import is_ready
from tests.lab.operator.test_shadow_evaluation import list_evaluators, restart_evaluators

pytestmark = pytest.mark.timeout(900)
Object = dict[str, Any]
PROMPTS = "\n".join(json.dumps({"prompt": f"Eagle {number}", "max_tokens": 40, "temperature": 0.7}) for number in range(40))
SHADOW = {"source": "Prompts", "prompts": {"configMap": "prompts"}, "maxDuration": "10m"}
LONG_PROMPT_TOKENS = 100
"""More tokens than any prompt of the evaluator has, and fewer than any of a user. A bound of the engines' histograms."""
USERS = [
    replace(kind, prompt_lengths=LengthDistribution(250), answer_lengths=LengthDistribution(20)) for kind in SHORT_TRAFFIC_CLASSES
]
RATES = {"worse": 2.0, "better": 8.0}
"""Users' requests per second."""
SIMULATOR = '{"startup_seconds": 0.5, "step_time": {"formula": {"base_seconds": 0.02, "seconds_per_token": 1e-4}}}'
NAMES = tuple(RATES)


def shadowed(namespace: Namespace, name: str, drafter: str) -> Object:
    gateway = {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host_of(namespace, name)]}
    traffic = {"mode": "Gateway", "gateway": gateway}
    document = resource(
        name,
        drafter,
        simulator=SIMULATOR,
        canary={"approval": "Manual"},
        analysis={"shadow": SHADOW, "minBlocks": 2},
        preflight={"mode": "Off"},
        traffic=traffic,
    )
    (container,) = document["spec"]["engine"]["podTemplate"]["spec"]["containers"]
    container["lifecycle"]["preStop"]["sleep"]["seconds"] = 5  # a busy gateway takes seconds to leave a pod out
    return document


def host_of(namespace: Namespace, name: str) -> str:
    return f"{name}.{namespace.name}.example"


_PROGRAM = """
import json, sys, urllib.request
pages = {}
for name, address in json.load(sys.stdin).items():
    try:
        pages[name] = urllib.request.urlopen(address, timeout=10).read().decode()
    except OSError:
        pages[name] = ""  # it starts or ends
print(json.dumps(pages))
"""


def count_requests(namespace: Namespace, name: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Return how many requests with short and with long prompts the engines have answered, by revision and whether of control."""
    pods = {pod["metadata"]["name"]: pod for pod in list_engine_pods(namespace, name) if pod["status"].get("podIP")}
    addresses = {pod: f"http://{item['status']['podIP']}:{naming.ENGINE_PORT}/metrics" for pod, item in pods.items()}
    network = [sys.executable, "-m", "aerie_lab.sandbox.inside", "--network", str(process.find_lab_pid(namespace.lab.folder))]
    completed = subprocess.run(
        [*network, sys.executable, "-c", _PROGRAM], input=json.dumps(addresses), capture_output=True, text=True, check=True
    )
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for pod, page in json.loads(completed.stdout).items():
        labels = pods[pod]["metadata"]["labels"]
        key = labels[naming.REVISION_LABEL], labels[naming.CONTROL_LABEL]
        short = read_sample(page, rf'_bucket{{.*le="{LONG_PROMPT_TOKENS}(?:\.0)?".*}}')
        total = read_sample(page, r"_count(?:{.*})?")
        before = counts.get(key, (0, 0))
        counts[key] = before[0] + short, before[1] + total - short
    return counts


def read_sample(page: str, suffix: str) -> int:
    """Return the sum of the samples of the histogram of prompt lengths."""
    return int(sum(map(float, re.findall(rf"^vllm:request_prompt_tokens{suffix} (\S+)$", page, re.MULTILINE))))


@dataclass
class Evaluation:
    """What was seen of a resource's evaluation."""

    namespace: Namespace
    name: str
    stable: str
    pairs: int = 0
    """Pairs that its status has counted."""
    users_requests: int = 0
    """Long requests that its stable pods have answered."""

    def observe(self) -> Object:
        """Check the engines' counters against the status, and return the status."""
        status = self.read_status()
        counts = count_requests(self.namespace, self.name)
        after = self.read_status()
        self.users_requests = max(self.users_requests, counts.get((self.stable, "false"), (0, 0))[1])
        if self.is_isolated(status) and self.is_isolated(after):
            canary = status["canary"]["revision"]
            for key, (_, long) in counts.items():
                assert key == (self.stable, "false") or long == 0, f"{self.name}: {long} requests of users reached {key}"
            state = read_state(status)
            if state is not None:
                assert state.steps.pairs >= self.pairs, "counts never go back"
                self.pairs = state.steps.pairs
                assert self.pairs <= counts.get((canary, "false"), (0, 0))[0], "no pair counts twice"
        return after

    def read_status(self) -> Object:
        status: Object = self.namespace.get("specdep", self.name)["status"]
        return status

    @staticmethod
    def is_isolated(status: Object) -> bool:
        """Return whether the canary is not evaluated yet, or is rolled back."""
        canary = status.get("canary") or {}
        return bool(canary) and canary["phase"] in ("Starting", "Evaluating", "RollingBack")


def read_state(status: Object) -> PairedState | None:
    """Return the counts of a status; None without any."""
    packed = (status["canary"].get("evaluation") or {}).get("state")
    return PairedState.from_dict(codec.unpack(packed)["state"]) if packed else None


def has_passed(evaluation: Evaluation) -> bool:
    """Return whether the canary is accepted, and has then passed its analysis under the traffic of users."""
    return bool(evaluation.read_status()["phase"] == "AwaitingApproval")


def read_pair_count(message: str) -> int:
    """Return the number of pairs in the message of a verdict."""
    count = re.search(r"after (\d+) pairs", message)
    assert count is not None, message
    return int(count[1])


def test_a_drafter_is_evaluated_by_pods_before_users_meet_it(namespace: Namespace, inner_operator: Any) -> None:
    namespace.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "prompts"}, "data": {"prompts.jsonl": PROMPTS}}
    )
    namespace.apply(*(shadowed(namespace, name, "eagle3") for name in NAMES))
    url = namespace.lab.gateway_url or ""
    evaluations = {
        name: Evaluation(namespace, name, wait_for(namespace, name, is_ready, "it is Ready")["stable"]["revision"])
        for name in NAMES
    }
    targets = [TrafficTarget(url, name, host_of(namespace, name), timeout_seconds=120) for name in NAMES]
    for target in targets:
        wait_until(lambda target=target: is_answered(target), "the gateway answers")  # type: ignore[misc]
    with contextlib.ExitStack() as stack:
        traffic = [
            stack.enter_context(BackgroundTraffic(target, rate, USERS))
            for target, rate in zip(targets, RATES.values(), strict=True)
        ]
        namespace.apply(*(shadowed(namespace, name, name) for name in NAMES))
        worse, better = (evaluations[name] for name in NAMES)

        def observe_until(condition: Any, description: str) -> None:
            wait_until(
                lambda: [each.observe() for each in evaluations.values()] and condition(),
                description,
                timeout_seconds=300,
                interval_seconds=1.0,
            )

        observe_until(lambda: better.pairs >= 10, "pairs are counted")
        assert inner_operator.end(signal.SIGKILL) == -signal.SIGKILL
        better.observe()
        counted = better.pairs
        restart_evaluators(namespace, ["better"])  # what only the killed one knew is lost
        inner_operator.start()
        observe_until(lambda: better.pairs > counted or has_passed(better), "another operator goes on")
        inner_operator.kill_and_replace()  # the evaluator lives on, unless the verdict has come

        observe_until(lambda: worse.read_status()["phase"] == "RolledBack", "the worse one is rolled back")
        observe_until(lambda: has_passed(better), "the better one passes")
        canary = better.read_status()["canary"]
        assert canary["evaluation"]["result"] == "Accepted", canary["evaluation"]
        pairs = read_pair_count(canary["evaluation"]["message"])
        assert pairs > counted >= 10, "the next operators count pairs of the next evaluator"
        answered, _ = count_requests(namespace, "better")[canary["revision"], "false"]
        assert pairs <= answered, "no pair counts twice"
        namespace.kubectl("annotate", "specdep", "better", f"{PROMOTE_ANNOTATION}={canary['revision']}")
        status = wait_for(namespace, "better", lambda s: s["stable"]["revision"] != better.stable, "it is promoted")
    outcome = worse.read_status()["rolloutHistory"][0]
    assert outcome["result"] == "RolledBack"
    assert re.search(r"Tokens per step -.*, significantly below the control's, after ", outcome["message"]), outcome["message"]
    assert read_pair_count(outcome["message"]) > 10
    assert worse.read_status()["stable"]["revision"] == worse.stable
    assert status["rolloutHistory"][0]["result"] == "Promoted"
    for each in evaluations.values():
        assert each.users_requests > 10
        wait_until(lambda name=each.name: not list_evaluators(namespace, name), "the evaluator is removed")  # type: ignore[misc]
    assert not [error for each in traffic for error in each.report.errors]
