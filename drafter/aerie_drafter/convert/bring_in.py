"""From another project's folder to a checkpoint of this package's."""

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
    """A checkpoint brought in, and what was found on the way, a sentence each."""

    checkpoint: DrafterCheckpoint
    origin: CheckpointOrigin
    findings: tuple[str, ...]


def import_checkpoint(
    source: Path, folder: Path, overrides: ConversionOverrides, *, target: Path | None = None, target_name: str = ""
) -> Conversion:
    """Convert the checkpoint in `source` into the checkpoint `folder`. Raises EagleError.

    `target` is the target's folder, where its number of layers is needed; `name` what provenance calls the target.
    """
    found = convert_checkpoint(source, overrides, target=target)
    kept = found.checkpoint.provenance
    notes = {**kept.notes, "converted_from": found.origin.value}
    provenance = replace(kept, target=target_name or kept.target or (str(target) if target else ""), notes=notes)
    with checkpoints.replace_checkpoint(folder) as new:
        checkpoints.write_checkpoint(new, replace(found.checkpoint, provenance=provenance))
    return found


def convert_checkpoint(source: Path, overrides: ConversionOverrides, *, target: Path | None = None) -> Conversion:
    """Read and convert, without writing. Raises EagleError."""
    raw = read_source_checkpoint(source)
    if target is not None and overrides.target_layer_count is None:
        overrides = replace(overrides, target_layer_count=TargetConfig.read(target).layer_count)
    try:
        origin, evidence = detect_origin(raw.config, raw.tensors.keys(), raw.metadata)
        if overrides.origin is None:
            findings = [f"Taken to be from {origin.value}: {evidence}."]
        else:
            origin, findings = overrides.origin, []
        tensors, more = rename_tensors(raw.tensors)
        findings += more
        config, more = convert_config(
            raw.config, tensors, origin, overrides, has_vllm_tensor_names=any("layers.0." in one for one in raw.tensors)
        )
        findings += more
        findings += normalize_vocabulary_mapping(config, tensors)
        faults = find_shape_errors(config, {one: tuple(tensor.shape) for one, tensor in tensors.items()})
        if not faults and "d2t" in tensors:
            faults = find_vocabulary_mapping_errors(config, tensors["d2t"], tensors.get("t2d"))
    except CheckpointError as error:
        raise CheckpointError(f"{raw.weights_file}: {error}") from None
    except (ConfigError, *MALFORMED_VALUE_ERRORS) as error:
        raise ConfigError(f"{source / CONFIG_FILE}: {format_error(error)}") from None
    for fault in faults:
        raise CheckpointError(f"{raw.weights_file}: {fault}")
    if "d2t" in tensors:
        tensors |= {"d2t": tensors["d2t"].long(), "t2d": checkpoints.build_t2d(config, tensors["d2t"])}
    checkpoint = DrafterCheckpoint(config, tensors, Provenance.from_metadata(raw.metadata))
    return Conversion(checkpoint, origin, tuple(findings))
