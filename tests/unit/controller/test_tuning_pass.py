"""Recommendations of the tuner reach the status, and its telemetry the ConfigMap, by reconciles and by nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

from aerie.controller.scraping.targets import EngineEndpoint
from aerie.controller.tuning.tuner import Tuner
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.sample import Gauges, Sample
from aerie.manifests.tuning_config_map import TuningRecord
from tests.unit.controller.conftest import Run
from tests.unit.controller.test_reconciler import CHAT, Operator, start_settled_operator
from tests.unit.controller.test_tuner import BUSY, INTERVAL, ZERO, FakeTuningWorker, VirtualClock

TUNING_CONFIG_MAP = ("ConfigMap", "chat-aerie-tuning")


async def run_tuner(operator: Operator, worker: FakeTuningWorker, seconds: float) -> list[NamespacedName]:
    """Run a tuner on `seconds` of traffic of the first stable pod; return the notified keys."""
    notified_keys: list[NamespacedName] = []
    tuner = operator.reconciler.tuner = Tuner(notified_keys.append, clock=VirtualClock(), worker=worker)
    await operator.reconciler.reconcile(CHAT)
    revision = operator.server.objects["SpeculativeDeployment", "chat"]["status"]["stable"]["revision"]
    tuning, counters = asyncio.create_task(tuner.run()), ZERO
    for _ in range(round(seconds / 60)):
        counters = counters + BUSY
        sample = Sample(counters, Gauges(1.0, 0.0, 0.1, 1000.0), frozenset({"0"}))
        target = EngineEndpoint("http://10.0.0.1:8000/metrics", f"chat-{revision}", "c1")
        now = tuner._clock.now().timestamp()
        tuner.record_sample(CHAT, f"chat-{revision}-0", target, now, sample, 60.0)
        await asyncio.sleep(60.0)
    tuning.cancel()
    await asyncio.gather(tuning, return_exceptions=True)
    return notified_keys


def get_status(operator: Operator) -> dict[str, Any]:
    status: dict[str, Any] = operator.server.objects["SpeculativeDeployment", "chat"]["status"]
    return status


def test_recommendation_reaches_status_and_config_map(run: Run) -> None:
    async def scenario() -> None:
        operator, worker = await start_settled_operator(), FakeTuningWorker()
        worker.action = "Hold"
        notified_keys = await run_tuner(operator, worker, 1.2 * INTERVAL)
        assert notified_keys == [CHAT]
        operator.server.calls.clear()
        await operator.settle()
        assert "APPLY ConfigMap chat-aerie-tuning" in operator.server.writes
        tuning_record = TuningRecord.from_data(operator.server.objects[TUNING_CONFIG_MAP]["data"])
        assert tuning_record is not None
        assert tuning_record.explanation == "all of it"
        conditions = {condition["type"]: condition for condition in get_status(operator)["conditions"]}
        assert conditions["SpeculationTuned"]["status"] == "True"
        operator.server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.calls == [], "and then nothing more is written"

    run(scenario())


def test_next_operator_restores_telemetry_and_mode_off_deletes_it(run: Run) -> None:
    async def scenario() -> None:
        operator = await start_settled_operator()
        await run_tuner(operator, FakeTuningWorker(), 1.2 * INTERVAL)
        await operator.settle()
        stored_record = operator.reconciler.tuner.tuning_record(
            CHAT, operator.server.objects["SpeculativeDeployment", "chat"]["metadata"]["uid"]
        )
        next_operator = Operator(operator.server)
        next_operator.reconciler.tuner = Tuner(lambda _: None, clock=VirtualClock(), worker=FakeTuningWorker())
        operator.server.calls.clear()
        await next_operator.list()
        await next_operator.settle()
        assert operator.server.writes == []
        uid = operator.server.objects["SpeculativeDeployment", "chat"]["metadata"]["uid"]
        restored_record = next_operator.reconciler.tuner.tuning_record(CHAT, uid)
        assert restored_record is not None
        assert stored_record is not None
        assert restored_record.telemetry == stored_record.telemetry
        operator.server.edit(speculation={"numSpeculativeTokens": 3, "tuning": {"mode": "Off"}})
        await next_operator.settle()
        assert TUNING_CONFIG_MAP not in operator.server.objects

    run(scenario())
