"""Other projects' tensor names in vLLM's, and the draft vocabulary's two tensors in order.

Sources: SGLang python/sglang/srt/models/llama_eagle3.py (aux_norm_*), NeMo Automodel serve_vllm.py (`model.`), speculators 0.9.0
models/eagle3/core.py (verifier_*), SafeAILab/EAGLE eagle/model/cnets.py.
"""

from __future__ import annotations

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
"""Frozen copies from the target that speculators keeps for its loss; vLLM does not load them."""


def rename_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by vLLM's names, and what was done as findings. Raises CheckpointError, without the file's name."""
    found: dict[str, Tensor] = {}
    findings: list[str] = []
    dropped: list[str] = []
    for name, tensor in tensors.items():
        if "mask_hidden" in name:
            raise CheckpointError(f"{name} is there: this drafts in parallel (P-EAGLE), which this package does not know.")
        new = name
        for prefix in _WRAPPER_PREFIXES:
            new = new.removeprefix(prefix)
        for old, fresh in _NORM_NAME_ALIASES.items():
            new = new.replace(old, fresh)
        new = canonical_tensor_name(new)
        if new.startswith(_TARGET_COPY_PREFIXES) or new.endswith("rotary_emb.inv_freq"):
            dropped.append(name)
            continue
        if new in found:
            raise CheckpointError(f"{name} and another tensor are both {new} to vLLM.")
        found[new] = tensor
    if any(name.startswith("model.") for name in tensors):
        findings.append("The prefix `model.` is taken off: vLLM adds it by itself.")
    if any("aux_norm_" in name for name in tensors):
        findings.append("aux_norm_low, _mid and _high are fc_norm.0, .1 and .2.")
    if dropped:
        findings.append(f"Left out, because vLLM does not load it: {', '.join(sorted(dropped))}.")
    return found, findings


def normalize_vocabulary_mapping(config: DrafterConfig, tensors: dict[str, Tensor]) -> list[str]:
    """Bring d2t and t2d in `tensors` into vLLM's form, in place; findings. What stays wrong is for `mapping_faults` to say."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if config.draft_vocab_size == config.vocab_size:
        if d2t is not None and d2t.any():
            return []  # said to be wrong by whoever checks values
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        return [] if d2t is None else ["d2t and t2d are left out: the draft vocabulary is the target's."]
    if d2t is None:
        if t2d is None or int(t2d.sum()) != config.draft_vocab_size:
            return []  # said to be missing by whoever checks names
        tensors["d2t"] = torch.nonzero(t2d.bool()).flatten() - torch.arange(config.draft_vocab_size)
        return ["d2t was missing and is made from t2d."]
    if len(d2t) != config.draft_vocab_size or not find_vocabulary_mapping_errors(config, d2t, t2d):
        return []
    offsets = d2t.long() - torch.arange(len(d2t))
    if t2d is not None and not find_vocabulary_mapping_errors(config, offsets, t2d):
        tensors["d2t"] = offsets
        return ["d2t held ids of tokens, as t2d proves; it now holds offsets, as vLLM reads it."]
    return []
