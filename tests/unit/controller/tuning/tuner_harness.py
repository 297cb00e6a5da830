"""A tuner in virtual time, the resource that it tracks, and a worker that decides immediately.

Guarantees: nothing but the test adds samples, and a decision takes no time.
Not guaranteed: what a real worker would recommend.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.controller.clock import Clock
from aerie.controller.scraping.targets import EngineEndpoint
from aerie.controller.tuning.tuner import Tuner
from aerie.controller.tuning.worker_client import TuningWorkerClient, TuningWorkerError
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.sample import Counters, Gauges, Sample
from aerie.engine.speculation import Static
from aerie.manifests import preflight_job, tuning_config_map
from aerie.tuning.recommendation import Recommendation
from aerie.tuning.worker.codec import pack_telemetry
from aerie.tuning.worker.protocol import DecisionRequest, DecisionResponse
from tests.snapshots import build_snapshot
from tests.unit.controller.scraped import deployment, pod
from tests.unit.tuning.windows import K3, window

CHAT = NamespacedName("default", "chat")
T0 = datetime(2026, 11, 1, tzinfo=UTC)
MINUTE = 60.0
INTERVAL = 30 * MINUTE
SETTING = {"mode": "Static", "numSpeculativeTokens": 3}
ZERO = window(K3, 1.0, 0.01) - window(K3, 1.0, 0.01)
BUSY = window(K3, 8.0, 0.01)
"""Counters of one pod in a minute."""


class VirtualClock(Clock):
    """A clock that follows the time of the event loop."""

    def now(self) -> datetime:
        return T0 + timedelta(seconds=asyncio.get_running_loop().time())


class FakeTuningWorker(TuningWorkerClient):
    """A worker that returns the configured action immediately."""

    def __init__(self) -> None:
        super().__init__(("false",))
        self.requests: list[DecisionRequest] = []
        self.action = "Hold"
        self.error = ""

    async def request_decision(self, request: DecisionRequest) -> DecisionResponse:
        self.requests.append(request)
        if self.error:
            raise TuningWorkerError(self.error)
        setting = Static(5) if self.action in ("Change", "Explore") else None
        recommendation = Recommendation(request.revision, request.now, self.action, setting, None, "because.")  # type: ignore[arg-type]
        return DecisionResponse(recommendation, "all of it", pack_telemetry(request.merged_telemetry()))

    async def close(self) -> None:
        pass


def resource(
    mode: str = "Auto",
    *,
    image: str = "vllm/vllm-openai:v0.33.0",
    version: str | None = None,
    args: tuple[str, ...] = (),
    tuning_fields: Any = None,
    **status: Any,
) -> SpeculativeDeployment:
    arm = {"revision": "r1", "setting": {"mode": "Static", "numSpeculativeTokens": 3}}
    return SpeculativeDeployment.from_dict(
        {
            "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat"},
            "spec": {
                "replicas": 2,
                "model": {"source": {"persistentVolumeClaim": {"claimName": "models"}}},
                "drafter": {"source": {"persistentVolumeClaim": {"claimName": "drafters"}}},
                "engine": {"image": image, "args": list(args), **({"version": version} if version else {})},
                "speculation": {"tuning": {"mode": mode, **(tuning_fields or {})}},
            },
            "status": {"stable": arm, **status},
        }
    )


class TunerHarness:
    """A tuner, and a resource that it tracks."""

    def __init__(self) -> None:
        self.worker, self.notified_at, self.outcomes = FakeTuningWorker(), list[float](), Counter[str]()
        self.unavailable_reason = ""
        self.tuner = Tuner(self._notify, self._count_outcome, lambda _: self.unavailable_reason, VirtualClock(), self.worker)
        self.counters: dict[str, Counters] = {}
        self.children: dict[str, dict[str, Any]] = {}

    def _notify(self, key: NamespacedName) -> None:
        assert key == CHAT
        self.notified_at.append(asyncio.get_running_loop().time())

    def _count_outcome(self, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.outcomes[outcome] += 1

    def track(self, tracked_resource: SpeculativeDeployment, *revisions: SpeculativeDeployment) -> None:
        """Track the resource; `revisions` are the specs of r1, r2, ..."""
        for number, revision_spec in enumerate(revisions or (tracked_resource,), 1):
            config_map = preflight_job.build_preflight_config_map(revision_spec, f"r{number}", {})
            self.children[f"r{number}"] = config_map
        children = (deployment(), *self.children.values())
        pods = (pod(), pod(1, address="10.0.0.2"))
        self.tuner.track(CHAT, build_snapshot(tracked_resource, children, pods=pods), tracked_resource.status or Status())

    def store_tuning_record(self) -> None:
        tuning_record = self.tuner.tuning_record(CHAT, "uid-chat")
        assert tuning_record is not None
        config_map = tuning_config_map.render_tuning_config_map("chat", tuning_record)
        config_map["metadata"] |= {"ownerReferences": [{"controller": True, "uid": "uid-chat"}]}
        self.children["tuning"] = config_map

    def record_sample(
        self, counters: Counters, *, number: int = 0, deployment_name: str = "chat-r1", run: str = "c1", **gauges: Any
    ) -> None:
        """Record a sample of a pod, with the counters added since the last one."""
        name = f"{deployment_name}-hash-{number}"
        self.counters[name] = self.counters.get(name, ZERO) + counters
        sample = Sample(self.counters[name], Gauges(1.0, gauges.get("waiting", 0.0), 0.1, 1000.0), frozenset({"0"}))
        sampled_at = self.tuner._clock.now().timestamp()
        self.tuner.record_sample(
            CHAT, name, EngineEndpoint("http://10.0.0.1:8000/metrics", deployment_name, run), sampled_at, sample, 60.0
        )

    async def run_traffic(self, seconds: float, counters: Counters = BUSY, interval: float = 60.0, **sample_options: Any) -> None:
        for _ in range(round(seconds / interval)):
            self.record_sample(counters, **sample_options)
            await asyncio.sleep(interval)

    async def __aenter__(self) -> Self:
        self.running = asyncio.create_task(self.tuner.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    @property
    def recommendation(self) -> Recommendation:
        recommendation = self.tuner.recommendation(CHAT, "uid-chat")
        assert recommendation is not None
        return recommendation
