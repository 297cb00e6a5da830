"""Configuration of a drafter: sizes, layers, window, and the four norm switches that distinguish EAGLE 3 and EAGLE 3.1.

Guarantees: a DrafterConfig is consistent, or its construction raises ConfigError. `to_vllm_config` writes every key that any
vLLM from 0.22 on reads, because each version has other defaults. Not guaranteed: that the drafter fits a certain target;
`aerie_drafter.inspect` checks that.

Source of keys and defaults: vLLM 0.32 and 0.33, model_executor/models/{llama,qwen3,deepseek}_eagle3.py and
transformers_utils/configs/speculators/algos.py. Layers and windows are the same in 0.26. vLLM's model runner V1, the only
one on CPU, requires that all layers of a drafter share a KV cache group (v1/spec_decode/llm_base_proposer.py), which layers with
and without a window do not: so the window is that of every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aerie_drafter.errors import ConfigError


class DrafterFamily(Enum):
    """The kind of attention, and with it the class that vLLM loads; the value is the config's `model_type`."""

    LLAMA = "llama"
    QWEN3 = "qwen3"
    MLA = "deepseek_v2"  # also for V3 and Kimi: vLLM takes a deepseek_v3 for an MTP module (config/speculative.py)


ARCHITECTURE_BY_FAMILY = {
    DrafterFamily.LLAMA: "LlamaForCausalLMEagle3",
    DrafterFamily.QWEN3: "Eagle3Qwen3ForCausalLM",
    DrafterFamily.MLA: "Eagle3DeepseekV2ForCausalLM",
}
"""Written architecture name of each family."""

FAMILY_BY_ARCHITECTURE = {
    "LlamaForCausalLMEagle3": DrafterFamily.LLAMA,
    "Eagle3LlamaForCausalLM": DrafterFamily.LLAMA,
    "Eagle3Qwen3ForCausalLM": DrafterFamily.QWEN3,
    "Eagle3DeepseekV2ForCausalLM": DrafterFamily.MLA,
    "Eagle3DeepseekV3ForCausalLM": DrafterFamily.MLA,
}
"""Accepted architecture names."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
"""Entries of `layer_types`."""

MAX_VOCAB_SIZE = 2**24
"""Tokens; the largest published vocabularies have some 262,000. Tensors of this size are allocated, so it is limited."""


MAX_LAYERS = 64
"""Decoder layers; those of published drafters have up to five."""

MIN_SLIDING_WINDOW = 33
"""Tokens. More than the most unrolled steps (32), so that each step sees a column of the target's states."""


@dataclass(frozen=True)
class MlaDims:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), per head where not a rank."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int


@dataclass(frozen=True)
class DrafterConfig:
    """An EAGLE 3 or 3.1 drafter. Sizes in elements; layer ids as vLLM counts them: k is the input of layer k."""

    family: DrafterFamily
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    """Layers of the target whose inputs are read, ascending; the number of the target's layers means its final output,
    before the last norm."""
    fc_norm: bool = False
    """EAGLE 3.1: each auxiliary state has an RMSNorm of its own before `fc`."""
    norm_output: bool = False
    """EAGLE 3.1: the next step is fed the state after the final norm instead of the one before it."""
    norm_before_fc: bool = False
    """One RMSNorm over all auxiliary states together, before `fc` (the form of gpt-oss drafters)."""
    norm_before_residual: bool = False
    """The residual branch starts from the normed hidden state."""
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    rope: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """`rope_parameters` of the Hugging Face configuration."""
    num_hidden_layers: int = 1
    """Decoder layers; the first reads the embedding beside the hidden state, later ones the state of the layer before."""
    sliding_window: int | None = None
    """A query sees so many tokens, its own included, in every layer; None: all before it."""
    mla: MlaDims | None = None
    """Given exactly when family is MLA; num_key_value_heads and head_dim then have no effect."""

    def __post_init__(self) -> None:
        sizes = (
            "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size draft_vocab_size"
            " target_hidden_size max_position_embeddings num_hidden_layers"
        )
        for name in sizes.split():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}: must be an integer of at least 1.")
        if self.num_hidden_layers > MAX_LAYERS:
            raise ConfigError(f"num_hidden_layers is {self.num_hidden_layers}: a drafter has at most {MAX_LAYERS}.")
        ids = self.aux_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise ConfigError(
                f"eagle_aux_hidden_state_layer_ids is {list(ids)}: must list at least one layer, ascending, each once "
                "(vLLM sorts them, so another order would exchange the parts of fc)."
            )
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ConfigError(
                f"vocab_size is {self.vocab_size}: must be at most {MAX_VOCAB_SIZE}. Use that of the target's config.json."
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size {self.draft_vocab_size} is larger than vocab_size {self.vocab_size}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}."
            )
        if self.family is not DrafterFamily.QWEN3 and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}: transformers, "
                f"with which vLLM reads a {self.family.value} configuration, rejects that for any head_dim."
            )
        if self.fc_norm and self.norm_before_fc:
            raise ConfigError("fc_norm and norm_before_fc are both true: vLLM would apply both norms; set one of them to false.")
        self._check_sliding_window()
        if (self.family is DrafterFamily.MLA) != (self.mla is not None):
            raise ConfigError(f"the sizes of latent attention require family deepseek_v2, but it is {self.family.value}.")
        if self.mla is not None:
            self._check_latent_attention(self.mla)
        rope_type, supported = self.rope.get("rope_type", "default"), ("default", "linear", "llama3", "yarn")
        if rope_type not in supported:
            raise ConfigError(f"rope_type is {rope_type!r}: supported: {', '.join(supported)}.")
        if self.rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(
                f"partial_rotary_factor is {self.rope['partial_rotary_factor']!r}: only whole heads are rotated; omit it."
            )

    def _check_sliding_window(self) -> None:
        window: Any = self.sliding_window  # a file may have anything
        if window is None:
            return
        if self.family is DrafterFamily.MLA:
            raise ConfigError(
                f"sliding_window is {window}: vLLM's drafter with latent attention ignores it and attends to the whole text; "
                "use the family llama or qwen3, or no window."
            )
        if not isinstance(window, int) or isinstance(window, bool) or window < MIN_SLIDING_WINDOW:
            raise ConfigError(f"sliding_window is {window!r}: must be an integer of at least {MIN_SLIDING_WINDOW}.")

    def _check_latent_attention(self, mla: MlaDims) -> None:
        """Reject what vLLM 0.32 cannot load or reads differently (deepseek_eagle3.py, deepseek_v2.py)."""
        for name, value in dataclasses.asdict(mla).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                why = " (vLLM's drafter always has low-rank queries)" if name == "q_lora_rank" else ""
                raise ConfigError(f"{name} is {value!r}: must be an integer of at least 1{why}.")
        if self.norm_before_fc:
            raise ConfigError(
                "norm_before_fc is true: vLLM's drafter with latent attention does not have this norm; use fc_norm."
            )
        kind = self.rope.get("rope_type", "default")
        if kind not in ("default", "yarn") or self.rope.get("attention_factor") is not None:
            raise ConfigError(
                f"rope_parameters is {dict(self.rope)}: with latent attention vLLM treats every rope_type except default as "
                "DeepSeek's yarn; use default, or yarn with mscale and mscale_all_dim in place of attention_factor."
            )

    @property
    def eagle_version(self) -> str:
        """Return `EAGLE 3.1`, `EAGLE 3`, or EAGLE 3 with the enabled switches of 3.1."""
        if self.norm_output and (self.fc_norm or self.norm_before_fc):
            return "EAGLE 3.1"
        if not (self.norm_output or self.fc_norm or self.norm_before_fc):
            return "EAGLE 3"
        switches = [name for name in ("fc_norm", "norm_output", "norm_before_fc") if getattr(self, name)]
        return "EAGLE 3 with " + " and ".join(switches)

    def to_vllm_config(self) -> dict[str, Any]:
        """Return the config.json for vLLM: every switch explicit, the auxiliary layers in all three places."""
        heads: dict[str, Any] = {"head_dim": self.head_dim} if self.mla is None else dataclasses.asdict(self.mla)
        window: dict[str, Any] = {}
        if self.sliding_window is not None:
            window = {
                "sliding_window": self.sliding_window,
                "use_sliding_window": True,  # without it transformers drops the window of a qwen3 configuration
                "layer_types": [_SLIDING] * self.num_hidden_layers,
            }
        return {
            "architectures": [ARCHITECTURE_BY_FAMILY[self.family]],
            "model_type": self.family.value,
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            **heads,
            **window,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": dict(self.rope),
            "attention_bias": False,
            "tie_word_embeddings": False,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "norm_before_fc": self.norm_before_fc,
            "norm_before_residual": self.norm_before_residual,
            "num_aux_hidden_states": len(self.aux_layer_ids),
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            },
        }

    @classmethod
    def from_vllm_config(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Read a config.json as vLLM would, with its defaults and transformers' (Qwen3Config's heads). Raises ConfigError.

        If no auxiliary layers are configured, vLLM uses (2, L // 2, L - 3) of a target with L layers. That requires the
        target, so it is an error here.
        """
        names = config.get("architectures") or []
        families = [FAMILY_BY_ARCHITECTURE[name] for name in names if name in FAMILY_BY_ARCHITECTURE]
        if not families:
            raise ConfigError(f"architectures is {names!r}: supported: {', '.join(FAMILY_BY_ARCHITECTURE)}.")
        family = families[0]
        if config.get("attention_bias"):
            raise ConfigError("attention_bias is true: bias in attention is not supported.")
        nested = config.get("eagle_config") or {}
        ids = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
        if not ids:
            raise ConfigError(
                "eagle_aux_hidden_state_layer_ids is missing: add the layers that the drafter was trained on; "
                "vLLM would guess (2, L // 2, L - 3)."
            )

        def need(name: str) -> int:
            if not isinstance(config.get(name), int):
                raise ConfigError(f"{name} is {config.get(name)!r}: expected: an integer.")
            return int(config[name])

        hidden, heads, vocabulary = need("hidden_size"), need("num_attention_heads"), need("vocab_size")
        layers = 1 if config.get("num_hidden_layers") is None else need("num_hidden_layers")
        mla = None
        if family is DrafterFamily.MLA:
            dims = {name: need(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
            mla = MlaDims(**dims, q_lora_rank=config.get("q_lora_rank", 0))
        return cls(
            family=family,
            hidden_size=hidden,
            intermediate_size=need("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=int(config.get("num_key_value_heads") or (32 if family is DrafterFamily.QWEN3 else heads)),
            head_dim=int(config.get("head_dim") or (128 if family is DrafterFamily.QWEN3 else hidden // heads)),
            vocab_size=vocabulary,
            draft_vocab_size=int(config.get("draft_vocab_size") or vocabulary),
            target_hidden_size=int(config.get("target_hidden_size") or hidden),
            aux_layer_ids=tuple(int(i) for i in ids),
            fc_norm=bool(config.get("fc_norm", False)),
            norm_output=bool(config.get("norm_output", False)),
            norm_before_fc=bool(nested.get("norm_before_fc", config.get("norm_before_fc", False))),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
            rope=read_rope_parameters(config),
            num_hidden_layers=layers,
            sliding_window=_read_sliding_window(config, family, layers),
            mla=mla,
        )


def _read_sliding_window(config: Mapping[str, Any], family: DrafterFamily, layers: int) -> int | None:
    """Return the window of every layer, None for full attention. Raises ConfigError for layers of both kinds."""
    if layers > MAX_LAYERS:
        return None  # DrafterConfig rejects the number
    window, layer_types = config.get("sliding_window"), config.get("layer_types")
    if family is DrafterFamily.QWEN3:  # as transformers' Qwen3Config
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
        if layer_types is None and window is not None:
            layer_types = [_SLIDING if layer >= config.get("max_window_layers", 28) else _FULL for layer in range(layers)]
    if layer_types is None:
        return None
    if len(layer_types) != layers:
        raise ConfigError(f"layer_types is {list(layer_types)}: must have one entry for each of the {layers} layers.")
    if unknown := [kind for kind in layer_types if kind not in (_SLIDING, _FULL)]:
        raise ConfigError(f"layer_types contains {unknown[0]!r}: supported: {_FULL}, {_SLIDING}.")
    if _SLIDING not in layer_types or (window is None and family is DrafterFamily.QWEN3):
        return None
    if _FULL in layer_types:
        raise ConfigError(
            f"layer_types is {list(layer_types)}: all layers must have the same kind of attention (vLLM's model runner V1: "
            "all drafting layers should belong to the same kv cache group)."
        )
    if window is None:
        raise ConfigError("layer_types names sliding_attention, but sliding_window is missing: add the window of the training.")
    return int(window)


def read_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a configuration, also from the older `rope_theta` and `rope_scaling`."""
    if config.get("rope_parameters"):
        return dict(config["rope_parameters"])
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", None)
    return {"rope_type": scaling.get("rope_type", kind or "default"), "rope_theta": config.get("rope_theta", 10000.0), **scaling}


def default_aux_layer_ids(target_layer_count: int) -> tuple[int, ...]:
    """vLLM's default for a target with that many layers: one low, one middle, one high.

    Targets of fewer than six layers have no three such layers apart; they get what is left, ascending and each once.
    """
    return tuple(sorted({min(2, target_layer_count), target_layer_count // 2, max(target_layer_count - 3, 1)}))
