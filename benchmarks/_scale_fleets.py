"""Large fleets with hostile pods among them, which scale.py measures after its thousand small resources.

    small resources, 1,000        one pod each
    large-0                       1,000 pods; its drafter changes, and all of them are replaced
    fleet-0 .. fleet-4            200 pods each; 100 each later, with rollouts in progress, 20 of the 500 hostile

The operator works in the lab's own network and reads the pages of all pods (_scale_pages.py). A pod is Ready after `LOAD_S`.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aerie.rollout.canary.messages import PROMOTE_ANNOTATION
from aerie_lab.cluster import Lab, process
from aerie_lab.node.support import PROCESSLESS_ANNOTATION, PROCESSLESS_LOAD_SECONDS_ANNOTATION
from benchmarks._hostile_pods import HOSTILE_RESPONSES
from benchmarks._scale_operator import Operator, quantile
from benchmarks._scale_pages import PORT

NAMESPACE = "fleets"
LARGE_PODS, FLEETS, FLEET_PODS = 1000, 5, 200
HOSTILE_FLEET_PODS, HOSTILE = 100, 20
LOAD_S = 10
SURGE = 50
"""Canary and control pods each of the large resource, which is how many pods a step of its promotion replaces."""
HOSTILE_S = 600.0
METRICS_PORT = 18080


class LabNetworkOperator(Operator):
    """The operator in the lab's own network, like its pod."""

    def __init__(self, lab: Lab, log: Path, socket: Path) -> None:
        self._lab = lab
        super().__init__(lab.folder / "components" / "admin.kubeconfig", log, METRICS_PORT, lab_command_prefix(lab), socket)


def lab_command_prefix(lab: Lab) -> list[str]:
    """Return the command prefix that runs a command in the lab's network."""
    return [sys.executable, "-m", "aerie_lab.sandbox.inside", "--network", str(process.find_lab_pid(lab.folder))]


def fleet(name: str, replicas: int, drafter: str, surge: int = 2) -> dict[str, Any]:
    """Return a resource of many processless pods."""

    def source(repository: str) -> dict[str, Any]:
        return {"huggingFace": {"repo": repository, "revision": "0" * 40}}

    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas,
            "model": {"source": source("example/target")},
            "engine": {
                "image": "vllm/vllm-openai:v0.33.0",
                "args": ["--max-model-len=8192"],
                "podTemplate": {
                    "metadata": {
                        "annotations": {PROCESSLESS_ANNOTATION: "true", PROCESSLESS_LOAD_SECONDS_ANNOTATION: str(LOAD_S)}
                    },
                    "spec": {},
                },
            },
            "drafter": {"source": source(f"example/{drafter}")},
            "rollout": {
                "inPlace": {"mode": "Off"},  # its pods run no process
                "canary": {"stepWeights": [], "replicas": surge, "scaleDownDelay": "0s"},
            },
        },
    }


class Fleets:
    """One run of the fleets; `report_progress` prints its progress."""

    def __init__(self, lab: Lab, folder: Path, log: Path, report_progress: Callable[[str], None]) -> None:
        self.lab, self.log, self.report_progress = lab, log, report_progress
        self.socket, self.hostile = folder / "metrics.sock", folder / "hostile.json"
        self.hostile.write_text("{}")

    @contextmanager
    def engines(self) -> Iterator[None]:
        """Serve the metrics of all pods while the block runs."""
        command = [*lab_command_prefix(self.lab), sys.executable, "-m", "benchmarks._scale_pages"]
        command += [str(self.socket), str(METRICS_PORT), str(self.hostile)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            try:
                assert server.stdout.readline() == "serves\n"
                yield
            finally:
                server.stdin.close()
                server.wait(30)

    def measure(self) -> dict[str, float]:
        """Measure the large and the hostile fleets."""
        self.lab.kubectl("create", "namespace", NAMESPACE)
        fleets = [f"fleet-{number}" for number in range(FLEETS)]
        self.lab.apply(fleet("large-0", LARGE_PODS, "first", SURGE), *(fleet(name, FLEET_PODS, "first") for name in fleets))
        with self.engines():
            with LabNetworkOperator(self.lab, self.log, self.socket) as operator:
                self._wait(operator, "large and the fleets serve", lambda: all(map(is_ready, self._resources())), 1200)
                large = self._large(operator)
                lost = operator.metrics().total("aerie_leader") != 1
            self.lab.kubectl("delete", "specdep", "large-0", "-n", NAMESPACE)
            for name in fleets:
                self._patch(name, {"spec": {"replicas": HOSTILE_FLEET_PODS}})
            with LabNetworkOperator(self.lab, self.log, self.socket) as operator:
                self._wait(operator, "the fleets are smaller", lambda: len(self._pods()) == FLEETS * HOSTILE_FLEET_PODS, 600)
                pods = self._pods()
                forms = itertools.islice(itertools.cycle(sorted(HOSTILE_RESPONSES)), HOSTILE)
                hostile_forms = {
                    pod["status"]["podIP"]: form for pod, form in zip(pods[:: len(pods) // HOSTILE], forms, strict=False)
                }
                self.hostile.write_text(json.dumps(hostile_forms))
                for name in fleets:
                    self._patch(name, {"spec": {"drafter": fleet(name, 1, "second")["spec"]["drafter"]}})
            with LabNetworkOperator(self.lab, self.log, self.socket) as operator:
                hostile = self._hostile(operator)
                lost = lost or operator.metrics().total("aerie_leader") != 1
        return {"large_pods": LARGE_PODS, **large, **hostile, "lease_lost": int(lost)}

    def _large(self, operator: Operator) -> dict[str, float]:
        """Change the drafter of the large resource, and wait until all of its pods are replaced."""
        before, cpu, began = operator.metrics().buckets("aerie_event_loop_lag_seconds"), operator.cpu(), time.monotonic()
        document = fleet("large-0", LARGE_PODS, "second", SURGE)
        revision = self._resource("large-0")["status"]["stable"]["revision"]
        self._patch("large-0", {"spec": {"drafter": document["spec"]["drafter"]}})
        canary: str | None = None

        def promoted() -> bool:
            nonlocal canary
            status = self._resource("large-0")["status"]
            if canary is None and (arm := status.get("canary")):
                canary = arm["revision"]
                self._patch("large-0", {"metadata": {"annotations": {PROMOTE_ANNOTATION: canary}}})
            stable = status["stable"]
            return bool(stable["revision"] != revision and stable["readyReplicas"] == LARGE_PODS and not status.get("canary"))

        self._wait(operator, "the large fleet is promoted", promoted, 2400)
        seconds, spent = time.monotonic() - began, operator.cpu() - cpu
        after = operator.metrics().buckets("aerie_event_loop_lag_seconds")
        self.report_progress(f"{LARGE_PODS} pods were replaced in {seconds:.0f} s, with {spent:.1f} s of CPU time")
        lags = [(bound, late - early) for (bound, late), (_, early) in zip(after, before, strict=True)]
        return {
            "large_cpu_pct": round(100 * spent / seconds, 1),
            "large_rollout_s": round(seconds),
            "large_loop_lag_p99_ms": round(1000 * quantile(lags, 0.99), 1),
            "large_rss_mib": round(operator.memory("VmHWM"), 1),
        }

    def _hostile(self, operator: Operator) -> dict[str, float]:
        """Measure rollouts of all fleets with hostile pods among the stable ones."""
        operator.until(lambda metrics: metrics.total("aerie_scrape_failures_total") > 0, "a hostile page was scraped", 300, 1)
        before, cpu = operator.metrics(), operator.cpu()
        time.sleep(HOSTILE_S)
        after = operator.metrics()
        pages = after.total("aerie_scrape_duration_seconds_count") - before.total("aerie_scrape_duration_seconds_count")
        failed = after.total("aerie_scrape_failures_total") - before.total("aerie_scrape_failures_total")
        open_rollouts = sum(bool(item["status"].get("canary")) for item in self._resources())
        self.report_progress(
            f"{pages:.0f} pages in {HOSTILE_S:.0f} s, {failed:.0f} of them rejected; {open_rollouts} rollouts are in progress"
        )
        assert failed > HOSTILE, "hostile pages were not scraped"
        name = "aerie_event_loop_lag_seconds"
        steps = zip(after.buckets(name), before.buckets(name), strict=True)
        lags = [(bound, late - early) for (bound, late), (_, early) in steps]
        return {
            "hostile_pods": HOSTILE,
            "hostile_pages_refused": failed,
            "hostile_pages_per_s": round(pages / HOSTILE_S, 1),
            "hostile_cpu_pct": round(100 * (operator.cpu() - cpu) / HOSTILE_S, 1),
            "hostile_loop_lag_p99_ms": round(1000 * quantile(lags, 0.99), 1),
            "hostile_rss_mib": round(operator.memory("VmHWM"), 1),
        }

    # -- the cluster
    def _wait(self, operator: Operator, description: str, check: Callable[[], bool], timeout_seconds: float) -> None:
        deadline, last_report = time.monotonic() + timeout_seconds, 0.0
        while not check():
            if operator.process.poll() is not None:
                raise RuntimeError(f"the operator has ended with status {operator.process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_seconds:g} s: {description}")
            if time.monotonic() - last_report > 30:
                last_report = time.monotonic()
                self.report_progress(
                    f"until {description}: {', '.join(map(progress, self._resources()))}; {operator.memory():.0f} MiB"
                )
            time.sleep(2)
        self.report_progress(description)

    def _resources(self) -> list[dict[str, Any]]:
        return list(json.loads(self.lab.kubectl("get", "specdep", "-n", NAMESPACE, "-o", "json"))["items"])

    def _resource(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.lab.kubectl("get", "specdep", name, "-n", NAMESPACE, "-o", "json")))

    def _pods(self) -> list[dict[str, Any]]:
        """Return the stable pods of all resources, without terminating ones."""
        output = self.lab.kubectl("get", "pods", "-n", NAMESPACE, "-l", "aerie.dev/control=false", "-o", "json")
        return [pod for pod in json.loads(output)["items"] if "deletionTimestamp" not in pod["metadata"]]

    def _patch(self, name: str, patch: dict[str, Any]) -> None:
        self.lab.kubectl("patch", "specdep", name, "-n", NAMESPACE, "--type=merge", "-p", json.dumps(patch))


def is_ready(item: dict[str, Any]) -> bool:
    status = item.get("status") or {}
    return bool(status.get("phase") == "Ready" and (status.get("stable") or {}).get("readyReplicas") == item["spec"]["replicas"])


def progress(item: dict[str, Any]) -> str:
    status = item.get("status") or {}
    arms = (f"{arm} {status[arm].get('readyReplicas', 0)}" for arm in ("stable", "canary") if status.get(arm))
    return f"{item['metadata']['name']} {status.get('phase')} ({', '.join(arms)})"


assert PORT == 8000, "the default port of engines, where spec.engine.args choose no other"


def main() -> None:
    """Measure the fleets alone, without the thousand small resources."""
    from benchmarks.scale import small_lab

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as folder, small_lab(Path(folder)) as lab:
        log = Path(folder) / "operator.log"
        fleets = Fleets(lab, Path(folder), log, lambda text: print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True))
        try:
            print(json.dumps(fleets.measure()))
        except BaseException:
            print(log.read_text(errors="replace")[-5000:] if log.exists() else "")
            raise


if __name__ == "__main__":
    main()
