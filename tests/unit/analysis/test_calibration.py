"""What a history of equal pods tells, where the truth is known."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from aerie.analysis.statistics.calibration import (
    BLOCKS_PER_BATCH,
    DEFAULT_INFLATION,
    FULL_HISTORY_DEGREES_OF_FREEDOM,
    FULL_TRUST_BATCHES,
    MAX_BATCHES_PER_POD,
    MAX_FOLLOWED_PODS,
    MIN_BATCHES,
    UNCALIBRATED_DISPERSION,
    DeviationHistory,
    Dispersion,
    PodEffect,
)


def history(
    blocks: int, pods: int = 3, *, sd: float = 0.04, keep: float = 0.0, offset_sd: float = 0.0, seed: int = 0
) -> DeviationHistory:
    """Of pods at level 2 whose blocks are AR(1) with the given standard deviation."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal((blocks, pods))
    for index in range(1, blocks):
        noise[index] = keep * noise[index - 1] + math.sqrt(1 - keep**2) * noise[index]
    levels = 2 * (1 + offset_sd * random.standard_normal(pods) + sd * noise)
    found = DeviationHistory()
    for row in levels.tolist():
        found = found.add_block({f"pod-{index}": value for index, value in enumerate(row)})
    return found


def mean_of(name: str, **arguments: Any) -> float:
    dispersions = [history(24 * BLOCKS_PER_BATCH, seed=seed, **arguments).estimate_dispersion() for seed in range(15)]
    return float(np.mean([getattr(dispersion, name) for dispersion in dispersions]))


@pytest.mark.parametrize("pods", [2, 3, 4])
def test_the_variance_is_per_pod_whatever_their_number(pods: int) -> None:
    assert mean_of("variance", pods=pods) == pytest.approx(0.04**2, rel=0.08)


@pytest.mark.parametrize("keep", [0.0, 0.4])
def test_inflation_is_that_of_a_mean_of_a_batch(keep: float) -> None:
    within = sum((1 - lag / BLOCKS_PER_BATCH) * keep**lag for lag in range(1, BLOCKS_PER_BATCH))
    assert mean_of("inflation", keep=keep) == pytest.approx(1 + 2 * within, rel=0.15)


def test_lasting_differences_are_told_from_noise() -> None:
    assert mean_of("pod_effect_sd", offset_sd=0.02) == pytest.approx(0.02, rel=0.3)
    assert mean_of("pod_effect_sd") < 0.002


def test_little_history_is_mistrusted() -> None:
    assert history(MIN_BATCHES * BLOCKS_PER_BATCH - 1).estimate_dispersion() == UNCALIBRATED_DISPERSION
    short, full = history(6 * BLOCKS_PER_BATCH).estimate_dispersion(), history(24 * BLOCKS_PER_BATCH).estimate_dispersion()
    assert 0.75 * DEFAULT_INFLATION + 0.25 <= short.inflation <= DEFAULT_INFLATION
    assert (short.batch_count, short.degrees_of_freedom, full.degrees_of_freedom) == (
        6,
        FULL_HISTORY_DEGREES_OF_FREEDOM / 4,
        FULL_HISTORY_DEGREES_OF_FREEDOM,
    )
    assert full.inflation < 2


def test_a_pod_alone_tells_nothing() -> None:
    assert DeviationHistory().add_block({"a": 2.0}) == DeviationHistory()
    assert DeviationHistory().add_block({"a": 2.0, "b": 0.0}) == DeviationHistory()


def test_shares_that_are_always_zero_do_not_scatter() -> None:
    found = DeviationHistory()
    for _ in range(24 * BLOCKS_PER_BATCH):
        found = found.add_block({"a": 0.0, "b": 0.0}, relative=False)
    assert found.estimate_dispersion() == Dispersion(
        inflation=1.0, variance=0.0, degrees_of_freedom=0.0, pod_effect_sd=0.0, pod_effect_degrees_of_freedom=1.0, batch_count=24
    )


def test_two_arms_of_other_sizes() -> None:
    scatter = Dispersion(
        inflation=1.5,
        variance=0.0016,
        degrees_of_freedom=20.0,
        pod_effect_sd=0.01,
        pod_effect_degrees_of_freedom=2.0,
        batch_count=24,
    )
    assert scatter.variance_prior(2.0, (1, 3)).variance == pytest.approx(4 * 0.0016 * 4 / 3)
    none = PodEffect(0.0, 0.0)
    found = scatter.pod_effect(none, 2.0, (2, 2))
    assert found.degrees_of_freedom == 2.0
    assert found.sd == pytest.approx(0.02)
    assert UNCALIBRATED_DISPERSION.pod_effect(none, 2.0, (2, 2)) == PodEffect(0.0, math.inf)


def test_few_pods_that_happen_to_be_alike_do_not_prove_that_all_are() -> None:
    alike = Dispersion(pod_effect_sd=0.0, pod_effect_degrees_of_freedom=2.0, batch_count=24)
    found = alike.pod_effect(PodEffect(0.01, 1.0), 1.0, (1, 1))
    assert found.degrees_of_freedom == 3.0, "the prior is worth a pod"
    assert found.sd == pytest.approx(0.01 * (2 / 3) ** 0.5)
    unknown = UNCALIBRATED_DISPERSION.pod_effect(PodEffect(0.02, 3.0), 1.0, (1, 1))
    assert unknown.degrees_of_freedom == 3.0
    assert unknown.sd == pytest.approx(0.02 * 2**0.5)


def test_it_stays_small_and_survives_a_crash() -> None:
    found = DeviationHistory()
    random = np.random.default_rng(5)
    for block in range((MAX_BATCHES_PER_POD + 3) * BLOCKS_PER_BATCH + 7):
        names = [f"pod-{block // 900}-{index}" for index in range(12)]
        found = found.add_block(dict(zip(names, random.normal(2.0, 0.1, 12).tolist(), strict=True)))
    text = json.dumps(found.to_dict())
    assert len(found.pods) == MAX_FOLLOWED_PODS
    assert len(text) < 20_000
    again = DeviationHistory.from_dict(json.loads(text))
    assert again == found
    assert again.estimate_dispersion() == found.estimate_dispersion()
    scatter = found.estimate_dispersion()
    assert Dispersion.from_dict(json.loads(json.dumps(scatter.to_dict()))) == scatter


def go_on(found: DeviationHistory, blocks: int, names: str, *, sd: float = 0.04, seed: int = 7) -> DeviationHistory:
    random = np.random.default_rng(seed)
    for _ in range(blocks):
        found = found.add_block(dict(zip(names, (2 * (1 + sd * random.standard_normal(len(names)))).tolist(), strict=True)))
    return found


def test_what_pods_told_that_are_gone_holds_until_others_have_told_as_much() -> None:
    found = go_on(DeviationHistory(), FULL_TRUST_BATCHES * BLOCKS_PER_BATCH, "abcdefgh")
    found = go_on(found, 1, "stuvwxyz")
    assert found.estimate_dispersion().batch_count == FULL_TRUST_BATCHES, "all pods are others, as after a promotion"
    found = go_on(found, 3 * BLOCKS_PER_BATCH, "stuvwxyz")
    kept = set(found.pods) & set("abcdefgh")
    assert (len(kept), len(found.pods)) == (MAX_FOLLOWED_PODS // 2, MAX_FOLLOWED_PODS)
    assert found.estimate_dispersion().batch_count == FULL_TRUST_BATCHES
    found = go_on(found, (FULL_TRUST_BATCHES + 1) * BLOCKS_PER_BATCH, "stuvwxyz")
    assert set(found.pods) == set("stuvwxyz")
    assert found.estimate_dispersion().batch_count >= FULL_TRUST_BATCHES


def test_a_pod_that_is_missing_for_some_blocks_keeps_what_it_told() -> None:
    found = go_on(DeviationHistory(), 5 * BLOCKS_PER_BATCH, "abcdefgh")
    away = go_on(found, BLOCKS_PER_BATCH - 1, "bcdefghi")
    assert away.pods["a"].batches == found.pods["a"].batches
    assert "i" not in away.pods
    back = go_on(away, 1, "abcdefgh")
    assert (back.pods["a"].batch_count, back.pods["a"].missed_blocks) == (5, 0)


def test_a_pod_that_came_and_went_before_it_told_anything_is_forgotten() -> None:
    found = go_on(DeviationHistory(), BLOCKS_PER_BATCH, "abc")
    assert set(go_on(found, BLOCKS_PER_BATCH + 1, "ab").pods) == {"a", "b"}


def test_another_traffic_is_believed_after_some_batches() -> None:
    calm = go_on(DeviationHistory(), 6 * BLOCKS_PER_BATCH, "abc", sd=0.01)
    wild = go_on(calm, 20 * BLOCKS_PER_BATCH, "abc", sd=0.1)
    last = [variance for pod in wild.pods.values() for _, variance in pod.batches[-10:]]
    assert float(np.mean(last)) == pytest.approx(0.1**2, rel=0.2)
