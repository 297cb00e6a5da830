"""From another project's folder to a checkpoint of this package's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from aerie.engine.models.origin import CheckpointOrigin, detect_origin
from aerie_drafter import checkpoint as checkpoints
from aerie_drafter.checkpoint import Checkpoint, Provenance
from aerie_drafter.checks import ODD_VALUES, mapping_faults, say, shape_faults
from aerie_drafter.convert.names import rename, set_mapping_right
from aerie_drafter.convert.read import read
from aerie_drafter.convert.settings import Wishes, settings
from aerie_drafter.errors import CheckpointError, ConfigError
from aerie_drafter.targets import TargetFacts
from aerie_drafter.weights import CONFIG


@dataclass(frozen=True)
class Conversion:
    """A checkpoint brought in, and what was found on the way, a sentence each."""

    checkpoint: Checkpoint
    origin: CheckpointOrigin
    findings: tuple[str, ...]


def bring_in(source: Path, folder: Path, wishes: Wishes, *, target: Path | None = None, name: str = "") -> Conversion:
    """Convert the checkpoint in `source` into the checkpoint `folder`. Raises EagleError.

    `target` is the target's folder, where its number of layers is needed; `name` what provenance calls the target.
    """
    found = convert(source, wishes, target=target)
    kept = found.checkpoint.provenance
    notes = {**kept.notes, "converted_from": found.origin.value}
    provenance = replace(kept, target=name or kept.target or (str(target) if target else ""), notes=notes)
    with checkpoints.writing(folder) as new:
        checkpoints.write(new, replace(found.checkpoint, provenance=provenance))
    return found


def convert(source: Path, wishes: Wishes, *, target: Path | None = None) -> Conversion:
    """Read and convert, without writing. Raises EagleError."""
    raw = read(source)
    if target is not None and wishes.target_layers is None:
        wishes = replace(wishes, target_layers=TargetFacts.read(target).layers)
    try:
        origin, evidence = detect_origin(raw.config, raw.tensors.keys(), raw.metadata)
        if wishes.origin is None:
            findings = [f"Taken to be from {origin.value}: {evidence}."]
        else:
            origin, findings = wishes.origin, []
        tensors, more = rename(raw.tensors)
        findings += more
        config, more = settings(raw.config, tensors, origin, wishes, vllm_names=any("layers.0." in one for one in raw.tensors))
        findings += more
        findings += set_mapping_right(config, tensors)
        faults = shape_faults(config, {one: tuple(tensor.shape) for one, tensor in tensors.items()})
        if not faults and "d2t" in tensors:
            faults = mapping_faults(config, tensors["d2t"], tensors.get("t2d"))
    except CheckpointError as error:
        raise CheckpointError(f"{raw.file}: {error}") from None
    except (ConfigError, *ODD_VALUES) as error:
        raise ConfigError(f"{source / CONFIG}: {say(error)}") from None
    for fault in faults:
        raise CheckpointError(f"{raw.file}: {fault}")
    if "d2t" in tensors:
        tensors |= {"d2t": tensors["d2t"].long(), "t2d": checkpoints.reachable(config, tensors["d2t"])}
    checkpoint = Checkpoint(config, tensors, Provenance.from_metadata(raw.metadata))
    return Conversion(checkpoint, origin, tuple(findings))
