"""Objects for tests of the scraper: a resource, its pods and their metrics, and a scraper that records its notifications."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.controller.scraping.prometheus import PrometheusAccess
from aerie.controller.scraping.scraper import Scraper
from aerie.controller.work_queue import NamespacedName
from aerie.rollout.facts.arm_metrics import ArmMetrics
from aerie.rollout.facts.snapshot import Snapshot

DATA = Path(__file__).parents[1] / "engine" / "data"
BEFORE, AFTER = ((DATA / f"vllm-0.32.0-ngram-{number}.prom").read_bytes() for number in (1, 2))
ARM_METRICS = ArmMetrics(acceptance_length=2.27, time_per_output_token=0.00356, time_to_first_token=0.0237)
"""Metrics of the window between BEFORE and AFTER."""
OLD = "2026-01-01T00:00:00Z"


def resource(name: str = "chat", interval: str = "15s", *, rolling: bool = False, **arm: Any) -> SpeculativeDeployment:
    stable = {"revision": "r1"} | arm
    canary = {"canary": {"revision": "r2", "change": "K=5", "startTime": OLD}} if rolling else {}
    return SpeculativeDeployment.from_dict(
        {
            "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
            "spec": {
                "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
                "engine": {"image": "vllm/vllm-openai:v0.33.0"},
                "metrics": {"scrapeInterval": interval},
            },
            "status": {"stable": stable, **canary},
        }
    )


def deployment(
    name: str = "chat", revision: str = "r1", uid: str | None = None, image: str = "vllm/vllm-openai:v0.33.0"
) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": f"{name}-{revision}",
            "labels": {"aerie.dev/name": name, "aerie.dev/revision": revision, "aerie.dev/control": "false"},
            "ownerReferences": [{"controller": True, "uid": uid or f"uid-{name}"}],
        },
        "spec": {"template": {"spec": {"containers": [{"name": "engine", "image": image}]}}},
    }


def pod(number: int = 0, name: str = "chat", revision: str = "r1", address: str = "10.0.0.1", **changes: Any) -> dict[str, Any]:
    pod_object: dict[str, Any] = {
        "metadata": {
            "name": f"{name}-{revision}-hash-{number}",
            "labels": {
                "aerie.dev/name": name,
                "aerie.dev/revision": revision,
                "aerie.dev/control": "false",
                "pod-template-hash": "hash",
            },
            "ownerReferences": [
                {"controller": True, "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"{name}-{revision}-hash"}
            ],
        },
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {
            "podIP": address,
            "containerStatuses": [{"name": "engine", "started": True, "containerID": "c1", "restartCount": 0}],
        },
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = pod_object
        for parent in parents:
            node = node[parent]
        node[last] = value
    return pod_object


class ScraperHarness:
    """A scraper with a transport; records notifications and outcomes."""

    def __init__(self, transport: httpx.AsyncBaseTransport, access: PrometheusAccess | None = None) -> None:
        self.notifications: list[tuple[float, NamespacedName]] = []
        self.outcomes: Counter[str] = Counter()
        self.scraper = Scraper(self._notify, self._count_outcome, transport, access=access)

    def _notify(self, key: NamespacedName) -> None:
        self.notifications.append((asyncio.get_running_loop().time(), key))

    def _count_outcome(self, outcome: str, _: float) -> None:
        self.outcomes[outcome] += 1

    def track_pods(self, observed: Snapshot) -> NamespacedName:
        """Scrape the pods of the resource from now on."""
        observed_resource = observed.resource
        key = NamespacedName("default", observed_resource.metadata.name)
        self.scraper.track(key, observed, observed_resource.status or Status())
        return key

    async def run_for(self, seconds: float) -> None:
        scraping = asyncio.create_task(self.scraper.run())
        await asyncio.sleep(seconds)
        scraping.cancel()
        await asyncio.gather(scraping, return_exceptions=True)
