"""A checkpoint from its config and the headers of its safetensors files, without the weights.

Preflight needs only a few hundred kilobytes of a model: config.json, and the JSON table of names, types and shapes at the start
of each weight file. So a laptop can check a 600 GB model, and before a GPU is requested.

A weight file (format of the safetensors project, README, section "Format"):

    0        8                8 + N                              size
    | N: u64 | N bytes of JSON | tensor data, no gaps, no overlap |
      little   {"name": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [begin, end)}, "__metadata__": {str: str}}
      endian   offsets count from 8 + N

Guarantees: pure, bytes in and dataclasses out. Any bytes give a header or a CheckpointError whose text names the file and the
fix, in time linear in the bytes. Every whole number has 64 bits at most, and names of tensors and files have no control
characters. A valid header describes exactly the bytes of a file of the given size. Not guaranteed: anything about the values of
the weights. The one exception is d2t, which is small and whose values matter: the reader of the file may add them
(`with_d2t_offsets`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

MAX_HEADER_BYTES = 100_000_000
"""Bytes. The safetensors library rejects longer headers, so vLLM does too."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element. A type that is not listed is valid, and its size follows from its offsets."""


_MAX_INT64 = 2**63 - 1
"""The limit of every number here: safetensors and PyTorch count in 64 bits."""


class CheckpointError(Exception):
    """A checkpoint that cannot be read or parsed. `str(error)` is a message that names the file and the fix."""


class TensorInfo(NamedTuple):
    """One tensor: its type in the spelling of safetensors, its shape, and its place: bytes [begin, end) of `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def byte_size(self) -> int:
        """The size in bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class SafetensorsHeader:
    """The tensors and metadata of one weight file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A model without its weights."""

    name: str
    """The name that a user would write: a repository with revision, or a folder."""
    config: Mapping[str, Any]
    """The object in config.json."""
    tensors: Mapping[str, TensorInfo] | None
    """Tensors by name. None if the weights are in a format without readable headers, such as a pickle."""
    metadata: Mapping[str, str]
    """`__metadata__` of all files together."""
    d2t_offsets: tuple[int, ...] | None = None
    """The values of `d2t`, if the checkpoint has one and it was read."""
    misindexed_tensors: Mapping[str, str] = field(default_factory=dict)
    """Tensors that the index assigns to a file that does not contain them, with that file."""
    duplicate_tensors: Mapping[str, tuple[TensorInfo, ...]] = field(default_factory=dict)
    """Tensors that several files contain, with all copies. `tensors` has the last one, like an engine that loads file by file."""

    @property
    def weight_bytes(self) -> int | None:
        """The bytes of all weights; None if their headers cannot be read."""
        return None if self.tensors is None else sum(tensor.end - tensor.begin for tensor in self.tensors.values())

    def with_d2t_offsets(self, raw: bytes) -> Checkpoint:
        """Return a copy with the values of `d2t`, parsed from its raw bytes. Raises CheckpointError if they are no integers."""
        tensor = (self.tensors or {}).get("d2t")
        codes = {"I64": "q", "I32": "i"}
        if tensor is None or tensor.dtype not in codes or len(raw) != tensor.byte_size:
            state = "is missing" if tensor is None else f"is {tensor.dtype} with {len(raw)} of {tensor.byte_size} bytes read"
            raise CheckpointError(f"{self.name}: d2t {state}: it must be I64, one offset for each token of the draft vocabulary.")
        code = codes[tensor.dtype]
        return replace(self, d2t_offsets=struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def read_header_length(prefix: bytes, file_size: int, file: str) -> int:
    """Return N of the drawing above, from the first 8 bytes and the size of the file. Raises CheckpointError."""
    if len(prefix) < 8 or file_size < 8:
        raise CheckpointError(
            f"{file} has {min(len(prefix), file_size)} bytes, but a safetensors file has at least 8: {_DOWNLOAD_AGAIN}"
        )
    length = int(struct.unpack("<Q", prefix[:8])[0])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file} declares a header of {length} bytes, but the maximum is {MAX_HEADER_BYTES}: "
            "it is not a safetensors file (a Git LFS pointer or an error page?), or it is damaged; download it again."
        )
    if length > file_size - 8:
        raise CheckpointError(
            f"{file} declares a header of {length} bytes, but the file ends after {file_size - 8} more: {_DOWNLOAD_AGAIN}"
        )
    return length


def parse_header(text: bytes, file_size: int, file: str, display_name: str | None = None) -> SafetensorsHeader:
    """Parse a header whose JSON is `text`, from a file of `file_size` bytes in total. Raises CheckpointError.

    `file`: its name inside the checkpoint, which the tensors store. `display_name`: its name in errors.
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
    """Build one checkpoint from its parts.

    `headers`: those of all weight files, or None if they cannot be read. `index`: tensor name to file, from
    model.safetensors.index.json, if the checkpoint has one. Contradictions of index and files are in `misindexed_tensors`, and
    those between files in `duplicate_tensors`; preflight decides how an engine reacts to them.
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
    """Parse config.json. Raises CheckpointError."""
    return _parse_object(text, file, "a table of settings")


def parse_index(text: bytes, file: str) -> dict[str, str]:
    """Parse model.safetensors.index.json into a mapping from tensor name to file. Raises CheckpointError."""
    mapping = _parse_object(text, file, "a table with weight_map").get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(
            f"{file}: weight_map is {_abbreviate(mapping)}, but must contain the file of each tensor: {_DOWNLOAD_AGAIN}"
        )
    for tensor, shard in mapping.items():
        # The name becomes a path or a URL, so it must stay inside the checkpoint.
        is_plain_name = isinstance(shard, str) and shard.isprintable() and not shard.startswith(".")
        if not is_plain_name or not shard or "/" in shard or "\\" in shard:
            raise CheckpointError(
                f"{file}: weight_map gives {_abbreviate(tensor)} the file {_abbreviate(shard)}, which is not a "
                f"plain name: {_DOWNLOAD_AGAIN}"
            )
    return mapping


_DOWNLOAD_AGAIN = "it is damaged or incomplete; download it again."
_EXPORT_AGAIN = "export the checkpoint again."


class _DuplicateKeyError(Exception):
    pass


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        previous_names: set[str] = set()
        for name, _ in pairs:
            if name in previous_names:
                raise _DuplicateKeyError(name)
            previous_names.add(name)
    return table


def _parse_object(text: bytes, file: str, expected: str) -> dict[str, Any]:
    try:
        document = json.loads(text, parse_int=_parse_int64)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON ({error}): {_DOWNLOAD_AGAIN}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{file} contains a {type(document).__name__}, but must contain {expected}: {_DOWNLOAD_AGAIN}")
    return document


def _parse_int64(text: str) -> int:
    """Parse a number of a table. Raises ValueError beyond 64 bits: no real size is so large, and products would not print."""
    if len(text) > 20 or not -_MAX_INT64 <= (number := int(text)) <= _MAX_INT64:
        raise ValueError(f"a whole number of {len(text)} digits")
    return number


def _parse_tensor(name: str, entry: Any, file: str, start: int, display_name: str) -> TensorInfo:
    """Parse one row of a header. Types are compared exactly, because JSON's true and 1.0 would pass for integers otherwise."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [begin, end, *shape] if type(shape) is list else [None]
        is_valid = type(dtype) is str and all(type(number) is int and abs(number) <= _MAX_INT64 for number in numbers)
    except (TypeError, KeyError, ValueError):
        dtype, shape, begin, end, is_valid = "", [], 0, 0, False
    if not name.isprintable():
        raise CheckpointError(
            f"{display_name}: the tensor {_abbreviate(name)} has control characters in its name: {_EXPORT_AGAIN}"
        )
    if not is_valid or any(length < 0 for length in shape):
        raise CheckpointError(
            f"{display_name}: '{name}' is {_abbreviate(entry)}, but must have dtype, shape and data_offsets: {_EXPORT_AGAIN}"
        )
    if not 0 <= begin <= end:
        raise CheckpointError(f"{display_name}: '{name}' goes from byte {begin} to byte {end}: {_DOWNLOAD_AGAIN}")
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and _element_count(shape) * bits != (end - begin) * 8:
        raise CheckpointError(
            f"{display_name}: '{name}', {dtype} {_abbreviate(shape)}, needs {-(-_element_count(shape) * bits // 8)} bytes "
            f"and has {end - begin}: {_DOWNLOAD_AGAIN}"
        )
    return TensorInfo(dtype, tuple(shape), file, start + begin, start + end)


def _element_count(shape: list[int]) -> int:
    """Return the number of elements, or some number above `_MAX_INT64`: the product of a hostile shape has millions of digits."""
    if 0 in shape:
        return 0
    count = 1
    for length in shape:
        count *= length
        if count > _MAX_INT64:
            break
    return count


def _check_coverage(tensors: Mapping[str, TensorInfo], start: int, size: int, file: str) -> None:
    """Check that every byte after the header belongs to one tensor. Overlaps, gaps and tensors past the end are errors."""
    position, previous = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            relation = "overlaps" if tensor.begin < position else "leaves a gap after"
            raise CheckpointError(
                f"{file}: '{name}' begins at byte {tensor.begin} of the file and {relation} {previous}: {_DOWNLOAD_AGAIN}"
            )
        position, previous = tensor.end, f"'{name}'"
    if position != size:
        problem = "is cut off" if position > size else "is longer than its header says"
        raise CheckpointError(f"{file} {problem}: its header describes {position} bytes, and it has {size}: {_DOWNLOAD_AGAIN}")


def _abbreviate(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
