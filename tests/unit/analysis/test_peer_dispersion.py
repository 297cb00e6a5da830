"""Deviations of equal pods during an analysis: what they prove of a history, where the true dispersion is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.criteria.history_fit import MIN_COMPARED_BLOCKS, MISFIT_QUANTILE
from aerie.analysis.statistics.calibration import MAX_FOLLOWED_PODS, Dispersion, PodEffect
from aerie.analysis.statistics.peer_dispersion import BATCH_BLOCKS, MIN_TESTED_BLOCKS, PeerDeviations

HISTORY = Dispersion(
    inflation=1.0, variance=0.04**2, degrees_of_freedom=20.0, pod_effect_sd=0.0, pod_effect_degrees_of_freedom=2.0, batch_count=24
)
PRIOR = PodEffect(0.003, 2.0)


def add_blocks(blocks: int, pods: int = 3, *, sd: float = 0.04, offset_sd: float = 0.0, seed: int = 1) -> PeerDeviations:
    """Add blocks of pods at level 2, which differ permanently by `offset_sd` and from block to block by `sd`."""
    random, peers = np.random.default_rng(seed), PeerDeviations()
    offsets = offset_sd * random.standard_normal(pods)
    for row in (2 * (1 + offsets + sd * random.standard_normal((blocks, pods)))).tolist():
        peers = peers.add_block({f"pod-{index}": value for index, value in enumerate(row)})
    return peers


def explained_share(blocks: int, pods: int = 3, **arguments: float) -> float:
    """Return the share of 200 analyses in which the history explains the deviations."""
    runs = [add_blocks(blocks, pods, seed=seed, **arguments) for seed in range(200)]
    return float(np.mean([peers.is_explained_by(HISTORY, PRIOR, MISFIT_QUANTILE) for peers in runs]))


@pytest.mark.parametrize("blocks", [MIN_COMPARED_BLOCKS, 60])
def test_a_history_of_the_same_traffic_fits_in_four_of_ten_cases(blocks: int) -> None:
    assert 0.33 < explained_share(blocks) < 0.47


def test_lasting_differences_and_larger_dispersion_do_not_fit() -> None:
    assert explained_share(30, offset_sd=0.03) < 0.1
    assert explained_share(30, 8, offset_sd=0.03) == 0.0, "the more pods, the surer"
    assert explained_share(30, sd=0.12) < 0.05


def test_the_pod_effect_is_what_pods_are_apart_on_average() -> None:
    effects = [add_blocks(40, offset_sd=0.02, seed=seed).pod_effect(40) for seed in range(100)]
    assert all(effect is not None and effect.degrees_of_freedom == 2.0 for effect in effects)
    mean_square = float(np.mean([effect.sd**2 for effect in effects if effect is not None]))
    assert mean_square == pytest.approx(0.02**2 + 0.04**2 / 40, rel=0.2)


@pytest.mark.parametrize(("blocks", "pods"), [(MIN_COMPARED_BLOCKS - 1, 3), (100, 1), (0, 3)])
def test_few_blocks_or_pods_prove_nothing(blocks: int, pods: int) -> None:
    peers = add_blocks(blocks, pods)
    assert peers.pod_effect(MIN_COMPARED_BLOCKS) is None
    apart = add_blocks(MIN_TESTED_BLOCKS if pods > 1 and blocks else blocks, pods, offset_sd=0.5)
    assert apart.is_explained_by(HISTORY, PRIOR, MISFIT_QUANTILE) == (pods < 2 or not blocks), "a few blocks may refute a history"
    assert add_blocks(MIN_TESTED_BLOCKS - 1, offset_sd=0.5).is_explained_by(HISTORY, PRIOR, MISFIT_QUANTILE)


def test_a_pod_without_steps_is_left_out_of_a_block() -> None:
    peers = add_blocks(20)
    assert peers.add_block({"pod-0": 2.0, "pod-1": 0.0}) == peers
    fewer = peers.add_block({"pod-0": 2.0, "pod-1": 2.0, "pod-2": 0.0})
    assert [fewer.pods[f"pod-{index}"].block_count for index in range(3)] == [21, 21, 20]


@given(st.lists(st.sets(st.integers(0, 30), max_size=20), max_size=30))
def test_any_pods_leave_the_state_small_and_restorable(blocks: list[set[int]]) -> None:
    peers = PeerDeviations()
    for pods in blocks:
        peers = peers.add_block({f"pod-{pod}": 2.0 + pod / 100 for pod in pods})
    assert len(peers.pods) <= MAX_FOLLOWED_PODS
    assert PeerDeviations.from_dict(json.loads(json.dumps(peers.to_dict()))) == peers
    assert peers.batch_squares >= 0.0


def test_a_pod_that_has_left_makes_room() -> None:
    names = "abcdefgh"
    peers = PeerDeviations().add_block(dict.fromkeys(names, 2.0))
    peers = peers.add_block(dict.fromkeys("bcdefghi", 2.0))
    assert set(peers.pods) == set("bcdefghi")
    peers = peers.add_block(dict.fromkeys("bc", 2.0))
    assert set(peers.pods) == set("bcdefghi"), "it may return"


def test_batches_show_a_memory_that_the_mean_hides() -> None:
    """Deviations that alternate by batches: each batch is far off, and the mean of all is not."""
    peers = PeerDeviations()
    for block in range(8 * BATCH_BLOCKS):
        swing = 0.06 * (-1) ** (block // BATCH_BLOCKS)
        peers = peers.add_block({"a": 2 * (1 + swing), "b": 2 * (1 - swing), "c": 2.0})
    effect = peers.pod_effect(8 * BATCH_BLOCKS)
    assert effect is not None
    assert effect.sd < 0.01
    assert not peers.is_explained_by(HISTORY, PRIOR, MISFIT_QUANTILE)
    assert peers.is_explained_by(Dispersion(inflation=20.0, variance=0.04**2, batch_count=24), PRIOR, MISFIT_QUANTILE)
    assert math.isfinite(peers.batch_squares)
