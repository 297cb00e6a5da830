"""The target's layers that the ids of a drafter's config mean, and those that vLLM reads.

There are two ways to number layers. vLLM's id k is the state that enters layer k. SpecForge, TorchSpec and ModelOpt write k for
the state that leaves layer k, which is k + 1 in vLLM: they capture the output of layer k (SpecForge
algorithms/model_providers.py, TorchSpec inference/engine/vllm_engine.py, ModelOpt speculative/plugins/hf_eagle.py). All three
default to [1, L/2 - 1, L - 4], which is vLLM's default (2, L/2, L - 3) in the other numbering. SGLang (pull request 25454)
distinguishes the two by the first id: 1 is the output of layer 1.

Guarantees: pure. A numbering is returned only if a project's mark, the first id or a default determines it, else None.
Not guaranteed: that the ids are those that the drafter was trained with. A config can be edited.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from aerie.engine.models.origin import CheckpointOrigin

LayerIds = tuple[int, ...]


class LayerNumbering(Enum):
    """The numbering of layers in a config; the value is the offset to vLLM's ids."""

    INPUTS = 0
    """Id k is the state that enters layer k: vLLM."""
    OUTPUTS = 1
    """Id k is the state that leaves layer k: SpecForge, TorchSpec, ModelOpt."""

    def to_vllm(self, ids: Sequence[int]) -> LayerIds:
        return tuple(layer_id + self.value for layer_id in ids)


def vllm_default_layer_ids(layer_count: int) -> LayerIds:
    """Return the layers that vLLM reads of a target if the drafter names none (models/interfaces.py, SupportsEagle3)."""
    return (2, layer_count // 2, layer_count - 3)


def detect_layer_numbering(
    ids: Sequence[int],
    origin: CheckpointOrigin,
    *,
    is_origin_explicit: bool = False,
    has_vllm_tensor_names: bool = False,
    model_type: str | None = None,
    layer_count: int | None = None,
) -> LayerNumbering | None:
    """Return the numbering of `ids`, or None if nothing determines it.

    `is_origin_explicit`: the user named the origin. `has_vllm_tensor_names`: the layer is `layers.0.` and not `midlayer.`.
    `layer_count`: the number of the target's layers.
    """
    default = None if layer_count is None else set(vllm_default_layer_ids(layer_count))
    if origin is CheckpointOrigin.AERIE:
        return LayerNumbering.INPUTS
    if is_origin_explicit and origin in (CheckpointOrigin.SPECFORGE, CheckpointOrigin.MODELOPT):
        return LayerNumbering.OUTPUTS
    if default is not None and set(LayerNumbering.OUTPUTS.to_vllm(ids)) == default:
        return LayerNumbering.OUTPUTS
    if origin is CheckpointOrigin.SPECULATORS:
        return LayerNumbering.INPUTS
    if ids[0] == 1:
        return LayerNumbering.OUTPUTS
    if origin is CheckpointOrigin.TORCHSPEC:  # its exporter for vLLM adds 1 only for this model_type
        return LayerNumbering.INPUTS if has_vllm_tensor_names and model_type == "kimi_k2" else LayerNumbering.OUTPUTS
    if default is not None and set(ids) == default:
        return LayerNumbering.INPUTS
    if origin is CheckpointOrigin.MODELOPT:
        return LayerNumbering.OUTPUTS
    return None if origin is CheckpointOrigin.SPECFORGE else LayerNumbering.INPUTS


def resolve_layer_ids(
    top_level_ids: LayerIds | None,
    nested_ids: LayerIds | None,
    v2_runner_ids: LayerIds | None,
    *,
    model_runner: int,
    default_ids: LayerIds | None,
) -> LayerIds | None:
    """Return the ids that vLLM 0.22 to 0.33 uses. None if they depend on the target and its number of layers is unknown.

    `v2_runner_ids` are those of eagle_config.layer_ids, which model runner V2 reads from 0.27 on, and V1 never.
    """
    return top_level_ids or (nested_ids if model_runner == 1 else v2_runner_ids) or default_ids
