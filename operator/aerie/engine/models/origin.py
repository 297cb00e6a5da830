"""Which project wrote a checkpoint, and by which evidence that is known.

Four projects leave a mark of their own: speculators (speculators_model_type), TorchSpec (_torchspec_version), ModelOpt (keys of
its eagle_config) and this one (metadata). The others are told by how they name classes and tensors, which a further project may
share; the evidence says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any


class CheckpointOrigin(Enum):
    """A project whose checkpoints are known."""

    AERIE = "aerie"
    SPECULATORS = "speculators"
    TORCHSPEC = "torchspec"
    MODELOPT = "modelopt"
    NEMO = "nemo"
    SGLANG = "sglang"
    SAFEAILAB = "safeailab"
    SPECFORGE = "specforge"
    OTHER = "other"
    """None of them, in vLLM's own names."""


_MODELOPT_KEYS = ("next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers")
"""Keys that only NVIDIA's exporter writes (Model-Optimizer modelopt/torch/export/plugins/hf_spec_configs.py)."""


def detect_origin(
    config: Mapping[str, Any], tensor_names: Collection[str], metadata: Mapping[str, str]
) -> tuple[CheckpointOrigin, str]:
    """The project and the evidence, as the end of a sentence. Total: a key of the wrong type counts as absent."""
    classes = config.get("architectures")
    architectures = classes if isinstance(classes, list) else []
    if "speculators_model_type" in config:
        return CheckpointOrigin.SPECULATORS, "config.json has speculators_model_type"
    if any(key.startswith("eagle.") for key in metadata):
        return CheckpointOrigin.AERIE, "the metadata of its weights says so"
    if "_torchspec_version" in config or "torchspec_version" in metadata:
        return CheckpointOrigin.TORCHSPEC, "it names a torchspec version"
    own = config.get("eagle_config")
    if isinstance(own, Mapping) and (mark := next((key for key in _MODELOPT_KEYS if key in own), None)):
        return CheckpointOrigin.MODELOPT, f"its eagle_config has {mark}, which ModelOpt writes"
    legacy = next((name for name in tensor_names if "aux_norm_" in name), None)
    if legacy is not None or "use_aux_norm" in config:
        return CheckpointOrigin.SGLANG, f"{legacy or 'use_aux_norm'} is a name that SGLang had before fc_norm"
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
