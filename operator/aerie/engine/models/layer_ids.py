"""Which layers of the target the ids of a drafter's config mean, and which of them vLLM reads.

Layers are counted in two ways. vLLM's id k is the state that enters layer k. SpecForge, TorchSpec and ModelOpt write k for the
state that layer k gives, which is k + 1 to vLLM: they capture the output of layer k (SpecForge algorithms/model_providers.py,
TorchSpec inference/engine/vllm_engine.py, ModelOpt speculative/plugins/hf_eagle.py), and all three default to
[1, L/2 - 1, L - 4], which is vLLM's default (2, L/2, L - 3) in the other way to count. SGLang (pull request 25454) tells the two
apart by the first id: 1 is the output of layer 1.

Guarantees: pure; a way to count is named only where a project's mark, the first id or a default decides, else None.
Not guaranteed: that the ids are those that the drafter was trained with. A config can be edited.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from aerie.engine.models.origin import Origin

Layers = tuple[int, ...]


class Counting(Enum):
    """How a config counts layers; the value is what is added for vLLM's id."""

    INPUTS = 0
    """k is the state that enters layer k: vLLM."""
    OUTPUTS = 1
    """k is the state that layer k gives: SpecForge, TorchSpec, ModelOpt."""

    def to_vllm(self, ids: Sequence[int]) -> Layers:
        return tuple(one + self.value for one in ids)


def default_layers(layers: int) -> Layers:
    """What vLLM reads of a target with so many layers where the drafter names none (models/interfaces.py, SupportsEagle3)."""
    return (2, layers // 2, layers - 3)


def counting(
    ids: Sequence[int],
    origin: Origin,
    *,
    named: bool = False,
    vllm_names: bool = False,
    model_type: str | None = None,
    layers: int | None = None,
) -> Counting | None:
    """How `ids` are counted, or None where nothing decides.

    `named`: a person named the origin. `vllm_names`: the layer is `layers.0.` and not `midlayer.`. `layers`: the target's number.
    """
    default = None if layers is None else set(default_layers(layers))
    if origin is Origin.AERIE:
        return Counting.INPUTS
    if named and origin in (Origin.SPECFORGE, Origin.MODELOPT):
        return Counting.OUTPUTS
    if default is not None and set(Counting.OUTPUTS.to_vllm(ids)) == default:
        return Counting.OUTPUTS
    if origin is Origin.SPECULATORS:
        return Counting.INPUTS
    if ids[0] == 1:
        return Counting.OUTPUTS
    if origin is Origin.TORCHSPEC:  # its exporter for vLLM adds 1 for this one model_type only
        return Counting.INPUTS if vllm_names and model_type == "kimi_k2" else Counting.OUTPUTS
    if default is not None and set(ids) == default:
        return Counting.INPUTS
    if origin is Origin.MODELOPT:
        return Counting.OUTPUTS
    return None if origin is Origin.SPECFORGE else Counting.INPUTS


def read_by_vllm(
    top: Layers | None, nested: Layers | None, layer_ids: Layers | None, *, runner: int, default: Layers | None
) -> Layers | None:
    """The ids that vLLM 0.22 to 0.33 goes by, or None where only the target tells them and its number of layers is unknown.

    `layer_ids` are those of eagle_config.layer_ids, which model runner V2 reads from 0.27 on, and V1 never.
    """
    return top or (nested if runner == 1 else layer_ids) or default
