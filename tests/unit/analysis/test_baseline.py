"""Calibration on stable pods: which blocks count, what outlives a promotion, and which changes discard the history."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria.criterion import (
    ACCEPTANCE_LENGTH,
    FAILED_REQUESTS,
    SLOW_TIME_PER_OUTPUT_TOKEN,
    SLOW_TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    TOKENS_PER_BUSY_SECOND,
    TOKENS_PER_STEP,
)
from aerie.analysis.criteria.plan import AnalysisPlan
from aerie.analysis.criteria.table import build_calibration_criteria, build_criteria
from aerie.analysis.measurement import codec
from aerie.analysis.measurement.blocks import ArmCounts, BlockRule, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts, SampleProjection
from aerie.analysis.statistics.calibration import (
    BLOCKS_PER_BATCH,
    FULL_TRUST_BATCHES,
    MAX_BATCHES_PER_POD,
    MAX_FOLLOWED_PODS,
    DeviationHistory,
)

PLAN = AnalysisPlan(projection=SampleProjection(draft_positions=3))
RULE = BlockRule(pods_per_minimum=1)
ORIGIN = "vllm/vllm-openai:v0.33.0"
CALIBRATED_CRITERIA = {criterion.name for criterion in build_calibration_criteria(PLAN)}
ANALYZED_CRITERIA = {criterion.name for criterion in build_criteria(PLAN)}


def make_counts(noise: np.random.Generator, length: float = 2.5, drafts: float = 5000.0) -> EngineCounts:
    length *= float(noise.normal(1, 0.01))
    return EngineCounts(
        drafts=drafts,
        accepted_tokens=drafts * (length - 1),
        draft_tokens=3 * drafts,
        decode_tokens=12_000.0,
        decode_seconds=120 * float(noise.normal(1, 0.01)),
        output_tokens=12_120.0,
        finished_requests=drafts / 40,
        first_tokens=120.0,
        first_token_seconds=12.0,
        timed_requests=120.0,
        request_steps=12_000.0 / length,
        iterations=1000.0,
    )


def make_block(number: int, **pods: EngineCounts) -> ClosedBlock:
    return ClosedBlock(120.0 * number, 120.0 * (number + 1), None, ArmCounts(len(pods), EngineCounts(), None, pods))


def add_blocks(
    block_count: int, calibration: BaselineCalibration | None = None, pods: str = "abc", seed: int = 2
) -> BaselineCalibration:
    noise, calibration = np.random.default_rng(seed), calibration or BaselineCalibration(PLAN, origin=ORIGIN)
    for number in range(block_count):
        calibration = calibration.add_block(make_block(number, **{name: make_counts(noise) for name in pods}), RULE)
    return calibration


CALIBRATED_FOR_A_DAY = add_blocks(FULL_TRUST_BATCHES * BLOCKS_PER_BATCH)


def test_a_day_of_stable_pods_gives_each_criterion_a_dispersion() -> None:
    dispersions = CALIBRATED_FOR_A_DAY.calibrate_plan(PLAN).dispersions
    assert (CALIBRATED_FOR_A_DAY.block_count, CALIBRATED_FOR_A_DAY.last_block_end_time) == (720, 720 * 120.0)
    assert set(dispersions) == ANALYZED_CRITERIA
    for name in (TOKENS_PER_STEP, ACCEPTANCE_LENGTH):
        assert dispersions[name].variance == pytest.approx(0.01**2, rel=0.15)
        assert dispersions[name].inflation < 2
    assert dispersions[FAILED_REQUESTS].inflation == 1.0


def test_too_few_blocks_give_no_dispersions() -> None:
    assert add_blocks(4 * BLOCKS_PER_BATCH - 1).calibrate_plan(PLAN).dispersions == {}
    first = add_blocks(4 * BLOCKS_PER_BATCH).calibrate_plan(PLAN).dispersions.keys()
    assert first == ANALYZED_CRITERIA - {TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN}, "how these go with the load is learnt first"
    assert add_blocks(5 * BLOCKS_PER_BATCH).calibrate_plan(PLAN).dispersions.keys() == ANALYZED_CRITERIA


def test_a_trial_is_calibrated_by_the_same_pods() -> None:
    assert {TIME_PER_OUTPUT_TOKEN, TOKENS_PER_BUSY_SECOND} < CALIBRATED_CRITERIA
    assert CALIBRATED_FOR_A_DAY.calibrate_plan(
        replace(PLAN, goal="Faster", drafts_not_comparable_reason="it is a trial.")
    ).dispersions.keys() == CALIBRATED_CRITERIA - {
        TOKENS_PER_STEP,
        ACCEPTANCE_LENGTH,
    }


def test_packed_calibration_is_unpacked_unchanged() -> None:
    unpacked = BaselineCalibration.unpack(add_blocks(50, CALIBRATED_FOR_A_DAY, "abd").pack())
    assert unpacked == add_blocks(50, CALIBRATED_FOR_A_DAY, "abd")
    assert len(CALIBRATED_FOR_A_DAY.pack()) < 8000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not base64!",
        "aGVsbG8=",
        codec.pack([]),
        codec.pack({"deviations": {}}),
        codec.pack({"deviations": []}),
    ],
)
def test_text_of_another_release_is_not_unpacked(text: str) -> None:
    assert BaselineCalibration.unpack(text) is None


def test_a_truncated_history_is_not_unpacked() -> None:
    content = codec.unpack(CALIBRATED_FOR_A_DAY.pack())
    content["deviations"][ACCEPTANCE_LENGTH]["a"]["closed"] = "AAAA"
    assert BaselineCalibration.unpack(codec.pack(content)) is None


def test_a_block_counts_if_two_pods_have_enough_drafts() -> None:
    noise = np.random.default_rng(1)
    empty = BaselineCalibration(PLAN)
    whole, few = make_counts(noise), make_counts(noise, drafts=900)
    assert empty.add_block(ClosedBlock(0.0, 120.0, None, None), RULE) == empty
    assert empty.add_block(make_block(0, a=whole), RULE) == empty
    assert empty.add_block(make_block(0, a=whole, b=few), RULE) == empty, "fewer than half of the drafts that a block needs"
    assert empty.add_block(make_block(0, a=whole, b=few), replace(RULE, pods_per_minimum=2)).block_count == 1, (
        "of two pods, each needs half"
    )
    calibration = empty.add_block(make_block(0, a=whole, b=whole, c=few), RULE)
    assert set(calibration.deviations[ACCEPTANCE_LENGTH].pods) == {"a", "b"}


def test_a_promotion_keeps_the_deviations() -> None:
    promoted = CALIBRATED_FOR_A_DAY.compatible_with(
        replace(PLAN, margin=0.05, min_duration_seconds=60.0, pod_counts=(2, 2)), ORIGIN
    )
    assert promoted.deviations == CALIBRATED_FOR_A_DAY.deviations
    dispersion = add_blocks(10, promoted, "xyz").calibrate_plan(PLAN).dispersions[ACCEPTANCE_LENGTH]
    assert dispersion.batch_count == FULL_TRUST_BATCHES
    assert dispersion.variance == pytest.approx(0.01**2, rel=0.15)


@pytest.mark.parametrize(
    ("change", "restarted"),
    [
        ({"block_seconds": 60.0}, CALIBRATED_CRITERIA),
        ({"projection": SampleProjection(draft_positions=5)}, {TOKENS_PER_STEP, ACCEPTANCE_LENGTH}),
        ({"projection": SampleProjection(draft_positions=2)}, set()),
        ({"projection": SampleProjection(3, time_per_output_token_edge=0.05)}, {SLOW_TIME_PER_OUTPUT_TOKEN}),
        ({"projection": SampleProjection(3, time_to_first_token_edge=0.5)}, {SLOW_TIME_TO_FIRST_TOKEN}),
        ({"drafts_not_comparable_reason": "the canary serves without a drafter."}, set()),
        ({"goal": "Superior"}, set()),
    ],
)
def test_criteria_that_are_measured_differently_restart(change: dict[str, Any], restarted: set[str]) -> None:
    plan = replace(PLAN, **change)
    expected_criteria = {row.name for row in build_calibration_criteria(plan)}
    assert expected_criteria - set(CALIBRATED_FOR_A_DAY.compatible_with(plan, ORIGIN).deviations) == (
        expected_criteria if restarted == CALIBRATED_CRITERIA else restarted
    )
    assert CALIBRATED_FOR_A_DAY.compatible_with(plan, ORIGIN).block_count == (
        0 if restarted == CALIBRATED_CRITERIA else CALIBRATED_FOR_A_DAY.block_count
    )


def test_another_origin_restarts_the_calibration() -> None:
    """vLLM 0.33 and later skip drafts that no request can use: their times are not those of 0.32."""
    newer = CALIBRATED_FOR_A_DAY.compatible_with(PLAN, "vllm/vllm-openai:v0.34.0")
    assert newer == BaselineCalibration(PLAN, origin="vllm/vllm-openai:v0.34.0")
    assert add_blocks(1, newer).origin == newer.origin
    assert CALIBRATED_FOR_A_DAY.compatible_with(replace(PLAN, block_seconds=60.0), ORIGIN).origin == ORIGIN
    assert CALIBRATED_FOR_A_DAY.compatible_with(PLAN, ORIGIN) == CALIBRATED_FOR_A_DAY


def test_text_without_an_origin_is_not_unpacked() -> None:
    content = codec.unpack(CALIBRATED_FOR_A_DAY.pack())
    del content["origin"]
    assert BaselineCalibration.unpack(codec.pack(content)) is None


def test_shares_beyond_an_objective_are_calibrated_apart() -> None:
    plan = replace(PLAN, projection=SampleProjection(3, time_per_output_token_edge=0.05))
    noise = np.random.default_rng(1)
    counts_by_pod = {
        name: replace(make_counts(noise), slow_output_requests=float(share)) for name, share in zip("ab", (2, 3), strict=True)
    }
    calibration = BaselineCalibration(plan)
    for number in range(5 * BLOCKS_PER_BATCH):
        calibration = calibration.add_block(make_block(number, **counts_by_pod), RULE)
    dispersions = calibration.calibrate_plan(plan).dispersions
    assert dispersions[SLOW_TIME_PER_OUTPUT_TOKEN] == calibration.deviations[SLOW_TIME_PER_OUTPUT_TOKEN].estimate_dispersion()
    assert dispersions[TIME_PER_OUTPUT_TOKEN] == calibration.deviations[TIME_PER_OUTPUT_TOKEN].estimate_dispersion()
    assert calibration.deviations[TIME_PER_OUTPUT_TOKEN] != calibration.deviations[SLOW_TIME_PER_OUTPUT_TOKEN]


def make_loaded_counts(noise: np.random.Generator, elasticity: float, output: float) -> EngineCounts:
    """Make the counts of a pod whose time per token changes with its output."""
    usual = make_counts(noise)
    factor = output / usual.output_tokens
    seconds = usual.decode_seconds * factor ** (1 + elasticity)
    return replace(usual, output_tokens=output, decode_tokens=usual.decode_tokens * factor, decode_seconds=seconds)


@pytest.mark.parametrize("elasticity", [0.5, -0.5])
def test_pods_are_compared_at_equal_output(elasticity: float) -> None:
    noise, calibration = np.random.default_rng(4), BaselineCalibration(PLAN)
    for number in range(5 * BLOCKS_PER_BATCH):
        outputs = 12_000 * np.exp(noise.normal(0, 0.1, 3))
        pods = {name: make_loaded_counts(noise, elasticity, output) for name, output in zip("abc", outputs.tolist(), strict=True)}
        calibration = calibration.add_block(make_block(number, **pods), RULE)
    calibrated_plan = calibration.calibrate_plan(PLAN)
    deviation = calibrated_plan.dispersions[TIME_PER_OUTPUT_TOKEN].variance ** 0.5
    if elasticity > 0:
        assert calibrated_plan.load_curves[TIME_PER_OUTPUT_TOKEN].elasticity(90.0, 110.0) == pytest.approx(elasticity, abs=0.05)
        assert deviation < 0.015, "0.01 of its own"
    else:  # slow pods get fewer requests: that is no reason to make up for anything
        assert calibrated_plan.load_curves[TIME_PER_OUTPUT_TOKEN].elasticity(90.0, 110.0) == 0
        assert deviation > 0.04
    assert ACCEPTANCE_LENGTH not in calibrated_plan.load_curves
    assert BaselineCalibration.unpack(calibration.pack()) == calibration


def test_outlying_blocks_do_not_change_the_dispersion() -> None:
    noise, calibration = np.random.default_rng(2), BaselineCalibration(PLAN)
    for number in range(FULL_TRUST_BATCHES * BLOCKS_PER_BATCH):
        pods = {name: make_counts(noise) for name in "abc"}
        if number in (100, 400):
            pods["a"] = make_counts(noise, length=3.9)  # a dozen requests that fell into repetition
        calibration = calibration.add_block(make_block(number, **pods), RULE)
    with_outliers, without_outliers = (
        calibration.calibrate_plan(PLAN).dispersions[ACCEPTANCE_LENGTH],
        CALIBRATED_FOR_A_DAY.calibrate_plan(PLAN).dispersions[ACCEPTANCE_LENGTH],
    )
    assert with_outliers.variance == pytest.approx(without_outliers.variance, rel=0.25)
    assert with_outliers.inflation == pytest.approx(without_outliers.inflation, rel=0.25)
    assert json.loads(json.dumps(calibration.deviations[ACCEPTANCE_LENGTH].to_dict()))


def test_packed_size_is_bounded() -> None:
    noise = np.random.default_rng(3)

    def pod() -> dict[str, Any]:
        closed = (
            np.column_stack([noise.normal(0, 0.01, MAX_BATCHES_PER_POD), noise.normal(0.001, 0.0002, MAX_BATCHES_PER_POD)])
            .astype("<f4")
            .tobytes()
        )
        return {"closed": base64.b64encode(closed).decode(), "open": [29, *noise.normal(0, 0.1, 2).tolist()]}

    pods = {
        name: {f"chat-0123456789-5d4b8c7f6-{index}": pod() for index in range(MAX_FOLLOWED_PODS)} for name in CALIBRATED_CRITERIA
    }
    full = BaselineCalibration(
        PLAN, {name: DeviationHistory.from_dict(content) for name, content in pods.items()}, {}, 2000, 240_000.0
    )
    assert 20_000 < len(full.pack()) < 48_000
    assert BaselineCalibration.unpack(full.pack()) == full
