"""Conversion of another project's folder to a checkpoint of this package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from aerie.engine.models.origin import CheckpointOrigin, detect_origin
from aerie_drafter import checkpoint as checkpoints
from aerie_drafter.checkpoint import DrafterCheckpoint, Provenance
from aerie_drafter.checks import MALFORMED_VALUE_ERRORS, find_shape_errors, find_vocabulary_mapping_errors, format_error
from aerie_drafter.convert.names import normalize_vocabulary_mapping, rename_tensors
from aerie_drafter.convert.read import read_source_checkpoint
from aerie_drafter.convert.settings import ConversionOverrides, convert_config
from aerie_drafter.errors import CheckpointError, ConfigError
from aerie_drafter.targets import TargetConfig
from aerie_drafter.weights import CONFIG_FILE


@dataclass(frozen=True)
class Conversion:
    """A converted checkpoint, and messages about what was assumed and changed."""

    checkpoint: DrafterCheckpoint
    origin: CheckpointOrigin
    findings: tuple[str, ...]


def import_checkpoint(
    source: Path, folder: Path, overrides: ConversionOverrides, *, target: Path | None = None, target_name: str = ""
) -> Conversion:
    """Convert the checkpoint in `source` and write it to `folder`. Raises DrafterError.

    `target` is the target's folder, required if its number of layers decides; `target_name` is its name in the provenance.
    """
    conversion = convert_checkpoint(source, overrides, target=target)
    source_provenance = conversion.checkpoint.provenance
    notes = {**source_provenance.notes, "converted_from": conversion.origin.value}
    provenance = replace(
        source_provenance, target=target_name or source_provenance.target or (str(target) if target else ""), notes=notes
    )
    with checkpoints.replace_checkpoint(folder) as new:
        checkpoints.write_checkpoint(new, replace(conversion.checkpoint, provenance=provenance))
    return conversion


def convert_checkpoint(source: Path, overrides: ConversionOverrides, *, target: Path | None = None) -> Conversion:
    """Read and convert a checkpoint without writing it. Raises DrafterError."""
    source_checkpoint = read_source_checkpoint(source)
    if target is not None and overrides.target_layer_count is None:
        overrides = replace(overrides, target_layer_count=TargetConfig.read(target).layer_count)
    try:
        origin, evidence = detect_origin(source_checkpoint.config, source_checkpoint.tensors.keys(), source_checkpoint.metadata)
        if overrides.origin is None:
            findings = [f"Detected as a checkpoint of {origin.value}: {evidence}."]
        else:
            origin, findings = overrides.origin, []
        tensors, new_findings = rename_tensors(source_checkpoint.tensors)
        findings += new_findings
        config, new_findings = convert_config(
            source_checkpoint.config,
            tensors,
            origin,
            overrides,
            has_vllm_tensor_names=any("layers.0." in name for name in source_checkpoint.tensors),
        )
        findings += new_findings
        findings += normalize_vocabulary_mapping(config, tensors)
        errors = find_shape_errors(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        if not errors and "d2t" in tensors:
            errors = find_vocabulary_mapping_errors(config, tensors["d2t"], tensors.get("t2d"))
    except CheckpointError as error:
        raise CheckpointError(f"{source_checkpoint.weights_file}: {error}") from None
    except (ConfigError, *MALFORMED_VALUE_ERRORS) as error:
        raise ConfigError(f"{source / CONFIG_FILE}: {format_error(error)}") from None
    for message in errors:
        raise CheckpointError(f"{source_checkpoint.weights_file}: {message}")
    if "d2t" in tensors:
        tensors |= {"d2t": tensors["d2t"].long(), "t2d": checkpoints.build_t2d(config, tensors["d2t"])}
    checkpoint = DrafterCheckpoint(config, tensors, Provenance.from_metadata(source_checkpoint.metadata))
    return Conversion(checkpoint, origin, tuple(findings))
