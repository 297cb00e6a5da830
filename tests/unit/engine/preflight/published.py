"""Auxiliary layers in the configs of trainers and publishers, and the layers that vLLM reads from them, with sources.

Each row was read in a public repository at the commit named. What model runners V1 and V2 read was computed with vLLM's own
functions of 0.22 to 0.33: V1 vllm/v1/worker/gpu_model_runner.py, _get_eagle3_aux_layers_from_config; V2
vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, get_eagle3_aux_layers_from_config; where they give None, the default of
models/interfaces.py for the target's number of layers. All twelve releases agree on every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Layers = tuple[int, ...]

SPECFORGE = "sgl-project/SpecForge@a6b6b02 (2026-08-08) configs/"
TORCHSPEC = "lightseekorg/TorchSpec@6f21829 (2026-04-28) configs/draft_models/"
MODELOPT = (
    "NVIDIA/Model-Optimizer@a2fbac7 (2026-08-21) modelopt/torch/speculative/plugins/hf_eagle.py, default_eagle_aux_layer_ids"
)
SPECULATORS = "vllm-project/speculators@c05b95b (2026-08-20) "

KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Row:
    """One config, as far as it concerns auxiliary layers."""

    name: str
    source: str
    config: Mapping[str, Any]
    target_layers: int
    v1: Layers
    """Layers that model runner V1 reads, by vLLM's count."""
    v2: Layers
    trained: Layers | None
    """Layers that the trainer captured, by vLLM's count. None: the config names no layers and no default of the trainer."""
    layer: str = "midlayer"


def _nested(*ids: int, **more: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "eagle_config": {KEY: list(ids), **more}}


_MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}

_MLA = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "_torchspec_version": "0.1",
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
}

ROWS = (
    Row("deepseek-v3-671b", SPECFORGE + "deepseek-v3-671b-eagle3.json", _nested(1, 29, 57, use_aux_hidden_state=True), 61,
        v1=(1, 29, 57), v2=(2, 30, 58), trained=(2, 30, 58)),
    Row("qwen3-235B-A22B", SPECFORGE + "qwen3-235B-A22B-eagle3.json", _nested(1, 46, 90, use_aux_hidden_state=True), 94,
        v1=(1, 46, 90), v2=(2, 47, 91), trained=(2, 47, 91)),
    Row("gpt-oss-120B", SPECFORGE + "gpt-oss-120B-eagle3.json", _nested(1, 17, 33), 36,
        v1=(1, 17, 33), v2=(2, 18, 33), trained=(2, 18, 34)),
    Row("gpt-oss-20B", SPECFORGE + "gpt-oss-20B-eagle3.json", _nested(1, 11, 21), 24,
        v1=(1, 11, 21), v2=(2, 12, 21), trained=(2, 12, 22)),
    Row("qwen3-30B-A3B 3.1", SPECFORGE + "qwen3-30B-A3B-eagle3.1.json",
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, 48,
        v1=(2, 24, 45), v2=(2, 24, 45), trained=None),
    Row("kimi-k2.5 MLA", TORCHSPEC + "kimi_k25_eagle3_mla.json", {**_MLA, "eagle_config": {KEY: [1, 29, 57]}}, 61,
        v1=(1, 29, 57), v2=(2, 30, 58), trained=(2, 30, 58)),
    Row("kimi-k2.5 MLA, exported with --vllm", TORCHSPEC + "kimi_k25_eagle3_mla.json; tools/convert_to_hf.py",
        {**_MLA, "eagle_config": {KEY: [2, 30, 58]}}, 61,
        v1=(2, 30, 58), v2=(2, 30, 58), trained=(2, 30, 58), layer="layers.0"),
    Row("qwen3-8b", TORCHSPEC + "qwen3_8b_eagle3.json", {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, 36,
        v1=(2, 18, 33), v2=(2, 18, 33), trained=None),
    Row("ModelOpt, 36 layers", MODELOPT, _nested(1, 17, 32, **_MODELOPT), 36,
        v1=(1, 17, 32), v2=(2, 18, 33), trained=(2, 18, 33), layer="layers.0"),
    Row("ModelOpt, 80 layers", MODELOPT, _nested(1, 39, 76, **_MODELOPT), 80,
        v1=(1, 39, 76), v2=(2, 40, 77), trained=(2, 40, 77), layer="layers.0"),
    Row("Llama 4 Maverick, converted", SPECULATORS + "examples/convert/eagle3/apply_eagle3_llama4_maverick.sh",
        {"speculators_model_type": "eagle3", KEY: [1, 23, 44], "transformer_layer_config": {"model_type": "llama"}}, 48,
        v1=(1, 23, 44), v2=(1, 23, 44), trained=(2, 24, 45), layer="layers.0"),
    Row("Qwen3-8B, trained by speculators", SPECULATORS + "src/speculators/models/utils.py",
        {"speculators_model_type": "eagle3", KEY: [2, 18, 33], "transformer_layer_config": {"model_type": "llama"}}, 36,
        v1=(2, 18, 33), v2=(2, 18, 33), trained=(2, 18, 33), layer="layers.0"),
)  # fmt: skip
