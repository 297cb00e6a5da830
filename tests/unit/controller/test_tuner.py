"""Input of the tuner, the times of its decisions, and decisions without evidence. Time is virtual, and so are decisions,
except in the tests of the real process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest

from aerie.api import SpeculativeDeployment
from aerie.api.rollout import CanarySpec
from aerie.api.status import Status
from aerie.controller.clock import Clock
from aerie.controller.scraping.targets import EngineEndpoint
from aerie.controller.tuning.startup_time import median_startup_seconds
from aerie.controller.tuning.tuner import Tuner
from aerie.controller.tuning.worker_client import TuningWorkerClient, TuningWorkerError
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.sample import Counters, Gauges, Sample
from aerie.engine.speculation import Off, Static
from aerie.manifests import preflight_job, tuning_config_map
from aerie.tuning.recommendation import Recommendation
from aerie.tuning.telemetry import TelemetryScale, TuningTelemetry
from aerie.tuning.worker.codec import pack_telemetry
from aerie.tuning.worker.protocol import DecisionRequest, DecisionResponse
from tests.golden import Messages
from tests.snapshots import build_snapshot
from tests.unit.controller.conftest import Run
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


# ----------------------------------------------------------------------------------------------------------- times of decisions
def test_tuner_decides_once_per_interval_on_all_new_telemetry(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource())
            await harness.run_traffic(2.5 * INTERVAL)
            assert [request.current_setting for request in harness.worker.requests] == [Static(3)] * 2
            first, second = (request.new_telemetry for request in harness.worker.requests)
            telemetry = harness.worker.requests[1].merged_telemetry()
            windows = sum(cell.windows for cell in telemetry.cells.values())
            assert windows == sum(cell.windows for new_telemetry in (first, second) for cell in new_telemetry.cells.values())
            assert 50 <= windows <= 70
            assert harness.outcomes == {"hold": 2}
            assert len(harness.notified_at) == 2
            assert harness.recommendation.revision == "r1"
            tuning_record = harness.tuner.tuning_record(CHAT, "uid-chat")
            assert tuning_record is not None
            assert (tuning_record.explanation, Recommendation.from_dict(json.loads(tuning_record.recommendation))) == (
                "all of it",
                harness.recommendation,
            )

    run(scenario())


def test_only_a_canary_with_reuse_borrows_a_replica(run: Run) -> None:
    async def scenario() -> None:
        for canary, borrowed in (({}, 0), ({"capacity": "Reuse"}, 1), ({"capacity": "Reuse", "control": "Stable"}, 1)):
            async with TunerHarness() as harness:
                tracked_resource = resource()
                rollout = tracked_resource.spec.rollout.model_copy(update={"canary": CanarySpec.from_dict(canary)})
                harness.track(
                    tracked_resource.model_copy(update={"spec": tracked_resource.spec.model_copy(update={"rollout": rollout})})
                )
                await harness.run_traffic(1.2 * INTERVAL)
                assert [request.borrowed_replicas for request in harness.worker.requests] == [borrowed], (
                    "of two replicas one stays in any case"
                )

    run(scenario())


def test_completed_exploration_causes_a_decision_immediately(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource())
            await harness.run_traffic(1.3 * INTERVAL)
            assert len(harness.worker.requests) == 1
            now = harness.tuner._clock.now()
            arms = {"fromSetting": SETTING, "toSetting": SETTING | {"numSpeculativeTokens": 5}, "revision": "r2"}
            trial = arms | {"purpose": "Explore", "result": "Explored", "message": "It was measured."}
            times = {"startTime": T0.isoformat(), "completionTime": now.isoformat()}
            speculation = {"current": SETTING, "trials": [trial | times], "explorationTimes": [now.isoformat()]}
            harness.track(resource(speculation=speculation))
            await harness.run_traffic(0.2 * INTERVAL)
            assert [request.history.exploration_times for request in harness.worker.requests] == [(), (now.timestamp(),)]
            await harness.run_traffic(INTERVAL)
            assert len(harness.worker.requests) == 3, "and then once per interval, as before"

    run(scenario())


def test_exploration_causes_frequent_decisions(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource())
            await harness.run_traffic(1.3 * INTERVAL)
            assert [request.explored_setting for request in harness.worker.requests] == [None]
            now = harness.tuner._clock.now().isoformat()
            setting = SETTING | {"numSpeculativeTokens": 5}
            trial = {"setting": setting, "purpose": "Explore", "revision": "r2", "specRevision": "r1", "startTime": now}
            canary = {"revision": "r2", "setting": setting, "change": "K=5", "startTime": now, "readyTime": now}
            speculation = {"current": SETTING, "trial": trial}
            harness.track(resource(speculation=speculation, canary=canary | {"phase": "WarmingUp"}))
            await harness.run_traffic(0.3 * INTERVAL)
            assert len(harness.worker.requests) == 1
            harness.track(resource(speculation=speculation, canary=canary | {"phase": "Analyzing"}))
            await harness.run_traffic(0.45 * INTERVAL)
            assert [request.explored_setting for request in harness.worker.requests[1:]] == [Static(5)] * 4
            harness.track(resource(speculation=speculation | {"trial": trial | {"purpose": "Improve"}}, canary=canary))
            await harness.run_traffic(1.2 * INTERVAL)
            assert [request.explored_setting for request in harness.worker.requests[5:]] == [None, None]

    run(scenario())


def test_request_has_spec_status_and_telemetry(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            tuning_fields = {
                "maxSpeculativeTokens": 5,
                "cooldownDuration": "1h",
                "historyWindow": "12h",
                "decisionInterval": "10m",
                "slo": {"timePerOutputToken": "40ms"},
            }
            speculation = {"current": {"mode": "Static", "numSpeculativeTokens": 3}, "lastChangeTime": "2026-10-31T00:00:00Z"}
            harness.track(resource(args=("--max-num-seqs=64",), tuning_fields=tuning_fields, speculation=speculation))
            await harness.run_traffic(700.0, waiting=3.0)
            (request,) = harness.worker.requests
            assert (
                request.revision,
                request.max_speculative_tokens,
                request.replicas,
                request.queued_requests,
                request.borrowed_replicas,
            ) == ("r1", 5, 2, 3.0, 0)
            assert (request.engine.version, request.engine.arguments) == ("0.33.0", ("--max-num-seqs=64",))
            assert (request.policy.cooldown_seconds, request.policy.cooldown_after_rollback_seconds) == (3600.0, 4 * 3600.0)
            assert (request.policy.exploration_seconds, request.horizon, request.scale) == (
                600.0,
                12 * 3600.0,
                TelemetryScale.from_decision_interval(600.0, 12 * 3600.0),
            )
            assert request.objectives.time_per_output_token == pytest.approx(0.04)
            assert request.history.changed_at == datetime(2026, 10, 31, tzinfo=UTC).timestamp()
            decoded = DecisionRequest.from_line(request.to_line())
            assert replace(decoded, new_telemetry=request.new_telemetry) == request
            assert decoded.new_telemetry.cells.keys() == request.new_telemetry.cells.keys()

    run(scenario())


@pytest.mark.parametrize("mode", ["Recommend", "Off"])
def test_resource_with_mode_off_is_not_tracked(run: Run, mode: str) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource(mode))
            await harness.run_traffic(1.2 * INTERVAL)
            assert len(harness.worker.requests) == (mode == "Recommend")
            harness.track(resource("Off"))
            assert harness.tuner.recommendation(CHAT, "uid-chat") is None
            assert harness.tuner.tuning_record(CHAT, "uid-chat") is None

    run(scenario())


def test_next_operator_continues_from_the_stored_record(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource())
            await harness.run_traffic(1.2 * INTERVAL)
            harness.store_tuning_record()
            async with TunerHarness() as next_harness:
                next_harness.children = dict(harness.children)
                next_harness.track(resource())
                assert next_harness.recommendation == harness.recommendation
                await next_harness.run_traffic(1.3 * INTERVAL)
                (request,) = next_harness.worker.requests
                assert request.packed_telemetry
                assert sum(cell.windows for cell in request.merged_telemetry().cells.values()) > sum(
                    cell.windows for cell in request.new_telemetry.cells.values()
                )
            async with TunerHarness() as harness_of_other_engine:
                harness_of_other_engine.children = dict(harness.children)
                harness_of_other_engine.track(resource(image="vllm/vllm-openai:v0.32.0"))
                assert harness_of_other_engine.tuner.tuning_record(CHAT, "uid-chat") is None, "it is of other engines"

    run(scenario())


# ------------------------------------------------------------------------------------------------------------ without evidence
def test_no_requests_cause_no_decision_and_store_no_telemetry(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource())
            await harness.run_traffic(3.5 * INTERVAL, ZERO)
            assert harness.worker.requests == []
            assert harness.recommendation.action == "Insufficient"
            assert "no requests" in harness.recommendation.reason
            assert len(harness.notified_at) == 1, "an unchanged recommendation causes no reconcile"
            assert harness.outcomes == {"no_data": 3}
            assert harness.tuner._sessions[CHAT].pending_telemetry is None

    run(scenario())


def test_recommendation_without_metrics_names_the_reason(run: Run, messages: Messages) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.worker.action = "Change"
            harness.track(resource())
            await harness.run_traffic(1.2 * INTERVAL)
            assert harness.recommendation.setting == Static(5)
            harness.unavailable_reason = "http://prometheus:9090 cannot be reached."
            await asyncio.sleep(2 * INTERVAL)
            assert harness.recommendation.action == "Insufficient"
            messages.check("no metrics", harness.recommendation.reason)
            tuning_record = harness.tuner.tuning_record(CHAT, "uid-chat")
            assert tuning_record is not None, "earlier telemetry is kept"

    run(scenario())


@pytest.mark.parametrize(
    ("counters", "name"),
    [
        (window(Static(5), 8.0, 0.01), "K changed by hand"),
        (window(Off(), 8.0, 0.01), "speculation switched off by hand"),
    ],
)
def test_engine_with_another_setting_is_no_evidence(run: Run, messages: Messages, counters: Counters, name: str) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource())
            harness.counters["chat-r1-hash-0"] = counters - counters
            await harness.run_traffic(1.2 * INTERVAL, counters)
            assert harness.worker.requests == []
            assert harness.recommendation.action == "Insufficient"
            messages.check(name, harness.recommendation.reason)

    run(scenario())


def test_windows_over_restarts_and_gaps_are_excluded_and_counted(run: Run, messages: Messages) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource())
            await harness.run_traffic(600.0)
            harness.counters.clear()  # the counters restart
            await harness.run_traffic(600.0, run="c2")
            harness.counters["chat-r1-hash-0"] = ZERO
            await harness.run_traffic(120.0, run="c2")
            await asyncio.sleep(301.0)
            await harness.run_traffic(600.0, run="c2")
            (request,) = harness.worker.requests
            (restart, restarts), (gap, gaps) = request.new_telemetry.excluded_windows.most_common()
            assert (restarts, gaps) == (2, 1)
            messages.check("window over a restart", restart)
            messages.check("window over a gap", gap)

    run(scenario())


def test_short_windows_are_merged(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource())
            await harness.run_traffic(1.2 * INTERVAL, window(K3, 8.0, 0.01, seconds=5.0), interval=5.0)
            (request,) = harness.worker.requests
            windows = sum(cell.windows for cell in request.new_telemetry.cells.values())
            assert 150 <= windows <= 200, "of ten seconds each"

    run(scenario())


def test_no_decision_without_a_record_of_the_engines(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.tuner.track(CHAT, build_snapshot(resource(), (deployment(),), pods=(pod(),)), resource().status or Status())
            await harness.run_traffic(1.2 * INTERVAL)
            assert harness.worker.requests == []
            assert harness.recommendation.reason.startswith("there is no record of the engines")

    run(scenario())


# ----------------------------------------------------------------------------------------------------------------- counted pods
@pytest.mark.parametrize(
    ("hardware_mismatch", "settings"), [(None, {"3", "5"}), ("the canary's pods run on A100 (1 pod), ...", {"3"})]
)
def test_canary_on_other_hardware_is_no_evidence(run: Run, hardware_mismatch: str | None, settings: set[str]) -> None:
    async def scenario() -> None:
        arm = {
            "revision": "r2",
            "change": "K=5",
            "startTime": "2026-11-01T00:00:00Z",
            "setting": {"mode": "Static", "numSpeculativeTokens": 5},
        }
        analysis = {
            "parameters": {},
            "verdict": "Continue",
            **({"hardwareMismatch": hardware_mismatch} if hardware_mismatch else {}),
        }
        async with TunerHarness() as harness:
            harness.track(resource(canary={**arm, "control": {"revision": "r1"}}, analysis=analysis), resource(), resource())
            canary_counters = window(Static(5), 8.0, 0.01)
            harness.counters["chat-r2-hash-0"] = canary_counters - canary_counters
            for _ in range(40):
                harness.record_sample(BUSY)
                harness.record_sample(BUSY, deployment_name="chat-r1-control")
                harness.record_sample(canary_counters, deployment_name="chat-r2")
                await asyncio.sleep(60.0)
            (request,) = harness.worker.requests
            assert {str(block.setting) for block in request.new_telemetry.blocks()} == settings
            assert any("control" in key.replica for key in request.new_telemetry.cells) == (hardware_mismatch is None)

    run(scenario())


def test_only_arms_with_the_same_engine_count(run: Run) -> None:
    async def scenario() -> None:
        other_engines = (resource(image="vllm/vllm-openai:v0.32.0"), resource(version="0.34.0"))
        for other, settings in ((resource(), 2), *((other_engine, 1) for other_engine in other_engines)):
            canary: dict[str, Any] = {
                "canary": {
                    "revision": "r2",
                    "change": "K=5",
                    "startTime": "2026-11-01T00:00:00Z",
                    "setting": {"mode": "Static", "numSpeculativeTokens": 5},
                    "control": {"revision": "r1"},
                }
            }
            async with TunerHarness() as harness:
                harness.track(resource(**canary), resource(), other)
                canary_counters = window(Static(5), 8.0, 0.01)
                harness.counters["chat-r2-hash-0"] = canary_counters - canary_counters
                for _ in range(40):
                    harness.record_sample(BUSY)
                    harness.record_sample(BUSY, deployment_name="chat-r1-control")
                    harness.record_sample(canary_counters, deployment_name="chat-r2")
                    await asyncio.sleep(60.0)
                (request,) = harness.worker.requests
                assert {str(block.setting) for block in request.new_telemetry.blocks()} == (
                    {"3", "5"} if settings == 2 else {"3"}
                )
                assert {key.replica for key in request.new_telemetry.cells} >= {"chat-r1-hash-0"}

    run(scenario())


@pytest.mark.parametrize("engine", [{"image": "vllm/vllm-openai:v0.32.0"}, {"version": "0.34.0"}])
def test_telemetry_ends_with_its_engine_and_not_with_its_setting(run: Run, engine: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource())
            await harness.run_traffic(1.2 * INTERVAL)
            arm = {"revision": "r2", "setting": {"mode": "Static", "numSpeculativeTokens": 5}}
            harness.track(resource(stable=arm), resource(), resource())
            assert harness.tuner.tuning_record(CHAT, "uid-chat") is not None
            arm = {"revision": "r3", "setting": {"mode": "Static", "numSpeculativeTokens": 5}}
            newer_engine = resource(**engine)
            harness.track(resource(stable=arm), resource(), resource(), newer_engine)
            assert harness.tuner.tuning_record(CHAT, "uid-chat") is None
            assert harness.tuner.recommendation(CHAT, "uid-chat") is None

    run(scenario())


# --------------------------------------------------------------------------------------------------------------------- failures
def test_failed_decision_is_retried_on_all_telemetry(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.worker.error = "it ended with status -9"
            harness.track(resource())
            await harness.run_traffic(1.2 * INTERVAL)
            failure_count = len(harness.worker.requests)
            assert failure_count >= 2
            assert harness.outcomes == {"failed": failure_count}
            assert harness.notified_at == []
            harness.worker.error = ""
            await harness.run_traffic(0.5 * INTERVAL)
            assert harness.outcomes["hold"] == 1
            windows = sum(cell.windows for cell in harness.worker.requests[-1].new_telemetry.cells.values())
            assert windows >= 30, "windows of the failed decisions are included"

    run(scenario())


def test_startup_time_is_the_median_of_first_starts() -> None:
    def build_started_pod(seconds: int, **engine: Any) -> dict[str, Any]:
        started_pod = pod()
        container_status = {"state": {"running": {"startedAt": "2026-11-01T00:00:00Z"}}, **engine}
        started_pod["status"]["containerStatuses"][0] |= container_status
        ready_at = (T0 + timedelta(seconds=seconds)).isoformat()
        started_pod["status"]["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": ready_at}]
        return started_pod

    assert (
        median_startup_seconds(
            (build_started_pod(100), build_started_pod(200), build_started_pod(900), build_started_pod(1, restartCount=2), pod())
        )
        == 200.0
    )
    assert median_startup_seconds((pod(),)) is None


# ------------------------------------------------------------------------------------------------------------- the real process
def build_request(**changes: Any) -> DecisionRequest:
    from aerie.tuning.decision.policy import LatencyObjectives, TrialHistory, TuningPolicy
    from aerie.tuning.worker.protocol import EngineFacts
    from tests.unit.tuning.windows import spread, telemetry

    new_telemetry = telemetry([K3], lambda b, k: 0.01 + 5e-5 * b * (k + 1), spread(2, 40, 60))
    request = DecisionRequest(
        *(
            "r1",
            3600.0,
            K3,
            EngineFacts("0.33.0"),
            7,
            4,
            0.0,
            0,
            2,
            (),
            None,
            LatencyObjectives(),
            TrialHistory(),
            TuningPolicy(),
        ),
        *(new_telemetry.horizon, new_telemetry.scale, "", new_telemetry),
    )
    return replace(request, **changes)


def run_in_real_time(work: Any) -> None:
    asyncio.run(work)


@pytest.mark.slow
def test_worker_process_decides_and_exits_when_idle() -> None:
    async def scenario() -> None:
        worker = TuningWorkerClient(timeout_seconds=300.0, idle_timeout_seconds=0.0)
        try:
            first = await worker.request_decision(build_request())
            assert first.recommendation.action in ("Hold", "Change", "Explore")
            assert first.recommendation.revision == "r1"
            assert "Evidence" in first.explanation
            process = worker._process
            assert process is not None
            async with asyncio.timeout(300.0):
                assert await process.wait() == 0, "it ends with its input"
            second = await worker.request_decision(
                build_request(packed_telemetry=first.packed_telemetry, new_telemetry=TuningTelemetry())
            )
            assert second.recommendation == first.recommendation, "the same telemetry, from its text"
            without_evidence = await worker.request_decision(build_request(new_telemetry=TuningTelemetry()))
            assert without_evidence.recommendation.action == "Insufficient"
            with pytest.raises(TuningWorkerError, match="failed: "):
                await worker.request_decision(build_request(engine=replace(build_request().engine, version="none")))
        finally:
            await worker.close()

    run_in_real_time(scenario())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.stdin.readline(); print('nonsense')", "failed"),
        ("import sys; sys.exit(3)", "failed|cannot be started"),
        ("import time; time.sleep(600)", "did not respond within"),
        ("import sys; sys.stdin.readline(); sys.stdout.write('x' * 5_000_000); sys.stdout.flush()", "failed"),
    ],
    ids=["invalid response", "exits", "hangs", "endless response"],
)
def test_worker_process_with_an_invalid_response_is_killed(program: str, message: str) -> None:
    async def scenario() -> None:
        worker = TuningWorkerClient((sys.executable, "-c", program), timeout_seconds=1.0 if "sleep" in program else 300.0)
        with pytest.raises(TuningWorkerError, match=message):
            await worker.request_decision(build_request(new_telemetry=TuningTelemetry()))
        assert worker._process is None

    run_in_real_time(scenario())


def test_missing_worker_command_is_an_error() -> None:
    async def scenario() -> None:
        with pytest.raises(TuningWorkerError, match="cannot be started"):
            await TuningWorkerClient(("/nonexistent",)).request_decision(build_request(new_telemetry=TuningTelemetry()))

    run_in_real_time(scenario())


def test_request_has_failed_trials_and_surge_pods(run: Run) -> None:
    ended_at = T0.isoformat()
    failure = {
        "setting": SETTING | {"numSpeculativeTokens": 5},
        "reason": "Failed",
        "failureCount": 2,
        "specRevision": "r1",
        "lastStartTime": ended_at,
        "lastCompletionTime": ended_at,
    }
    without_capacity = failure | {
        "setting": SETTING | {"numSpeculativeTokens": 7},
        "reason": "InsufficientCapacity",
        "requiredPods": 4,
    }
    speculation = {
        "current": SETTING,
        "consecutiveFailures": 2,
        "failures": [failure, without_capacity],
        "lastRollbackTime": ended_at,
    }

    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.track(resource(speculation=speculation))
            await harness.run_traffic(1.3 * INTERVAL)
            (request,) = harness.worker.requests
            assert (request.surge_pods, request.history.consecutive_failures) == (2, 2)
            (failed_trial,) = request.failed_trials
            assert (failed_trial.setting, failed_trial.was_compared) == (Static(5), False)
            assert failed_trial.backoff_until == (T0 + timedelta(hours=48)).timestamp()
            assert DecisionRequest.from_line(request.to_line()).failed_trials == request.failed_trials

    run(scenario())


def test_no_decision_for_a_spec_without_draft_tokens(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            tracked_resource = resource()
            speculation = tracked_resource.spec.speculation.model_copy(update={"num_speculative_tokens": 0})
            harness.track(
                tracked_resource.model_copy(
                    update={"spec": tracked_resource.spec.model_copy(update={"speculation": speculation})}
                )
            )
            await harness.run_traffic(1.3 * INTERVAL)
            assert harness.worker.requests == []
            assert harness.tuner.recommendation(CHAT, "uid-chat") is None

    run(scenario())
