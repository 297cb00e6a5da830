"""From windows to what a person sees: what the tuner says reaches the status and its ConfigMap by passes, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

from aerie.controller.scraping.targets import EngineEndpoint
from aerie.controller.tuning.tuner import Tuner
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.sample import Gauges, Sample
from aerie.manifests.tuning_config_map import TuningRecord
from tests.unit.controller.conftest import Run
from tests.unit.controller.test_reconciler import CHAT, Operator, settled
from tests.unit.controller.test_tuner import BUSY, INTERVAL, ZERO, Fake, Virtual

PLACE = ("ConfigMap", "chat-aerie-tuning")


async def lived(operator: Operator, decider: Fake, seconds: float) -> list[NamespacedName]:
    """Minutes of traffic of its first stable pod, with a tuner that tells by `told`."""
    told: list[NamespacedName] = []
    tuner = operator.reconciler.tuner = Tuner(told.append, clock=Virtual(), worker=decider)
    await operator.reconciler.reconcile(CHAT)
    revision = operator.server.objects["SpeculativeDeployment", "chat"]["status"]["stable"]["revision"]
    deciding, counters = asyncio.create_task(tuner.run()), ZERO
    for _ in range(round(seconds / 60)):
        counters = counters + BUSY
        sample = Sample(counters, Gauges(1.0, 0.0, 0.1, 1000.0), frozenset({"0"}))
        target = EngineEndpoint("http://10.0.0.1:8000/metrics", f"chat-{revision}", "c1")
        now = tuner._clock.now().timestamp()
        tuner.record_sample(CHAT, f"chat-{revision}-0", target, now, sample, 60.0)
        await asyncio.sleep(60.0)
    deciding.cancel()
    await asyncio.gather(deciding, return_exceptions=True)
    return told


def status_of(operator: Operator) -> dict[str, Any]:
    found: dict[str, Any] = operator.server.objects["SpeculativeDeployment", "chat"]["status"]
    return found


def test_an_advice_reaches_the_status_and_what_is_known_its_config_map(run: Run) -> None:
    async def story() -> None:
        operator, decider = await settled(), Fake()
        decider.action = "Hold"
        told = await lived(operator, decider, 1.2 * INTERVAL)
        assert told == [CHAT]
        operator.server.calls.clear()
        await operator.settle()
        assert "APPLY ConfigMap chat-aerie-tuning" in operator.server.writes
        kept = TuningRecord.from_data(operator.server.objects[PLACE]["data"])
        assert kept is not None
        assert kept.explanation == "all of it"
        conditions = {one["type"]: one for one in status_of(operator)["conditions"]}
        assert conditions["SpeculationTuned"]["status"] == "True"
        operator.server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert operator.server.calls == [], "and then nothing more is written"

    run(story())


def test_the_next_operator_knows_it_and_mode_off_forgets_it(run: Run) -> None:
    async def story() -> None:
        operator = await settled()
        await lived(operator, Fake(), 1.2 * INTERVAL)
        await operator.settle()
        known = operator.reconciler.tuner.tuning_record(
            CHAT, operator.server.objects["SpeculativeDeployment", "chat"]["metadata"]["uid"]
        )
        next_one = Operator(operator.server)
        next_one.reconciler.tuner = Tuner(lambda _: None, clock=Virtual(), worker=Fake())
        operator.server.calls.clear()
        await next_one.list()
        await next_one.settle()
        assert operator.server.writes == []
        uid = operator.server.objects["SpeculativeDeployment", "chat"]["metadata"]["uid"]
        recalled = next_one.reconciler.tuner.tuning_record(CHAT, uid)
        assert recalled is not None
        assert known is not None
        assert recalled.telemetry == known.telemetry
        operator.server.edit(speculation={"numSpeculativeTokens": 3, "tuning": {"mode": "Off"}})
        await next_one.settle()
        assert PLACE not in operator.server.objects

    run(story())
