"""Read a drafter's files so that what was checked is what is loaded: every byte is read once, and hashed as it is read.

Only config.json and safetensors files count. The header of a safetensors file is read first, so that a checkpoint that cannot fit
is rejected before its weights are read; its format: https://github.com/huggingface/safetensors#format.

Guarantees: `load` returns bytes whose SHA-256 is the expected one, from regular files, and the headers that were checked are part
of them; nothing is unpickled or executed; what a file claims (lengths, offsets, shapes) is compared with its size before it is
used. Raises CheckpointError, with a reason and a sentence, and OSError where the disk fails.

Not guaranteed: that the values make a good drafter, or that a file does not change after it was read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

CONFIG = "config.json"
SUFFIX = ".safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
"""Some 100,000 tensors; a drafter has 15, and a quantized mixture of experts some thousands."""
MAX_NAME_CHARACTERS = 200
CHUNK_BYTES = 16 << 20
"""Bytes between two checks of whether the reader is still needed."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "F32": 4,
    "I64": 8,
    "F64": 8,
}
"""Bytes of an element, by the format's name of the type."""


class CheckpointError(Exception):
    """A checkpoint that is rejected: `reason` is one CamelCase word, the message says what is, why, and what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ReadingCancelledError(Exception):
    """The checkpoint is no longer needed."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file, as its header describes it."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    """First byte in the file."""
    end: int


@dataclass
class Checkpoint:
    """A drafter's open files; the headers are read, the weights are not."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    """All files' tensors, by name."""
    _config_digest: str
    _streams: dict[str, BinaryIO]
    _headers: dict[str, bytes] = field(repr=False)
    """The bytes of each safetensors file up to its first tensor."""

    def hash_files(self, is_cancelled: Callable[[], bool]) -> dict[str, str]:
        """Return the SHA-256 of every file, and retain no weights. Raises ReadingCancelledError."""
        digests = {CONFIG: self._config_digest}
        buffer = bytearray(CHUNK_BYTES)
        for name, stream in self._streams.items():
            digest = hashlib.sha256(self._headers[name])
            while count := stream.readinto(buffer):  # type: ignore[attr-defined] # of BinaryIO's implementations
                digest.update(memoryview(buffer)[:count])
                _raise_if(is_cancelled)
            digests[name] = digest.hexdigest()
        return digests

    def load(self, expected: Mapping[str, str], is_cancelled: Callable[[], bool]) -> dict[str, memoryview]:
        """Return the bytes of each safetensors file, whose digests are the expected ones.

        Args:
            expected: SHA-256 (hex) by file name, of config.json as well.
            is_cancelled: called every CHUNK_BYTES.

        Raises:
            CheckpointError: a digest is another one, or a file has shrunk since its header was read.
            ReadingCancelledError: `is_cancelled` returned true.
        """
        _check_digest(self.folder / CONFIG, self._config_digest, expected[CONFIG])
        contents = {}
        for name, stream in self._streams.items():
            header = self._headers[name]
            content = memoryview(bytearray(os.fstat(stream.fileno()).st_size))
            content[: len(header)] = header
            digest, position = hashlib.sha256(header), len(header)
            while position < len(content):
                count = stream.readinto(content[position : position + CHUNK_BYTES])  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError("Truncated", f"{self.folder / name} became shorter while it was read: copy it again.")
                digest.update(content[position : position + count])
                position += count
                _raise_if(is_cancelled)
            _check_digest(self.folder / name, digest.hexdigest(), expected[name])
            contents[name] = content
        return contents


@contextmanager
def open_checkpoint(folder: Path, names: list[str] | None = None) -> Iterator[Checkpoint]:
    """Open the files of a drafter, and close them at the end.

    Args:
        folder: where they lie.
        names: the expected files; None: config.json and all safetensors files of the folder. vLLM loads all of them, so another
            safetensors file beside the expected ones is an error.

    Raises:
        CheckpointError: a file is missing, unexpected or invalid.
    """
    present = list_files(folder)
    names = present if names is None else names
    if CONFIG not in names or len(names) < 2:
        raise CheckpointError("FileMissing", f"a drafter is {CONFIG} and at least one {SUFFIX} file, and not {sorted(names)}.")
    for name in names:
        if name != os.path.basename(name) or not (name == CONFIG or name.endswith(SUFFIX)):
            raise CheckpointError(
                "UnexpectedFile", f"{name!r} is neither {CONFIG} nor the name of a {SUFFIX} file: leave it out."
            )
    if unlisted := sorted(set(present) - set(names)):
        raise CheckpointError(
            "UnexpectedFile",
            f"{folder} also has {', '.join(unlisted)}, which vLLM would load too: remove it, or name it with its digest.",
        )
    streams: dict[str, BinaryIO] = {}
    try:
        with _open_regular(folder / CONFIG) as stream:
            content = stream.read(MAX_CONFIG_BYTES + 1)
        config = _parse_config(folder / CONFIG, content)
        tensors: dict[str, Tensor] = {}
        headers = {}
        for name in sorted(set(names) - {CONFIG}):
            streams[name] = _open_regular(folder / name)
            headers[name], own_tensors = _read_header(streams[name], folder / name)
            if twice := sorted(own_tensors.keys() & tensors.keys()):
                raise CheckpointError("InvalidHeader", f"{folder / name} repeats {twice[0]} of another file: export it again.")
            tensors |= own_tensors
        yield Checkpoint(folder, config, tensors, hashlib.sha256(content).hexdigest(), streams, headers)
    finally:
        for stream in streams.values():
            stream.close()


def list_files(folder: Path) -> list[str]:
    """Return the names of the folder's files that make the drafter. Raises CheckpointError without such a folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError("FolderMissing", f"{folder} is no folder here: mount the drafter, or correct the path.") from None
    return sorted(name for name in names if name == CONFIG or name.endswith(SUFFIX))


def _raise_if(is_cancelled: Callable[[], bool]) -> None:
    if is_cancelled():
        raise ReadingCancelledError


def _check_digest(path: Path, actual: str, expected: str) -> None:
    if actual != expected:
        raise CheckpointError(
            "DigestMismatch",
            f"{path} has the SHA-256 {actual[:12]}..., and {expected[:12]}... is expected: copy it again, or correct the digest.",
        )


def _open_regular(path: Path) -> BinaryIO:
    """Open a regular file; a pipe or device is rejected without being waited for."""
    try:
        stream = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)  # noqa: SIM115 - the caller closes
    except FileNotFoundError:
        raise CheckpointError("FileMissing", f"{path} does not exist: copy it, or correct the list of files.") from None
    except IsADirectoryError:
        raise CheckpointError("NotARegularFile", f"{path} is a folder, and has to be a regular file.") from None
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise CheckpointError("NotARegularFile", f"{path} is no regular file: mount the drafter's files themselves.")
    return stream


def _parse_config(path: Path, content: bytes) -> dict[str, Any]:
    if len(content) > MAX_CONFIG_BYTES:
        raise CheckpointError("InvalidConfig", f"{path} is longer than {MAX_CONFIG_BYTES} bytes: it is no drafter's config.")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("InvalidConfig", f"{path} is no JSON ({error}): export the drafter again.") from None
    if not isinstance(config, dict):
        raise CheckpointError("InvalidConfig", f"{path} is no JSON object: export the drafter again.")
    return config


def _read_header(stream: BinaryIO, path: Path) -> tuple[bytes, dict[str, Tensor]]:
    """Return the bytes before the first tensor, and the tensors. Raises CheckpointError."""
    size = os.fstat(stream.fileno()).st_size
    prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length < 2 or length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError("Truncated", f"{path} has {size} bytes, and no safetensors header fits: copy it again.")
    content = b""
    while len(content) < length:
        part = stream.read(length - len(content))
        if not part:
            raise CheckpointError("Truncated", f"{path} became shorter while it was read: copy it again.")
        content += part
    return prefix + content, parse_header(content, path, size)


def parse_header(content: bytes, path: Path, size: int) -> dict[str, Tensor]:
    """Return the tensors that a header describes, by name.

    Args:
        content: the header's JSON.
        path: of the file, for messages.
        size: of the file, in bytes.

    Raises:
        CheckpointError: no valid header, or one whose tensors do not fill the file without gap or overlap.
    """

    def reject(what: str) -> CheckpointError:
        return CheckpointError("InvalidHeader", f"{path} is no valid safetensors file: {what}. Export or copy it again.")

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            raise reject("its header has a key twice")
        return entries

    try:
        header = json.loads(content, object_pairs_hook=collect)
    except (ValueError, RecursionError) as error:
        raise reject(f"its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise reject("its header is no JSON object")
    header.pop("__metadata__", None)
    first = 8 + len(content)
    tensors = {}
    for name, entry in header.items():
        # Names become a part of messages and of vLLM's names of weights.
        if not (name.isascii() and name.isprintable()) or len(name) > MAX_NAME_CHARACTERS:
            raise reject(
                f"its header has a tensor {name[:80]!r}, and names are at most {MAX_NAME_CHARACTERS} printable ASCII characters"
            )
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
                pass
            case _:
                raise reject(f"the entry of {name} lacks dtype, shape or data_offsets")
        if dtype not in DTYPE_BYTES:
            raise reject(f"{name} has the type {dtype}, and a drafter's weights are of {', '.join(DTYPE_BYTES)}")
        if not all(type(length) is int and length >= 0 for length in shape):
            raise reject(f"{name} has the shape {shape}")
        if begin < 0 or end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
            raise reject(f"{name} takes {end - begin} bytes, which is not its shape {shape} of {dtype}")
        tensors[name] = Tensor(dtype, tuple(shape), path.name, first + begin, first + end)
    position = first
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != position:
            raise reject("its tensors overlap or leave a gap")
        position = tensor.end
    if position > size:
        raise CheckpointError("Truncated", f"{path} has {size} bytes, and its header describes {position}: copy it again.")
    if position < size:
        raise reject(f"it has {size - position} bytes after its last tensor")
    return tensors
