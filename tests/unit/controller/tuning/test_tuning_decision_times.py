"""Times of the tuner's decisions: once per interval, sooner around an exploration, and none without a reason to decide."""

from __future__ import annotations

import json

import pytest

from aerie.api.status import Status
from aerie.engine.speculation import Static
from aerie.tuning.recommendation import Recommendation
from tests.snapshots import build_snapshot
from tests.unit.controller.conftest import Run
from tests.unit.controller.scraped import deployment, pod
from tests.unit.controller.tuning.tuner_harness import CHAT, INTERVAL, SETTING, T0, ZERO, TunerHarness, resource


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


# ------------------------------------------------------------------------------------------------------------------- no decision
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


def test_no_decision_without_a_record_of_the_engines(run: Run) -> None:
    async def scenario() -> None:
        async with TunerHarness() as harness:
            harness.tuner.track(CHAT, build_snapshot(resource(), (deployment(),), pods=(pod(),)), resource().status or Status())
            await harness.run_traffic(1.2 * INTERVAL)
            assert harness.worker.requests == []
            assert harness.recommendation.reason.startswith("there is no record of the engines")

    run(scenario())
