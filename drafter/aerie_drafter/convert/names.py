"""Conversion of other projects' tensor names, and of the draft vocabulary's two tensors.

Sources: SGLang python/sglang/srt/models/llama_eagle3.py (aux_norm_*), NeMo Automodel serve_vllm.py (`model.`), speculators 0.9.0
models/eagle3/core.py (verifier_*), SafeAILab/EAGLE eagle/model/cnets.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from aerie_drafter.checkpoint import canonical_tensor_name
from aerie_drafter.checks import find_vocabulary_mapping_errors
from aerie_drafter.config import DrafterConfig
from aerie_drafter.errors import CheckpointError

_NORM_NAME_ALIASES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_WRAPPER_PREFIXES = ("draft_model.", "model.")
_TARGET_COPY_PREFIXES = ("verifier_lm_head.", "verifier_norm.")
"""Prefixes of frozen copies of the target that speculators needs for its loss; vLLM does not load them."""

_UNUSED_NORM = re.compile(r"layers\.\d+\.hidden_norm\.weight")
"""A norm of later layers that vLLM's classes have and do not apply; that of the first layer has the prefix midlayer here."""


def rename_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors by vLLM's names, and findings. Raises CheckpointError without the file's name."""
    renamed: dict[str, Tensor] = {}
    findings: list[str] = []
    dropped: list[str] = []
    for name, tensor in tensors.items():
        if "mask_hidden" in name:
            raise CheckpointError(f"{name} exists: parallel drafting (P-EAGLE) is not supported.")
        new_name = name
        for prefix in _WRAPPER_PREFIXES:
            new_name = new_name.removeprefix(prefix)
        for old, new_norm in _NORM_NAME_ALIASES.items():
            new_name = new_name.replace(old, new_norm)
        new_name = canonical_tensor_name(new_name)
        if new_name.startswith(_TARGET_COPY_PREFIXES) or new_name.endswith("rotary_emb.inv_freq") or _UNUSED_NORM.match(new_name):
            dropped.append(name)
            continue
        if new_name in renamed:
            raise CheckpointError(f"{name} and another tensor both have the name {new_name} in vLLM.")
        renamed[new_name] = tensor
    if any(name.startswith("model.") for name in tensors):
        findings.append("The prefix `model.` is removed, because vLLM adds it.")
    if any("aux_norm_" in name for name in tensors):
        findings.append("aux_norm_low, _mid and _high are renamed to fc_norm.0, .1 and .2.")
    if dropped:
        findings.append(f"Omitted, because vLLM does not use it: {', '.join(sorted(dropped))}.")
    return renamed, findings


def normalize_vocabulary_mapping(config: DrafterConfig, tensors: dict[str, Tensor]) -> list[str]:
    """Convert d2t and t2d in `tensors` to vLLM's format, in place, and return findings. Errors are left to
    `find_vocabulary_mapping_errors`."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if config.draft_vocab_size == config.vocab_size:
        if d2t is not None and d2t.any():
            return []  # reported by find_vocabulary_mapping_errors
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        return [] if d2t is None else ["d2t and t2d are omitted: the draft vocabulary is the target's."]
    if d2t is None:
        if t2d is None or int(t2d.sum()) != config.draft_vocab_size:
            return []  # reported by find_shape_errors
        tensors["d2t"] = torch.nonzero(t2d.bool()).flatten() - torch.arange(config.draft_vocab_size)
        return ["d2t was missing and is computed from t2d."]
    if len(d2t) != config.draft_vocab_size or not find_vocabulary_mapping_errors(config, d2t, t2d):
        return []
    offsets = d2t.long() - torch.arange(len(d2t))
    if t2d is not None and not find_vocabulary_mapping_errors(config, offsets, t2d):
        tensors["d2t"] = offsets
        return ["d2t contained token ids, as t2d proves; it is converted to the offsets that vLLM reads."]
    return []
