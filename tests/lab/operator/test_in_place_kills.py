"""Kills with SIGKILL in every phase of rollouts in place: of the operator, of an engine, and of the gateway.

    promoted    Staging ─► Analyzing ─► AwaitingApproval ─► Promoting       a better drafter, which a user approves
    returned    Staging ─► Analyzing ─► RollingBack                         a better drafter, which a user rolls back

Each path is taken once for each victim, all at the same time; the victim is killed once in each phase. Faults keep a phase until
the kill has had its effect: a disk that hangs (Staging, Promoting), swaps that fail (RollingBack). The operator that is killed in
Analyzing stays away until all pods have come back to their own drafter, because nobody renews their leases.

The end state is the same as without a kill: the drafter of all pods, their number, the objects, and the history.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from aerie.manifests import naming
from aerie_lab.cluster import Lab
from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget
from aerie_lab.errors import LabError
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.plugin import new_namespace
from tests.lab.operator.in_place_resources import (
    compute_model_digest,
    create_model_claim,
    list_engine_pods,
    read_drafter_states,
    resource,
    revision_of,
    serves_alone,
)
from tests.lab.operator.test_in_place_rollouts import find_condition, find_expected_drafter, is_measured

# At night: test_shadow_evaluation.py kills operator and evaluators, and unit tests restart the operator at any time.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
Object = dict[str, Any]
TIMEOUT_SECONDS = 900.0
"""Maximum for one wait. A minute or two is usual."""
LEASE_SECONDS = 60.0
"""Lease of the shortest windows."""
LATE_SECONDS = 15.0
"""Seconds that a return at the end of a lease may take on a busy machine."""
PODS_ON_TRIAL, REPLICAS = 2, 3


@dataclass
class Rollout:
    """A resource whose drafter changes, and what is killed meanwhile."""

    namespace: Namespace
    name: str
    models: Path
    kill: Callable[[Rollout, str], None]
    """Kills the victim in a phase; returns when it has had its effect."""
    is_promoted: bool
    """Whether it takes the path to the promotion; else that of a rollback."""
    traffic: Object = field(default_factory=dict)
    revision: str = ""
    """Revision of the Deployment."""

    def document(self, drafter: str) -> Object:
        in_place, canary = {"pods": PODS_ON_TRIAL}, {"approval": "Manual"}
        document = resource(self.name, drafter, replicas=REPLICAS, in_place=in_place, canary=canary)
        document["spec"]["rollout"] |= {"traffic": self.traffic} if self.traffic else {}
        return document

    def wait_for(self, condition: Callable[[Object], object], description: str) -> Object:
        """Wait until the status satisfies a condition, and return it."""
        last: Object = {}

        def is_satisfied() -> bool:
            nonlocal last
            last = self.namespace.get("specdep", self.name).get("status") or {}
            return bool(condition(last))

        try:
            wait_until(is_satisfied, f"{self}: {description}", timeout_seconds=TIMEOUT_SECONDS, interval_seconds=1.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(last, indent=1)[:6000]}") from None
        return last

    def enter(self, phase: str) -> Object:
        """Wait for a phase, kill the victim in it, and return the status that showed it."""
        status = self.wait_for(lambda status: status.get("phase") == phase, f"phase {phase}")
        self.kill(self, phase)
        return status

    def annotate(self, action: str, drafter: str) -> None:
        """Request the promotion or the rollback of a drafter's revision."""
        annotation = f"aerie.dev/{action}={revision_of(self.document(drafter))}"
        self.namespace.kubectl("annotate", "--overwrite", "specdep", self.name, annotation)

    def wait_for_pods(self, condition: Callable[[Object], object], description: str) -> dict[str, Object]:
        """Wait until the reports of all pods satisfy a condition; return them by the pods' names."""

        def find_states() -> dict[str, Object] | None:
            states = read_drafter_states(self.namespace, self.name)
            return states if len(states) == REPLICAS and all(map(condition, states.values())) else None

        states = wait_until(find_states, f"{self}: {description}", timeout_seconds=TIMEOUT_SECONDS, interval_seconds=1.0)
        assert states is not None
        return states

    def wait_for_lease(self, pod: str) -> None:
        """Wait until a pod has the new drafter, with a lease."""
        wait_until(
            lambda: read_drafter_states(self.namespace, self.name)[pod]["lease"],
            f"{self}: {pod} has a lease",
            timeout_seconds=TIMEOUT_SECONDS,
            interval_seconds=0.5,
        )

    def list_pods(self) -> tuple[list[str], list[str]]:
        """Return the names of the pods on trial, and of the others. Before the trial, pods are selected by their names."""
        names = sorted(pod["metadata"]["name"] for pod in list_engine_pods(self.namespace, self.name))
        rollout = self.namespace.get("specdep", self.name)["status"].get("inPlaceRollout") or {}
        on_trial = [pod["name"] for pod in rollout.get("pods") or []] or names[:PODS_ON_TRIAL]
        return on_trial, [name for name in names if name not in on_trial]

    def fail_drafter(self, pod: str, fault: str) -> contextlib.ExitStack:
        """Let the changes of a pod's drafter fail until the end of a block, even if its engine is killed meanwhile."""
        stack = contextlib.ExitStack()
        injected = self.namespace.faults.fail_drafter(pod, fault, namespace=self.namespace.name)  # type: ignore[arg-type]
        stack.callback(lambda: _undo(injected.undo))
        return stack

    @contextlib.contextmanager
    def keep_new_drafter(self) -> Iterator[None]:
        """Keep the new drafter in a pod on trial, which cannot return then: a rollback lasts until the end of the block."""
        with contextlib.ExitStack() as faults:

            def is_kept() -> bool:
                on_trial = self.list_pods()[0]
                for name in on_trial:
                    faults.enter_context(self.fail_drafter(name, "swap-fails"))
                states = read_drafter_states(self.namespace, self.name)
                if any(states[name]["lease"] for name in on_trial if name in states):
                    return True
                faults.close()  # all of them had the drafter before
                return False

            wait_until(
                is_kept, f"{self}: a pod on trial has the new drafter", timeout_seconds=TIMEOUT_SECONDS, interval_seconds=1.0
            )
            yield

    def start(self) -> None:
        """Wait for the first revision and its requests, then change the drafter, with a disk that hangs in one pod."""
        self.revision = self.wait_for(
            lambda status: status.get("phase") == "Ready" and status.get("readyReplicas") == REPLICAS, "it is Ready"
        )["stable"]["revision"]
        wait_until(lambda: is_measured(self.namespace, self.name), f"{self} has had requests", timeout_seconds=TIMEOUT_SECONDS)
        with self.fail_drafter(self.list_pods()[0][0], "stage-hangs"):
            self.namespace.apply(self.document("better"))
            self.enter("Staging")

    def run(self) -> None:
        """Take the path, and check its end."""
        self.start()
        self.enter("Analyzing")
        if self.is_promoted:
            self.enter("AwaitingApproval")
            with self.fail_drafter(self.list_pods()[1][0], "stage-hangs"):
                self.annotate("promote", "better")
                self.enter("Promoting")
            self.check_end("better", ["Promoted", "Promoted"])
            return
        with self.keep_new_drafter():
            self.annotate("rollback", "better")
            self.enter("RollingBack")
        self.check_end("eagle3", ["RolledBack", "Promoted"])

    def check_end(self, drafter: str, results: list[str]) -> None:
        """Check that the end state is that of a rollout without kills."""
        phase = "Ready" if drafter == "better" else "RolledBack"
        status = self.wait_for(lambda status: status["phase"] == phase and "inPlaceRollout" not in status, f"it is {phase}")
        digest = compute_model_digest(self.models, drafter)
        assert [outcome["result"] for outcome in status["rolloutHistory"]] == results
        assert status["stable"]["revision"] == self.revision
        served = status["stable"].get("inPlace", {})
        expected = find_expected_drafter(self.namespace, self.name, self.revision)
        if drafter == "better":
            assert served["digest"] == digest
            assert digest in json.dumps(expected)
        else:
            assert (served, expected) == ({}, None)
        self.wait_for_pods(lambda state: serves_alone(state, digest), f"all pods serve with {drafter} alone")
        pods = list_engine_pods(self.namespace, self.name)
        assert len(pods) == REPLICAS
        assert len(self.namespace.list_all("deployments", f"{naming.NAME_LABEL}={self.name}")) == 1
        self.wait_for(lambda status: find_condition(status, "Degraded").get("status") == "False", "nothing is wrong")

    def __str__(self) -> str:
        return f"{self.namespace.name}/{self.name}"


def _undo(undo: Callable[[], None]) -> None:
    with contextlib.suppress(LabError):  # the fault went with the process
        undo()


def kill_engine(rollout: Rollout, phase: str) -> None:
    """Kill an engine, and wait until its pod is Ready again.

    In Analyzing it has the new drafter on trial, or is not on trial before a promotion: a single crash with the new drafter is
    reason enough not to promote it for hours.
    """
    on_trial, others = rollout.list_pods()
    name = others[0] if phase == "Analyzing" and rollout.is_promoted else on_trial[0]
    if phase == "Analyzing" and not rollout.is_promoted:
        rollout.wait_for_lease(name)

    def find_state() -> tuple[int, bool]:
        pod = rollout.namespace.get("pod", name)
        restarts = pod["status"]["containerStatuses"][0]["restartCount"]
        return int(restarts), find_condition(pod["status"], "Ready").get("status") == "True"

    restarts, _ = find_state()
    rollout.namespace.faults.kill(name, "engine", namespace=rollout.namespace.name)
    wait_until(
        lambda: find_state() == (restarts + 1, True),
        f"{rollout}: {name} is Ready again after a kill in {phase}",
        timeout_seconds=TIMEOUT_SECONDS,
        interval_seconds=1.0,
    )


_gateway_lock = threading.Lock()
"""Held during a kill: there is one gateway for all rollouts."""


def kill_gateway(rollout: Rollout, phase: str) -> None:
    """Kill Envoy, and wait until requests are answered again."""
    lab = rollout.namespace.lab
    (host,) = rollout.traffic["gateway"]["hostnames"]
    target = TrafficTarget(lab.gateway_url or "", rollout.name, host)

    def wait_for_answer(when: str) -> None:
        wait_until(
            lambda: is_answered(target),
            f"{rollout}: the gateway answers {when} a kill in {phase}",
            timeout_seconds=TIMEOUT_SECONDS,
            interval_seconds=1.0,
        )

    with _gateway_lock:
        wait_for_answer("before")
        (envoy,) = json.loads(lab.kubectl("-n", "projectcontour", "get", "pods", "-l", "app=envoy", "-o", "json"))["items"]
        rollout.namespace.faults.kill(envoy["metadata"]["name"], "envoy", namespace="projectcontour")
        wait_for_answer("after")


def is_answered(target: TrafficTarget) -> bool:
    """Return whether a request succeeds."""
    body = {"model": target.model, "prompt": "Where do eagles nest?", "max_tokens": 4}
    try:
        answer = httpx.post(f"{target.url}/v1/completions", json=body, headers={"Host": target.host or ""}, timeout=30)
    except httpx.TransportError:
        return False
    return answer.status_code == 200


class KilledOperator:
    """The operator of one namespace. After a kill the next one has a Lease of its own, so it waits for no other to expire."""

    def __init__(self, launcher: Any, namespace: Namespace) -> None:
        self._launcher, self._namespace, self._numbers = launcher, namespace, itertools.count()
        self.start()

    def start(self) -> None:
        self._operator = self._launcher.keep_running(self._namespace.name, lease=f"operator-{next(self._numbers)}")
        self._operator.__enter__()

    def kill(self, rollout: Rollout, phase: str) -> None:
        """Kill it and start the next one: in Analyzing, only once all leases have ended."""
        if phase == "Analyzing":  # not in the first instant, when no pod has the new drafter yet
            rollout.wait_for_lease(rollout.list_pods()[0][0])
        self._operator.kill()
        killed_at = time.time()
        if phase == "Analyzing":
            digest = compute_model_digest(rollout.models, "eagle3")
            states = rollout.wait_for_pods(lambda state: serves_alone(state, digest), "the leases of all pods have ended")
            for name, state in states.items():
                assert state["since"] <= killed_at + LEASE_SECONDS + LATE_SECONDS, f"{name}: {state}"
        self.start()

    def close(self) -> None:
        """End it."""
        self._operator.__exit__()


@pytest.fixture
def share(inner_operators: Any) -> Iterator[Any]:
    """A launcher whose operators end with the test; their logs are printed for failed tests."""
    share = inner_operators.share()
    yield share
    for log in share.end_all():
        print(f"{log.name}: {log.read_text(errors='replace')[-3000:]}")  # noqa: T201


def test_end_state_is_the_same_after_kills_in_every_phase(lab: Lab, share: Any, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def create_namespace(label: str) -> tuple[Namespace, Path]:
            namespace = stack.enter_context(new_namespace(lab, f"in-place-kills-{label}"))
            stack.enter_context(create_model_claim(namespace, tmp_path / label))
            return namespace, tmp_path / label

        rollouts: list[Rollout] = []
        paths = {"promoted": True, "returned": False}
        for path, is_promoted in paths.items():
            namespace, models = create_namespace(f"operator-{path}")
            operator = KilledOperator(share, namespace)
            stack.callback(operator.close)
            rollouts.append(Rollout(namespace, path, models, operator.kill, is_promoted))
        namespace, models = create_namespace("others")
        stack.enter_context(share.keep_running(namespace.name))
        for path, is_promoted in paths.items():
            name, host = f"gateway-{path}", f"{path}.{namespace.name}.example"
            gateway = {"parentRefs": [{"name": "lab", "namespace": "projectcontour"}], "hostnames": [host]}
            traffic = {"mode": "Gateway", "gateway": gateway}
            rollouts.append(Rollout(namespace, f"engine-{path}", models, kill_engine, is_promoted))
            rollouts.append(Rollout(namespace, name, models, kill_gateway, is_promoted, traffic))
            stack.enter_context(BackgroundTraffic(TrafficTarget(lab.gateway_url or "", name, host), 1.0))
        for rollout in rollouts:
            rollout.namespace.apply(rollout.document("eagle3"))
        with ThreadPoolExecutor(len(rollouts)) as pool:
            for run in [pool.submit(rollout.run) for rollout in rollouts]:
                run.result()
