"""The project that wrote a checkpoint, and the evidence for it.

Four projects leave a mark of their own: speculators (speculators_model_type), TorchSpec (_torchspec_version), ModelOpt (keys of
its eagle_config) and Aerie (metadata). The others are recognised by their names of classes and tensors. Another project may share
these names; the evidence states that. Guarantees: pure and total. Not guaranteed: the origin of a config that somebody edited.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any


class CheckpointOrigin(Enum):
    """A project whose checkpoints Aerie recognises."""

    AERIE = "aerie"
    SPECULATORS = "speculators"
    TORCHSPEC = "torchspec"
    MODELOPT = "modelopt"
    NEMO = "nemo"
    SGLANG = "sglang"
    SAFEAILAB = "safeailab"
    SPECFORGE = "specforge"
    OTHER = "other"
    """No known project; the names are vLLM's own."""


_MODELOPT_KEYS = ("next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers")
"""Keys that only NVIDIA's exporter writes (Model-Optimizer modelopt/torch/export/plugins/hf_spec_configs.py)."""


def detect_origin(
    config: Mapping[str, Any], tensor_names: Collection[str], metadata: Mapping[str, str]
) -> tuple[CheckpointOrigin, str]:
    """Return the project and the evidence, as the end of a sentence. Total: a key of the wrong type counts as absent."""
    classes = config.get("architectures")
    architectures = classes if isinstance(classes, list) else []
    if "speculators_model_type" in config:
        return CheckpointOrigin.SPECULATORS, "config.json has speculators_model_type"
    if any(key.startswith("eagle.") for key in metadata):
        return CheckpointOrigin.AERIE, "the metadata of its weights says so"
    if "_torchspec_version" in config or "torchspec_version" in metadata:
        return CheckpointOrigin.TORCHSPEC, "it names a torchspec version"
    eagle_config = config.get("eagle_config")
    if isinstance(eagle_config, Mapping) and (mark := next((key for key in _MODELOPT_KEYS if key in eagle_config), None)):
        return CheckpointOrigin.MODELOPT, f"its eagle_config has {mark}, which ModelOpt writes"
    legacy_name = next((name for name in tensor_names if "aux_norm_" in name), None)
    if legacy_name is not None or "use_aux_norm" in config:
        return CheckpointOrigin.SGLANG, f"{legacy_name or 'use_aux_norm'} is a name that SGLang had before fc_norm"
    if "LlamaEagle3DraftModel" in architectures or any(name.startswith("model.") for name in tensor_names):
        return CheckpointOrigin.NEMO, "its tensors have the prefix `model.`, as NeMo Automodel writes them"
    if "LlamaForCausalLM" in architectures and any(name.startswith("midlayer.") for name in tensor_names):
        return CheckpointOrigin.SAFEAILAB, "its class is LlamaForCausalLM and its layer midlayer, as in SafeAILab/EAGLE"
    if "LlamaForCausalLMEagle3" in architectures and any(name.startswith("midlayer.") for name in tensor_names):
        return CheckpointOrigin.SPECFORGE, (
            "its class is LlamaForCausalLMEagle3 and its layer midlayer; SpecForge leaves no mark of its own, "
            "so name the origin if it is another"
        )
    return CheckpointOrigin.OTHER, "nothing in it is a known project's"
