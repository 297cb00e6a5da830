"""Target and drafter as vLLM will see them: one view over the formats that their config.json comes in.

A drafter comes in one of two formats: native (the keys at the top level, as `LlamaForCausalLMEagle3` checkpoints have them)
or that of the speculators library (`transformer_layer_config` inside, and defaults of its own). A target may keep what
matters here in `text_config`. The rules are those of vLLM 0.32: transformers_utils/configs/eagle.py,
configs/speculators/algos.py (update_eagle3), models/{llama,qwen3,deepseek}_eagle3.py.

Guarantees: pure and total. A key of the wrong type counts as absent, so that no config can break a check; what is absent is
None, and the check that needs it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aerie.engine.models.layer_ids import default_layers

Family = Literal["llama", "qwen3", "mla", "other"]

_FAMILIES: dict[str, Family] = {
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
"""vLLM's EAGLE 3 classes (model_executor/models/registry.py), by the file that implements them and its rules."""


@dataclass(frozen=True)
class Attention:
    """What decides the size of the KV cache of one model."""

    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    kv_lora_rank: int | None
    """Set: multi-head latent attention, which caches one vector of `kv_lora_rank + rope_dim` per token and layer."""
    rope_dim: int | None
    sliding_window: int | None
    """Tokens that a sliding layer keeps."""
    sliding_layers: int
    """How many of the layers keep no more than `sliding_window` tokens."""
    linear_layers: int
    """How many of the layers keep a state of fixed size instead of a KV cache (Mamba, gated delta nets, ...)."""


@dataclass(frozen=True)
class TargetModel:
    """The served model."""

    model_type: str | None
    architecture: str | None
    hidden_size: int | None
    layers: int | None
    vocab_size: int | None
    max_position: int | None
    dtype: str | None
    quantized: bool
    experts: bool
    """Whether it is a mixture of experts."""
    attention: Attention

    @property
    def default_aux_layers(self) -> tuple[int, ...] | None:
        """The layers that vLLM reads where the drafter names none (interfaces.py, SupportsEagle3), or None if unknown."""
        return None if self.layers is None else default_layers(self.layers)


@dataclass(frozen=True)
class DrafterModel:
    """An EAGLE 3 or 3.1 drafter. Of any other method only the fields up to `quantized` mean anything."""

    format: Literal["native", "speculators"]
    architecture: str | None
    """As vLLM calls it under the method eagle3, which puts `Eagle3` before a name that does not have it yet."""
    family: Family
    model_type: str | None
    kind: str
    """`eagle3`, or what else the config says that it is: `peagle`, `dflash`, `dspark`, `medusa`, ..."""
    hidden_size: int | None
    vocab_size: int | None
    max_position: int | None
    rope_type: str
    dtype: str | None
    quantized: bool
    attention: Attention
    draft_vocab_size: int | None
    target_hidden_size: int | None
    fc_norm: bool
    norm_output: bool | None
    """None: the config does not say, so vLLM takes False."""
    norm_before_fc: bool
    norm_before_residual: bool | None
    """None: the config does not say. vLLM then takes False for the native format and True for speculators'."""
    uses_aux: bool
    num_aux: int | None
    top_layers: tuple[int, ...] | None
    """eagle_aux_hidden_state_layer_ids at the top level."""
    nested_layers: tuple[int, ...] | None
    """The same inside eagle_config."""
    runner_2_layers: tuple[int, ...] | None
    """eagle_config.layer_ids, another name for them that only model runner V2 knows, from 0.27 on."""
    verifier: str | None
    """speculators format: the target that the drafter was trained for."""

    @property
    def layers_named(self) -> tuple[int, ...] | None:
        """The auxiliary layers that the checkpoint means, wherever they are written."""
        return self.top_layers or self.nested_layers

    @property
    def aux_count(self) -> int:
        """How many hidden states vLLM expects: this sizes fc and fc_norm. The classes differ in where they look."""
        if self.num_aux is not None:
            return self.num_aux
        ids = self.nested_layers if self.family != "qwen3" else self.layers_named
        return len(ids) if ids else 3

    @property
    def is_31(self) -> bool:
        """Whether the config asks for any part of EAGLE 3.1."""
        return self.fc_norm or bool(self.norm_output)


def target_model(config: Mapping[str, Any]) -> TargetModel:
    """The view of a target's config.json."""
    text = _text(config)
    return TargetModel(
        model_type=_str(text.get("model_type")) or _str(config.get("model_type")),
        architecture=_first(config.get("architectures")),
        hidden_size=_int(text.get("hidden_size")),
        layers=_int(text.get("num_hidden_layers")),
        vocab_size=_int(text.get("vocab_size")) or _int(config.get("vocab_size")),
        max_position=_int(text.get("max_position_embeddings")),
        dtype=_dtype(text) or _dtype(config),
        quantized=_quantized(config) or _quantized(text),
        experts=any((_int(text.get(key)) or 0) > 1 for key in _EXPERTS),
        attention=_attention(text),
    )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def drafter_model(config: Mapping[str, Any]) -> DrafterModel:
    """The view of a drafter's config.json."""
    speculators = _str(config.get("speculators_model_type"))
    layer = _map(config.get("transformer_layer_config")) if speculators else _text(config)
    # update_eagle3 copies these from the top level over the layer's config, and nothing else.
    flags = config if speculators else layer
    eagle = _map(layer.get("eagle_config"))
    architecture: str | None
    if speculators:
        layer_type = _str(layer.get("model_type")) or "llama"
        architecture = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}.get(layer_type, layer_type)
    else:
        architecture = _eagle3_name(_first(config.get("architectures")))
    return DrafterModel(
        format="speculators" if speculators else "native",
        architecture=architecture,
        family=_FAMILIES.get(architecture or "", "other"),
        model_type=_str(layer.get("model_type")),
        kind=_kind(config, speculators, architecture),
        hidden_size=_int(layer.get("hidden_size")),
        vocab_size=_int(layer.get("vocab_size")),
        max_position=_int(layer.get("max_position_embeddings")),
        rope_type=_rope_type(layer),
        dtype=_dtype(layer) or _dtype(config),
        quantized=_quantized(config) or _quantized(layer),
        attention=_attention(layer),
        draft_vocab_size=_int(flags.get("draft_vocab_size")) or _int(layer.get("vocab_size")),
        target_hidden_size=_int(flags.get("target_hidden_size"))
        or _int(layer.get("target_hidden_size") or layer.get("hidden_size")),
        fc_norm=flags.get("fc_norm") is True,
        norm_output=_bool(flags.get("norm_output")),
        norm_before_fc=eagle.get("norm_before_fc", flags.get("norm_before_fc")) is True,
        norm_before_residual=_bool(flags.get("norm_before_residual")),
        uses_aux=eagle.get("use_aux_hidden_state", True) is not False,
        num_aux=_int(layer.get("num_aux_hidden_states")),
        top_layers=_ints(flags.get("eagle_aux_hidden_state_layer_ids")) or _ints(layer.get("eagle_aux_hidden_state_layer_ids")),
        nested_layers=_ints(eagle.get("eagle_aux_hidden_state_layer_ids")),
        runner_2_layers=_ints(eagle.get("layer_ids")),
        verifier=_str(_map(_map(config.get("speculators_config")).get("verifier")).get("name_or_path")),
    )


def _first(names: Any) -> str | None:
    return _str(names[0]) if isinstance(names, list) and names else None


def _eagle3_name(name: str | None) -> str | None:
    if name is None or name in _FAMILIES or name.startswith("Eagle3") or name.endswith("Eagle3"):
        return name
    return f"Eagle3{name}"


def _kind(config: Mapping[str, Any], speculators: str | None, architecture: str | None) -> str:
    if speculators:
        return speculators
    name = (architecture or "").removeprefix("Eagle3").lower()
    if config.get("parallel_drafting") is True or name.startswith("peagle"):
        return "peagle"
    if architecture in _FAMILIES:
        return "eagle3"
    kinds = {"dflash": "dflash", "dspark": "dspark", "medusa": "medusa", "mlpspeculator": "mlp_speculator", "mtp": "mtp"}
    return next((kind for part, kind in kinds.items() if part in name), "unknown")


def _attention(text: Mapping[str, Any]) -> Attention:
    layers, heads, hidden = (_int(text.get(key)) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    head_dim = _int(text.get("head_dim")) or (hidden // heads if hidden and heads else None)
    window = _int(text.get("sliding_window")) if text.get("use_sliding_window") is not False else None
    types = text.get("layer_types")
    named = [kind for kind in types if isinstance(kind, str)] if isinstance(types, list) else None
    if named is not None:
        sliding = sum("sliding" in kind or "chunked" in kind for kind in named)
        linear = sum("attention" not in kind or kind == "linear_attention" for kind in named)
    else:
        sliding, linear = layers or 0, 0
    return Attention(
        layers=layers,
        heads=heads,
        kv_heads=_int(text.get("num_key_value_heads")) or heads,
        head_dim=head_dim,
        kv_lora_rank=_int(text.get("kv_lora_rank")),
        rope_dim=_int(text.get("qk_rope_head_dim")),
        sliding_window=window,
        sliding_layers=sliding if window else 0,
        linear_layers=linear,
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: Llama 4, Kimi-K2.5, Gemma and others keep it in `text_config`."""
    return _map(config.get("text_config")) or config


def _rope_type(layer: Mapping[str, Any]) -> str:
    for key in ("rope_parameters", "rope_scaling"):
        rope = _map(layer.get(key))
        found = _str(rope.get("rope_type")) or _str(rope.get("type"))
        if found == "mrope" and "mrope_section" in rope:
            return "default"  # transformers_utils/config.py, patch_legacy_rope_type
        if found:
            return found
    return "default"


def _dtype(config: Mapping[str, Any]) -> str | None:
    return _str(config.get("dtype")) or _str(config.get("torch_dtype"))


def _quantized(config: Mapping[str, Any]) -> bool:
    return bool(_map(config.get("quantization_config")))


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _int(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _ints(value: Any) -> tuple[int, ...] | None:
    """None for an empty list too: vLLM treats both alike."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return tuple(value)
    return None
