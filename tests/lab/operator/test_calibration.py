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
from aerie.manifests import calibration_config_map
from aerie_lab.engine.background import BackgroundTraffic
from aerie_lab.engine.traffic import TrafficTarget
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.test_canary import PATIENCE, RATE, answers, resource

NAME = calibration_config_map.calibration_config_map_name("chat")


def written(namespace: Namespace) -> BaselineCalibration | None:
    """What is written of the resource's stable pods."""
    found = next((one for one in namespace.list_all("configmaps") if one["metadata"]["name"] == NAME), None)
    return None if found is None else BaselineCalibration.unpack(found["data"][calibration_config_map.CALIBRATION_KEY])


def a_day_later(calibration: BaselineCalibration) -> BaselineCalibration:
    """The same pods after a day's worth of blocks, for which a test has no time."""
    chance = random.Random(1)  # noqa: S311 - no secrets
    for _ in range(FULL_TRUST_BATCHES * BLOCKS_PER_BATCH):
        pods = {}
        for name in calibration.deviation_histories[ACCEPTANCE_LENGTH].pods:
            accepted, seconds = 2000 * chance.gauss(1.5, 0.1), chance.gauss(1, 0.1)
            pods[name] = EngineCounts(
                drafts=2000,
                accepted_tokens=accepted,
                decode_tokens=4000,
                decode_seconds=40 * seconds,
                output_tokens=4100,
                finished_requests=100,
                first_tokens=100,
                first_token_seconds=10 * seconds,
                timed_requests=100,
                request_steps=4000 / chance.gauss(2.5, 0.1),
                iterations=500,
            )
        block = ClosedBlock(
            calibration.last_block_end_time,
            calibration.last_block_end_time + calibration.plan.block_seconds,
            None,
            ArmCounts(len(pods), EngineCounts(), None, pods),
        )
        calibration = calibration.add_block(block, BlockRule(pods_per_minimum=1))
    return calibration


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
            lambda: (written(namespace) or first).block_count >= 2 * first.block_count,
            "and again when it has doubled",
            timeout_seconds=PATIENCE,
        )
        assert inside.end(signal.SIGKILL) == -signal.SIGKILL
        known = written(namespace)
        assert known is not None
        assert all(
            name.startswith(f"chat-{status['stable']['revision']}-") for name in known.deviation_histories[ACCEPTANCE_LENGTH].pods
        )
        day = a_day_later(known)
        data = {
            calibration_config_map.BLOCK_COUNT_KEY: str(day.block_count),
            calibration_config_map.CALIBRATION_KEY: day.pack(),
        }
        namespace.kubectl("patch", "configmap", NAME, "--type=merge", "--patch", json.dumps({"data": data}))
        inside.start()
        namespace.apply(resource(host, "worse"))
        begun = specdep(lambda s: s.get("analysis"), "another drafter is analyzed", PATIENCE)["status"]["analysis"]
    assert begun["calibrationBlocks"] >= FULL_TRUST_BATCHES * BLOCKS_PER_BATCH
    assert 1 <= begun["varianceInflation"] < 3
    kept = written(namespace)
    assert kept is not None
    assert kept.block_count >= day.block_count, "nothing that was known is lost"
    assert inside.end() == 0
