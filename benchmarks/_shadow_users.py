"""Requests of users that a drafter answers before its shadow evaluation has accepted it: rollouts by pods and by prompts.

    users, prompts of 200 tokens and more ─► gateway ─► stable pods
    evaluator, prompts of a few tokens ───────────────► canary and control

The operator from its chart, a real gateway and simulated engines. The length of its prompt tells whose a request is, and the
engines' own histograms count it. They are read once a second, between two reads of the status that both have a canary that is not
accepted. One drafter is promoted, and one is rolled back.

Guarantee: a run in which the evaluated engines count no request of the evaluator, or the stable pods none of users, is an error.
Not guaranteed: anything about copies of users' requests (source Mirror), which are as long as the originals. The same Services
and route keep users away there.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from aerie.manifests import naming
from aerie_lab.cli.scenarios import SIMULATED_SCENARIO
from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget
from aerie_lab.engine.load_generation.workload import LengthDistribution
from aerie_lab.errors import LabError
from benchmarks.e2e_vllm import ROOT

SCENARIO = SIMULATED_SCENARIO
REQUESTS_PER_SECOND = 6.0
MAX_EVALUATOR_PROMPT_TOKENS = 100
"""More tokens than a prompt of the evaluator has, and fewer than one of a user. A bound of the engines' histograms."""
START_SECONDS, ROLLOUT_SECONDS, POLL_SECONDS = 120.0, 600.0, 1.0
_ISOLATED_PHASES = ("Starting", "Evaluating", "RollingBack")
_PROMPTS = "\n".join(json.dumps({"prompt": f"Eagle {number}", "max_tokens": 40, "temperature": 0.7}) for number in range(3000))


def measure_users() -> dict[str, float]:
    """Return the keys of the part."""
    with Lab.up(LabSettings(name="shadow-users", image_tables=[str(file) for file in SCENARIO.image_tables])) as lab:
        rollouts = _Rollouts(lab)
        rollouts.serve()
        target = TrafficTarget(lab.gateway_url or "", SCENARIO.name, SCENARIO.host, timeout_seconds=60)
        users = [
            replace(kind, prompt_lengths=LengthDistribution(300, 0.2, 200, 1000), answer_lengths=LengthDistribution(20))
            for kind in SCENARIO.classes
        ]
        with BackgroundTraffic(target, REQUESTS_PER_SECOND, users, len(SCENARIO.changes) * ROLLOUT_SECONDS) as traffic:
            for change in SCENARIO.changes:
                rollouts.change_drafter(change.drafter, change.expected_result)
        answered = [outcome for outcome in traffic.report.outcomes if outcome.error is None]
    print(f"{len(answered)} requests of users answered; by engines before acceptance: {rollouts.counts}")
    if not rollouts.counts.evaluator or not rollouts.counts.stable_users:
        raise AssertionError(f"nothing was counted that has to be: {rollouts.counts}")
    return {
        "user_requests_before_acceptance": rollouts.counts.users,
        "user_requests_meanwhile": rollouts.counts.stable_users,
        "evaluated_requests": rollouts.counts.evaluator,
    }


@dataclass
class _Counts:
    """Requests that engines have answered while a drafter was not accepted, over all rollouts."""

    users: int = 0
    """Users' requests on canary and control pods."""
    evaluator: int = 0
    """The evaluator's on these pods."""
    stable_users: int = 0
    """Users' requests on the stable pods."""


@dataclass(frozen=True)
class _Engine:
    """Requests that one engine has answered since its start."""

    pod: str
    revision: str
    is_control: bool
    users: int
    evaluator: int


@dataclass
class _Rollouts:
    """The deployment in the lab, and what was counted of its rollouts."""

    lab: Lab
    counts: _Counts = field(default_factory=_Counts)

    def serve(self) -> None:
        """Install the operator, and wait until the first drafter serves."""
        where = ("--namespace", "aerie-system", "--create-namespace", "--wait", "--timeout=180s")
        self.lab.helm("install", "aerie", str(ROOT / "charts" / "aerie"), *where)
        prompts = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "prompts"}, "data": {"prompts.jsonl": _PROMPTS}}
        self.lab.kubectl("apply", "-f", "-", stdin=json.dumps(prompts))
        self._apply(None)
        deadline = time.monotonic() + START_SECONDS
        while self._read_status().get("phase") != "Ready":
            if time.monotonic() > deadline:
                raise AssertionError(f"the first drafter does not serve: {self._read_status()}")
            time.sleep(POLL_SECONDS)

    def change_drafter(self, drafter: dict[str, str], expected_result: str) -> None:
        """Change the drafter, and count until its rollout has ended."""
        self._apply(drafter)
        evaluated: dict[str, _Engine] = {}
        stable_users: list[int] = []
        deadline = time.monotonic() + ROLLOUT_SECONDS
        while True:
            before, engines, status = self._read_status(), self._read_engines(), self._read_status()
            if _is_isolated(before) and _is_isolated(status):
                stable, canary = status["stable"]["revision"], status["canary"]["revision"]
                stable_users.append(sum(each.users for each in engines if each.revision == stable and not each.is_control))
                evaluated |= {each.pod: each for each in engines if each.revision == canary or each.is_control}
            last = status["rolloutHistory"][0]
            if last["drafter"].startswith(f"{drafter['repo']}@") and status["phase"] in ("Ready", "RolledBack", "Failed"):
                break
            if time.monotonic() > deadline:
                raise AssertionError(f"the rollout of {drafter['repo']} has not ended: {status}")
            time.sleep(POLL_SECONDS)
        print(f"{drafter['repo']}: {last['result']}. {last['message']}", flush=True)
        if last["result"] != expected_result:
            raise AssertionError(f"the rollout of {drafter['repo']} ended as {last['result']} instead of {expected_result}")
        self.counts.users += sum(each.users for each in evaluated.values())
        self.counts.evaluator += sum(each.evaluator for each in evaluated.values())
        self.counts.stable_users += max(stable_users, default=0) - min(stable_users, default=0)

    def _apply(self, drafter: dict[str, str] | None) -> None:
        resource: dict[str, Any] = yaml.safe_load(SCENARIO.manifest.read_text())
        if drafter is not None:
            resource["spec"]["drafter"]["source"]["huggingFace"] = drafter
        resource["spec"]["rollout"] |= {
            "inPlace": {"mode": "Off"},
            "canary": {"stepWeights": [50], "stepDuration": "5s", "scaleDownDelay": "3s"},
            "analysis": {"shadow": {"source": "Prompts", "prompts": {"configMap": "prompts"}}},
        }
        self.lab.kubectl("apply", "-f", "-", stdin=json.dumps(resource))

    def _read_status(self) -> dict[str, Any]:
        resource = json.loads(self.lab.kubectl("get", "specdep", SCENARIO.name, "-o", "json"))
        status: dict[str, Any] = resource.get("status") or {}
        return status if status.get("observedGeneration") == resource["metadata"]["generation"] else {**status, "phase": ""}

    def _read_engines(self) -> list[_Engine]:
        """Return the requests that each engine has answered, without engines that start or end."""
        items = json.loads(self.lab.kubectl("get", "pods", "-l", f"{naming.NAME_LABEL}={SCENARIO.name}", "-o", "json"))["items"]
        engines = []
        for pod in items:
            labels, name = pod["metadata"]["labels"], pod["metadata"]["name"]
            if naming.REVISION_LABEL not in labels:
                continue
            try:
                page = self.lab.kubectl("get", "--raw", f"/api/v1/namespaces/default/pods/{name}:8000/proxy/metrics")
            except LabError:
                continue  # it starts or ends
            short = _read_sample(page, rf'_bucket{{.*le="{MAX_EVALUATOR_PROMPT_TOKENS}(?:\.0)?".*}}')
            users = _read_sample(page, r"_count(?:{.*})?") - short
            engines.append(_Engine(name, labels[naming.REVISION_LABEL], labels[naming.CONTROL_LABEL] == "true", users, short))
        return engines


def _is_isolated(status: dict[str, Any]) -> bool:
    """Return whether a canary is not accepted yet, or is rolled back."""
    return (status.get("canary") or {}).get("phase") in _ISOLATED_PHASES


def _read_sample(page: str, suffix: str) -> int:
    """Return the sum of the samples of the histogram of prompt lengths."""
    return int(sum(map(float, re.findall(rf"^vllm:request_prompt_tokens{suffix} (\S+)$", page, re.MULTILINE))))
