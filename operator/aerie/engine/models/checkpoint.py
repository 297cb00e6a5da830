"""A checkpoint as its config and the headers of its safetensors files tell it, without the weights.

Everything that preflight asks of a model is in a few hundred kilobytes: config.json, and at the start of each weight file a
JSON table of names, types and shapes. So a 600 GB model is checked from a laptop, and before a GPU is asked for.

A weight file (format of the safetensors project, README, section "Format"):

    0        8                8 + N                              size
    | N: u64 | N bytes of JSON | tensor data, no gaps, no overlap |
      little   {"name": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [begin, end)}, "__metadata__": {str: str}}
      endian   offsets count from 8 + N

Guarantees: pure, bytes in and dataclasses out. Whatever the bytes are, the outcome is a header or a CheckpointError whose text
names the file and the way out, in time linear in the bytes; every whole number has 64 bits at most, and names of
tensors and files have no control characters. A header that passes describes exactly the bytes of a file of the size given.
Not guaranteed: anything about the values of the weights. The one exception is d2t, which is small and whose values matter;
whoever reads the file may pass it along (`with_offsets`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

MAX_HEADER_BYTES = 100_000_000
"""Bytes. The safetensors library refuses longer ones, so vLLM would too."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element. A type that is not listed is let through, with its size taken from its offsets."""


_MAX_INT64 = 2**63 - 1
"""Of any number here: safetensors and PyTorch count in 64 bits."""


class CheckpointError(Exception):
    """A checkpoint that cannot be read or understood. `str(error)` is a sentence that names the file and the way out."""


class TensorInfo(NamedTuple):
    """One tensor: its type as safetensors spells it, its shape, and where it is: bytes [begin, end) of `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def byte_size(self) -> int:
        """Bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class SafetensorsHeader:
    """What one weight file holds."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A model without its weights."""

    name: str
    """As its user would name it: a repository with revision, or a folder."""
    config: Mapping[str, Any]
    """config.json."""
    tensors: Mapping[str, TensorInfo] | None
    """By name. None where the weights are in a format whose headers cannot be read, such as a pickle."""
    metadata: Mapping[str, str]
    """`__metadata__` of all files together."""
    d2t_offsets: tuple[int, ...] | None = None
    """The values of `d2t`, where the checkpoint has one and it was read."""
    misindexed_tensors: Mapping[str, str] = field(default_factory=dict)
    """Tensors that the index places in a file that does not hold them, with that file."""
    duplicate_tensors: Mapping[str, tuple[TensorInfo, ...]] = field(default_factory=dict)
    """Tensors that several files hold, with all copies; `tensors` has the last, as an engine that loads file by file does."""

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of all weights; None where their headers cannot be read."""
        return None if self.tensors is None else sum(tensor.end - tensor.begin for tensor in self.tensors.values())

    def with_d2t_offsets(self, raw: bytes) -> Checkpoint:
        """The same with the values of `d2t`, given its raw bytes. Raises CheckpointError if they are no integers."""
        tensor = (self.tensors or {}).get("d2t")
        codes = {"I64": "q", "I32": "i"}
        if tensor is None or tensor.dtype not in codes or len(raw) != tensor.byte_size:
            found = "is missing" if tensor is None else f"is {tensor.dtype} with {len(raw)} of {tensor.byte_size} bytes read"
            raise CheckpointError(f"{self.name}: d2t {found}: it must be I64, one offset for each token of the draft vocabulary.")
        code = codes[tensor.dtype]
        return replace(self, d2t_offsets=struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def read_header_length(prefix: bytes, file_size: int, file: str) -> int:
    """N of the picture above, given the first 8 bytes and the size of the file. Raises CheckpointError."""
    if len(prefix) < 8 or file_size < 8:
        raise CheckpointError(
            f"{file} has {min(len(prefix), file_size)} bytes, and a safetensors file at least 8: {_DOWNLOAD_AGAIN}"
        )
    length = int(struct.unpack("<Q", prefix[:8])[0])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file} says that its header has {length} bytes, and {MAX_HEADER_BYTES} is the most: "
            "it is not a safetensors file (a Git LFS pointer or an error page?), or it is damaged; download it again."
        )
    if length > file_size - 8:
        raise CheckpointError(
            f"{file} says that its header has {length} bytes, but the file ends after {file_size - 8} more: {_DOWNLOAD_AGAIN}"
        )
    return length


def parse_header(text: bytes, file_size: int, file: str, display_name: str | None = None) -> SafetensorsHeader:
    """The header whose JSON is `text`, of a file of `size` bytes in all. Raises CheckpointError.

    `file`: its name inside the checkpoint, which the tensors keep. `shown`: what an error calls it.
    """
    display_name = display_name or file
    start = 8 + len(text)
    try:
        document = json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    except _DuplicateKeyError as error:
        raise CheckpointError(f"{display_name}: the header names '{error}' twice: {_EXPORT_AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{display_name}: the header is not JSON ({error}): {_DOWNLOAD_AGAIN}") from None
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{display_name}: the header is a {type(document).__name__}, not a table of tensors: {_DOWNLOAD_AGAIN}"
        )
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{display_name}: __metadata__ must map strings to strings, found {_abbreviate(metadata)}: {_EXPORT_AGAIN}"
        )
    tensors = {name: _parse_tensor(name, entry, file, start, display_name) for name, entry in document.items()}
    _check_coverage(tensors, start, file_size, display_name)
    return SafetensorsHeader(tensors, metadata)


def build_checkpoint(
    name: str, config: Mapping[str, Any], headers: Iterable[SafetensorsHeader] | None, index: Mapping[str, str] | None = None
) -> Checkpoint:
    """One checkpoint from its parts.

    `headers`: of all weight files, or None where they cannot be read. `index`: tensor name to file, from
    model.safetensors.index.json, for a checkpoint that has one. Where it contradicts the files, or these each other, the
    checkpoint says so (`misplaced`, `doubled`): what an engine makes of that is for preflight to say.
    """
    if headers is None:
        return Checkpoint(name, config, None, {})
    copies: dict[str, tuple[TensorInfo, ...]] = {}
    metadata: dict[str, str] = {}
    for header in headers:
        for tensor, entry in header.tensors.items():
            copies[tensor] = (*copies.get(tensor, ()), entry)
        metadata.update(header.metadata)
    return Checkpoint(
        name,
        config,
        {tensor: entries[-1] for tensor, entries in copies.items()},
        metadata,
        misindexed_tensors={
            tensor: file for tensor, file in (index or {}).items() if all(entry.file != file for entry in copies.get(tensor, ()))
        },
        duplicate_tensors={tensor: entries for tensor, entries in copies.items() if len(entries) > 1},
    )


def parse_config(text: bytes, file: str) -> dict[str, Any]:
    """config.json. Raises CheckpointError."""
    return _parse_object(text, file, "a table of settings")


def parse_index(text: bytes, file: str) -> dict[str, str]:
    """Tensor name to file, from model.safetensors.index.json. Raises CheckpointError."""
    mapping = _parse_object(text, file, "a table with weight_map").get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(
            f"{file}: weight_map is {_abbreviate(mapping)}, and must name the file of each tensor: {_DOWNLOAD_AGAIN}"
        )
    for tensor, shard in mapping.items():
        # The name becomes a path or an address, so it has to stay inside the checkpoint.
        sound = isinstance(shard, str) and shard.isprintable() and not shard.startswith(".")
        if not sound or not shard or "/" in shard or "\\" in shard:
            raise CheckpointError(
                f"{file}: weight_map gives {_abbreviate(tensor)} the file {_abbreviate(shard)}, which is no plain name: {_DOWNLOAD_AGAIN}"
            )
    return mapping


_DOWNLOAD_AGAIN = "it is damaged or incomplete; download it again."
_EXPORT_AGAIN = "export the checkpoint again."


class _DuplicateKeyError(Exception):
    pass


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _DuplicateKeyError(name)
            seen.add(name)
    return table


def _parse_object(text: bytes, file: str, expected: str) -> dict[str, Any]:
    try:
        document = json.loads(text, parse_int=_parse_int64)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON ({error}): {_DOWNLOAD_AGAIN}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{file} holds a {type(document).__name__}, and must hold {expected}: {_DOWNLOAD_AGAIN}")
    return document


def _parse_int64(text: str) -> int:
    """A number of a table. Raises ValueError beyond 64 bits: nothing is so large, and a product of such could not be written."""
    if len(text) > 20 or not -_MAX_INT64 <= (number := int(text)) <= _MAX_INT64:
        raise ValueError(f"a whole number of {len(text)} digits")
    return number


def _parse_tensor(name: str, entry: Any, file: str, start: int, shown: str) -> TensorInfo:
    """The types are compared exactly, because JSON's true and 1.0 would pass for integers otherwise."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [begin, end, *shape] if type(shape) is list else [None]
        sound = type(dtype) is str and all(type(number) is int and abs(number) <= _MAX_INT64 for number in numbers)
    except (TypeError, KeyError, ValueError):
        dtype, shape, begin, end, sound = "", [], 0, 0, False
    if not name.isprintable():
        raise CheckpointError(f"{shown}: the tensor {_abbreviate(name)} has control characters in its name: {_EXPORT_AGAIN}")
    if not sound or any(length < 0 for length in shape):
        raise CheckpointError(
            f"{shown}: '{name}' is {_abbreviate(entry)}, and must have dtype, shape and data_offsets: {_EXPORT_AGAIN}"
        )
    if not 0 <= begin <= end:
        raise CheckpointError(f"{shown}: '{name}' goes from byte {begin} to byte {end}: {_DOWNLOAD_AGAIN}")
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and _element_count(shape) * bits != (end - begin) * 8:
        raise CheckpointError(
            f"{shown}: '{name}', {dtype} {_abbreviate(shape)}, needs {-(-_element_count(shape) * bits // 8)} bytes and has {end - begin}: "
            f"{_DOWNLOAD_AGAIN}"
        )
    return TensorInfo(dtype, tuple(shape), file, start + begin, start + end)


def _element_count(shape: list[int]) -> int:
    """Their number, or one beyond `_MOST` where there are more: the product of a hostile shape has millions of digits."""
    if 0 in shape:
        return 0
    found = 1
    for length in shape:
        found *= length
        if found > _MAX_INT64:
            break
    return found


def _check_coverage(tensors: Mapping[str, TensorInfo], start: int, size: int, file: str) -> None:
    """Every byte after the header belongs to one tensor: what overlaps, leaves a gap or goes past the end is refused."""
    position, previous = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            word = "overlaps" if tensor.begin < position else "leaves a gap after"
            raise CheckpointError(
                f"{file}: '{name}' begins at byte {tensor.begin} of the file and {word} {previous}: {_DOWNLOAD_AGAIN}"
            )
        position, previous = tensor.end, f"'{name}'"
    if position != size:
        word = "is cut off" if position > size else "is longer than its header says"
        raise CheckpointError(f"{file} {word}: its header describes {position} bytes, and it has {size}: {_DOWNLOAD_AGAIN}")


def _abbreviate(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
