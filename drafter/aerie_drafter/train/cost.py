"""Estimated time and memory of a training, from the sizes of target and drafter.

Time: 6 operations per trained weight, unrolled step and token (forward, and twice that backward), of the weights that read hidden
states or their projections; the others count once. 2 per weight and token of the target. All divided by the rate that a device
sustains. Memory: what is stored for each weight, plus the activations that the backward pass needs. The factors of the
activations were counted in `aerie_drafter.model`, and compared with a measured training of a small drafter of one layer on CPU
(docs/measurements/training-cost.md). Not guaranteed: a figure on a GPU, where nothing was measured; fragmentation, communication
between processes, and the target's own activations are not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from aerie_drafter.config import DrafterConfig
from aerie_drafter.model import Drafter
from aerie_drafter.train.ttt import LOGIT_SLICE_ELEMENTS, count_slice_positions

_STORED_BYTES_PER_TRAINED_WEIGHT = 16
"""float32: the weight, its gradient, and two moments of AdamW."""


@dataclass(frozen=True)
class TrainingCost:
    """Estimate of a training, per device."""

    trained_weights: int
    target_weights: int
    drafter_operations_per_token: float
    target_operations_per_token: float
    drafter_bytes: float
    """Weights, gradients and moments."""
    embedding_bytes: float
    """The frozen embedding of the drafter, in float32."""
    target_bytes: float
    activation_bytes: float
    """Memory of one batch: the unrolled steps, states of the target, and a slice of logits."""

    @property
    def total_bytes(self) -> float:
        """Return the memory of a device."""
        return self.drafter_bytes + self.embedding_bytes + self.target_bytes + self.activation_bytes

    def hours(self, tokens: float, operations_per_second: float) -> float:
        """Return the time of a training over `tokens`, all epochs together, with that rate over all devices."""
        return tokens * (self.drafter_operations_per_token + self.target_operations_per_token) / operations_per_second / 3600


def estimate_cost(
    drafter: DrafterConfig,
    *,
    target_weights: int,
    horizon: int,
    tokens_per_batch: int,
    processes: int = 1,
    bytes_per_number: int = 2,
    shard_target: bool = False,
    shard_drafter: bool = False,
    runs_target: bool = True,
    recompute: bool = False,
    device_type: str = "cuda",
) -> TrainingCost:
    """Estimate a training; `tokens_per_batch` is that of one process, and `runs_target` is false with stored states."""
    weights = count_trained_weights(drafter)
    once = count_weights_used_once(drafter)
    unrolled = weights - once
    target_share = processes if shard_target else 1
    drafter_share = processes if shard_drafter else 1
    # Backward and forward of a step again: 4 passes in place of 3.
    passes = 8 if recompute else 6
    operations = 6 * once + passes * horizon * unrolled
    return TrainingCost(
        trained_weights=weights,
        target_weights=target_weights if runs_target else 0,
        drafter_operations_per_token=operations,
        target_operations_per_token=2 * target_weights if runs_target else 0,
        drafter_bytes=_drafter_bytes(weights, drafter_share),
        embedding_bytes=4 * drafter.vocab_size * drafter.hidden_size,
        target_bytes=bytes_per_number * target_weights / target_share if runs_target else 0,
        activation_bytes=tokens_per_batch * bytes_per_number * _numbers_per_token(drafter, horizon, recompute=recompute)
        + 4 * _numbers_of_slice(drafter, device_type),
    )


def _drafter_bytes(weights: int, share: int) -> float:
    """Return the bytes of weights, gradients and moments; a shard's step gathers all weights and gradients besides its own."""
    stored = _STORED_BYTES_PER_TRAINED_WEIGHT * weights / share
    return stored if share == 1 else stored + 8 * weights


def _numbers_per_token(drafter: DrafterConfig, horizon: int, *, recompute: bool) -> float:
    """Return the numbers that a token keeps until the backward pass."""
    hidden, intermediate = drafter.hidden_size, drafter.intermediate_size
    layers = drafter.num_hidden_layers
    step = layers * (9 * hidden + 2 * intermediate)
    # Recomputed steps keep their input, result, keys and values, and one step at a time all of its numbers.
    key_values = 2 * layers * drafter.num_key_value_heads * drafter.head_dim
    unrolled = horizon * (2 * hidden + key_values) + step if recompute else horizon * step
    states = (len(drafter.aux_layer_ids) + 1) * drafter.target_hidden_size
    return unrolled + states + 2 * horizon * hidden


def _numbers_of_slice(drafter: DrafterConfig, device_type: str) -> int:
    """Return the numbers of a slice of the loss: logits of the target and of some steps of the drafter, with temporary ones."""
    positions = count_slice_positions(LOGIT_SLICE_ELEMENTS, drafter.vocab_size, device_type)
    return positions * (2 * drafter.vocab_size + 5 * drafter.draft_vocab_size)


def count_weights_used_once(config: DrafterConfig) -> int:
    """Return the number of trained weights that read the target's states or the tokens, which are the same for all steps."""
    with torch.device("meta"):
        drafter = Drafter(config)
    projections = drafter.midlayer.self_attn.input_projections
    return drafter.fc.weight.numel() + sum(projection.weight.numel() // 2 for projection in projections)


def count_trained_weights(config: DrafterConfig) -> int:
    """Return the number of trained weights of a drafter, without creating it."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Drafter(config).parameters() if parameter.requires_grad)


def count_target_weights(config: Any) -> int:
    """Return the number of weights of a target's Hugging Face configuration, without creating it."""
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        return sum(parameter.numel() for parameter in auto.from_config(config).parameters())
