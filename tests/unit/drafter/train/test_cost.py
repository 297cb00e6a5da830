"""The estimate of a training's cost, against a measured training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aerie_drafter.config import DrafterConfig, DrafterFamily
from aerie_drafter.train.cost import TrainingCost, estimate_cost

MEASURED_PEAK_MIB = 125
"""The peak of benchmarks/_drafter_training.py at 4x256, beyond weights and data (docs/measurements/training-cost.md)."""

BENCHMARK = DrafterConfig(
    family=DrafterFamily.LLAMA,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    vocab_size=2048,
    draft_vocab_size=1024,
    target_hidden_size=256,
    aux_layer_ids=(1, 2, 3),
    fc_norm=True,
    norm_output=True,
)


def estimate(**changes: Any) -> TrainingCost:
    fields: dict[str, Any] = {
        "target_weights": 10_000_000,
        "horizon": 7,
        "tokens_per_batch": 4 * 256,
        "bytes_per_number": 4,
        "runs_target": False,
        "device_type": "cpu",
    }
    return estimate_cost(changes.pop("drafter", BENCHMARK), **fields | changes)


def test_the_estimate_is_near_the_measured_peak() -> None:
    cost = estimate()
    assert cost.trained_weights == 1_181_440
    # The measurement excludes the weights themselves, a quarter of `drafter_bytes`.
    assert (cost.drafter_bytes * 12 / 16 + cost.activation_bytes) / 2**20 == pytest.approx(MEASURED_PEAK_MIB, rel=0.1)


def test_each_setting_moves_its_part_only() -> None:
    plain = estimate(runs_target=True)
    assert estimate().target_bytes == 0
    assert estimate(runs_target=True, processes=4, shard_target=True).target_bytes == plain.target_bytes / 4
    sharded = estimate(runs_target=True, processes=4, shard_drafter=True)
    assert sharded.drafter_bytes == plain.drafter_bytes * (16 / 4 + 8) / 16
    recomputed = estimate(runs_target=True, recompute=True)
    assert recomputed.activation_bytes < 0.6 * plain.activation_bytes
    assert recomputed.drafter_operations_per_token > plain.drafter_operations_per_token
    assert plain.hours(3.6e6, 1e12) == pytest.approx(
        (plain.drafter_operations_per_token + plain.target_operations_per_token) / 1e9
    )


def test_a_second_layer_adds_its_weights_and_activations() -> None:
    single, double = estimate(), estimate(drafter=replace(BENCHMARK, num_hidden_layers=2))
    hidden, queries = BENCHMARK.hidden_size, BENCHMARK.num_attention_heads * BENCHMARK.head_dim
    attention = 2 * hidden * (queries + BENCHMARK.num_key_value_heads * BENCHMARK.head_dim)
    mlp, norms = 3 * hidden * BENCHMARK.intermediate_size, 2 * hidden
    assert double.trained_weights - single.trained_weights == attention + mlp + norms
    assert single.activation_bytes < double.activation_bytes < 2 * single.activation_bytes
