"""Successive rollouts by pods with real vLLM on CPU, the bundle's models, and continuous traffic through the gateway.

    EAGLE 3 serves ─► EAGLE 3.1: promoted ─► a weak drafter: rolled back ─► EAGLE 3.1 under another name: accepted

Each begins with a shadow evaluation by copies of the users' requests, the default behind a gateway. PARTS=rollouts, PARTS=aa or
PARTS=sampling runs one part alone.

| key                          | what is measured                                                                              |
|------------------------------|-----------------------------------------------------------------------------------------------|
| requests, failed, truncated  | streamed chat completions over all of it; failed: any but a whole answer; truncated: those of |
|                              | them that began and did not end                                                               |
| apply_to_promoted_min        | from `kubectl apply` of EAGLE 3.1 to its promotion; the start of vLLM and the ramp are in it  |
| rollback_min                 | from `kubectl apply` of the weak drafter to the outcome in the status                         |
| pairs_better, pairs_weak     | pairs of answers until EAGLE 3.1 was accepted, and until the weak drafter was rolled back     |
| pairs_equal                  | pairs of answers until the same drafter under another name was accepted                       |
| al_stable, al_canary         | acceptance length of EAGLE 3 and EAGLE 3.1 in the status when the second was accepted         |
| al_gain_pct and its bounds   | the estimate and its confidence bounds, in the outcome's comparisons                          |
| al_weak_pct                  | the estimate for the weak drafter when it was rolled back                                     |
| pods_reloaded_by_promotion   | pods of the canary that were removed or restarted before it is stable                         |
| aa_runs, aa_rollbacks        | evaluations of a drafter against itself (AA_RUNS=20), and those that were rolled back         |
| aa_accepted, aa_pairs_max    | those that were accepted, and the most pairs that took                                        |
| released_sampling_runs       | such evaluations by sampled requests, with vLLM as released, which samples wrongly on a CPU   |
| released_sampling_noticed    | those that were rolled back as AnswersDiffer                                                  |
| released_sampling_pairs_max  | the most pairs that took                                                                      |

Three engines share two cores: the results show that rollouts work with a real engine, and nothing about a GPU. Rollouts in place
are measured by `inplace`, and error rates by `shadow`.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from aerie_lab.cli.scenarios import REAL_SCENARIO
from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import RequestOutcome, TrafficTarget
from benchmarks._parts import Part, measure_parts, name_result
from benchmarks._shadow_same_drafter import measure_released_sampling, measure_same_drafter

ROOT = Path(__file__).resolve().parent.parent
SCENARIO = REAL_SCENARIO
BETTER, WEAK, SAME = (change.drafter for change in SCENARIO.changes)
BUNDLE = ROOT / "drafter" / "bundle"
START, DECISION = 1200.0, 2400.0
"""Seconds for the first start, and for a change until its outcome."""
LONGEST = START + 3 * DECISION
AA_RUNS, RELEASED_SAMPLING_RUNS = 20, 10


def measure() -> dict[str, float]:
    return measure_parts(PARTS)


def result_name() -> str:
    return name_result("e2e_vllm", PARTS)


def measure_rollouts() -> dict[str, float]:
    """Return the keys of the rollouts."""
    with Lab.up(LabSettings(name="e2e", image_tables=[str(file) for file in SCENARIO.image_tables])) as lab:
        return RolloutSequence(lab, build_resource()).measure()


def build_resource() -> dict[str, Any]:
    """Return the demo's resource, with short blocks after a shadow evaluation without a verdict."""
    resource: dict[str, Any] = yaml.safe_load(SCENARIO.manifest.read_text())
    resource["spec"]["rollout"]["analysis"] = {
        "warmupDuration": "20s",
        "blockDuration": "15s",
        "minDuration": "1m",
        "failureMargin": 0.05,  # the default, 0.005, takes 1,000 requests
        "maxDuration": "35m",
    }
    return resource


class RolloutSequence:
    """One run of the benchmark."""

    POLL_SECONDS = 1.0
    """Seconds between two reads of the status."""

    def __init__(self, lab: Lab, resource: Mapping[str, Any]) -> None:
        self.lab, self.resource, self.began = lab, resource, time.monotonic()
        self._last_progress = ""

    def report_progress(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def measure(self) -> dict[str, float]:
        self.install()
        self.apply(None)
        self.until(lambda status: status.get("phase") == "Ready", "EAGLE 3 serves", START)
        target = TrafficTarget(self.lab.gateway_url or "", SCENARIO.name, SCENARIO.host, chats=SCENARIO.chats)
        with BackgroundTraffic(target, SCENARIO.load, SCENARIO.classes, LONGEST) as traffic:
            self.until(lambda status: status["stable"].get("acceptanceLength"), "its acceptance length is known", 300)
            promoted = self.promotion()
            rolled_back = self.rollback()
            same_drafter = self.compare_same_drafter()
        report = traffic.report
        failures = [outcome for outcome in report.outcomes if outcome.error is not None]
        for outcome in failures:
            self.report_progress(
                f"at {outcome.end_time - time.time() + time.monotonic() - self.began:.1f} s a request failed: {outcome}"
            )
        return {
            "requests": len(report.outcomes),
            "failed": len(failures),
            "truncated": sum(map(truncated, failures)),
            **promoted,
            **rolled_back,
            **same_drafter,
        }

    # -- the parts
    def promotion(self) -> dict[str, float]:
        began = self.apply(BETTER)
        ramping = self.until(
            lambda status: status.get("phase") in ("Ramping", "RolledBack", "Held", "Failed"), "a verdict", DECISION
        )
        if ramping["phase"] != "Ramping":
            raise AssertionError(f"EAGLE 3.1 was not accepted: {self._last_progress}")
        revision = ramping["canary"]["revision"]
        before = self.pods(revision)
        status = self.until(lambda status: status["stable"]["revision"] == revision, "it is promoted", DECISION)
        minutes = (time.monotonic() - began) / 60
        self.until(lambda status: status.get("phase") == "Ready", "all is calm", 300)
        after = self.pods(revision)
        length = comparison(status["rolloutHistory"][0])
        return {
            "apply_to_promoted_min": round(minutes, 1),
            "pairs_better": length["sampleCount"],
            "al_stable": ramping["stable"]["acceptanceLength"],
            "al_canary": ramping["canary"]["acceptanceLength"],
            "al_gain_pct": round(100 * length["estimate"], 1),
            "al_gain_lower_pct": round(100 * length["lower"], 1),
            "al_gain_upper_pct": round(100 * length["upper"], 1),
            "pods_reloaded_by_promotion": sum(after.get(uid) != 0 for uid in before),
        }

    def rollback(self) -> dict[str, float]:
        began = self.apply(WEAK)
        status = self.until(lambda status: status.get("phase") == "RolledBack", "the weak drafter is rolled back", DECISION)
        return {
            "rollback_min": round((time.monotonic() - began) / 60, 1),
            "al_weak_pct": round(100 * comparison(status["rolloutHistory"][0])["estimate"], 1),
            "pairs_weak": comparison(status["rolloutHistory"][0])["sampleCount"],
        }

    def compare_same_drafter(self) -> dict[str, float]:
        self.apply(SAME)
        ended = ("Ramping", "WarmingUp", "RollingBack", "RolledBack", "Failed")
        status = self.until(lambda status: status.get("phase") in ended, "the same drafter again is evaluated", DECISION)
        if status["phase"] != "Ramping":
            raise AssertionError(f"the same drafter was not accepted: {self._last_progress}")
        return {"pairs_equal": comparison(status["analysis"])["sampleCount"]}

    # -- the cluster
    def install(self) -> None:
        where = ("--namespace", "aerie-system", "--create-namespace", "--wait", "--timeout=180s")
        self.lab.helm("install", "aerie", str(ROOT / "charts" / "aerie"), *where)

    def apply(self, drafter: dict[str, str] | None) -> float:
        """Apply the resource, with the given drafter."""
        resource = copy.deepcopy(dict(self.resource))
        if drafter is not None:
            resource["spec"]["drafter"]["source"]["huggingFace"] = drafter
        self.report_progress(f"kubectl apply: {resource['spec']['drafter']['source']['huggingFace']['repo']}")
        self.lab.kubectl("apply", "-f", "-", stdin=json.dumps(resource))
        return time.monotonic()

    def status(self) -> dict[str, Any]:
        resource = json.loads(self.lab.kubectl("get", "specdep", SCENARIO.name, "-o", "json"))
        status: dict[str, Any] = resource.get("status") or {}
        return (
            status
            if status.get("observedGeneration") == resource["metadata"]["generation"]
            else {"phase": "", **status, "old": True}
        )

    def print_progress(self, status: dict[str, Any]) -> None:
        conditions = status.get("conditions") or []
        message = next((condition["message"] for condition in conditions if condition["type"] == "Progressing"), "")
        if (progress := f"{status.get('phase')}: {message}") != self._last_progress:
            self._last_progress = progress
            self.report_progress(progress)

    def until(self, check: Callable[[dict[str, Any]], object], description: str, timeout_seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            status = self.status()
            self.print_progress(status)
            if "old" not in status and check(status):
                return status
            time.sleep(self.POLL_SECONDS)
        raise AssertionError(
            f"{description}: not within {timeout_seconds:g} s\n{self.lab.kubectl('describe', 'specdep', SCENARIO.name)}"
        )

    def pods(self, revision: str | None = None) -> dict[str, int]:
        """Restarts by uid of the engine pods, or of those of one revision."""
        selector = f"aerie.dev/name={SCENARIO.name}" + (f",aerie.dev/revision={revision}" if revision else "")
        items = json.loads(self.lab.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        return {pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in items}


def comparison(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the comparison of tokens per step of an analysis or of a rollout's outcome."""
    tokens_per_step: dict[str, Any] = next(item for item in outcome["comparisons"] if item["metric"] == "TokensPerStep")
    return tokens_per_step


def truncated(outcome: RequestOutcome) -> bool:
    return outcome.time_to_first_token is not None


PARTS: dict[str, Part] = {
    "rollouts": measure_rollouts,
    "aa": lambda: measure_same_drafter(int(os.environ.get("AA_RUNS", AA_RUNS))),
    "sampling": lambda: measure_released_sampling(RELEASED_SAMPLING_RUNS),
}
"""The parts by name, in the order in which they run."""
