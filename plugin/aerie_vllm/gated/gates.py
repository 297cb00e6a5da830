"""Gates: flags of an EAGLE 3 head as buffers, so that one module is every kind of head.

vLLM's classes decide by Python attributes when a graph is compiled or captured. Here both results are calculated and
`torch.where(gate, ...)` takes one, so a compiled graph and a CUDA graph follow the gate's value. The modules of a head are
replaced where they differ, and vLLM's own forward methods stay as they are.

Guarantees: an engine drafts as vLLM's own class does with the flags that the gates hold. A gate is one buffer however many
modules read it, and is written in place. The cost: normalizations of the aux states, and a selection for each gate.

The replaced modules, as vLLM 0.26 to 0.33 uses them in llama_eagle3.py, qwen3_eagle3.py and deepseek_eagle3.py:
    norm_output           `norm`: the second result of the last normalization
    fc_norm               `fc_norm`: one normalization for each aux state
    norm_before_fc        `input_norm`: one normalization for all aux states (not in deepseek_eagle3.py)
    norm_before_residual  `_residual_norm` of the layers
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm

from aerie_vllm.validation import read_flags


class OptionalNorm(RMSNorm):  # type: ignore[misc] # vLLM carries no types here
    """A normalization that leaves its input as it is while the gate is closed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.gate, super().forward(x), x)


class OutputNorm(RMSNorm):  # type: ignore[misc]
    """The last normalization: (normalized, what the next draft step gets, which is normalized while the gate is open)."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normalized, prenorm = super().forward(x, residual)
        return normalized, torch.where(self.gate, normalized, prenorm)


class ResidualNorm(RMSNorm):  # type: ignore[misc]
    """The normalization of a layer's hidden states, and the residual, which is normalized while the gate is open."""

    def normalize(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normalized, residual)."""
        normalized = self(hidden_states)
        return normalized, torch.where(self.gate, normalized, hidden_states)


@contextmanager
def all_optional_modules(config: Any) -> Iterator[None]:
    """Let vLLM's class build every optional module: its config says that the head has them, until the end of the block."""
    eagle_config = getattr(config, "eagle_config", None)
    built = {"fc_norm": True, "norm_before_fc": True, "norm_output": False, "norm_before_residual": False}
    saved = {name: getattr(config, name, False) for name in built}
    try:
        for name, value in built.items():
            setattr(config, name, value)
        if eagle_config:
            config.eagle_config = {**eagle_config, "norm_before_fc": True}
        yield
    finally:
        for name, value in saved.items():
            setattr(config, name, value)
        if eagle_config:
            config.eagle_config = eagle_config


def install_gates(head: Any, config: Any) -> None:
    """Replace the modules of a head that has just been built, and set the gates to its config's flags.

    `head.aerie_gates` has the gates by flag, each a bool tensor without dimensions.
    """
    flags = read_flags(config.to_dict())
    model = head.model
    gates: dict[str, torch.Tensor] = {}

    def replace(flag: str, norm_class: type[RMSNorm], norm: Any) -> Any:
        gate = gates.setdefault(flag, torch.tensor(flags[flag], device=norm.weight.device))
        gated = norm_class(norm.hidden_size, eps=norm.variance_epsilon, dtype=norm.weight.dtype)
        gated.register_buffer("gate", gate, persistent=False)
        return gated

    model.norm = replace("norm_output", OutputNorm, model.norm)
    if getattr(model, "fc_norm", None) is not None:
        model.fc_norm = nn.ModuleList(replace("fc_norm", OptionalNorm, norm) for norm in model.fc_norm)
    if getattr(model, "input_norm", None) is not None:
        model.input_norm = replace("norm_before_fc", OptionalNorm, model.input_norm)
    for layer in model.layers:
        layer.hidden_norm = replace("norm_before_residual", ResidualNorm, layer.hidden_norm)
        layer._residual_norm = layer.hidden_norm.normalize
    head.aerie_gates = gates
