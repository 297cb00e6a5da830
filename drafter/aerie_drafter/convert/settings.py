"""Other projects' configuration in vLLM's: the class, the layers, the norm switches.

Layers are counted in two ways, by what enters them (vLLM) and by what they give: aerie.engine.models.layer_ids.

SpecForge's norm_output had two meanings. From 2026-07-20 (pull request 568) to 2026-09-15 (879) it decided whether the state
is normed before lm_head, and the state that was fed back never was: `true` there is EAGLE 3's feedback.
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
    """How a checkpoint counts layers."""

    AUTO = "auto"
    INPUTS = "inputs"
    """k is what enters layer k: vLLM."""
    OUTPUTS = "outputs"
    """k is what layer k gives: SpecForge, TorchSpec, ModelOpt."""


@dataclass(frozen=True)
class ConversionOverrides:
    """What the one who converts knows and the files do not say."""

    origin: CheckpointOrigin | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    """Auxiliary layers, as vLLM counts them."""
    layer_id_convention: LayerIdConvention = LayerIdConvention.AUTO
    target_layer_count: int | None = None
    training_date: datetime.date | None = None
    norm_output: bool | None = None
    assume_full_attention: bool = False
    """Take in a drafter with a sliding window as one that attends to all."""


def convert_config(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    origin: CheckpointOrigin,
    overrides: ConversionOverrides,
    *,
    has_vllm_tensor_names: bool,
) -> tuple[DrafterConfig, list[str]]:
    """The drafter's configuration, and what was assumed; `tensors` by vLLM's names. Raises ConfigError.

    `vllm_names` says that the layer was called `layers.0.` and not `midlayer.`.
    """
    found = dict(_flatten_speculators_config(config) if origin is CheckpointOrigin.SPECULATORS else config)
    findings: list[str] = []
    for refused, what in (("parallel_drafting", "drafts in parallel (P-EAGLE)"), ("quantization_config", "is quantised")):
        if found.get(refused):
            raise ConfigError(f"{refused} is there: the drafter {what}, which this package does not know.")
    findings += _check_sliding_window(found, overrides)
    if not any(name in FAMILY_BY_ARCHITECTURE for name in found.get("architectures") or []):
        if origin not in (CheckpointOrigin.SAFEAILAB, CheckpointOrigin.NEMO):
            raise ConfigError(f"architectures is {found.get('architectures')!r}: none of {', '.join(FAMILY_BY_ARCHITECTURE)}.")
        found["architectures"] = [ARCHITECTURE_BY_FAMILY[DrafterFamily.LLAMA]]
    found.setdefault("draft_vocab_size", None)
    if found["draft_vocab_size"] is None and "lm_head.weight" in tensors:
        found["draft_vocab_size"] = tensors["lm_head.weight"].shape[0]
    ids, more = _resolve_aux_layer_ids(found, origin, overrides, vllm_names=has_vllm_tensor_names)
    findings += more
    found |= {
        _AUX_LAYER_IDS_KEY: list(ids),
        "eagle_config": {k: v for k, v in (found.get("eagle_config") or {}).items() if k != _AUX_LAYER_IDS_KEY},
    }
    if found.get("target_hidden_size") is None and "fc.weight" in tensors and tensors["fc.weight"].shape[1] % len(ids) == 0:
        found["target_hidden_size"] = tensors["fc.weight"].shape[1] // len(ids)
    findings += _set_norm_switches(config, found, tensors, origin, overrides)
    return DrafterConfig.from_vllm_config(found), findings


def _flatten_speculators_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's reading of a speculators configuration (transformers_utils/configs/speculators/algos.py, update_eagle3)."""
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise ConfigError(f"speculators_model_type is {kind!r}: this package knows eagle3.")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ConfigError("transformer_layer_config is missing.")
    family = {"llama": DrafterFamily.LLAMA, "qwen3": DrafterFamily.QWEN3}.get(layer.get("model_type", "llama"))
    if family is None:
        raise ConfigError(f"transformer_layer_config.model_type is {layer['model_type']!r}: vLLM serves llama and qwen3.")
    own = ("draft_vocab_size", "target_hidden_size", _AUX_LAYER_IDS_KEY, "fc_norm", "norm_output", "norm_before_fc")
    return {
        **layer,
        "architectures": [ARCHITECTURE_BY_FAMILY[family]],
        **{key: config[key] for key in own if config.get(key) is not None},
        "norm_before_residual": config.get("norm_before_residual", True),
    }


def _check_sliding_window(config: Mapping[str, Any], wishes: ConversionOverrides) -> list[str]:
    kinds = config.get("layer_types") or []
    window = config.get("sliding_window")
    if not window or not ("sliding_attention" in kinds or (config.get("use_sliding_window") and not kinds)):
        return []
    if not wishes.assume_full_attention:
        raise ConfigError(
            f"sliding_window is {window} and the layer uses it: drafters here attend to the whole text; convert with "
            "--full-attention for one that differs past the window, or let vLLM serve the checkpoint as it is."
        )
    return [
        f"It was trained with a window of {window} tokens and now attends to all: past {window} tokens it is another drafter."
    ]


def _resolve_aux_layer_ids(
    config: Mapping[str, Any], origin: CheckpointOrigin, wishes: ConversionOverrides, *, vllm_names: bool
) -> tuple[tuple[int, ...], list[str]]:
    """Auxiliary layers as vLLM counts them."""
    if wishes.aux_layer_ids is not None:
        return wishes.aux_layer_ids, []
    ids = config.get(_AUX_LAYER_IDS_KEY) or (config.get("eagle_config") or {}).get(_AUX_LAYER_IDS_KEY)
    if not ids:
        if wishes.target_layer_count is None:
            raise ConfigError(
                f"{_AUX_LAYER_IDS_KEY} is missing: give the target's folder, whose number of layers decides, or name the layers."
            )
        usual = default_aux_layer_ids(wishes.target_layer_count)
        return usual, [f"It names no layers: taken are {list(usual)}, the usual ones of {wishes.target_layer_count} layers."]
    ids = [int(one) for one in ids]
    way = _resolve_layer_numbering(ids, config, origin, wishes, vllm_names=vllm_names)
    new = way.to_vllm(ids)
    if way is LayerNumbering.INPUTS:
        return new, []
    finding = f"Its layers {list(ids)} are counted by what they give; to vLLM they are {list(new)}."
    return new, [f"{finding} If they were counted as vLLM does, convert with --layer-ids inputs."]


def _resolve_layer_numbering(
    ids: list[int], config: Mapping[str, Any], origin: CheckpointOrigin, wishes: ConversionOverrides, *, vllm_names: bool
) -> LayerNumbering:
    if wishes.layer_id_convention is not LayerIdConvention.AUTO:
        return LayerNumbering[wishes.layer_id_convention.name]
    found = detect_layer_numbering(
        ids,
        origin,
        is_origin_explicit=wishes.origin is not None,
        has_vllm_tensor_names=vllm_names,
        model_type=config.get("model_type"),
        layer_count=wishes.target_layer_count,
    )
    if found is None:
        raise ConfigError(
            f"{_AUX_LAYER_IDS_KEY} is {ids}, and nothing says whether these are the layers' inputs (vLLM) or outputs (SpecForge): "
            "convert with --layer-ids inputs or --layer-ids outputs."
        )
    return found


def _set_norm_switches(
    config: Mapping[str, Any],
    found: dict[str, Any],
    tensors: Mapping[str, Tensor],
    origin: CheckpointOrigin,
    wishes: ConversionOverrides,
) -> list[str]:
    """Set the norm switches in `found`; findings."""
    findings: list[str] = []
    if "use_aux_norm" in found:
        found.setdefault("fc_norm", bool(found["use_aux_norm"]))
    nested = found["eagle_config"]
    for switch, tensor in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        if tensor in tensors and found.get(switch) is None and nested.get(switch) is None:
            found[switch] = True
            findings.append(f"{switch} is true, because {tensor} is there and the configuration does not say.")
    if origin is CheckpointOrigin.SPECULATORS and "norm_before_residual" not in config:
        findings.append("norm_before_residual is true, as vLLM takes it where a speculators configuration does not say.")
    if wishes.norm_output is not None:
        found["norm_output"] = wishes.norm_output
    elif origin is CheckpointOrigin.SPECFORGE:
        findings += _fix_specforge_norm_output(found, wishes.training_date)
    return findings


def _fix_specforge_norm_output(found: dict[str, Any], trained: datetime.date | None) -> list[str]:
    """Give norm_output vLLM's meaning; see the module."""
    said = found.get("norm_output")
    if said is None:  # before pull request 568, or with either default: the feedback of EAGLE 3
        found["norm_output"] = False
        return []
    begin, end = SPECFORGE_NORM_OUTPUT_BUG_DATES
    if trained is not None and trained > end:
        return []
    if trained is None or trained < begin:
        when = "nothing in it says when it was trained" if trained is None else f"SpecForge had no such key on {trained}"
        raise ConfigError(
            f"norm_output is {str(said).lower()}, which meant another thing in SpecForge from {begin} to {end} (its pull request "
            f"879), and {when}: convert with --trained DATE, with --norm-output or --no-norm-output, or with another --origin."
        )
    if not said:
        raise ConfigError(
            f"norm_output is false, and on {trained} that made SpecForge train lm_head on states without the final norm: "
            "no engine computes that; train it again."
        )
    found["norm_output"] = False
    fed = f"on {trained} SpecForge fed back the state before the norm whatever it said (its pull request 879)"
    cost = "served as EAGLE 3.1 it would lose acceptance with every step, without an error"
    return [f"norm_output is false now. It said true, but {fed}: {cost}."]
