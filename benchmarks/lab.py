"""Speed and resources of the lab: cold build, warm start, container start, 60 pods, 1,000 pods, and idle load.

| key                  | what is measured                                                                                  |
|----------------------|---------------------------------------------------------------------------------------------------|
| build_cold_s         | all Go-built families with empty caches, downloads included                                       |
| up_warm_s            | `aerie-lab up` with the gateway, as a command, binaries ready; median of three                    |
| bind_to_start_p95_ms | from before the request that creates a bound pod, to the first line of its process; 60 pods in turn |
| echo60_ready_s       | from applying a Deployment of 60 echo pods to 60 ready replicas                                   |
| idle_cores           | CPU time of all processes of a lab without user pods, per second, over 60 s                       |
| idle_rss_mib         | the sum of their resident memory (pages that they share count once for each)                      |
| pods1000_ready_s     | from applying a Deployment of 1,000 processless pods on four nodes to 1,000 ready replicas        |
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aerie_lab.cluster import Lab, LabSettings, process, take_down_lab
from aerie_lab.errors import KubeError
from aerie_lab.kube.client import core_path, resource_path
from aerie_lab.node.support import PROCESSLESS_ANNOTATION

FAMILIES = ("etcd", "kubernetes", "helm", "contour", "prometheus")
NAME = "bench"


def measure() -> dict[str, float]:
    figures = {"build_cold_s": build_cold(), "up_warm_s": up_warm()}
    with Lab.up(LabSettings(name=NAME)) as lab:
        time.sleep(30)  # the load of the start has ended
        figures |= idle(lab)
        figures["bind_to_start_p95_ms"] = bind_to_start(lab)
        figures["echo60_ready_s"] = deployment_ready(lab, 60, processless=False)
    with Lab.up(LabSettings(name=NAME, nodes=4, pods_per_node=400)) as lab:
        figures["pods1000_ready_s"] = deployment_ready(lab, 1000, processless=True)
    order = ("build_cold_s", "up_warm_s", "bind_to_start_p95_ms", "echo60_ready_s", "idle_cores", "idle_rss_mib")
    return {name: figures[name] for name in (*order, "pods1000_ready_s")}


def build_cold() -> float:
    """Measure the seconds to build everything with empty caches."""
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as folder:
        caches = {name: f"{folder}/{name}" for name in ("AERIE_LAB_CACHE", "GOCACHE", "GOMODCACHE")}
        environment = {**os.environ, **caches, "GOFLAGS": "-modcacherw"}
        began = time.monotonic()
        build = "from aerie_lab.cli import main; main()"
        subprocess.run([sys.executable, "-c", build, "build", *FAMILIES], env=environment, check=True)
        return round(time.monotonic() - began, 1)


def up_warm() -> float:
    """Measure the seconds of the command."""
    command = [sys.executable, "-c", "from aerie_lab.cli import main; main()", "up", "--name", NAME]
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.monotonic() - began)
        take_down_lab(NAME)
    return round(statistics.median(seconds), 1)


def idle(lab: Lab) -> dict[str, float]:
    """Measure cores and MiB of all processes of the lab."""
    seconds = 60
    first, began = _cpu_seconds(lab), time.monotonic()
    time.sleep(seconds)
    cores = (_cpu_seconds(lab) - first) / (time.monotonic() - began)
    resident = sum(_resident_kib(pid) for pid in _processes(lab))
    return {"idle_cores": round(cores, 3), "idle_rss_mib": round(resident / 1024, 0)}


def bind_to_start(lab: Lab, count: int = 60) -> float:
    """Measure the 95th percentile in ms."""

    async def start_pod(index: int) -> float:
        name = f"start-{index}"
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "nodeName": f"node-{index % lab.settings.nodes + 1}",
                "restartPolicy": "Never",
                "containers": [{"name": "date", "image": "aerie.dev/lab/shell:1", "command": ["date", "+%s.%N"]}],
            },
        }
        async with lab.client() as client:
            began = time.time()
            await client.create(core_path("pods", "default"), pod)
            while True:
                await asyncio.sleep(0.1)
                try:
                    started = float(await client.get(core_path("pods", "default", name, "log")))
                    break
                except (KubeError, ValueError):
                    continue
            await client.delete(core_path("pods", "default", name))
            return started - began

    milliseconds = [1000 * asyncio.run(start_pod(index)) for index in range(count)]
    return round(statistics.quantiles(milliseconds, n=20, method="inclusive")[-1], 0)


def deployment_ready(lab: Lab, replicas: int, *, processless: bool) -> float:
    """Measure the seconds until all replicas are ready."""
    labels = {"app": f"many-{replicas}"}
    container: dict[str, object] = {"name": "echo", "image": "aerie.dev/lab/echo:1"}
    if not processless:
        container["readinessProbe"] = {"httpGet": {"path": "/healthz", "port": 8080}, "periodSeconds": 1}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": labels["app"], "namespace": "default"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": {PROCESSLESS_ANNOTATION: "true"} if processless else {}},
                "spec": {"containers": [container]},
            },
        },
    }

    async def run() -> float:
        async with lab.client() as client:
            began = time.monotonic()
            await client.apply(deployment)
            where = resource_path("apps/v1", "deployments", "default", labels["app"])
            while (await client.get(where))["status"].get("readyReplicas", 0) < replicas:
                if time.monotonic() - began > 600:
                    raise TimeoutError(f"{replicas} pods were not ready within 600 s")
                await asyncio.sleep(0.2)
            return time.monotonic() - began

    return round(asyncio.run(run()), 1)


def _processes(lab: Lab) -> list[int]:
    """Return all processes of the lab: its process 1 and every descendant."""
    first = process.find_lab_pid(lab.folder)
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    processes = {first}
    while grown := {pid for pid, parent in parents.items() if parent in processes} - processes:
        processes |= grown
    return [pid for pid in processes if pid is not None]


def _cpu_seconds(lab: Lab) -> float:
    ticks = 0
    for pid in _processes(lab):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(int(value) for value in fields[11:15])  # own and waited-for children, user and system
    return ticks / os.sysconf("SC_CLK_TCK")


def _resident_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)
