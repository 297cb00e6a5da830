"""Calibration on stable pods under traffic: it is stored, and a restarted operator continues with it."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria.criterion import ACCEPTANCE_LENGTH
from aerie.analysis.measurement.blocks import ArmCounts, BlockRule, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts
from aerie.analysis.statistics.calibration import BLOCKS_PER_BATCH, FULL_TRUST_BATCHES
from aerie.manifests import calibration_config_map
from aerie_lab.engine.load_generation.background import BackgroundTraffic
from aerie_lab.engine.load_generation.traffic import TrafficTarget
from aerie_lab.testing import Namespace, wait_until
from tests.lab.operator.test_canary import RATE, TIMEOUT_SECONDS, gateway_answers, resource

NAME = calibration_config_map.calibration_config_map_name("chat")


def stored_calibration(namespace: Namespace) -> BaselineCalibration | None:
    """Return the stored calibration of the resource's stable pods, or None."""
    config_map = next((item for item in namespace.list_all("configmaps") if item["metadata"]["name"] == NAME), None)
    return None if config_map is None else BaselineCalibration.unpack(config_map["data"][calibration_config_map.CALIBRATION_KEY])


def a_day_later(calibration: BaselineCalibration) -> BaselineCalibration:
    """Return the calibration of the same pods after a day's blocks, which would take a test too long."""
    rng = random.Random(1)  # noqa: S311 - no secrets
    for _ in range(FULL_TRUST_BATCHES * BLOCKS_PER_BATCH):
        pods = {}
        for name in calibration.deviations[ACCEPTANCE_LENGTH].pods:
            accepted, seconds = 2000 * rng.gauss(1.5, 0.1), rng.gauss(1, 0.1)
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
                request_steps=4000 / rng.gauss(2.5, 0.1),
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


@pytest.mark.nightly  # unit tests have the record and its readers
def test_calibration_survives_killed_operator_and_is_used(
    namespace: Namespace, inner_operator: Any, wait_for_status: Callable[..., dict[str, Any]]
) -> None:
    host = f"{namespace.name}.example"
    namespace.apply(resource(host, "eagle3"))
    status = wait_for_status(lambda s: s.get("phase") == "Ready", "it is Ready")["status"]
    url = namespace.lab.gateway_url or ""
    wait_until(lambda: gateway_answers(url, host), "the gateway answers")
    with BackgroundTraffic(TrafficTarget(url, "chat", host, timeout_seconds=120), RATE):
        first = wait_until(lambda: stored_calibration(namespace), "the calibration is stored", timeout_seconds=TIMEOUT_SECONDS)
        assert first is not None
        wait_until(
            lambda: (stored_calibration(namespace) or first).block_count >= 2 * first.block_count,
            "and again when it has doubled",
            timeout_seconds=TIMEOUT_SECONDS,
        )
        assert inner_operator.end(signal.SIGKILL) == -signal.SIGKILL
        stored = stored_calibration(namespace)
        assert stored is not None
        assert all(name.startswith(f"chat-{status['stable']['revision']}-") for name in stored.deviations[ACCEPTANCE_LENGTH].pods)
        day = a_day_later(stored)
        data = {
            calibration_config_map.BLOCK_COUNT_KEY: str(day.block_count),
            calibration_config_map.CALIBRATION_KEY: day.pack(),
        }
        namespace.kubectl("patch", "configmap", NAME, "--type=merge", "--patch", json.dumps({"data": data}))
        inner_operator.start()
        namespace.apply(resource(host, "worse"))
        analysis = wait_for_status(lambda s: s.get("analysis"), "another drafter is analyzed", TIMEOUT_SECONDS)["status"][
            "analysis"
        ]
    assert analysis["calibrationBlocks"] >= FULL_TRUST_BATCHES * BLOCKS_PER_BATCH
    assert 1 <= analysis["varianceInflation"] < 3
    final = stored_calibration(namespace)
    assert final is not None
    assert final.block_count >= day.block_count, "no stored block is lost"
    assert inner_operator.end() == 0
