"""Weight files: their headers, and reading and writing of tensors. Errors contain the file.

Guarantees: the same tensors and metadata always result in the same bytes (the safetensors library orders metadata at random). A
header is valid only if it fits the file's size, so a truncated file is detected before any tensor is read. Not read: formats
other than safetensors; `aerie_drafter.convert` imports pickled files.
Format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from aerie_drafter.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"


class TensorEntry(NamedTuple):
    """Location of a tensor: its bytes in the file are `begin_offset` to `end_offset`."""

    dtype: str
    """Type by its safetensors name: F32, BF16, I64, BOOL, ..."""
    shape: tuple[int, ...]
    file: Path
    begin_offset: int
    end_offset: int


@dataclass(frozen=True)
class WeightsHeader:
    """Headers of one or several weight files."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes by name."""
        return {name: entry.shape for name, entry in self.tensors.items()}


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: invalid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected: an object, not a {type(value).__name__}.")
    return value


def read_header(file: Path) -> WeightsHeader:
    """Read the header of a safetensors file. Raises CheckpointError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            raw = stream.read(length) if 0 < length <= size - 8 else b""
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing.") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}).") from error
    try:
        listed = json.loads(raw)
        metadata = listed.pop("__metadata__", {})
        begin = 8 + length
        tensors = {name: _parse_tensor_entry(entry, file, begin) for name, entry in sorted(listed.items())}
        metadata = {str(key): str(text) for key, text in metadata.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{file}: no safetensors header ({size} bytes in total): the file is truncated or of another format; "
            "download it again."
        ) from None
    expected = max((entry.end_offset for entry in tensors.values()), default=begin)
    if size != expected:
        problem = "truncated" if size < expected else "longer than its header states"
        raise CheckpointError(f"{file}: {problem}: {size} bytes found, {expected} expected; download it again.")
    return WeightsHeader(tensors, metadata)


def _parse_tensor_entry(listed: dict[str, Any], file: Path, start: int) -> TensorEntry:
    shape, (begin, end) = listed["shape"], listed["data_offsets"]
    if any(not isinstance(number, int) or not 0 <= number < 2**63 for number in [*shape, begin, end]) or begin > end:
        raise ValueError("invalid offsets")
    return TensorEntry(str(listed["dtype"]), tuple(shape), file, start + begin, start + end)


def read_headers(folder: Path) -> WeightsHeader:
    """Read the headers of a model's safetensors, one file or several with an index. Raises CheckpointError."""
    if (folder / WEIGHTS_FILE).exists() or not (folder / WEIGHTS_INDEX_FILE).exists():
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: the folder does not exist.")
        return read_header(folder / WEIGHTS_FILE)
    index = read_json(folder / WEIGHTS_INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not all(map(_is_file_name, index.values())):
        raise CheckpointError(
            f"{folder / WEIGHTS_INDEX_FILE}: weight_map is missing, or contains names that are not files of this folder."
        )
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for name in sorted(set(index.values())):
        part = read_header(folder / name)
        tensors |= part.tensors
        metadata |= part.metadata
    absent = sorted(set(index) - set(tensors))
    if absent:
        raise CheckpointError(f"{folder / index[absent[0]]}: {absent[0]} is missing, although {WEIGHTS_INDEX_FILE} lists it.")
    return WeightsHeader(dict(sorted(tensors.items())), metadata)


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name.isprintable() and Path(name).name == name


def read_tensors(header: WeightsHeader, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read the named tensors, or all. Raises CheckpointError."""
    selected = sorted(header.tensors if names is None else names)
    tensors: dict[str, Tensor] = {}
    for file in sorted({header.tensors[name].file for name in selected}):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in selected if header.tensors[name].file == file}
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(f"{file}: cannot be read ({str(error).splitlines()[0]}).") from error
    return tensors


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; its bytes depend only on the arguments. Raises OSError."""
    raw = to_bytes({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    length = int.from_bytes(raw[:8], "little")
    listed = json.loads(raw[8 : 8 + length])
    header = json.dumps({"__metadata__": dict(sorted(metadata.items())), **listed}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.write(memoryview(raw)[8 + length :])


def find_embedding_name(header: WeightsHeader) -> str | None:
    """Return the name of a model's token embedding, with any prefix."""
    candidates = [name for name in header.tensors if name == "embed_tokens.weight" or name.endswith(".embed_tokens.weight")]
    return min(candidates, key=len) if candidates else None


def is_finite(tensor: Tensor) -> bool:
    """Return whether no element is NaN or infinite."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
