"""Dispersions estimated from a history of equal pods, where the true values are known."""

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


def make_history(
    blocks: int, pods: int = 3, *, sd: float = 0.04, keep: float = 0.0, offset_sd: float = 0.0, seed: int = 0
) -> DeviationHistory:
    """Make the history of pods at level 2 whose blocks are AR(1) with the given standard deviation."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal((blocks, pods))
    for index in range(1, blocks):
        noise[index] = keep * noise[index - 1] + math.sqrt(1 - keep**2) * noise[index]
    levels = 2 * (1 + offset_sd * random.standard_normal(pods) + sd * noise)
    history = DeviationHistory()
    for row in levels.tolist():
        history = history.add_block({f"pod-{index}": value for index, value in enumerate(row)})
    return history


def mean_of(name: str, **arguments: Any) -> float:
    dispersions = [make_history(24 * BLOCKS_PER_BATCH, seed=seed, **arguments).estimate_dispersion() for seed in range(15)]
    return float(np.mean([getattr(dispersion, name) for dispersion in dispersions]))


@pytest.mark.parametrize("pods", [2, 3, 4])
def test_the_variance_is_per_pod_whatever_their_number(pods: int) -> None:
    assert mean_of("variance", pods=pods) == pytest.approx(0.04**2, rel=0.08)


@pytest.mark.parametrize("keep", [0.0, 0.4])
def test_inflation_is_that_of_a_mean_of_a_batch(keep: float) -> None:
    within = sum((1 - lag / BLOCKS_PER_BATCH) * keep**lag for lag in range(1, BLOCKS_PER_BATCH))
    assert mean_of("inflation", keep=keep) == pytest.approx(1 + 2 * within, rel=0.15)


def test_lasting_differences_are_distinguished_from_noise() -> None:
    assert mean_of("pod_effect_sd", offset_sd=0.02) == pytest.approx(0.02, rel=0.3)
    assert mean_of("pod_effect_sd") < 0.002


def test_a_short_history_has_fewer_degrees_of_freedom() -> None:
    assert make_history(MIN_BATCHES * BLOCKS_PER_BATCH - 1).estimate_dispersion() == UNCALIBRATED_DISPERSION
    short, full = (
        make_history(6 * BLOCKS_PER_BATCH).estimate_dispersion(),
        make_history(24 * BLOCKS_PER_BATCH).estimate_dispersion(),
    )
    assert 0.75 * DEFAULT_INFLATION + 0.25 <= short.inflation <= DEFAULT_INFLATION
    assert (short.batch_count, short.degrees_of_freedom, full.degrees_of_freedom) == (
        6,
        FULL_HISTORY_DEGREES_OF_FREEDOM / 4,
        FULL_HISTORY_DEGREES_OF_FREEDOM,
    )
    assert full.inflation < 2


def test_a_single_pod_adds_no_history() -> None:
    assert DeviationHistory().add_block({"a": 2.0}) == DeviationHistory()
    assert DeviationHistory().add_block({"a": 2.0, "b": 0.0}) == DeviationHistory()


def test_shares_that_are_always_zero_have_no_variance() -> None:
    history = DeviationHistory()
    for _ in range(24 * BLOCKS_PER_BATCH):
        history = history.add_block({"a": 0.0, "b": 0.0}, relative=False)
    assert history.estimate_dispersion() == Dispersion(
        inflation=1.0, variance=0.0, degrees_of_freedom=0.0, pod_effect_sd=0.0, pod_effect_degrees_of_freedom=1.0, batch_count=24
    )


def test_two_arms_of_different_sizes() -> None:
    dispersion = Dispersion(
        inflation=1.5,
        variance=0.0016,
        degrees_of_freedom=20.0,
        pod_effect_sd=0.01,
        pod_effect_degrees_of_freedom=2.0,
        batch_count=24,
    )
    assert dispersion.variance_prior(2.0, (1, 3)).variance == pytest.approx(4 * 0.0016 * 4 / 3)
    no_effect = PodEffect(0.0, 0.0)
    pod_effect = dispersion.pod_effect(no_effect, 2.0, (2, 2))
    assert pod_effect.degrees_of_freedom == 2.0
    assert pod_effect.sd == pytest.approx(0.02)
    assert UNCALIBRATED_DISPERSION.pod_effect(no_effect, 2.0, (2, 2)) == PodEffect(0.0, math.inf)


def test_few_equal_pods_do_not_prove_that_all_are_equal() -> None:
    equal_pods = Dispersion(pod_effect_sd=0.0, pod_effect_degrees_of_freedom=2.0, batch_count=24)
    pod_effect = equal_pods.pod_effect(PodEffect(0.01, 1.0), 1.0, (1, 1))
    assert pod_effect.degrees_of_freedom == 3.0, "the prior is worth a pod"
    assert pod_effect.sd == pytest.approx(0.01 * (2 / 3) ** 0.5)
    uncalibrated = UNCALIBRATED_DISPERSION.pod_effect(PodEffect(0.02, 3.0), 1.0, (1, 1))
    assert uncalibrated.degrees_of_freedom == 3.0
    assert uncalibrated.sd == pytest.approx(0.02 * 2**0.5)


def test_a_history_is_bounded_and_is_restored_from_its_dict() -> None:
    history = DeviationHistory()
    random = np.random.default_rng(5)
    for block in range((MAX_BATCHES_PER_POD + 3) * BLOCKS_PER_BATCH + 7):
        names = [f"pod-{block // 900}-{index}" for index in range(12)]
        history = history.add_block(dict(zip(names, random.normal(2.0, 0.1, 12).tolist(), strict=True)))
    text = json.dumps(history.to_dict())
    assert len(history.pods) == MAX_FOLLOWED_PODS
    assert len(text) < 20_000
    restored = DeviationHistory.from_dict(json.loads(text))
    assert restored == history
    assert restored.estimate_dispersion() == history.estimate_dispersion()
    dispersion = history.estimate_dispersion()
    assert Dispersion.from_dict(json.loads(json.dumps(dispersion.to_dict()))) == dispersion


def add_blocks(history: DeviationHistory, blocks: int, names: str, *, sd: float = 0.04, seed: int = 7) -> DeviationHistory:
    random = np.random.default_rng(seed)
    for _ in range(blocks):
        history = history.add_block(dict(zip(names, (2 * (1 + sd * random.standard_normal(len(names)))).tolist(), strict=True)))
    return history


def test_removed_pods_count_until_others_have_as_much_history() -> None:
    history = add_blocks(DeviationHistory(), FULL_TRUST_BATCHES * BLOCKS_PER_BATCH, "abcdefgh")
    history = add_blocks(history, 1, "stuvwxyz")
    assert history.estimate_dispersion().batch_count == FULL_TRUST_BATCHES, "all pods are others, as after a promotion"
    history = add_blocks(history, 3 * BLOCKS_PER_BATCH, "stuvwxyz")
    retained_pods = set(history.pods) & set("abcdefgh")
    assert (len(retained_pods), len(history.pods)) == (MAX_FOLLOWED_PODS // 2, MAX_FOLLOWED_PODS)
    assert history.estimate_dispersion().batch_count == FULL_TRUST_BATCHES
    history = add_blocks(history, (FULL_TRUST_BATCHES + 1) * BLOCKS_PER_BATCH, "stuvwxyz")
    assert set(history.pods) == set("stuvwxyz")
    assert history.estimate_dispersion().batch_count >= FULL_TRUST_BATCHES


def test_a_pod_that_misses_some_blocks_keeps_its_history() -> None:
    before = add_blocks(DeviationHistory(), 5 * BLOCKS_PER_BATCH, "abcdefgh")
    without_pod = add_blocks(before, BLOCKS_PER_BATCH - 1, "bcdefghi")
    assert without_pod.pods["a"].batches == before.pods["a"].batches
    assert "i" not in without_pod.pods
    with_pod = add_blocks(without_pod, 1, "abcdefgh")
    assert (with_pod.pods["a"].batch_count, with_pod.pods["a"].missed_blocks) == (5, 0)


def test_a_pod_removed_before_its_first_batch_is_forgotten() -> None:
    history = add_blocks(DeviationHistory(), BLOCKS_PER_BATCH, "abc")
    assert set(add_blocks(history, BLOCKS_PER_BATCH + 1, "ab").pods) == {"a", "b"}


def test_a_change_of_traffic_is_followed_after_some_batches() -> None:
    calm = add_blocks(DeviationHistory(), 6 * BLOCKS_PER_BATCH, "abc", sd=0.01)
    wild = add_blocks(calm, 20 * BLOCKS_PER_BATCH, "abc", sd=0.1)
    last = [variance for pod in wild.pods.values() for _, variance in pod.batches[-10:]]
    assert float(np.mean(last)) == pytest.approx(0.1**2, rel=0.2)
