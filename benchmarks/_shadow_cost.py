"""What copies of users' requests cost: the evaluator's memory and CPU time, and the latency of the users themselves.

    users ─► Envoy ─┬─► engine of the users
                    └─► evaluator, which drops nine of ten copies ─┬─► canary
                       (in half of the windows)                    └─► control

The lab's own Envoy, three simulated engines, and the evaluator as the operator runs it. The route's mirror is on in one window
of each pair and off in the other, in a drawn order, so that the machine's noise meets both alike. Answers have one length, so
that the slowest percent of the latencies is that of the path and not that of long answers.

Guarantees: the share of copies that are dropped is measured, and far from nine in ten is an error. Not guaranteed: anything about
another gateway, or about a machine on which gateway, engines and evaluator do not share two cores.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from aerie.manifests.network import GATEWAY_API_VERSION
from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.engine.load_generation.background import SHORT_TRAFFIC_CLASSES, BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import RequestOutcome, TrafficTarget
from aerie_lab.engine.load_generation.workload import LengthDistribution
from aerie_lab.testing import wait_until

REQUESTS_PER_SECOND = 20.0
PAIRS_OF_WINDOWS, WINDOW_SECONDS, SETTLING_SECONDS = 16, 20.0, 4.0
"""Windows of each kind, their length, and the seconds at their beginning in which Envoy learns of the route."""
ANSWER_TOKENS = 24
IN_FLIGHT = 1
"""Pairs of answers at the same time: so few that the evaluator drops nine of ten copies."""
MIN_DROPPED_SHARE, MAX_DROPPED_SHARE = 0.8, 0.97
HOST = "cost.example"
ARMS = ("users", "canary", "control")
_SPECULATION = {"method": "eagle3", "model": "aerie/bundle-eagle31", "num_speculative_tokens": 3}
_USERS_STEP_SECONDS, _EVALUATED_STEP_SECONDS = 0.005, 0.05
"""Seconds of a step. The evaluated engines are slow, so that pairs take long and most copies come in vain."""


def measure_cost() -> dict[str, float]:
    """Return the keys of the part."""
    with Lab.up(LabSettings(name="shadow-cost")) as lab:
        lab.apply(*_build_engines())
        for arm in ARMS:
            lab.kubectl("wait", f"pod/{arm}", "--for=condition=Ready", "--timeout=120s")
        lab.apply(*_build_evaluator(_pod_address(lab, "canary"), _pod_address(lab, "control")))
        lab.kubectl("wait", "pod/evaluator", "--for=condition=Ready", "--timeout=120s")
        lab.apply(_build_route(is_mirrored=False))
        return _measure(lab, _find_evaluator_process())


def _measure(lab: Lab, process_id: int) -> dict[str, float]:
    target = TrafficTarget(lab.gateway_url or "", "chat", HOST, timeout_seconds=60)
    one_length = LengthDistribution(ANSWER_TOKENS, 0.0, ANSWER_TOKENS, ANSWER_TOKENS)
    (kind, *_) = SHORT_TRAFFIC_CLASSES
    classes = [replace(kind, name="fixed", answer_lengths=one_length, share=1.0)]
    latencies: dict[bool, list[list[float]]] = {False: [], True: []}
    cpu_seconds = mirrored_seconds = 0.0
    with BackgroundTraffic(target, REQUESTS_PER_SECOND, classes, (2 * PAIRS_OF_WINDOWS + 4) * WINDOW_SECONDS) as traffic:
        wait_until(lambda: any(outcome.error is None for outcome in traffic.report.outcomes), "the gateway answers")
        answering = len(traffic.report.outcomes)  # before, it does not know the route
        for is_mirrored in _draw_order():
            lab.apply(_build_route(is_mirrored=is_mirrored))
            time.sleep(SETTLING_SECONDS)
            first, cpu_before, began = len(traffic.report.outcomes), _read_cpu_seconds(process_id), time.monotonic()
            time.sleep(WINDOW_SECONDS - SETTLING_SECONDS)
            latencies[is_mirrored].append(_latencies(traffic.report.outcomes[first:]))
            if is_mirrored:
                cpu_seconds += _read_cpu_seconds(process_id) - cpu_before
                mirrored_seconds += time.monotonic() - began
        failed = [outcome for outcome in traffic.report.outcomes[answering:] if outcome.error is not None]
    received, dropped = _read_copies(lab)
    share = dropped / received
    print(f"{received:.0f} copies, {100 * share:.1f} % of them dropped; {len(failed)} requests of users failed")
    for outcome in failed:
        print(f"failed: {outcome}")
    if not MIN_DROPPED_SHARE <= share <= MAX_DROPPED_SHARE:
        raise AssertionError(f"{100 * share:.0f} % of the copies were dropped, which is far from nine in ten: set IN_FLIGHT.")
    return {
        "evaluator_rss_mib": round(_read_peak_mib(process_id), 1),
        "evaluator_cpu_pct": round(100 * cpu_seconds / mirrored_seconds, 2),
        "mirror_p50_ratio": round(_ratio(latencies, 0.50), 3),
        "mirror_p99_ratio": round(_ratio(latencies, 0.99), 3),
        "mirror_p99_ms": round(1000 * _quantile([value for window in latencies[True] for value in window], 0.99), 1),
        "mirror_requests": sum(len(window) for windows in latencies.values() for window in windows),
        "mirror_failed": len(failed),
    }


def _draw_order() -> Iterator[bool]:
    """Yield for each window whether the mirror is on."""
    coin = random.Random(1)  # noqa: S311 - the order of a measurement
    for _ in range(PAIRS_OF_WINDOWS):
        first = coin.random() < 0.5
        yield from (first, not first)


def _latencies(outcomes: list[RequestOutcome]) -> list[float]:
    return [outcome.total_seconds for outcome in outcomes if outcome.error is None]


def _ratio(latencies: dict[bool, list[list[float]]], share: float) -> float:
    """Return the quantile with the mirror over that without it, of all windows of a kind together."""
    copied, alone = (_quantile([value for window in latencies[kind] for value in window], share) for kind in (True, False))
    return copied / alone


def _quantile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


# --------------------------------------------------------------------------------------------------------------------- objects
def _build_engines() -> Iterator[dict[str, Any]]:
    for arm in ARMS:
        seconds = _USERS_STEP_SECONDS if arm == "users" else _EVALUATED_STEP_SECONDS
        options = {"startup_seconds": 1, "step_time": {"formula": {"base_seconds": seconds, "seconds_per_token": 0.0}}}
        container = {
            "name": "engine",
            "image": "aerie.dev/lab/engine:v0.33.0",
            "args": [
                "aerie/bundle-target",
                "--served-model-name=chat",
                "--port=8000",
                f"--speculative-config={json.dumps(_SPECULATION)}",
                "--per-request-spec-decode-metrics=summary",
                "--enable-per-request-metrics",
            ],
            "env": [{"name": "AERIE_SIMULATOR", "value": json.dumps(options)}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        }
        yield _build_pod(arm, container)
    yield _build_service("users")


def _build_evaluator(canary: str, control: str) -> Iterator[dict[str, Any]]:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "token"},
        "stringData": {"token": "of-the-benchmark" * 2},
    }
    container = {
        "name": "evaluator",
        "image": "aerie.dev/aerie:lab",
        "args": [
            "evaluator",
            f"--canary=http://{canary}:8000",
            f"--control=http://{control}:8000",
            "--token-file=/etc/token/token",
            "--port=8000",
            f"--in-flight={IN_FLIGHT}",
            "--waiting=0",
        ],
        "volumeMounts": [{"name": "token", "mountPath": "/etc/token"}],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": 8000}, "periodSeconds": 1},
    }
    yield secret
    yield _build_pod("evaluator", container, volumes=[{"name": "token", "secret": {"secretName": "token"}}])
    yield _build_service("evaluator")


def _build_pod(name: str, container: dict[str, Any], **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container], **spec}}


def _build_service(name: str) -> dict[str, Any]:
    spec = {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8000}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _build_route(*, is_mirrored: bool) -> dict[str, Any]:
    rule: dict[str, Any] = {"backendRefs": [{"name": "users", "port": 80}], "timeouts": {"request": "0s"}, "filters": []}
    if is_mirrored:
        backend = {"name": "evaluator", "port": 80}
        rule["filters"] = [{"type": "RequestMirror", "requestMirror": {"backendRef": backend}}]
    parent = {"name": "lab", "namespace": "projectcontour"}
    spec = {"parentRefs": [parent], "hostnames": [HOST], "rules": [rule]}
    return {"apiVersion": GATEWAY_API_VERSION, "kind": "HTTPRoute", "metadata": {"name": "cost"}, "spec": spec}


# -------------------------------------------------------------------------------------------------------------------- readings
def _pod_address(lab: Lab, name: str) -> str:
    return lab.kubectl("get", "pod", name, "-o", "jsonpath={.status.podIP}").strip()


def _find_evaluator_process() -> int:
    """Return the id of the evaluator's process: the lab's containers are processes of this machine."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"evaluator" in arguments and b"--token-file=/etc/token/token" in arguments and b"aerie.cli" in arguments:
                return int(folder.name)
    raise AssertionError("no process of the evaluator is running.")


def _read_cpu_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_peak_mib(process_id: int) -> float:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def _read_copies(lab: Lab) -> tuple[float, float]:
    """Return the copies that the evaluator has received, and those of them that it has dropped."""
    page = lab.kubectl("get", "--raw", "/api/v1/namespaces/default/pods/evaluator:8000/proxy/metrics")
    values = {line.split()[0]: float(line.split()[1]) for line in page.splitlines() if line and not line.startswith("#")}
    return values["aerie_evaluator_requests_received_total"], values["aerie_evaluator_requests_dropped_total"]
