"""What the tuner asks its worker: spec, status, failed trials, replicas and the startup time of engines."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aerie.api.rollout import CanarySpec
from aerie.controller.tuning.startup_time import median_startup_seconds
from aerie.engine.speculation import Static
from aerie.tuning.telemetry import TelemetryScale
from aerie.tuning.worker.protocol import DecisionRequest
from tests.unit.controller.conftest import Run
from tests.unit.controller.scraped import pod
from tests.unit.controller.tuning.tuner_harness import INTERVAL, SETTING, T0, TunerHarness, resource


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
