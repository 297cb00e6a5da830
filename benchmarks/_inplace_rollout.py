"""Rollouts in place with real vLLM on CPU: the operator, one engine, and continuous traffic through the gateway.

    measure_rollouts       EAGLE 3 serves ─► EAGLE 3.1: promoted ─► a weak drafter: rolled back
    measure_same_drafter   EAGLE 3.1 serves ─► EAGLE 3.1 under other names: never rolled back

A drafter under another name has the same weights and another config.json by a line end. So its digest differs, and the engine
changes to it as to any other. Such a trial is superseded after five minutes, if it has no verdict by then.

Guarantees: a pod that a rollout creates is counted, if it exists for ten seconds. Not guaranteed: anything about a GPU, or about
times on a machine with other work: on two cores a second busy process makes each step of the engine up to half as long again.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from aerie_lab.cli.scenarios import REAL_IN_PLACE_SCENARIO
from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget
from benchmarks.e2e_vllm import BUNDLE, START, RolloutSequence, comparison

SCENARIO = REAL_IN_PLACE_SCENARIO
BETTER, WEAK = (change.drafter for change in SCENARIO.changes)
DECISION_SECONDS = 1800.0
"""Limit of a rollout that needs a verdict."""
SAME_DRAFTER_SECONDS = 300.0
"""Seconds of a trial of the same drafter."""
PREPARATION_SECONDS = 300.0
"""Limit of preflight and preparation."""
REQUESTS_PER_SECOND = 6.0
"""Mean requests per second."""
TRAFFIC_SECONDS = 20.0
"""Seconds of traffic before the first rollout: the windows follow from the rate of requests."""

SAME_DRAFTER_TABLE = """
[[checkpoint]]
repository = "{repo}"
commit = "{commit}"
folder = "{folder}"
"""


def measure_rollouts() -> dict[str, float]:
    """Return the keys of a promotion and a rollback."""
    with Lab.up(LabSettings(name="inplace")) as lab:
        return InPlaceRollouts(lab).measure()


def measure_same_drafter(runs: int) -> dict[str, float]:
    """Return the keys of this many trials of the same drafter."""
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as folder:
        rows = [_write_same_drafter(Path(folder), number) for number in range(runs)]
        table = Path(folder) / "again.toml"
        table.write_text("".join(SAME_DRAFTER_TABLE.format(**row) for row in rows))
        with Lab.up(LabSettings(name="inplace", image_tables=[str(table)])) as lab:
            return SameDrafterTrials(lab, [{"repo": row["repo"], "revision": row["commit"]} for row in rows]).measure()


def _write_same_drafter(folder: Path, number: int) -> dict[str, str]:
    """Write the EAGLE 3.1 drafter with a digest of its own into the folder, and return its row of the lab's Hub."""
    copied = shutil.copytree(BUNDLE / "eagle31", folder / f"again-{number}")
    config = copied / "config.json"
    config.write_text(config.read_text() + "\n" * (number + 1))
    return {"repo": f"aerie/bundle-eagle31-again-{number}", "commit": f"{number + 1:040x}", "folder": str(copied)}


class _InPlaceSequence(RolloutSequence):
    """Rollouts of one engine in place, under traffic."""

    POLL_SECONDS = 4.0  # each read starts two processes of kubectl, beside an engine that two cores are few for

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab, yaml.safe_load(SCENARIO.manifest.read_text()))
        self._seen_pods: dict[str, int] = {}

    def status(self) -> dict[str, Any]:
        self._seen_pods = {**self._seen_pods, **self.pods()}
        return super().status()

    @contextlib.contextmanager
    def _serve(self, drafter: dict[str, str] | None, seconds: float) -> Iterator[BackgroundTraffic]:
        """Serve with a drafter, by default the manifest's, under traffic until the end of the block, `seconds` at most."""
        self.install()
        self.apply(drafter)
        self.until(lambda status: status.get("phase") == "Ready", "the first drafter serves", START)
        target = TrafficTarget(self.lab.gateway_url or "", SCENARIO.name, SCENARIO.host, chats=SCENARIO.chats)
        with BackgroundTraffic(target, REQUESTS_PER_SECOND, SCENARIO.classes, seconds) as traffic:
            time.sleep(TRAFFIC_SECONDS)
            yield traffic

    def _wait_for_outcome(self, drafter: Mapping[str, str], trial_seconds: float) -> tuple[datetime, dict[str, Any] | None]:
        """Return the start of the drafter's trial, and its outcome: None if there is none after `trial_seconds`."""
        status = self.until(
            lambda status: _is_on_trial(status, drafter["repo"]), f"{drafter['repo']} is on trial", PREPARATION_SECONDS
        )
        trial_start = datetime.fromisoformat(status["inPlaceRollout"]["trialStartTime"])
        deadline = time.monotonic() + trial_seconds
        while time.monotonic() < deadline:
            status = self.status()
            self.print_progress(status)
            last = status["rolloutHistory"][0]
            if last["drafter"].startswith(f"{drafter['repo']}@") and status["phase"] in ("Ready", "RolledBack", "Failed"):
                return trial_start, last
            time.sleep(self.POLL_SECONDS)
        return trial_start, None


class InPlaceRollouts(_InPlaceSequence):
    """A promotion and a rollback."""

    def measure(self) -> dict[str, float]:
        with self._serve(None, 2 * DECISION_SECONDS + PREPARATION_SECONDS) as traffic:
            first_pods = self._seen_pods = self.pods()
            promoted, returned = self._promote(), self._roll_back()
        outcomes = traffic.report.outcomes
        return {
            **promoted,
            **returned,
            "vllm_pods_created": len(self._seen_pods.keys() - first_pods.keys()),
            "vllm_pods_restarted": sum(self._seen_pods[uid] != restarts for uid, restarts in first_pods.items()),
            "vllm_rollout_requests": len(outcomes),
            "vllm_rollout_failed": sum(outcome.error is not None for outcome in outcomes),
        }

    def _promote(self) -> dict[str, float]:
        began = datetime.now(UTC)
        self.apply(BETTER)
        _, outcome = self._wait_for_outcome(BETTER, DECISION_SECONDS)
        if outcome is None or outcome["result"] != "Promoted":
            raise AssertionError(f"EAGLE 3.1 was not promoted: {outcome}")
        seconds = (datetime.fromisoformat(outcome["completionTime"]) - began).total_seconds()
        return {"vllm_better_minutes": round(seconds / 60, 1), **_read_gain("vllm_better", outcome)}

    def _roll_back(self) -> dict[str, float]:
        self.apply(WEAK)
        trial_start, outcome = self._wait_for_outcome(WEAK, DECISION_SECONDS)
        if outcome is None or outcome["result"] != "RolledBack":
            raise AssertionError(f"the weak drafter was not rolled back: {outcome}")
        seconds = (datetime.fromisoformat(outcome["completionTime"]) - trial_start).total_seconds()
        return {"vllm_weak_seconds": round(seconds, 1), **_read_gain("vllm_weak", outcome)}


class SameDrafterTrials(_InPlaceSequence):
    """Trials of the drafter that serves, under other names."""

    def __init__(self, lab: Lab, drafters: Sequence[Mapping[str, str]]) -> None:
        super().__init__(lab)
        self._drafters = drafters

    def measure(self) -> dict[str, float]:
        with self._serve(BETTER, len(self._drafters) * (PREPARATION_SECONDS + SAME_DRAFTER_SECONDS)) as traffic:
            rollback_count = sum(self._is_rolled_back(drafter) for drafter in self._drafters)
        return {
            "aa_runs": len(self._drafters),
            "aa_rollbacks": rollback_count,
            "aa_requests": len(traffic.report.outcomes),
            "aa_failed": sum(outcome.error is not None for outcome in traffic.report.outcomes),
        }

    def _is_rolled_back(self, drafter: Mapping[str, str]) -> bool:
        self.apply(dict(drafter))
        _, outcome = self._wait_for_outcome(drafter, SAME_DRAFTER_SECONDS)
        self.report_progress(f"{drafter['repo']}: {outcome['result'] if outcome else 'no verdict yet'}")
        return outcome is not None and outcome["result"] == "RolledBack"


def _is_on_trial(status: Mapping[str, Any], repository: str) -> bool:
    rollout = status.get("inPlaceRollout") or {}
    return "trialStartTime" in rollout and rollout["location"]["repository"] == repository


def _read_gain(prefix: str, outcome: Mapping[str, Any]) -> dict[str, float]:
    """Return the estimate of tokens per step with its bounds, in percent."""
    tokens_per_step = comparison(dict(outcome))
    names = {"estimate": "gain", "lower": "gain_lower", "upper": "gain_upper"}
    return {f"{prefix}_{names[key]}_pct": round(100 * tokens_per_step[key], 1) for key in names if key in tokens_per_step}
