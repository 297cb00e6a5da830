"""The estimate of a training's cost, against a measured training."""

from __future__ import annotations

from typing import Any

import pytest

from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.train.cost import TrainingCost, estimate_cost

MEASURED_PEAK_MIB = 1345
"""The peak of benchmarks/_drafter_training.py with 2048 tokens, beyond weights and data (docs/measurements/training-cost.md)."""

BENCHMARK = DrafterConfig(
    family=DrafterFamily.LLAMA,
    hidden_size=512,
    intermediate_size=1408,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=32000,
    draft_vocab_size=8000,
    target_hidden_size=512,
    aux_layer_ids=(1, 2, 3),
    fc_norm=True,
    norm_output=True,
)


def estimate(**changes: Any) -> TrainingCost:
    fields: dict[str, Any] = {
        "target_weights": 10_000_000,
        "horizon": 7,
        "tokens_per_batch": 2048,
        "bytes_per_number": 4,
        "runs_target": False,
    }
    return estimate_cost(BENCHMARK, **fields | changes)


def test_the_estimate_is_near_the_measured_peak() -> None:
    cost = estimate()
    assert cost.trained_weights == 8_359_424
    # The measurement excludes the weights themselves, a quarter of `drafter_bytes`.
    assert (cost.drafter_bytes * 12 / 16 + cost.activation_bytes) / 2**20 == pytest.approx(MEASURED_PEAK_MIB, rel=0.1)


def test_each_setting_moves_its_part_only() -> None:
    plain = estimate(runs_target=True)
    assert estimate().target_bytes == 0
    assert estimate(runs_target=True, processes=4, shard_target=True).target_bytes == plain.target_bytes / 4
    sharded = estimate(runs_target=True, processes=4, shard_drafter=True)
    assert sharded.drafter_bytes == plain.drafter_bytes * (16 / 4 + 8) / 16
    recomputed = estimate(runs_target=True, recompute=True)
    assert recomputed.activation_bytes < plain.activation_bytes / 2
    assert recomputed.drafter_operations_per_token > plain.drafter_operations_per_token
    assert plain.hours(3.6e6, 1e12) == pytest.approx(
        (plain.drafter_operations_per_token + plain.target_operations_per_token) / 1e9
    )
