"""Description of a checkpoint, and whether it fits a target, from config.json, headers and a few tensors.

Guarantee: a report lists every detected problem with its fix; nothing is written. The report claims nothing that files do not
show: norm_output has no weights, so only the training settings tell whether a drafter was trained with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie.engine.models.origin import CheckpointOrigin, detect_origin
from aerie_drafter import checkpoint as checkpoints
from aerie_drafter.checkpoint import EMBEDDING_TENSOR, Provenance, canonical_tensor_name
from aerie_drafter.checks import MALFORMED_VALUE_ERRORS, find_shape_errors, find_vocabulary_mapping_errors, format_error
from aerie_drafter.config import DrafterConfig
from aerie_drafter.convert.names import rename_tensors
from aerie_drafter.convert.read import PICKLED_WEIGHTS_FILE
from aerie_drafter.convert.settings import ConversionOverrides, LayerIdConvention, convert_config
from aerie_drafter.errors import CheckpointError, ConfigError
from aerie_drafter.export import ExportFormat, min_vllm_version
from aerie_drafter.targets import TargetConfig
from aerie_drafter.weights import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WeightsHeader,
    find_embedding_name,
    is_finite,
    read_headers,
    read_json,
    read_tensors,
)

_VLLM_READABLE_ORIGINS = (CheckpointOrigin.AERIE, CheckpointOrigin.OTHER, CheckpointOrigin.SPECULATORS)
"""Origins whose format vLLM reads as intended."""


@dataclass
class CheckpointReport:
    """Result of an inspection: facts by name, and messages."""

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """Return the result in one sentence."""
        kind = self.facts.get("eagle_version", "Unreadable drafter")
        about = f" for {self.facts['target']}" if "target" in self.facts else ""
        if not self.problems:
            return f"{kind}{about}: no problem found."
        return f"{kind}{about}: {len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}."

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs; `ok` is false if there is a problem."""
        return {
            "folder": str(self.folder),
            "ok": not self.problems,
            "summary": self.summary,
            **self.facts,
            "findings": self.findings,
            "problems": self.problems,
        }


def inspect_checkpoint(folder: Path, target: Path | None = None, *, compare_digests: bool = False) -> CheckpointReport:
    """Inspect a checkpoint, and whether it fits a target. Raises CheckpointError if there is no checkpoint.

    `compare_digests` reads the target's weights to compare them with those that the drafter was trained for.
    """
    if (folder / PICKLED_WEIGHTS_FILE).exists() and not list(folder.glob("*.safetensors*")):
        raise CheckpointError(
            f"{folder / PICKLED_WEIGHTS_FILE}: vLLM does not load pickled drafters; import it with `aerie-drafter convert`."
        )
    raw, header = read_json(folder / CONFIG_FILE), read_headers(folder)
    report = CheckpointReport(folder)
    facts = None if target is None else TargetConfig.read(target)
    try:
        origin, evidence = detect_origin(raw, header.tensors.keys(), header.metadata)
    except MALFORMED_VALUE_ERRORS as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {format_error(error)}") from None
    report.facts["origin"] = origin.value
    report.findings.append(f"Detected as a checkpoint of {origin.value}: {evidence}.")
    config = _check_config(report, raw, header, origin, facts)
    if config is not None:
        _add_config_facts(report, config, header, origin)
        _check_vllm_keys(report, raw, config, origin)
    if config is not None and facts is not None:
        _check_target_fit(report, config, facts)
        _check_embedding(report, config, header, facts)
    _check_provenance(report, Provenance.from_metadata(header.metadata), facts, digests=compare_digests)
    _check_values(report, config, header)
    return report


def _check_config(
    report: CheckpointReport, raw: Mapping[str, Any], header: WeightsHeader, origin: CheckpointOrigin, target: TargetConfig | None
) -> DrafterConfig | None:
    """Return the configuration in the origin's meaning; report its errors, and those of names and shapes."""
    shapes: dict[str, Tensor] = {
        name: torch.empty(entry.shape, dtype=torch.bool if entry.dtype == "BOOL" else torch.float32, device="meta")
        for name, entry in header.tensors.items()
    }
    overrides = ConversionOverrides(target_layer_count=target.layer_count if target else None)
    if origin in (CheckpointOrigin.AERIE, CheckpointOrigin.OTHER):
        overrides = ConversionOverrides(
            target_layer_count=overrides.target_layer_count, layer_id_convention=LayerIdConvention.INPUTS
        )
    else:
        try:
            shapes, findings = rename_tensors(shapes)
        except CheckpointError as error:
            report.problems.append(f"{report.folder / WEIGHTS_FILE}: {error}")
            return None
        report.findings += findings
    try:
        config, findings = convert_config(
            raw, shapes, origin, overrides, has_vllm_tensor_names=any("layers.0." in name for name in header.tensors)
        )
        shape_by_name = {canonical_tensor_name(name): tuple(tensor.shape) for name, tensor in shapes.items()}
        errors = find_shape_errors(config, shape_by_name)
    except (ConfigError, *MALFORMED_VALUE_ERRORS) as error:
        report.problems.append(f"{report.folder / CONFIG_FILE}: {format_error(error)}")
        return None
    report.findings += findings
    report.problems += [f"{report.folder / WEIGHTS_FILE}: {message}" for message in errors]
    if origin not in _VLLM_READABLE_ORIGINS:
        report.problems.append(
            f"{report.folder}: has the format of {origin.value}, which vLLM reads differently or not at all; "
            "import it with `aerie-drafter convert`."
        )
    return config


def _add_config_facts(report: CheckpointReport, config: DrafterConfig, header: WeightsHeader, origin: CheckpointOrigin) -> None:
    floats = {name: entry for name, entry in header.tensors.items() if entry.dtype not in ("I64", "I32", "BOOL")}
    numbers = sum(torch.Size(entry.shape).numel() for name, entry in floats.items() if not name.endswith(EMBEDDING_TENSOR))
    report.facts |= {
        "eagle_version": config.eagle_version,
        "family": config.family.value,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "sliding_window": config.sliding_window,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "target_hidden_size": config.target_hidden_size,
        "aux_layer_ids": list(config.aux_layer_ids),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope": dict(config.rope),
        **{name: getattr(config, name) for name in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")},
        "parameters_without_embedding": numbers,
        "weight_types": sorted({entry.dtype for entry in floats.values()}),
        "weight_bytes": sum(entry.end_offset - entry.begin_offset for entry in header.tensors.values()),
        "has_own_embedding": find_embedding_name(header) is not None,
        "min_vllm_version": min_vllm_version(
            config, ExportFormat.SPECULATORS if origin is CheckpointOrigin.SPECULATORS else ExportFormat.VLLM
        ),
    }


def _check_vllm_keys(report: CheckpointReport, raw: Mapping[str, Any], config: DrafterConfig, origin: CheckpointOrigin) -> None:
    """Check keys that some vLLM reads in one place only (vLLM 0.33: v1/worker/gpu, model_executor/models/llama_eagle3.py)."""
    if origin is not CheckpointOrigin.OTHER:
        return
    name, count = "eagle_aux_hidden_state_layer_ids", len(config.aux_layer_ids)
    if not raw.get(name):
        report.problems.append(
            f"{report.folder / CONFIG_FILE}: {name} is not at the top level, so vLLM's V2 runner uses (2, L // 2, L - 3) "
            "despite eagle_config; `aerie-drafter export` writes it in all places."
        )
    if count != 3 and not raw.get("num_aux_hidden_states") and not (raw.get("eagle_config") or {}).get(name):
        report.problems.append(
            f"{report.folder / CONFIG_FILE}: num_aux_hidden_states is missing, and vLLM assumes 3 instead of {count}; "
            "`aerie-drafter export` writes it."
        )


def _check_target_fit(report: CheckpointReport, config: DrafterConfig, target: TargetConfig) -> None:
    location = target.folder / CONFIG_FILE
    report.facts["target"] = str(target.folder)
    pairs = (
        ("target_hidden_size", config.target_hidden_size, "hidden_size", target.hidden_size),
        ("vocab_size", config.vocab_size, "vocab_size", target.vocab_size),
    )
    for drafter_key, actual, target_key, expected in pairs:
        if actual != expected:
            report.problems.append(
                f"{location}: {target_key} is {expected}, and the drafter's {drafter_key} is {actual}: it was "
                "trained for another target."
            )
    if config.aux_layer_ids[-1] > target.layer_count:
        report.problems.append(
            f"{location}: num_hidden_layers is {target.layer_count}, and the drafter reads layer {config.aux_layer_ids[-1]}: "
            "it was trained for another target."
        )
    target_positions = target.max_position_embeddings
    if target_positions is not None and config.max_position_embeddings < target_positions:
        positions = f"It was trained for {config.max_position_embeddings} positions and the target supports {target_positions}"
        report.findings.append(
            f"{positions}: past the smaller one vLLM up to 0.26 fails or drafts nonsense; later versions raise the drafter's "
            "limit or, with yarn, lower the engine's; evaluate acceptance on long texts."
        )


def _check_embedding(report: CheckpointReport, config: DrafterConfig, header: WeightsHeader, target: TargetConfig) -> None:
    try:
        target_header = read_headers(target.folder)
    except CheckpointError as error:
        report.findings.append(f"The target's weights were not compared: {error}")
        return
    target_name, own_name = find_embedding_name(target_header), find_embedding_name(header)
    if target_name is None:
        report.findings.append(f"The target's weights were not compared: {target.folder} has no embed_tokens.weight.")
        return
    if target_header.shapes[target_name][-1] != config.hidden_size and own_name is None:
        report.problems.append(
            f"{report.folder / WEIGHTS_FILE}: {EMBEDDING_TENSOR} is not in it, and the target's is "
            f"{target_header.shapes[target_name][-1]} wide where the "
            f"drafter needs {config.hidden_size}: include the drafter's own."
        )
    if own_name is None:
        report.facts["embedding"] = "the target's, shared"
        return
    embedding, target_embedding = (
        read_tensors(header, [own_name])[own_name],
        read_tensors(target_header, [target_name])[target_name],
    )
    equal = embedding.shape == target_embedding.shape and torch.equal(embedding, target_embedding.to(embedding.dtype))
    report.facts["embedding"] = "its own, equal to the target's" if equal else "its own, different from the target's"
    if equal:
        report.findings.append(
            "Its embedding equals the target's: `aerie-drafter export --no-embeddings` omits it, and vLLM shares the target's."
        )


def _check_provenance(report: CheckpointReport, provenance: Provenance, target: TargetConfig | None, *, digests: bool) -> None:
    report.facts["provenance"] = provenance.to_mapping()
    if not (digests and target is not None and provenance.target_digest):
        return
    digest = checkpoints.compute_model_digest(target.folder)
    if digest != provenance.target_digest:
        report.problems.append(
            f"{target.folder}: its digest is {digest}, and the drafter was trained for "
            f"{provenance.target_digest}: other weights, "
            "so evaluate acceptance before you serve it."
        )


def _check_values(report: CheckpointReport, config: DrafterConfig | None, header: WeightsHeader) -> None:
    """Check the values, one tensor at a time."""
    for name, entry in header.tensors.items():
        if entry.dtype in ("F64", "F32", "F16", "BF16") and not is_finite(read_tensors(header, [name])[name]):
            report.problems.append(f"{entry.file}: {name} contains NaN or infinity; use an earlier checkpoint.")
    if config is None or "d2t" not in header.tensors or header.shapes["d2t"] != (config.draft_vocab_size,):
        return
    mapping = read_tensors(header, [name for name in ("d2t", "t2d") if name in header.tensors])
    t2d = mapping.get("t2d")
    errors = find_vocabulary_mapping_errors(
        config, mapping["d2t"], t2d if t2d is not None and t2d.shape == (config.vocab_size,) else None
    )
    report.facts["d2t"] = "invalid" if errors else f"{config.draft_vocab_size} of {config.vocab_size} tokens"
    report.problems += [f"{report.folder / WEIGHTS_FILE}: {message}" for message in errors]
    if config.draft_vocab_size == config.vocab_size:
        report.problems.append(
            f"{report.folder / WEIGHTS_FILE}: d2t exists, and the draft vocabulary is the target's: vLLM cannot load it; "
            "`aerie-drafter convert` omits it."
        )
