"""Telemetry that counts as evidence: windows of complete counters, of pods with the setting, the engine and the hardware."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aerie.engine.metrics.sample import Counters
from aerie.engine.speculation import Off, Static
from tests.golden import Messages
from tests.unit.controller.conftest import Run
from tests.unit.controller.tuning.tuner_harness import BUSY, CHAT, INTERVAL, ZERO, TunerHarness, resource
from tests.unit.tuning.windows import K3, window


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


# ------------------------------------------------------------------------------------------------------------------ counted pods
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
