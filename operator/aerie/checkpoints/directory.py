"""Reads a checkpoint from a folder: config.json, the headers of its safetensors files, and d2t.

Guarantees: of each weight file only its header is read (and the tensor d2t, up to 16 MiB); every failure is a CheckpointError.
The files are those that vLLM would load: what the index names, or else every *.safetensors of the folder.
"""

from __future__ import annotations

from pathlib import Path

from aerie.engine.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    SafetensorsHeader,
    build_checkpoint,
    parse_config,
    parse_header,
    parse_index,
    read_header_length,
)

INDEX_FILE_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
MAX_D2T_BYTES = 16 * 2**20
"""Bytes of d2t at most: 2 M tokens."""


def read_checkpoint_directory(directory: Path, name: str | None = None) -> Checkpoint:
    """The checkpoint in `folder`, called `name` (default: the folder as given). Raises CheckpointError."""
    name = name or str(directory)
    try:
        return _read_checkpoint(directory, name)
    except OSError as error:
        reason = f"{error.filename or directory} cannot be read ({error.strerror or error})"
        raise CheckpointError(f"{name}: {reason}: give a folder with config.json and *.safetensors.") from error


def _read_checkpoint(folder: Path, name: str) -> Checkpoint:
    config = parse_config((folder / "config.json").read_bytes(), str(folder / "config.json"))
    index = None
    if (folder / INDEX_FILE_NAME).exists():
        index = parse_index((folder / INDEX_FILE_NAME).read_bytes(), str(folder / INDEX_FILE_NAME))
        files = sorted(set(index.values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        if any(path.suffix in PICKLE_SUFFIXES for path in folder.iterdir()):
            return build_checkpoint(name, config, None)
        raise CheckpointError(f"{name}: {folder} has no weights: it needs *.safetensors beside config.json.")
    checkpoint = build_checkpoint(name, config, [_read_header(folder / file) for file in files], index)
    d2t = (checkpoint.tensors or {}).get("d2t")
    if d2t is None or d2t.byte_size > MAX_D2T_BYTES:
        return checkpoint
    with (folder / d2t.file).open("rb") as file:
        file.seek(d2t.begin)
        return checkpoint.with_d2t_offsets(file.read(d2t.byte_size))


def _read_header(path: Path) -> SafetensorsHeader:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        length = read_header_length(file.read(8), size, str(path))
        return parse_header(file.read(length), size, path.name, str(path))
