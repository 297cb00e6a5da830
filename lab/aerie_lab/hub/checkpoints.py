"""The repositories of the lab's Hub: folders of this machine, and checkpoints that have headers and no weights.

A checkpoint without weights is for everything that looks before it loads: preflight and the simulator read config.json and the
headers of the safetensors files, and these are byte for byte what a checkpoint of that shape has, in files of its true size.
Behind a header are zeros, of which a Hub hands out little at a time: an engine that would load them is refused instead.

Guarantees: a folder's files are read only on request; the same commit has the same files as long as its folder does.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from aerie_lab.images.table import ImageTable

MAX_ZERO_BYTES_PER_RESPONSE = 16 * 2**20
"""Bytes of one answer from behind a header: enough for a tensor such as d2t, and not for weights."""
_BYTES_PER_ELEMENT = {"BOOL": 1, "U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I64": 8}


@dataclass(frozen=True)
class RepositoryFile:
    """One file of a repository."""

    size: int
    read: Callable[[int, int], bytes]
    """The bytes [begin, end) of it. Raises OSError."""
    header_bytes: int | None = None
    """Number of bytes at its beginning with content; the rest is zeros. None: all."""

    def requests_weights(self, begin: int, end: int) -> bool:
        """Return whether the range is larger than any reader of headers needs."""
        if self.header_bytes is None:
            return False
        return self.header_bytes == 0 or end - max(begin, self.header_bytes) > MAX_ZERO_BYTES_PER_RESPONSE


@dataclass(frozen=True)
class Repository:
    """One repository at the one commit that has files."""

    name: str
    commit: str
    gated: bool
    files: Callable[[], Mapping[str, RepositoryFile]]
    """Files by path. Raises OSError."""
    licence: str = ""
    """The licence in the metadata of its model card."""
    main: str = ""
    """The commit of its branch `main`, if that is another one: it is named, and has no files here."""


def load_repositories(image_tables: Sequence[Path] = ()) -> dict[str, Repository]:
    """Return the repositories of a lab's image tables and the lab's own, by name; the first of a name counts."""
    own = Path(str(resources.files("aerie_lab.hub").joinpath("checkpoints.toml")))
    return read_repositories(own) | _build_repositories(ImageTable(image_tables).checkpoints, own.parent)


def read_repositories(table: Path) -> dict[str, Repository]:
    """Return the repositories of a file like checkpoints.toml, by name."""
    return _build_repositories(tomllib.loads(table.read_text())["checkpoint"], table.parent)


def _build_repositories(rows: Iterable[Mapping[str, Any]], base: Path) -> dict[str, Repository]:
    repositories: dict[str, Repository] = {}
    for row in rows:
        repositories.setdefault(row["repository"], _build_repository(row, base))
    return repositories


def _build_repository(row: Mapping[str, Any], base: Path) -> Repository:
    if "folder" in row:
        folder = (base / row["folder"]).resolve()
        return Repository(row["repository"], row["commit"], False, lambda: dict(_read_folder_files(folder)))
    files = dict(_build_checkpoint_files(row))
    return Repository(row["repository"], row["commit"], row.get("gated", False), lambda: files, row.get("licence", ""))


# ------------------------------------------------------------------------------------------------------------------- folders
def _read_folder_files(folder: Path) -> Iterator[tuple[str, RepositoryFile]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), RepositoryFile(path.stat().st_size, _build_reader(path))
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")


def _build_reader(path: Path) -> Callable[[int, int], bytes]:
    def read(begin: int, end: int) -> bytes:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    return read


# -------------------------------------------------------------------------------------------------------------- without weights
def _build_checkpoint_files(row: Mapping[str, Any]) -> Iterator[tuple[str, RepositoryFile]]:
    config = json.loads(row["config"])
    yield "README.md", _build_text_file(row["source"].strip() + "\n")
    yield "config.json", _build_text_file(row["config"].strip() + "\n")
    tensors = list(_expand_tensors(row["tensors"], config.get("text_config", config)["num_hidden_layers"]))
    total = sum(_tensor_bytes(dtype, shape) for _, dtype, shape in tensors)
    if "pickle" in row:
        yield row["pickle"], build_file_without_weights(b"", total)
        return
    shards = list(_split_shards(tensors, row.get("shard", math.inf)))
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        header, rest = _build_safetensors_header(shard)
        yield name, build_file_without_weights(header, rest)
    if len(shards) > 1:
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _, _ in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        yield "model.safetensors.index.json", _build_text_file(json.dumps(index, indent=2) + "\n")


def _build_text_file(text: str) -> RepositoryFile:
    data = text.encode()
    return RepositoryFile(len(data), lambda begin, end: data[begin:end])


def build_file_without_weights(header: bytes, zero_bytes: int) -> RepositoryFile:
    """Return a file of a header and `zero_bytes` zeros."""

    def read(begin: int, end: int) -> bytes:
        return header[begin:end] + bytes(max(0, end - max(begin, len(header))))

    return RepositoryFile(len(header) + zero_bytes, read, len(header))


_Tensor = tuple[str, str, Sequence[int]]
"""Name, type, shape."""


def _expand_tensors(patterns: Mapping[str, Sequence[Any]], layers: int) -> Iterator[_Tensor]:
    """Yield the patterns' tensors in order; consecutive ones with {layer} are repeated together, layer by layer."""
    block: list[_Tensor] = []

    def repeated() -> Iterator[_Tensor]:
        for layer in range(layers):
            yield from ((name.replace("{layer}", str(layer)), dtype, shape) for name, dtype, shape in block)
        block.clear()

    for name, (dtype, *shape) in patterns.items():
        if "{layer}" in name:
            block.append((name, dtype, shape))
            continue
        yield from repeated()
        yield name, dtype, shape
    yield from repeated()


def _split_shards(tensors: Iterable[_Tensor], max_shard_bytes: float) -> Iterator[list[_Tensor]]:
    """Yield the shards: a tensor that does not fit begins a new file, as when huggingface_hub splits a state."""
    shard: list[_Tensor] = []
    filled = 0
    for tensor in tensors:
        size = _tensor_bytes(tensor[1], tensor[2])
        if shard and filled + size > max_shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size
    yield shard


def _build_safetensors_header(shard: Iterable[_Tensor]) -> tuple[bytes, int]:
    """Return the header of a safetensors file with these tensors, and the number of bytes after it."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in sorted(shard):
        begin, end = end, end + _tensor_bytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    return _BYTES_PER_ELEMENT[dtype] * math.prod(shape)
