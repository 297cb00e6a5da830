"""The worker process: it decides, exits when idle, and is killed on an invalid response. Time is real."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import Any

import pytest

from aerie.controller.tuning.worker_client import TuningWorkerClient, TuningWorkerError
from aerie.tuning.telemetry import TuningTelemetry
from aerie.tuning.worker.protocol import DecisionRequest
from tests.unit.tuning.windows import K3


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
