"""Target and drafter as vLLM sees them: one view of the formats of config.json.

A drafter has one of two formats: native (the keys at the top level, as in `LlamaForCausalLMEagle3` checkpoints) or that of the
speculators library (`transformer_layer_config` inside, and defaults of its own). A target may have its language model in
`text_config`. The rules are those of vLLM 0.32: transformers_utils/configs/eagle.py, configs/speculators/algos.py
(update_eagle3), models/{llama,qwen3,deepseek}_eagle3.py.

Guarantees: pure and total. A key of the wrong type counts as absent, so that no config can break a check. An absent value is
None, and the check that needs it reports that. Not guaranteed: that the weights match the config; preflight compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aerie.engine.models.layer_ids import vllm_default_layer_ids

DrafterFamily = Literal["llama", "qwen3", "mla", "other"]

_FAMILY_BY_ARCHITECTURE: dict[str, DrafterFamily] = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "PEagleDraftModel": "llama",
    "PeagleLlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
    "PeagleQwen3ForCausalLM": "qwen3",
    "Eagle3DeepseekV2ForCausalLM": "mla",
    "Eagle3DeepseekV3ForCausalLM": "mla",
}
"""The file that implements each of vLLM's EAGLE 3 classes (model_executor/models/registry.py), and so its rules."""


def list_architectures(family: DrafterFamily) -> frozenset[str]:
    """Return the architectures that vLLM serves with the same class of EAGLE 3 heads; none for other families."""
    return frozenset(name for name, other in _FAMILY_BY_ARCHITECTURE.items() if other == family)


@dataclass(frozen=True)
class AttentionConfig:
    """The parameters that determine the size of the KV cache of one model."""

    layer_count: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    kv_lora_rank: int | None
    """The rank of multi-head latent attention, which caches one vector of `kv_lora_rank + rope_dim` per token and layer; else
    None."""
    rope_dim: int | None
    sliding_window: int | None
    """Tokens that a sliding-window layer caches."""
    sliding_layer_count: int
    """The number of layers that cache no more than `sliding_window` tokens."""
    linear_layer_count: int
    """The number of layers that have a state of fixed size instead of a KV cache (Mamba, gated delta nets, ...)."""


@dataclass(frozen=True)
class TargetModel:
    """The served model."""

    model_type: str | None
    architecture: str | None
    hidden_size: int | None
    layer_count: int | None
    vocab_size: int | None
    max_position: int | None
    dtype: str | None
    is_quantized: bool
    is_moe: bool
    """Whether it is a mixture of experts."""
    attention: AttentionConfig

    @property
    def default_aux_layer_ids(self) -> tuple[int, ...] | None:
        """The layers that vLLM reads if the drafter names none (interfaces.py, SupportsEagle3), or None if unknown."""
        return None if self.layer_count is None else vllm_default_layer_ids(self.layer_count)


@dataclass(frozen=True)
class DrafterModel:
    """An EAGLE 3 or 3.1 drafter. For any other method only the fields up to `is_quantized` are meaningful."""

    format: Literal["native", "speculators"]
    architecture: str | None
    """The class name that vLLM uses under the method eagle3, which adds the prefix `Eagle3` if the name lacks it."""
    family: DrafterFamily
    model_type: str | None
    kind: str
    """The kind of drafter according to the config: `eagle3`, `peagle`, `dflash`, `dspark`, `medusa`, ..."""
    hidden_size: int | None
    vocab_size: int | None
    max_position: int | None
    rope_type: str
    dtype: str | None
    is_quantized: bool
    attention: AttentionConfig
    draft_vocab_size: int | None
    target_hidden_size: int | None
    fc_norm: bool
    norm_output: bool | None
    """The key of the config; None: absent, and vLLM uses False."""
    norm_before_fc: bool
    norm_before_residual: bool | None
    """The key of the config; None: absent, and vLLM uses False for the native format and True for speculators'."""
    uses_aux_hidden_states: bool
    num_aux_hidden_states: int | None
    top_level_aux_layer_ids: tuple[int, ...] | None
    """The value of eagle_aux_hidden_state_layer_ids at the top level."""
    nested_aux_layer_ids: tuple[int, ...] | None
    """The value of eagle_aux_hidden_state_layer_ids inside eagle_config."""
    v2_runner_aux_layer_ids: tuple[int, ...] | None
    """The value of eagle_config.layer_ids, another name for them that only model runner V2 reads, from 0.27 on."""
    verifier: str | None
    """The target that the drafter was trained for; only the speculators format has it."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        """The auxiliary layers that the checkpoint names, at the top level or inside eagle_config."""
        return self.top_level_aux_layer_ids or self.nested_aux_layer_ids

    @property
    def expected_aux_hidden_states(self) -> int:
        """The number of hidden states that vLLM expects, which sizes fc and fc_norm. vLLM's classes read different keys."""
        if self.num_aux_hidden_states is not None:
            return self.num_aux_hidden_states
        ids = self.nested_aux_layer_ids if self.family != "qwen3" else self.aux_layer_ids
        return len(ids) if ids else 3

    @property
    def is_eagle31(self) -> bool:
        """Whether the config enables any part of EAGLE 3.1."""
        return self.fc_norm or bool(self.norm_output)


def parse_target_model(config: Mapping[str, Any]) -> TargetModel:
    """Parse a target's config.json."""
    text = _text_config(config)
    return TargetModel(
        model_type=_as_text(text.get("model_type")) or _as_text(config.get("model_type")),
        architecture=_first_text(config.get("architectures")),
        hidden_size=_as_positive_int(text.get("hidden_size")),
        layer_count=_as_positive_int(text.get("num_hidden_layers")),
        vocab_size=_as_positive_int(text.get("vocab_size")) or _as_positive_int(config.get("vocab_size")),
        max_position=_as_positive_int(text.get("max_position_embeddings")),
        dtype=_dtype(text) or _dtype(config),
        is_quantized=_is_quantized(config) or _is_quantized(text),
        is_moe=any((_as_positive_int(text.get(key)) or 0) > 1 for key in _EXPERT_COUNT_KEYS),
        attention=_parse_attention(text),
    )


_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def parse_drafter_model(config: Mapping[str, Any]) -> DrafterModel:
    """Parse a drafter's config.json, in either format."""
    speculators = _as_text(config.get("speculators_model_type"))
    layer = _as_mapping(config.get("transformer_layer_config")) if speculators else _text_config(config)
    # update_eagle3 copies only these from the top level over the layer's config.
    flags = config if speculators else layer
    eagle = _as_mapping(layer.get("eagle_config"))
    architecture: str | None
    if speculators:
        layer_type = _as_text(layer.get("model_type")) or "llama"
        architecture = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}.get(layer_type, layer_type)
    else:
        architecture = _eagle3_class_name(_first_text(config.get("architectures")))
    return DrafterModel(
        format="speculators" if speculators else "native",
        architecture=architecture,
        family=_FAMILY_BY_ARCHITECTURE.get(architecture or "", "other"),
        model_type=_as_text(layer.get("model_type")),
        kind=_drafter_kind(config, speculators, architecture),
        hidden_size=_as_positive_int(layer.get("hidden_size")),
        vocab_size=_as_positive_int(layer.get("vocab_size")),
        max_position=_as_positive_int(layer.get("max_position_embeddings")),
        rope_type=_rope_type(layer),
        dtype=_dtype(layer) or _dtype(config),
        is_quantized=_is_quantized(config) or _is_quantized(layer),
        attention=_parse_attention(layer),
        draft_vocab_size=_as_positive_int(flags.get("draft_vocab_size")) or _as_positive_int(layer.get("vocab_size")),
        target_hidden_size=_as_positive_int(flags.get("target_hidden_size"))
        or _as_positive_int(layer.get("target_hidden_size") or layer.get("hidden_size")),
        fc_norm=flags.get("fc_norm") is True,
        norm_output=_as_bool(flags.get("norm_output")),
        norm_before_fc=eagle.get("norm_before_fc", flags.get("norm_before_fc")) is True,
        norm_before_residual=_as_bool(flags.get("norm_before_residual")),
        uses_aux_hidden_states=eagle.get("use_aux_hidden_state", True) is not False,
        num_aux_hidden_states=_as_positive_int(layer.get("num_aux_hidden_states")),
        top_level_aux_layer_ids=_as_ints(flags.get("eagle_aux_hidden_state_layer_ids"))
        or _as_ints(layer.get("eagle_aux_hidden_state_layer_ids")),
        nested_aux_layer_ids=_as_ints(eagle.get("eagle_aux_hidden_state_layer_ids")),
        v2_runner_aux_layer_ids=_as_ints(eagle.get("layer_ids")),
        verifier=_as_text(_as_mapping(_as_mapping(config.get("speculators_config")).get("verifier")).get("name_or_path")),
    )


def _first_text(names: Any) -> str | None:
    return _as_text(names[0]) if isinstance(names, list) and names else None


def _eagle3_class_name(name: str | None) -> str | None:
    if name is None or name in _FAMILY_BY_ARCHITECTURE or name.startswith("Eagle3") or name.endswith("Eagle3"):
        return name
    return f"Eagle3{name}"


def _drafter_kind(config: Mapping[str, Any], speculators: str | None, architecture: str | None) -> str:
    if speculators:
        return speculators
    name = (architecture or "").removeprefix("Eagle3").lower()
    if config.get("parallel_drafting") is True or name.startswith("peagle"):
        return "peagle"
    if architecture in _FAMILY_BY_ARCHITECTURE:
        return "eagle3"
    kinds = {"dflash": "dflash", "dspark": "dspark", "medusa": "medusa", "mlpspeculator": "mlp_speculator", "mtp": "mtp"}
    return next((kind for part, kind in kinds.items() if part in name), "unknown")


def _parse_attention(text: Mapping[str, Any]) -> AttentionConfig:
    layers, heads, hidden = (
        _as_positive_int(text.get(key)) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    head_dim = _as_positive_int(text.get("head_dim")) or (hidden // heads if hidden and heads else None)
    window = _as_positive_int(text.get("sliding_window")) if text.get("use_sliding_window") is not False else None
    types = text.get("layer_types")
    if isinstance(types, list):
        layer_types = [layer_type for layer_type in types if isinstance(layer_type, str)]
        sliding = sum("sliding" in layer_type or "chunked" in layer_type for layer_type in layer_types)
        linear = sum("attention" not in layer_type or layer_type == "linear_attention" for layer_type in layer_types)
    else:
        sliding, linear = layers or 0, 0
    return AttentionConfig(
        layer_count=layers,
        heads=heads,
        kv_heads=_as_positive_int(text.get("num_key_value_heads")) or heads,
        head_dim=head_dim,
        kv_lora_rank=_as_positive_int(text.get("kv_lora_rank")),
        rope_dim=_as_positive_int(text.get("qk_rope_head_dim")),
        sliding_window=window,
        sliding_layer_count=sliding if window else 0,
        linear_layer_count=linear,
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model: Llama 4, Kimi-K2.5, Gemma and others have it in `text_config`."""
    return _as_mapping(config.get("text_config")) or config


def _rope_type(layer: Mapping[str, Any]) -> str:
    for key in ("rope_parameters", "rope_scaling"):
        rope = _as_mapping(layer.get(key))
        rope_type = _as_text(rope.get("rope_type")) or _as_text(rope.get("type"))
        if rope_type == "mrope" and "mrope_section" in rope:
            return "default"  # transformers_utils/config.py, patch_legacy_rope_type
        if rope_type:
            return rope_type
    return "default"


def _dtype(config: Mapping[str, Any]) -> str | None:
    return _as_text(config.get("dtype")) or _as_text(config.get("torch_dtype"))


def _is_quantized(config: Mapping[str, Any]) -> bool:
    return bool(_as_mapping(config.get("quantization_config")))


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _as_positive_int(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _as_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _as_ints(value: Any) -> tuple[int, ...] | None:
    """Return a list of integers as a tuple, else None. An empty list is None too, as in vLLM."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return tuple(value)
    return None
