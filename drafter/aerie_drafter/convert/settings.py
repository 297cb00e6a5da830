"""Conversion of other projects' configurations to vLLM's: the class, the layers, the norm switches.

Layer ids name the input of a layer (vLLM) or its output (other projects): aerie.engine.models.layer_ids.

SpecForge's norm_output had two meanings. From 2026-07-20 (pull request 568) to 2026-09-15 (879) it decided whether the state
is normalized before lm_head, and the state that was fed back never was: `true` there is EAGLE 3's feedback.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from aerie.engine.models.layer_ids import LayerNumbering, detect_layer_numbering
from aerie.engine.models.origin import CheckpointOrigin
from aerie_drafter.config import (
    ARCHITECTURE_BY_FAMILY,
    FAMILY_BY_ARCHITECTURE,
    DrafterConfig,
    DrafterFamily,
    default_aux_layer_ids,
)
from aerie_drafter.errors import ConfigError

SPECFORGE_NORM_OUTPUT_BUG_DATES = (datetime.date(2026, 7, 20), datetime.date(2026, 9, 15))
"""First and last day of SpecForge's other meaning of norm_output."""

_AUX_LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"


class LayerIdConvention(Enum):
    """Layer numbering of a checkpoint."""

    AUTO = "auto"
    INPUTS = "inputs"
    """k is the input of layer k: vLLM."""
    OUTPUTS = "outputs"
    """k is the output of layer k: SpecForge, TorchSpec, ModelOpt."""


@dataclass(frozen=True)
class ConversionOverrides:
    """Settings of the user for what the files do not contain."""

    origin: CheckpointOrigin | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    """Auxiliary layers in vLLM's numbering."""
    layer_id_convention: LayerIdConvention = LayerIdConvention.AUTO
    target_layer_count: int | None = None
    training_date: datetime.date | None = None
    norm_output: bool | None = None


def convert_config(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    origin: CheckpointOrigin,
    overrides: ConversionOverrides,
    *,
    has_vllm_tensor_names: bool,
) -> tuple[DrafterConfig, list[str]]:
    """Return the drafter's configuration, and findings. Raises ConfigError.

    `tensors` have vLLM's names. `has_vllm_tensor_names`: the source's layer was `layers.0.`, not `midlayer.`.
    """
    converted = dict(_flatten_speculators_config(config) if origin is CheckpointOrigin.SPECULATORS else config)
    findings: list[str] = []
    for key, reason in (("parallel_drafting", "drafts in parallel (P-EAGLE)"), ("quantization_config", "is quantized")):
        if converted.get(key):
            raise ConfigError(f"{key} is set: the drafter {reason}, which is not supported.")
    if not any(name in FAMILY_BY_ARCHITECTURE for name in converted.get("architectures") or []):
        if origin not in (CheckpointOrigin.SAFEAILAB, CheckpointOrigin.NEMO):
            raise ConfigError(
                f"architectures is {converted.get('architectures')!r}: none of {', '.join(FAMILY_BY_ARCHITECTURE)}."
            )
        converted["architectures"] = [ARCHITECTURE_BY_FAMILY[DrafterFamily.LLAMA]]
    findings += _check_sliding_window(converted)
    converted.setdefault("draft_vocab_size", None)
    if converted["draft_vocab_size"] is None and "lm_head.weight" in tensors:
        converted["draft_vocab_size"] = tensors["lm_head.weight"].shape[0]
    ids, new_findings = _resolve_aux_layer_ids(converted, origin, overrides, vllm_names=has_vllm_tensor_names)
    findings += new_findings
    converted |= {
        _AUX_LAYER_IDS_KEY: list(ids),
        "eagle_config": {k: v for k, v in (converted.get("eagle_config") or {}).items() if k != _AUX_LAYER_IDS_KEY},
    }
    if converted.get("target_hidden_size") is None and "fc.weight" in tensors and tensors["fc.weight"].shape[1] % len(ids) == 0:
        converted["target_hidden_size"] = tensors["fc.weight"].shape[1] // len(ids)
    findings += _set_norm_switches(config, converted, tensors, origin, overrides)
    return DrafterConfig.from_vllm_config(converted), findings


def _flatten_speculators_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a speculators configuration as vLLM does (transformers_utils/configs/speculators/algos.py, update_eagle3)."""
    model_type = config.get("speculators_model_type")
    if model_type != "eagle3":
        raise ConfigError(f"speculators_model_type is {model_type!r}: supported: eagle3.")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ConfigError("transformer_layer_config is missing.")
    family = {"llama": DrafterFamily.LLAMA, "qwen3": DrafterFamily.QWEN3}.get(layer.get("model_type", "llama"))
    if family is None:
        raise ConfigError(f"transformer_layer_config.model_type is {layer['model_type']!r}: vLLM serves llama and qwen3.")
    drafter_keys = ("draft_vocab_size", "target_hidden_size", _AUX_LAYER_IDS_KEY, "fc_norm", "norm_output", "norm_before_fc")
    return {
        **layer,
        # vLLM reads it without transformers' class: only layer_types decides whether a window counts.
        "use_sliding_window": bool(layer.get("layer_types")),
        "sliding_window": layer.get("sliding_window"),
        "architectures": [ARCHITECTURE_BY_FAMILY[family]],
        **{key: config[key] for key in drafter_keys if config.get(key) is not None},
        "norm_before_residual": config.get("norm_before_residual", True),
    }


def _check_sliding_window(config: Mapping[str, Any]) -> list[str]:
    """Return a finding if transformers, and with it vLLM, drops the window that the configuration names."""
    if "sliding_attention" not in (config.get("layer_types") or []) or config.get("use_sliding_window"):
        return []
    if "Eagle3Qwen3ForCausalLM" not in config["architectures"]:
        return []
    reason = "layer_types names sliding_attention, and use_sliding_window is not true"
    return [f"{reason}: vLLM serves it with full attention, and so does this conversion."]


def _resolve_aux_layer_ids(
    config: Mapping[str, Any], origin: CheckpointOrigin, overrides: ConversionOverrides, *, vllm_names: bool
) -> tuple[tuple[int, ...], list[str]]:
    """Return the auxiliary layers in vLLM's numbering, and findings."""
    if overrides.aux_layer_ids is not None:
        return overrides.aux_layer_ids, []
    ids = config.get(_AUX_LAYER_IDS_KEY) or (config.get("eagle_config") or {}).get(_AUX_LAYER_IDS_KEY)
    if not ids:
        if overrides.target_layer_count is None:
            raise ConfigError(
                f"{_AUX_LAYER_IDS_KEY} is missing: set the target's folder, whose number of layers decides, or the layers."
            )
        default_ids = default_aux_layer_ids(overrides.target_layer_count)
        return default_ids, [
            f"It names no layers: using {list(default_ids)}, the default for {overrides.target_layer_count} layers."
        ]
    ids = [int(layer) for layer in ids]
    numbering = _resolve_layer_numbering(ids, config, origin, overrides, vllm_names=vllm_names)
    vllm_ids = numbering.to_vllm(ids)
    if numbering is LayerNumbering.INPUTS:
        return vllm_ids, []
    finding = f"Its layer ids {list(ids)} are read as outputs of layers, which vLLM numbers {list(vllm_ids)}."
    return vllm_ids, [f"{finding} If they are inputs of layers as in vLLM, convert with --layer-ids inputs."]


def _resolve_layer_numbering(
    ids: list[int], config: Mapping[str, Any], origin: CheckpointOrigin, overrides: ConversionOverrides, *, vllm_names: bool
) -> LayerNumbering:
    if overrides.layer_id_convention is not LayerIdConvention.AUTO:
        return LayerNumbering[overrides.layer_id_convention.name]
    numbering = detect_layer_numbering(
        ids,
        origin,
        is_origin_explicit=overrides.origin is not None,
        has_vllm_tensor_names=vllm_names,
        model_type=config.get("model_type"),
        layer_count=overrides.target_layer_count,
    )
    if numbering is None:
        raise ConfigError(
            f"{_AUX_LAYER_IDS_KEY} is {ids}, and it is unknown whether these are inputs (vLLM) or outputs (SpecForge) of layers: "
            "convert with --layer-ids inputs or --layer-ids outputs."
        )
    return numbering


def _set_norm_switches(
    config: Mapping[str, Any],
    converted: dict[str, Any],
    tensors: Mapping[str, Tensor],
    origin: CheckpointOrigin,
    overrides: ConversionOverrides,
) -> list[str]:
    """Set the norm switches in `converted`, and return findings."""
    findings: list[str] = []
    if "use_aux_norm" in converted:
        converted.setdefault("fc_norm", bool(converted["use_aux_norm"]))
    nested = converted["eagle_config"]
    for switch, tensor in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        if tensor in tensors and converted.get(switch) is None and nested.get(switch) is None:
            converted[switch] = True
            findings.append(f"{switch} is true, because {tensor} exists and the configuration does not set it.")
    if origin is CheckpointOrigin.SPECULATORS and "norm_before_residual" not in config:
        findings.append("norm_before_residual is true, vLLM's default for a speculators configuration.")
    if overrides.norm_output is not None:
        converted["norm_output"] = overrides.norm_output
    elif origin is CheckpointOrigin.SPECFORGE:
        findings += _fix_specforge_norm_output(converted, overrides.training_date)
    return findings


def _fix_specforge_norm_output(converted: dict[str, Any], trained: datetime.date | None) -> list[str]:
    """Convert norm_output to vLLM's meaning; see the module."""
    norm_output = converted.get("norm_output")
    if norm_output is None:  # before pull request 568, or with either default: the feedback of EAGLE 3
        converted["norm_output"] = False
        return []
    begin, end = SPECFORGE_NORM_OUTPUT_BUG_DATES
    if trained is not None and trained > end:
        return []
    if trained is None or trained < begin:
        when = "its date of training is unknown" if trained is None else f"SpecForge had no such key on {trained}"
        raise ConfigError(
            f"norm_output is {str(norm_output).lower()}, which had another meaning in SpecForge from {begin} to "
            f"{end} (its pull request "
            f"879), and {when}: convert with --trained DATE, with --norm-output or --no-norm-output, or with another --origin."
        )
    if not norm_output:
        raise ConfigError(
            f"norm_output is false, and on {trained} that made SpecForge train lm_head on states without the final norm: "
            "no engine computes that; retrain it."
        )
    converted["norm_output"] = False
    fed = f"on {trained} SpecForge always fed back the state before the norm (its pull request 879)"
    cost = "served as EAGLE 3.1 it would lose acceptance with every step, without an error"
    return [f"norm_output is changed from true to false, because {fed}: {cost}."]
