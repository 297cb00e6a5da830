"""What stable pods tell of themselves: which blocks count, what outlives a promotion, and what begins anew."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.criteria import (
    ACCEPTANCE_LENGTH,
    FAILED_REQUESTS,
    SLOW_TIME_PER_OUTPUT_TOKEN,
    SLOW_TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    TOKENS_PER_BUSY_SECOND,
    TOKENS_PER_STEP,
    AnalysisPlan,
    build_calibration_criteria,
    build_criteria,
)
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

TERMS = AnalysisPlan(projection=SampleProjection(draft_positions=3))
RULE = BlockRule(pods_per_minimum=1)
ENGINE = "vllm/vllm-openai:v0.33.0"
NAMES = {one.name for one in build_calibration_criteria(TERMS)}
ANALYSED = {one.name for one in build_criteria(TERMS)}


def counts(noise: np.random.Generator, length: float = 2.5, drafts: float = 5000.0) -> EngineCounts:
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


def block(number: int, **pods: EngineCounts) -> ClosedBlock:
    return ClosedBlock(120.0 * number, 120.0 * (number + 1), None, ArmCounts(len(pods), EngineCounts(), None, pods))


def lived(blocks: int, memory: BaselineCalibration | None = None, pods: str = "abc", seed: int = 2) -> BaselineCalibration:
    noise, found = np.random.default_rng(seed), memory or BaselineCalibration(TERMS, engine=ENGINE)
    for number in range(blocks):
        found = found.add_block(block(number, **{name: counts(noise) for name in pods}), RULE)
    return found


DAY = lived(FULL_TRUST_BATCHES * BLOCKS_PER_BATCH)


def test_a_day_of_stable_pods_tells_how_each_criterion_scatters() -> None:
    found = DAY.calibrate_plan(TERMS).dispersions
    assert (DAY.block_count, DAY.last_block_end_time) == (720, 720 * 120.0)
    assert set(found) == ANALYSED
    for name in (TOKENS_PER_STEP, ACCEPTANCE_LENGTH):
        assert found[name].variance == pytest.approx(0.01**2, rel=0.15)
        assert found[name].inflation < 2
    assert found[FAILED_REQUESTS].inflation == 1.0


def test_too_little_tells_nothing_at_all() -> None:
    assert lived(4 * BLOCKS_PER_BATCH - 1).calibrate_plan(TERMS).dispersions == {}
    first = lived(4 * BLOCKS_PER_BATCH).calibrate_plan(TERMS).dispersions.keys()
    assert first == ANALYSED - {TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN}, "how these go with the load is learnt first"
    assert lived(5 * BLOCKS_PER_BATCH).calibrate_plan(TERMS).dispersions.keys() == ANALYSED


def test_a_trial_is_informed_by_the_same_pods() -> None:
    assert {TIME_PER_OUTPUT_TOKEN, TOKENS_PER_BUSY_SECOND} < NAMES
    assert DAY.calibrate_plan(
        replace(TERMS, goal="Faster", drafts_not_comparable_reason="it is a trial.")
    ).dispersions.keys() == NAMES - {
        TOKENS_PER_STEP,
        ACCEPTANCE_LENGTH,
    }


def test_it_comes_back_as_it_was() -> None:
    again = BaselineCalibration.unpack(lived(50, DAY, "abd").pack())
    assert again == lived(50, DAY, "abd")
    assert len(DAY.pack()) < 8000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not base64!",
        "aGVsbG8=",
        codec.pack([]),
        codec.pack({"deviation_histories": {}}),
        codec.pack({"deviation_histories": []}),
    ],
)
def test_what_another_release_wrote_is_no_memory(text: str) -> None:
    assert BaselineCalibration.unpack(text) is None


def test_a_torn_history_is_no_memory() -> None:
    found = codec.unpack(DAY.pack())
    found["deviation_histories"][ACCEPTANCE_LENGTH]["a"]["closed"] = "AAAA"
    assert BaselineCalibration.unpack(codec.pack(found)) is None


def test_a_block_counts_with_two_pods_that_have_enough_of_it() -> None:
    noise = np.random.default_rng(1)
    empty = BaselineCalibration(TERMS)
    whole, few = counts(noise), counts(noise, drafts=900)
    assert empty.add_block(ClosedBlock(0.0, 120.0, None, None), RULE) == empty
    assert empty.add_block(block(0, a=whole), RULE) == empty
    assert empty.add_block(block(0, a=whole, b=few), RULE) == empty, "fewer than half of the drafts that a block needs"
    assert empty.add_block(block(0, a=whole, b=few), replace(RULE, pods_per_minimum=2)).block_count == 1, (
        "of two pods, each needs half"
    )
    found = empty.add_block(block(0, a=whole, b=whole, c=few), RULE)
    assert set(found.deviation_histories[ACCEPTANCE_LENGTH].pods) == {"a", "b"}


def test_a_promotion_keeps_what_is_known() -> None:
    promoted = DAY.compatible_with(replace(TERMS, margin=0.05, min_duration_seconds=60.0, pod_counts=(2, 2)), ENGINE)
    assert promoted.deviation_histories == DAY.deviation_histories
    found = lived(10, promoted, "xyz").calibrate_plan(TERMS).dispersions[ACCEPTANCE_LENGTH]
    assert found.batch_count == FULL_TRUST_BATCHES
    assert found.variance == pytest.approx(0.01**2, rel=0.15)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"block_seconds": 60.0}, NAMES),
        ({"projection": SampleProjection(draft_positions=5)}, {TOKENS_PER_STEP, ACCEPTANCE_LENGTH}),
        ({"projection": SampleProjection(draft_positions=2)}, set()),
        ({"projection": SampleProjection(3, time_per_output_token_edge=0.05)}, {SLOW_TIME_PER_OUTPUT_TOKEN}),
        ({"projection": SampleProjection(3, time_to_first_token_edge=0.5)}, {SLOW_TIME_TO_FIRST_TOKEN}),
        ({"drafts_not_comparable_reason": "the canary serves without a drafter."}, set()),
        ({"goal": "Superior"}, set()),
    ],
)
def test_what_is_counted_otherwise_begins_anew(change: dict[str, Any], lost: set[str]) -> None:
    terms = replace(TERMS, **change)
    wanted = {row.name for row in build_calibration_criteria(terms)}
    assert wanted - set(DAY.compatible_with(terms, ENGINE).deviation_histories) == (wanted if lost == NAMES else lost)
    assert DAY.compatible_with(terms, ENGINE).block_count == (0 if lost == NAMES else DAY.block_count)


def test_another_engine_begins_anew() -> None:
    """From 0.33 on, vLLM skips drafts that no request can use: its times are not those of 0.32."""
    newer = DAY.compatible_with(TERMS, "vllm/vllm-openai:v0.34.0")
    assert newer == BaselineCalibration(TERMS, engine="vllm/vllm-openai:v0.34.0")
    assert lived(1, newer).engine == newer.engine
    assert DAY.compatible_with(replace(TERMS, block_seconds=60.0), ENGINE).engine == ENGINE
    assert DAY.compatible_with(TERMS, ENGINE) == DAY


def test_text_that_does_not_say_of_which_engine_it_is_is_no_memory() -> None:
    found = codec.unpack(DAY.pack())
    del found["engine"]
    assert BaselineCalibration.unpack(codec.pack(found)) is None


def test_shares_beyond_an_objective_are_no_means() -> None:
    objective = replace(TERMS, projection=SampleProjection(3, time_per_output_token_edge=0.05))
    noise = np.random.default_rng(1)
    late = {name: replace(counts(noise), slow_output_requests=float(share)) for name, share in zip("ab", (2, 3), strict=True)}
    both = BaselineCalibration(objective)
    for number in range(5 * BLOCKS_PER_BATCH):
        both = both.add_block(block(number, **late), RULE)
    scatters = both.calibrate_plan(objective).dispersions
    assert scatters[SLOW_TIME_PER_OUTPUT_TOKEN] == both.deviation_histories[SLOW_TIME_PER_OUTPUT_TOKEN].estimate_dispersion()
    assert scatters[TIME_PER_OUTPUT_TOKEN] == both.deviation_histories[TIME_PER_OUTPUT_TOKEN].estimate_dispersion()
    assert both.deviation_histories[TIME_PER_OUTPUT_TOKEN] != both.deviation_histories[SLOW_TIME_PER_OUTPUT_TOKEN]


def loaded(noise: np.random.Generator, elasticity: float, output: float) -> EngineCounts:
    """A pod of whose tokens each takes longer the more there are."""
    usual = counts(noise)
    factor = output / usual.output_tokens
    seconds = usual.decode_seconds * factor ** (1 + elasticity)
    return replace(usual, output_tokens=output, decode_tokens=usual.decode_tokens * factor, decode_seconds=seconds)


@pytest.mark.parametrize("elasticity", [0.5, -0.5])
def test_pods_are_compared_at_like_output(elasticity: float) -> None:
    noise, found = np.random.default_rng(4), BaselineCalibration(TERMS)
    for number in range(5 * BLOCKS_PER_BATCH):
        outputs = 12_000 * np.exp(noise.normal(0, 0.1, 3))
        pods = {name: loaded(noise, elasticity, output) for name, output in zip("abc", outputs.tolist(), strict=True)}
        found = found.add_block(block(number, **pods), RULE)
    informed = found.calibrate_plan(TERMS)
    deviation = informed.dispersions[TIME_PER_OUTPUT_TOKEN].variance ** 0.5
    if elasticity > 0:
        assert informed.load_curves[TIME_PER_OUTPUT_TOKEN].elasticity(90.0, 110.0) == pytest.approx(elasticity, abs=0.05)
        assert deviation < 0.015, "0.01 of its own"
    else:  # slow pods get fewer requests: that is no reason to make up for anything
        assert informed.load_curves[TIME_PER_OUTPUT_TOKEN].elasticity(90.0, 110.0) == 0
        assert deviation > 0.04
    assert ACCEPTANCE_LENGTH not in informed.load_curves
    assert BaselineCalibration.unpack(found.pack()) == found


def test_a_wild_block_does_not_spoil_a_day() -> None:
    noise, found = np.random.default_rng(2), BaselineCalibration(TERMS)
    for number in range(FULL_TRUST_BATCHES * BLOCKS_PER_BATCH):
        pods = {name: counts(noise) for name in "abc"}
        if number in (100, 400):
            pods["a"] = counts(noise, length=3.9)  # a dozen requests that fell into repetition
        found = found.add_block(block(number, **pods), RULE)
    odd, usual = (
        found.calibrate_plan(TERMS).dispersions[ACCEPTANCE_LENGTH],
        DAY.calibrate_plan(TERMS).dispersions[ACCEPTANCE_LENGTH],
    )
    assert odd.variance == pytest.approx(usual.variance, rel=0.25)
    assert odd.inflation == pytest.approx(usual.inflation, rel=0.25)
    assert json.loads(json.dumps(found.deviation_histories[ACCEPTANCE_LENGTH].to_dict()))


def test_it_is_small_however_long_it_lives() -> None:
    noise = np.random.default_rng(3)

    def pod() -> dict[str, Any]:
        closed = (
            np.column_stack([noise.normal(0, 0.01, MAX_BATCHES_PER_POD), noise.normal(0.001, 0.0002, MAX_BATCHES_PER_POD)])
            .astype("<f4")
            .tobytes()
        )
        return {"closed": base64.b64encode(closed).decode(), "open": [29, *noise.normal(0, 0.1, 2).tolist()]}

    pods = {name: {f"chat-0123456789-5d4b8c7f6-{index}": pod() for index in range(MAX_FOLLOWED_PODS)} for name in NAMES}
    full = BaselineCalibration(
        TERMS, {name: DeviationHistory.from_dict(found) for name, found in pods.items()}, {}, 2000, 240_000.0
    )
    assert 20_000 < len(full.pack()) < 48_000
    assert BaselineCalibration.unpack(full.pack()) == full
