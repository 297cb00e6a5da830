"""Read a checkpoint from a folder: config.json, the headers of its safetensors files, and d2t.

Guarantees: only the header of each weight file is read (and the tensor d2t, up to 16 MiB). Every failure is a CheckpointError.
The files are those that vLLM would load: the files of the index, or else every *.safetensors of the folder. Not guaranteed: that
the weights themselves are intact.
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
"""Maximum bytes of d2t: 2 M tokens."""


def read_checkpoint_directory(directory: Path, name: str | None = None) -> Checkpoint:
    """Read the checkpoint in `directory`, with the name `name` (default: the path). Raises CheckpointError."""
    name = name or str(directory)
    try:
        return _read_checkpoint(directory, name)
    except OSError as error:
        reason = f"{error.filename or directory} cannot be read ({error.strerror or error})"
        raise CheckpointError(f"{name}: {reason}: give a folder with config.json and *.safetensors.") from error


def _read_checkpoint(directory: Path, name: str) -> Checkpoint:
    config = parse_config((directory / "config.json").read_bytes(), str(directory / "config.json"))
    index = None
    if (directory / INDEX_FILE_NAME).exists():
        index = parse_index((directory / INDEX_FILE_NAME).read_bytes(), str(directory / INDEX_FILE_NAME))
        files = sorted(set(index.values()))
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
    if not files:
        if any(path.suffix in PICKLE_SUFFIXES for path in directory.iterdir()):
            return build_checkpoint(name, config, None)
        raise CheckpointError(f"{name}: {directory} has no weights: it needs *.safetensors beside config.json.")
    checkpoint = build_checkpoint(name, config, [_read_header(directory / file) for file in files], index)
    d2t = (checkpoint.tensors or {}).get("d2t")
    if d2t is None or d2t.byte_size > MAX_D2T_BYTES:
        return checkpoint
    with (directory / d2t.file).open("rb") as file:
        file.seek(d2t.begin)
        return checkpoint.with_d2t_offsets(file.read(d2t.byte_size))


def _read_header(path: Path) -> SafetensorsHeader:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        length = read_header_length(file.read(8), size, str(path))
        return parse_header(file.read(length), size, path.name, str(path))
