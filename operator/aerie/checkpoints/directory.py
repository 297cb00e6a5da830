"""Reads a checkpoint from a folder: config.json, the headers of its safetensors files, and d2t.

Guarantees: of each weight file only its header is read (and the tensor d2t, up to 16 MiB); every failure is a CheckpointError.
The files are those that vLLM would load: what the index names, or else every *.safetensors of the folder.
"""

from __future__ import annotations

from pathlib import Path

from aerie.engine.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    Header,
    assemble,
    header_bytes,
    parse_config,
    parse_header,
    parse_index,
)

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth")
MAX_OFFSETS = 16 * 2**20
"""Bytes of d2t at most: 2 M tokens."""


def read_folder(folder: Path, name: str | None = None) -> Checkpoint:
    """The checkpoint in `folder`, called `name` (default: the folder as given). Raises CheckpointError."""
    name = name or str(folder)
    try:
        return _read(folder, name)
    except OSError as error:
        reason = f"{error.filename or folder} cannot be read ({error.strerror or error})"
        raise CheckpointError(f"{name}: {reason}: give a folder with config.json and *.safetensors.") from error


def _read(folder: Path, name: str) -> Checkpoint:
    config = parse_config((folder / "config.json").read_bytes(), str(folder / "config.json"))
    index = None
    if (folder / INDEX).exists():
        index = parse_index((folder / INDEX).read_bytes(), str(folder / INDEX))
        files = sorted(set(index.values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        if any(path.suffix in PICKLES for path in folder.iterdir()):
            return assemble(name, config, None)
        raise CheckpointError(f"{name}: {folder} has no weights: it needs *.safetensors beside config.json.")
    checkpoint = assemble(name, config, [_header(folder / file) for file in files], index)
    d2t = (checkpoint.tensors or {}).get("d2t")
    if d2t is None or d2t.size > MAX_OFFSETS:
        return checkpoint
    with (folder / d2t.file).open("rb") as file:
        file.seek(d2t.begin)
        return checkpoint.with_offsets(file.read(d2t.size))


def _header(path: Path) -> Header:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        length = header_bytes(file.read(8), size, str(path))
        return parse_header(file.read(length), size, path.name, str(path))
