"""The calibration on stable pods: when it is stored, that it persists, and that the next analysis uses it."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.measurement import codec
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts
from aerie.manifests import calibration_config_map as child
from aerie.rollout.canary.analysis_run import calibration_record
from aerie.rollout.canary.analysis_run.calibration_record import (
    CALIBRATION_WRITE_INTERVAL_SECONDS,
    StoredCalibration,
    is_calibration_write_due,
)
from aerie.rollout.canary.analysis_run.run import build_block_rule
from tests.unit.rollout.world import START, World, serving_world, side, world_in_phase

CONFIG_MAP = ("ConfigMap", "chat-aerie-calibration")


def run_stable_blocks(world: World, blocks: int, seconds: float = 120.0) -> None:
    """Add blocks of two stable pods with a dispersion of 2 % to the calibration, as the operator does."""
    resource = world.observed().resource
    assert resource.status is not None
    assert resource.status.stable is not None
    plan = calibration_record.build_calibration_plan(resource, resource.status.stable)
    origin = calibration_record.read_origin(world.observed(), resource.status.stable.revision)
    calibration = (world.baseline_calibration or BaselineCalibration(plan)).compatible_with(plan, origin)
    for _ in range(blocks):
        began = world.now.timestamp()
        world.now += timedelta(seconds=seconds)
        pods = {name: side(2.5 * (1 + world.rng.gauss(0, 0.02))).counts for name in ("a", "b")}
        block = ClosedBlock(began, world.now.timestamp(), None, ArmCounts(2, EngineCounts(), None, pods))
        calibration = calibration.add_block(block, build_block_rule(plan, 60.0))
    world.baseline_calibration = calibration


def blocks_written(world: World) -> int:
    return int(world.objects[CONFIG_MAP]["data"][child.BLOCK_COUNT_KEY])


def start_analysis(world: World) -> Any:
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()
    world.schedule()
    world.ready()
    world.step()
    world.now += timedelta(minutes=5)
    world.step()
    assert world.status["phase"] == "Analyzing"
    return world.status["analysis"]


# ------------------------------------------------------------------------------------------------------------------- writes
@pytest.mark.slow
def test_calibration_is_written_when_doubled_then_hourly() -> None:
    world = serving_world()
    assert CONFIG_MAP not in world.objects
    written = []
    for number in range(1, 241):
        run_stable_blocks(world, 1)
        before = world.status
        if world.step().objects_to_apply:
            written.append(number)
        assert world.status == before, "the resource itself is left alone"
        assert not world.step().objects_to_apply
    assert written == [1, 2, 4, 8, 16, 32, 62, 92, 122, 152, 182, 212]


def test_calibration_object_is_owned_by_the_resource() -> None:
    world = serving_world()
    run_stable_blocks(world, 3)
    world.step()
    config_map = world.objects[CONFIG_MAP]
    assert config_map["metadata"]["labels"]["aerie.dev/name"] == "chat"
    assert [owner["uid"] for owner in config_map["metadata"]["ownerReferences"]] == ["u1"]
    assert config_map["data"][child.BLOCK_COUNT_KEY] == "3"
    assert config_map["data"][child.LAST_BLOCK_END_KEY] == (START + timedelta(minutes=6)).isoformat(timespec="milliseconds")
    assert BaselineCalibration.unpack(config_map["data"][child.CALIBRATION_KEY]) == world.baseline_calibration


@pytest.mark.parametrize("manual_edit", ["deleted", "edited", "emptied"])
def test_manual_edit_of_calibration_is_repaired_from_memory(manual_edit: str) -> None:
    world = serving_world()
    run_stable_blocks(world, 3)
    world.step()
    if manual_edit == "deleted":
        del world.objects[CONFIG_MAP]
    elif manual_edit == "edited":
        world.objects[CONFIG_MAP]["data"][child.BLOCK_COUNT_KEY] = "many"
    else:
        del world.objects[CONFIG_MAP]["data"]
    assert [item["metadata"]["name"] for item in world.step().objects_to_apply] == ["chat-aerie-calibration"]
    assert blocks_written(world) == 3


def test_restarted_operator_does_not_overwrite_calibration() -> None:
    world = serving_world()
    run_stable_blocks(world, 3)
    world.step()
    world.baseline_calibration = None
    plan = world.step()
    assert not plan.objects_to_apply
    assert not plan.objects_to_delete
    assert CONFIG_MAP in world.objects


def test_calibration_is_not_written_while_paused() -> None:
    world = serving_world()
    run_stable_blocks(world, 3)
    world.edit(rollout={"paused": True})
    world.step()
    assert CONFIG_MAP not in world.objects


def test_restarted_calibration_replaces_the_old_one() -> None:
    world = serving_world()
    run_stable_blocks(world, 200)
    world.step()
    world.edit(rollout={"analysis": {"blockDuration": "60s"}})
    run_stable_blocks(world, 1, 60.0)
    world.step()
    assert blocks_written(world) == 1


@given(st.lists(st.floats(2.0, 20_000.0), min_size=1, max_size=200))
def test_calibration_writes_are_few_and_bound_the_loss(lengths: list[float]) -> None:
    calibration, stored, writes, now = BaselineCalibration(AnalysisPlan()), StoredCalibration(), 0, 0.0
    for number, seconds in enumerate(lengths, start=1):
        now += seconds
        calibration = BaselineCalibration(AnalysisPlan(), block_count=number, last_block_end_time=now)
        if is_calibration_write_due(calibration, stored, canary_active=False):
            stored, writes = StoredCalibration(calibration.block_count, calibration.last_block_end_time), writes + 1
        assert calibration.block_count - stored.blocks <= stored.blocks
        assert calibration.last_block_end_time - stored.counted_until < CALIBRATION_WRITE_INTERVAL_SECONDS
        assert not is_calibration_write_due(
            calibration, StoredCalibration(calibration.block_count, calibration.last_block_end_time), canary_active=True
        )
    assert writes <= 1 + math.log2(len(lengths)) + now / CALIBRATION_WRITE_INTERVAL_SECONDS


# ---------------------------------------------------------------------------------------------------------------------- use
def test_analysis_uses_calibration_and_names_it() -> None:
    world = serving_world()
    run_stable_blocks(world, 720)
    analysis = start_analysis(world)
    assert analysis["calibrationBlocks"] == 720
    assert 1 <= analysis["varianceInflation"] < 2
    assert blocks_written(world) == 720


def test_analysis_without_calibration_is_cautious() -> None:
    world, _ = world_in_phase("Analyzing")
    assert "calibrationBlocks" not in world.status["analysis"]
    assert world.status["analysis"]["varianceInflation"] == 3.0


def test_calibration_shortens_analysis() -> None:
    def blocks_to_promotion(calibration_blocks: int) -> int:
        world = serving_world(rollout={"analysis": {"minDuration": "0s"}})
        run_stable_blocks(world, calibration_blocks)
        start_analysis(world)
        for number in range(1, 60):
            world.measure(1, +0.1)
            if world.status["phase"] == "Ramping":
                return number
        raise AssertionError("never")

    assert blocks_to_promotion(720) < blocks_to_promotion(0)


def test_start_of_canary_writes_pending_calibration() -> None:
    world = serving_world()
    run_stable_blocks(world, 130)
    world.step()
    run_stable_blocks(world, 20)
    assert not world.step().objects_to_apply
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()
    assert blocks_written(world) == 150
    world.baseline_calibration = None  # killed
    world.schedule()
    world.ready()
    world.step()
    world.now += timedelta(minutes=5)
    world.step()
    assert world.status["analysis"]["calibrationBlocks"] == 150


def test_running_analysis_keeps_its_calibration() -> None:
    world = serving_world()
    run_stable_blocks(world, 150)
    first = start_analysis(world)
    world.baseline_calibration = None
    del world.objects[CONFIG_MAP]
    world.measure(3, 0.0)
    current = world.status["analysis"]
    assert (current["calibrationBlocks"], current["varianceInflation"]) == (
        first["calibrationBlocks"],
        first["varianceInflation"],
    )


def test_calibration_survives_promotion_and_rollback() -> None:
    world, _ = world_in_phase("Promoting")
    run_stable_blocks(world, 5)
    world.settle()
    assert world.status["stable"]["revision"] == world.desired_revision
    assert blocks_written(world) == 5
    world.baseline_calibration = None
    world.drafter("eagle3")
    world.settle()
    assert CONFIG_MAP in world.objects


def test_recreated_resource_does_not_inherit_calibration() -> None:
    world = serving_world()
    run_stable_blocks(world, 150)
    world.step()
    world.baseline_calibration = None
    assert find_stored_calibration(world) is not None
    world.document["metadata"]["uid"] = "u2"
    assert find_stored_calibration(world) is None
    assert calibration_record.read_stored_calibration(world.observed()) == StoredCalibration()


# ------------------------------------------------------------------------------------------------------------- another engine
def find_stored_calibration(world: World) -> BaselineCalibration | None:
    observed = world.observed()
    assert observed.resource.status is not None
    assert observed.resource.status.stable is not None
    return calibration_record.find_calibration(observed, observed.resource.status.stable)


def test_calibration_origin_is_engine_and_traffic_mode() -> None:
    world = serving_world()
    assert calibration_record.read_origin(world.observed(), world.desired_revision) == "vllm/vllm-openai:v0.33.0 Service"
    assert calibration_record.read_origin(world.observed(), "another") == ""
    world = serving_world(engine={"image": "registry/vllm:latest", "version": "0.33.0"})
    assert calibration_record.read_origin(world.observed(), world.desired_revision) == "registry/vllm:latest 0.33.0 Service"
    del world.objects["ConfigMap", f"chat-{world.desired_revision}-preflight"]
    assert calibration_record.read_origin(world.observed(), world.desired_revision) == "registry/vllm:latest Service"


@pytest.mark.parametrize(
    "engine", [{"image": "vllm/vllm-openai:v0.34.0"}, {"image": "vllm/vllm-openai:v0.33.0", "version": "0.34.0"}]
)
def test_analysis_of_another_engine_ignores_calibration(engine: dict[str, Any]) -> None:
    world = serving_world()
    run_stable_blocks(world, 720)
    world.step()
    calibration = world.baseline_calibration
    world.edit(engine=engine)
    world.settle_until("Starting")
    world.annotate(promote=world.desired_revision)
    for _ in range(20):
        world.schedule()
        world.ready()
        world.now += timedelta(minutes=10)
        world.step()
    assert world.status["stable"]["revision"] == world.desired_revision
    for value in (calibration, None):
        world.baseline_calibration = value
        assert find_stored_calibration(world) is None
    run_stable_blocks(world, 1)
    assert world.baseline_calibration is not None
    assert world.baseline_calibration.block_count == 1


def test_another_traffic_mode_or_choice_of_nodes_is_another_origin() -> None:
    world = serving_world()
    run_stable_blocks(world, 150)
    assert find_stored_calibration(world) is not None
    origin = calibration_record.read_origin(world.observed(), world.desired_revision)
    deployment = next(item for (kind, _), item in world.objects.items() if kind == "Deployment")
    pod_spec = deployment["spec"]["template"]["spec"]
    choices: list[dict[str, Any]] = [
        {"nodeSelector": {"pool": "b"}},
        {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}},
    ]
    for choice in choices:
        pod_spec.update(choice)
        assert calibration_record.read_origin(world.observed(), world.desired_revision) != origin
        assert find_stored_calibration(world) is None
        for field in choice:
            del pod_spec[field]
    assert find_stored_calibration(world) is not None
    observed = world.observed()
    gateway = observed.resource.spec.rollout.traffic.model_copy(update={"mode": "Gateway"})
    rollout = observed.resource.spec.rollout.model_copy(update={"traffic": gateway})
    spec = observed.resource.spec.model_copy(update={"rollout": rollout})
    changed = replace(observed, resource=observed.resource.model_copy(update={"spec": spec}))
    assert calibration_record.read_origin(changed, world.desired_revision) == origin.replace("Service", "Gateway")


def test_a_canary_on_other_nodes_is_compared_without_calibration() -> None:
    world = serving_world()
    run_stable_blocks(world, 150)
    world.drafter("eagle31")
    world.settle_until("Starting")
    assert find_stored_calibration(world) is not None
    name = f"chat-{world.desired_revision}"
    world.objects["Deployment", name]["spec"]["template"]["spec"]["nodeSelector"] = {"pool": "b"}
    assert find_stored_calibration(world) is None


def test_calibration_of_earlier_release_is_dropped() -> None:
    world = serving_world()
    run_stable_blocks(world, 150)
    world.step()
    world.baseline_calibration = None
    data = world.objects[CONFIG_MAP]["data"]
    content = codec.unpack(data[child.CALIBRATION_KEY])
    del content["origin"]
    data[child.CALIBRATION_KEY] = codec.pack(content)
    assert find_stored_calibration(world) is None
    assert "calibrationBlocks" not in start_analysis(world)
