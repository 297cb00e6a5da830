"""A drafter on disk: a folder with config.json and model.safetensors, exactly what `vllm serve` takes.

Guarantees: saving gives the same bytes for the same drafter, and replaces an earlier checkpoint whole or not at all; loading
returns the saved tensors bit for bit, or raises an error with the file, the key, the actual and the expected value.
Not guaranteed: that the drafter fits a certain target; `aerie_drafter.inspect` checks that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aerie_drafter import files
from aerie_drafter.checks import (
    MALFORMED_VALUE_ERRORS,
    expected_tensor_shapes,
    find_shape_errors,
    find_vocabulary_mapping_errors,
    format_error,
)
from aerie_drafter.config import DrafterConfig
from aerie_drafter.errors import CheckpointError, ConfigError
from aerie_drafter.model import Drafter
from aerie_drafter.weights import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WeightsHeader,
    find_embedding_name,
    is_finite,
    read_header,
    read_headers,
    read_json,
    read_tensors,
    write_tensors,
)

_METADATA_PREFIX = "eagle."
_METADATA_KEYS = {"training_data": "data", "training_horizon": "horizon", "written_by": "code"}
"""Keys of provenance fields that have another name in the metadata. Prefix and keys stay as they are: published checkpoints and
the shipped bundle contain them, preflight reads them, and they say what the file is, an EAGLE drafter."""
EMBEDDING_TENSOR = "embed_tokens.weight"


@dataclass(frozen=True)
class Provenance:
    """Origin of a drafter, stored in the metadata of model.safetensors. An empty field is unknown."""

    target: str = ""
    """Name or folder of the target."""
    target_digest: str = ""
    """`compute_model_digest` of the target's folder."""
    training_data: str = ""
    """Names and digest of the training data."""
    training_horizon: int | None = None
    """Number of unrolled steps of training-time test."""
    written_by: str = ""
    """Program and version that wrote the checkpoint."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Additional values by name."""

    @classmethod
    def from_mapping(cls, fields: Provenance | Mapping[str, Any]) -> Provenance:
        """Convert a mapping with the names of the fields; every other value becomes a note."""
        if isinstance(fields, Provenance):
            return fields
        names = {each.name for each in dataclasses.fields(cls)} - {"notes"}
        notes = {**fields.get("notes", {}), **{k: str(v) for k, v in fields.items() if k not in names and k != "notes"}}
        horizon = fields.get("training_horizon")
        texts = {name: str(fields[name]) for name in names - {"training_horizon"} if name in fields}
        return cls(**texts, training_horizon=None if horizon is None else int(horizon), notes=notes)

    def to_mapping(self) -> dict[str, Any]:
        """Return the known values by name, the notes beside the fields."""
        fields = {name: value for name, value in vars(self).items() if name != "notes"}
        return {name: value for name, value in {**fields, **self.notes, **fields}.items() if value not in ("", None)}

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of a safetensors file."""
        values = {**self.to_mapping(), "written_by": self.written_by or f"aerie {packages.version('aerie-drafter')}"}
        return {"format": "pt"} | {
            _METADATA_PREFIX + _METADATA_KEYS.get(name, name): str(value) for name, value in values.items()
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Provenance:
        """Read what `to_metadata` wrote; empty for another project's file."""
        names = {key: name for name, key in _METADATA_KEYS.items()}
        keys = [key for key in metadata if key.startswith(_METADATA_PREFIX)]
        values = {names.get(name := key.removeprefix(_METADATA_PREFIX), name): metadata[key] for key in keys}
        if not values.get("training_horizon", "0").isdecimal():
            values["horizon in words"] = values.pop("training_horizon")
        return cls.from_mapping(values)


@contextmanager
def replace_checkpoint(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces the checkpoint `folder` when the block ends without an error. Raises CheckpointError.

    For callers that write more files than `save_checkpoint` does.
    """
    with files.replace_folder(folder, _is_aerie_checkpoint) as new:
        yield new


@dataclass(frozen=True)
class DrafterCheckpoint:
    """Content of a checkpoint."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    """Tensors by the names of Drafter's state; the embedding and the mapping between vocabularies may be absent."""
    provenance: Provenance = field(default_factory=Provenance)


def save_checkpoint(
    folder: Path,
    drafter: Drafter,
    provenance: Provenance | Mapping[str, Any],
    *,
    include_embedding: bool = True,
    dtype: torch.dtype | None = None,
) -> None:
    """Save the drafter to `folder`, replacing an earlier checkpoint. Raises CheckpointError.

    Without `include_embedding` vLLM shares the target's. `dtype` applies to all weights; None keeps their types.
    """
    with replace_checkpoint(folder) as new:
        write_checkpoint(new, build_checkpoint(drafter, provenance), include_embedding=include_embedding, dtype=dtype)


def build_checkpoint(drafter: Drafter, provenance: Provenance | Mapping[str, Any]) -> DrafterCheckpoint:
    """Return the content of the drafter's checkpoint. Its tensors are the drafter's own, not copies."""
    tensors = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    return DrafterCheckpoint(drafter.config, tensors, Provenance.from_mapping(provenance))


def write_checkpoint(
    folder: Path, checkpoint: DrafterCheckpoint, *, include_embedding: bool = True, dtype: torch.dtype | None = None
) -> None:
    """Write config.json and model.safetensors to an existing folder, in place. Raises CheckpointError, OSError."""
    tensors = build_serving_tensors(checkpoint, include_embedding=include_embedding, dtype=dtype)
    config = checkpoint.config.to_vllm_config() | {"dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.")}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(folder / WEIGHTS_FILE, tensors, checkpoint.provenance.to_metadata())


def build_serving_tensors(
    checkpoint: DrafterCheckpoint, *, include_embedding: bool, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return the tensors that vLLM loads; d2t and t2d only if the vocabularies differ. Raises CheckpointError."""
    left_out = set() if include_embedding else {EMBEDDING_TENSOR}
    if checkpoint.config.draft_vocab_size == checkpoint.config.vocab_size:
        left_out |= {"d2t", "t2d"}  # vLLM does not accept an identity mapping
    tensors = {
        name: tensor.to(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
        for name, tensor in checkpoint.tensors.items()
        if name not in left_out
    }
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise CheckpointError(f"{name} contains NaN or infinity: the drafter is not saved.")
    return tensors


def load_drafter(folder: Path, *, target: Path | None = None) -> Drafter:
    """Load the drafter of a checkpoint. Raises CheckpointError, ConfigError.

    The embedding of a checkpoint without one is read from the target's folder. All weights get the type of `fc.weight`.
    """
    checkpoint = read_checkpoint(folder)
    if EMBEDDING_TENSOR not in checkpoint.tensors:
        embedding = read_target_embedding(checkpoint.config, target, folder)
        checkpoint = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, EMBEDDING_TENSOR: embedding})
    return build_drafter(checkpoint)


def read_checkpoint(folder: Path) -> DrafterCheckpoint:
    """Read and validate the content of a checkpoint; t2d is present if d2t is. Raises CheckpointError, ConfigError."""
    config = read_drafter_config(folder)
    header = read_headers(folder)
    _raise_first_error(
        folder / WEIGHTS_FILE,
        find_shape_errors(config, {canonical_tensor_name(name): shape for name, shape in header.shapes.items()}),
    )
    tensors = {canonical_tensor_name(name): tensor for name, tensor in read_finite_tensors(header).items()}
    d2t = tensors.get("d2t")
    if d2t is not None:
        _raise_first_error(folder / WEIGHTS_FILE, find_vocabulary_mapping_errors(config, d2t, tensors.get("t2d")))
        tensors |= {"d2t": d2t.long(), "t2d": build_t2d(config, d2t)}
    return DrafterCheckpoint(config, tensors, Provenance.from_metadata(header.metadata))


def build_drafter(checkpoint: DrafterCheckpoint) -> Drafter:
    """Build the drafter from valid content with an embedding."""
    config, tensors = checkpoint.config, checkpoint.tensors
    dtype = tensors["fc.weight"].dtype
    with torch.device("meta"):  # skip the random initialization, which is overwritten
        drafter = Drafter(config)
    d2t = tensors.get("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
    weights = {name: tensor.to(dtype) for name, tensor in tensors.items() if tensor.is_floating_point()}
    drafter.load_state_dict({**weights, "d2t": d2t, "t2d": build_t2d(config, d2t)}, assign=True)
    return drafter


def build_t2d(config: DrafterConfig, d2t: Tensor) -> Tensor:
    """Return t2d: which tokens of the target are in the draft vocabulary, [vocab_size]."""
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[d2t.long() + torch.arange(len(d2t))] = True
    return t2d


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Read the configuration of a checkpoint. Raises CheckpointError, ConfigError, both with the file."""
    raw = read_json(folder / CONFIG_FILE)
    if raw.get("quantization_config"):
        raise ConfigError(f"{folder / CONFIG_FILE}: quantization_config is set: quantized drafters are not supported.")
    try:
        config = DrafterConfig.from_vllm_config(raw)
        expected_tensor_shapes(config)  # also validates the rope parameters
    except (ConfigError, *MALFORMED_VALUE_ERRORS) as error:
        raise ConfigError(f"{folder / CONFIG_FILE}: {format_error(error)}") from None
    return config


def canonical_tensor_name(name: str) -> str:
    """Return the name of a tensor in this package; vLLM accepts both `layers.0.` and `midlayer.`."""
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def read_finite_tensors(header: WeightsHeader) -> dict[str, Tensor]:
    """Read all tensors of a header. Raises CheckpointError for quantized tensors and for values that are not finite."""
    for name, entry in header.tensors.items():
        if entry.dtype not in ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"):
            raise CheckpointError(f"{entry.file}: {name} is of type {entry.dtype}: quantized drafters are not supported.")
    tensors = read_tensors(header)
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise CheckpointError(f"{header.tensors[name].file}: {name} contains NaN or infinity; use an earlier checkpoint.")
    return tensors


def read_target_embedding(config: DrafterConfig, target: Path | None, folder: Path) -> Tensor:
    """Read the target's token embedding, [vocab_size, hidden_size]. Raises CheckpointError."""
    if target is None:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: {EMBEDDING_TENSOR} is missing, because the target's is shared: "
            "set the target's folder too."
        )
    header = read_headers(target)
    name = find_embedding_name(header)
    if name is None:
        raise CheckpointError(f"{target}: it has no tensor embed_tokens.weight.")
    shape, expected = header.shapes[name], (config.vocab_size, config.hidden_size)
    if shape != expected:
        raise CheckpointError(
            f"{header.tensors[name].file}: {name} has shape {shape[0]} x {shape[1]}, and the drafter in {folder} needs "
            f"{expected[0]} x {expected[1]}: it was trained for another target."
        )
    return read_tensors(header, [name])[name]


def read_provenance(folder: Path) -> Provenance:
    """Read the provenance of a checkpoint; unknown fields are empty. Raises CheckpointError."""
    return Provenance.from_metadata(read_headers(folder).metadata)


def compute_model_digest(folder: Path) -> str:
    """Compute `sha256:...` of the configuration and weights (names, types, shapes, bytes) of a drafter or target.

    It does not depend on provenance, file times, the order of keys and the files of the tensors. Raises CheckpointError.
    """
    total = hashlib.sha256(json.dumps(read_json(folder / CONFIG_FILE), sort_keys=True, separators=(",", ":")).encode())
    for name, entry in sorted(read_headers(folder).tensors.items()):
        total.update(json.dumps([name, entry.dtype, entry.shape]).encode())
        with entry.file.open("rb") as stream:
            stream.seek(entry.begin_offset)
            remaining = entry.end_offset - entry.begin_offset
            while remaining and (part := stream.read(min(remaining, 1 << 20))):
                total.update(part)
                remaining -= len(part)
    return f"sha256:{total.hexdigest()}"


def _is_aerie_checkpoint(folder: Path) -> bool:
    try:
        return any(key.startswith(_METADATA_PREFIX) for key in read_header(folder / WEIGHTS_FILE).metadata)
    except CheckpointError:
        return False


def _raise_first_error(file: Path, errors: Iterable[str]) -> None:
    for message in errors:
        raise CheckpointError(f"{file}: {message}")
