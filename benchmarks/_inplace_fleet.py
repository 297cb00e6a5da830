"""A drafter that changes in place in a fleet of 200 engines: how fast it is promoted, and how fast 40 pods on trial return.

| key                   | what is measured                                                                        |
|-----------------------|-----------------------------------------------------------------------------------------|
| promote_200_seconds   | from the verdict Promote in the status to phase Ready, with the drafter in all 200 pods |
| rollback_40_seconds   | from the verdict Rollback in the status until the last of 40 pods on trial has returned |
| fleet_pods_created    | pods that came after the fleet was ready                                                |
| fleet_target_loads    | engines that started after that                                                         |

The lab's pods are processless. Their addresses lead to one server with the plugin's own endpoint for each (_inplace_fleet_pods),
in which reading a drafter takes 2 s and a swap 50 ms. The operator runs in the lab's network as its own process. First a better
drafter is rolled out, then a worse one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from aerie.manifests import naming
from aerie_lab.cluster import Lab
from aerie_lab.errors import KubeError
from aerie_lab.kube.client import KubeClient, KubeObject, core_path, resource_path
from aerie_lab.kube.informer import Informer
from aerie_lab.node.support import PROCESSLESS_ANNOTATION
from benchmarks._inplace_fleet_pods import OWN_DRAFTER
from benchmarks._scale_fleets import METRICS_PORT, LabNetworkOperator, lab_command_prefix
from benchmarks._scale_operator import Operator
from benchmarks.scale import API, small_lab

NAMESPACE, NAME = "inplace", "chat"
REPLICAS, TRIAL_PODS = 200, 40
LOGIT_SHIFTS = {OWN_DRAFTER: 0.0, "better": 0.15, "worse": -0.15}
"""Acceptance of the drafters, on the logit scale: about 6 % more or fewer tokens per step."""
TENSORS = ("fc.weight", "norm.weight", "midlayer.hidden_norm.weight", "lm_head.weight")
READY_SECONDS, ROLLOUT_SECONDS = 300.0, 900.0

Status = dict[str, Any]


def measure() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as text, small_lab(Path(text), "inplace-fleet") as lab:
        folder = Path(text)
        try:
            return asyncio.run(run_fleet(lab, folder))
        except BaseException:
            for log in ("operator.log", "pods.log"):
                print((folder / log).read_text(errors="replace")[-5000:] if (folder / log).exists() else "")
            raise


async def run_fleet(lab: Lab, folder: Path) -> dict[str, float]:
    """Measure the fleet in a running lab."""
    write_drafters(folder / "drafters")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    async with lab.client() as client, serve_pods(lab, folder):
        for document in (namespace, *build_claim(folder / "drafters"), build_resource()):
            await client.apply(document)
        with LabNetworkOperator(lab, folder / "operator.log", folder / "metrics.sock") as operator:
            fleet = FleetRun(client, folder, operator)
            async with fleet.followed():
                return await fleet.measure()


class FleetRun:
    """One run, whose statuses are kept with the times at which they came."""

    def __init__(self, client: KubeClient, folder: Path, operator: Operator) -> None:
        self._client, self._folder, self._operator = client, folder, operator
        self._path = resource_path(API, "speculativedeployments", NAMESPACE)
        self._statuses: list[tuple[float, Status]] = []
        self._began = time.monotonic()

    async def measure(self) -> dict[str, float]:
        """Roll out a better drafter, then a worse one."""
        await self._wait("the fleet is ready", 0, is_fleet_ready, READY_SECONDS)
        while self._count_starts() < REPLICAS:  # an engine starts with the first request, which is a scrape
            await asyncio.sleep(1)
        uids = await self._read_pod_uids()
        promote_seconds, rollback_seconds = await self._promote(), await self._roll_back()
        return {
            "promote_200_seconds": round(promote_seconds, 1),
            "rollback_40_seconds": round(rollback_seconds, 2),
            "fleet_pods_created": len(await self._read_pod_uids() - uids),
            "fleet_target_loads": self._count_starts() - REPLICAS,
        }

    async def _promote(self) -> float:
        """Roll out the better drafter; return the seconds from the verdict to the end."""
        first = await self._change_drafter("better")
        verdict_time = await self._wait_for_verdict("Promote", "Promoting", first)
        ready_time, _ = await self._wait("it is promoted", first, is_promoted_in_place, ROLLOUT_SECONDS)
        drafters = read_loaded_drafters(self._read_log())
        assert list(drafters.values()) == ["better"] * REPLICAS, f"pods have {drafters}"
        return ready_time - verdict_time

    async def _roll_back(self) -> float:
        """Roll out the worse drafter; return the seconds from the verdict to the last return of a pod."""
        first = await self._change_drafter("worse")
        verdict_time = await self._wait_for_verdict("Rollback", "RollingBack", first)
        await self._wait("it is rolled back", first, is_rolled_back, ROLLOUT_SECONDS)
        log = self._read_log()
        drafters = read_loaded_drafters(log)
        assert set(drafters.values()) == {"better"}, f"pods have {drafters}"
        pods = max(len((status.get("inPlaceRollout") or {}).get("pods") or ()) for _, status in self._statuses[first:])
        assert pods == TRIAL_PODS, f"{pods} pods were on trial"
        returns = [event["time"] for event in log if event["time"] > verdict_time]
        self._report_progress(f"{len(returns)} changes of the drafter after the verdict")
        return float(max(returns)) - verdict_time

    async def _wait_for_verdict(self, verdict: str, phase: str, first: int) -> float:
        """Wait for a verdict; return the time at which the operator made it, by its own clock on the same machine."""
        _, status = await self._wait(
            f"verdict {verdict}", first, lambda status: has_verdict(status, verdict, phase), ROLLOUT_SECONDS
        )
        return datetime.fromisoformat(status["inPlaceRollout"]["phaseStartTime"]).timestamp()

    async def _change_drafter(self, drafter: str) -> int:
        """Change the drafter of the resource; return the number of the first status after that."""
        first = len(self._statuses)
        await self._client.patch(f"{self._path}/{NAME}", {"spec": {"drafter": build_source(drafter)}})
        self._report_progress(f"the drafter is changed to {drafter}")
        return first

    async def _wait(
        self, description: str, first: int, check: Callable[[Status], bool], timeout_seconds: float
    ) -> tuple[float, Status]:
        """Wait until a status from number `first` on passes the check; return it, and the time at which it came."""
        deadline, last_report = time.monotonic() + timeout_seconds, time.monotonic()
        while True:
            for moment, status in self._statuses[first:]:
                if check(status):
                    self._report_progress(description)
                    return moment, status
            if self._operator.process.poll() is not None:
                raise RuntimeError(f"the operator has ended with status {self._operator.process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_seconds:g} s: {description}: {self._statuses[-1:]}")
            if time.monotonic() - last_report > 15:
                last_report = time.monotonic()
                self._report_progress(f"until {description}: {describe(self._statuses[-1][1] if self._statuses else {})}")
            await asyncio.sleep(0.1)

    def _report_progress(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.0f} s] {text}", flush=True)

    def _read_log(self) -> list[dict[str, Any]]:
        """Return the events of the pods."""
        log = self._folder / "log.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def _count_starts(self) -> int:
        return sum(event["event"] == "start" for event in self._read_log())

    async def _read_pod_uids(self) -> set[str]:
        pods = await self._client.get(core_path("pods", NAMESPACE), labelSelector=f"{naming.NAME_LABEL}={NAME}")
        return {pod["metadata"]["uid"] for pod in pods["items"]}

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Follow the resource, and mount its Secret and ConfigMap, while the block runs."""
        informer = Informer(self._client, self._path, self._record)
        tasks = [asyncio.ensure_future(informer.run()), asyncio.ensure_future(self._mount())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _record(self, _: str, item: KubeObject) -> None:
        self._statuses.append((time.time(), item.get("status") or {}))

    async def _mount(self) -> None:
        """Write what pods mount into the folder, as a kubelet would."""
        secret = core_path("secrets", NAMESPACE, naming.drafter_token_secret_name(NAME))
        token, expected = self._folder / "token", self._folder / "expected.json"
        while True:
            with contextlib.suppress(KubeError):
                if not token.exists():
                    data = (await self._client.get(secret))["data"]
                    token.write_bytes(base64.b64decode(data[naming.DRAFTER_TOKEN_KEY]))
                config_maps = (await self._client.get(core_path("configmaps", NAMESPACE)))["items"]
                key = naming.EXPECTED_DRAFTER_KEY
                drafters = [data[key] for item in config_maps if key in (data := item.get("data") or {})]
                if drafters:
                    expected.write_text(drafters[0])
                else:
                    expected.unlink(missing_ok=True)
            await asyncio.sleep(0.5)


# ------------------------------------------------------------------------------------------------------------- the status
def is_fleet_ready(status: Status) -> bool:
    return status.get("phase") == "Ready" and (status.get("stable") or {}).get("readyReplicas") == REPLICAS


def is_promoted_in_place(status: Status) -> bool:
    return is_fleet_ready(status) and bool(status["stable"].get("inPlace")) and not status.get("inPlaceRollout")


def has_verdict(status: Status, verdict: str, phase: str) -> bool:
    analysis, rollout = status.get("analysis") or {}, status.get("inPlaceRollout") or {}
    return (analysis.get("verdict"), rollout.get("phase")) == (verdict, phase)


def is_rolled_back(status: Status) -> bool:
    return status.get("phase") == "RolledBack" and not status.get("inPlaceRollout")


def describe(status: Status) -> str:
    progressing = [item["message"] for item in status.get("conditions") or () if item["type"] == "Progressing"]
    return f"{status.get('phase')}, {(status.get('stable') or {}).get('readyReplicas')} ready. {' '.join(progressing)[:300]}"


def read_loaded_drafters(log: list[dict[str, Any]]) -> dict[str, str]:
    """Return the latest drafter of each pod that has loaded another one than its own."""
    names = {shift: name for name, shift in LOGIT_SHIFTS.items()}
    return {event["address"]: names[event["logit_shift"]] for event in log if event["event"] == "load"}


# ------------------------------------------------------------------------------------------------------------ the objects
def write_drafters(folder: Path) -> None:
    """Write the target's folder and the drafters into the folder of the claim."""
    (folder / "target").mkdir(parents=True)
    for name, logit_shift in LOGIT_SHIFTS.items():
        (folder / name).mkdir()
        config = {"architectures": ["LlamaForCausalLMEagle3"], "simulator": {"logit_shift": logit_shift}}
        (folder / name / "config.json").write_text(json.dumps(config))
        header = json.dumps({tensor: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for tensor in TENSORS}).encode()
        (folder / name / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def build_claim(folder: Path) -> tuple[KubeObject, KubeObject]:
    """Return a volume of a folder of this machine, and its claim `models`."""
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": "inplace"}
    volume_spec = {**common, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}}
    claim_spec = {**common, "resources": {"requests": {"storage": "1Gi"}}}
    claim_metadata = {"name": "models", "namespace": NAMESPACE}
    return (
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "models"}, "spec": volume_spec},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": claim_metadata, "spec": claim_spec},
    )


def build_source(path: str) -> dict[str, Any]:
    return {"source": {"persistentVolumeClaim": {"claimName": "models", "path": path}}}


def build_resource() -> KubeObject:
    return {
        "apiVersion": API,
        "kind": "SpeculativeDeployment",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "replicas": REPLICAS,
            "model": build_source("target"),
            "engine": {
                "image": "vllm/vllm-openai:v0.33.0",
                "args": ["--max-model-len=8192"],
                "podTemplate": {"metadata": {"annotations": {PROCESSLESS_ANNOTATION: "true"}}, "spec": {}},
            },
            "drafter": build_source(OWN_DRAFTER),
            "rollout": {"inPlace": {"mode": "Required", "pods": TRIAL_PODS, "minDuration": "0s"}},
        },
    }


@contextlib.asynccontextmanager
async def serve_pods(lab: Lab, folder: Path) -> AsyncIterator[None]:
    """Serve the endpoints and metrics of all pods while the block runs."""
    command = [*lab_command_prefix(lab), sys.executable, "-m", "benchmarks._inplace_fleet_pods"]
    command += [str(folder / "metrics.sock"), str(METRICS_PORT), str(folder)]
    with (folder / "pods.log").open("ab") as log:
        server = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        assert await server.stdout.readline() == b"serves\n"
        yield
    finally:
        server.stdin.close()
        await asyncio.wait_for(server.wait(), 60)


if __name__ == "__main__":
    print(json.dumps(measure()))
