"""What stable pods tell of themselves under traffic: it is written down, and an operator that begins goes on from it."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from typing import Any

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria import ACCEPTANCE_LENGTH
from aerie.analysis.measurement.blocks import ArmCounts, BlockRule, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts
from aerie.analysis.statistics.calibration import BLOCKS_PER_BATCH, FULL_TRUST_BATCHES
from aerie_lab.engine.background import BackgroundTraffic
from aerie_lab.engine.traffic import TrafficTarget
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.test_canary import PATIENCE, RATE, answers, resource

NAME = "chat-aerie-history"


def written(namespace: Namespace) -> BaselineCalibration | None:
    """What is written of the resource's stable pods."""
    found = next((one for one in namespace.list_all("configmaps") if one["metadata"]["name"] == NAME), None)
    return None if found is None else BaselineCalibration.unpack(found["data"]["memory"])


def a_day_later(memory: BaselineCalibration) -> BaselineCalibration:
    """The same pods after a day's worth of blocks, for which a test has no time."""
    chance = random.Random(1)  # noqa: S311 - no secrets
    for _ in range(FULL_TRUST_BATCHES * BLOCKS_PER_BATCH):
        pods = {}
        for name in memory.histories[ACCEPTANCE_LENGTH].pods:
            accepted, seconds = 2000 * chance.gauss(1.5, 0.1), chance.gauss(1, 0.1)
            pods[name] = EngineCounts(
                drafts=2000,
                accepted=accepted,
                decode_tokens=4000,
                decode_seconds=40 * seconds,
                output_tokens=4100,
                finished=100,
                first_tokens=100,
                first_seconds=10 * seconds,
                timed=100,
                request_steps=4000 / chance.gauss(2.5, 0.1),
                iterations=500,
            )
        block = ClosedBlock(
            memory.until, memory.until + memory.terms.block, None, ArmCounts(len(pods), EngineCounts(), None, pods)
        )
        memory = memory.add_block(block, BlockRule(pods_per_minimum=1))
    return memory


def test_what_stable_pods_told_outlives_a_killed_operator_and_the_next_analysis_goes_by_it(
    namespace: Namespace, inside: Any, specdep: Callable[..., dict[str, Any]]
) -> None:
    host = f"{namespace.name}.example"
    namespace.apply(resource(host, "eagle3"))
    status = specdep(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]
    url = namespace.lab.gateway_url or ""
    wait_until(lambda: answers(url, host), "the gateway answers")
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=120), RATE):
        first = wait_until(lambda: written(namespace), "what stable pods tell is written", timeout_seconds=PATIENCE)
        assert first is not None
        wait_until(
            lambda: (written(namespace) or first).blocks >= 2 * first.blocks,
            "and again when it has doubled",
            timeout_seconds=PATIENCE,
        )
        assert inside.end(signal.SIGKILL) == -signal.SIGKILL
        known = written(namespace)
        assert known is not None
        assert all(name.startswith(f"chat-{status['stable']['revision']}-") for name in known.histories[ACCEPTANCE_LENGTH].pods)
        day = a_day_later(known)
        data = {"blocks": str(day.blocks), "memory": day.pack()}
        namespace.kubectl("patch", "configmap", NAME, "--type=merge", "--patch", json.dumps({"data": data}))
        inside.start()
        namespace.apply(resource(host, "worse"))
        begun = specdep(lambda s: s.get("analysis"), "another drafter is analyzed", PATIENCE)["status"]["analysis"]
    assert begun["calibrationBlocks"] >= FULL_TRUST_BATCHES * BLOCKS_PER_BATCH
    assert 1 <= begun["varianceInflation"] < 3
    kept = written(namespace)
    assert kept is not None
    assert kept.blocks >= day.blocks, "nothing that was known is lost"
    assert inside.end() == 0
