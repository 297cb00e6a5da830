"""Reading a drafter's files: what is hashed is what is returned, and no file that lies about itself gets through."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from safetensors.torch import save_file

from aerie_vllm.checkpoint import CheckpointError, ReadingCancelledError, open_checkpoint, parse_header

Header = dict[str, Any]


def write_drafter(folder: Path) -> dict[str, str]:
    """Write a drafter of two safetensors files, and return its digests."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    save_file({"fc.weight": torch.arange(12.0).reshape(3, 4), "d2t": torch.arange(5)}, folder / "model-1.safetensors")
    save_file({"norm.weight": torch.ones(4, dtype=torch.bfloat16)}, folder / "model-2.safetensors", {"format": "pt"})
    (folder / "README.md").write_text("not read")
    names = ("config.json", "model-1.safetensors", "model-2.safetensors")
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def never() -> bool:
    return False


def test_a_drafter_is_read_as_it_is(tmp_path: Path) -> None:
    files = write_drafter(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.hash_files(never) == files
    with open_checkpoint(tmp_path, list(files)) as checkpoint:
        assert checkpoint.config == {"hidden_size": 4}
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint.tensors.items()} == {
            "fc.weight": ("F32", (3, 4)),
            "d2t": ("I64", (5,)),
            "norm.weight": ("BF16", (4,)),
        }
        contents = checkpoint.load(files, never)
    assert {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()} == {
        name: digest for name, digest in files.items() if name != "config.json"
    }
    tensor = checkpoint.tensors["fc.weight"]
    assert contents[tensor.file][tensor.begin : tensor.end].cast("f").tolist() == [float(i) for i in range(12)]


def test_files_that_change_between_header_and_weights_are_rejected(tmp_path: Path) -> None:
    files = write_drafter(tmp_path)
    path = tmp_path / "model-1.safetensors"
    with open_checkpoint(tmp_path, list(files)) as checkpoint:
        with path.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"\x7f")
        with pytest.raises(CheckpointError, match="expected: copy it again") as failure:
            checkpoint.load(files, never)
    assert failure.value.reason == "DigestMismatch"
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(ReadingCancelledError):
        checkpoint.hash_files(lambda: True)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def truncate(size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / "model-1.safetensors", size)


def replace(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def make_pipe(folder: Path) -> None:
    (folder / "model-1.safetensors").unlink()
    os.mkfifo(folder / "model-1.safetensors")


def make_folder(folder: Path) -> None:
    (folder / "model-1.safetensors").unlink()
    (folder / "model-1.safetensors").mkdir()


FAULTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no config": ("FileMissing", remove("config.json")),
    "no weights": ("FileMissing", remove("model-2.safetensors")),
    "a file more": ("UnexpectedFile", replace("more.safetensors", b"")),
    "config is no JSON": ("InvalidConfig", replace("config.json", b"{")),
    "config is no object": ("InvalidConfig", replace("config.json", b"[]")),
    "config is nested": ("InvalidConfig", replace("config.json", b"[" * 100_000)),
    "config is long": ("InvalidConfig", replace("config.json", b" " * (1 << 21))),
    "empty": ("Truncated", truncate(0)),
    "header cut": ("Truncated", truncate(40)),
    "weights cut": ("Truncated", truncate(180)),
    "a pickle": ("Truncated", replace("model-1.safetensors", b"\x80\x04K\x01.")),
    "a longer pickle": ("Truncated", replace("model-1.safetensors", b"\x80\x04" + b"x" * 1000)),
    "bytes after the last tensor": ("InvalidHeader", lambda folder: (folder / "model-1.safetensors").open("ab").write(b"x")),
    "a tensor twice": ("InvalidHeader", lambda folder: save_file({"d2t": torch.ones(1)}, folder / "model-2.safetensors")),
    "a pipe": ("NotARegularFile", make_pipe),
    "a folder": ("NotARegularFile", make_folder),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_are_no_drafter_are_rejected(fault: str, tmp_path: Path) -> None:
    reason, damage = FAULTS[fault]
    files = write_drafter(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError) as failure, open_checkpoint(tmp_path, list(files)):
        pass
    assert failure.value.reason == reason
    assert str(tmp_path) in str(failure.value)


@pytest.mark.parametrize("name", ["../model.safetensors", "sub/model.safetensors", "", "model.bin", "tokenizer.json"])
def test_only_a_drafters_own_files_can_be_named(name: str, tmp_path: Path) -> None:
    files = write_drafter(tmp_path)
    with pytest.raises(CheckpointError, match="is neither") as failure, open_checkpoint(tmp_path, [*files, name]):
        pass
    assert failure.value.reason == "UnexpectedFile"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder here") as failure, open_checkpoint(tmp_path / "none"):
        pass
    assert failure.value.reason == "FolderMissing"


def parse(header: object, weights: int) -> dict[str, Any]:
    content = json.dumps(header).encode()
    return dict(parse_header(content, Path("model.safetensors"), 8 + len(content) + weights))


def entry(begin: Any, end: Any, dtype: Any = "F32", shape: Any = (2,)) -> Header:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


INVALID: dict[str, tuple[object, int, str]] = {
    "a list": ([], 0, "no JSON object"),
    "a name that is no ASCII": ({"\ud800": entry(0, 8)}, 8, r"tensor '\\ud800', and names are at most 200 printable ASCII"),
    "a name with a control character": ({"a\n": entry(0, 8)}, 8, r"tensor 'a\\n', and names are"),
    "a long name": ({"a" * 201: entry(0, 8)}, 8, r"tensor 'a{80}', and names are at most 200"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "lacks dtype"),
    "a type by number": ({"a": entry(0, 8, dtype=1)}, 8, "lacks dtype"),
    "an unknown type": ({"a": entry(0, 8, dtype="X9")}, 8, "the type X9"),
    "a negative length": ({"a": entry(0, 8, shape=(-1, -2))}, 8, "the shape"),
    "a fractional length": ({"a": entry(0, 8, shape=(2.0,))}, 8, "the shape"),
    "a length of true": ({"a": entry(0, 4, shape=(True,))}, 4, "the shape"),
    "fewer bytes than its shape": ({"a": entry(0, 4)}, 4, "not its shape"),
    "a huge shape": ({"a": entry(0, 8, shape=(1 << 62, 1 << 62))}, 8, "not its shape"),
    "a negative offset": ({"a": entry(-8, 0)}, 0, "not its shape"),
    "an overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "overlap"),
    "a gap": ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "gap"),
    "a file that ends early": ({"a": entry(0, 8)}, 7, "copy it again"),
    "a file that ends late": ({"a": entry(0, 8)}, 9, "after its last tensor"),
}


@pytest.mark.parametrize("fault", INVALID)
def test_headers_that_lie_are_rejected(fault: str) -> None:
    header, weights, message = INVALID[fault]
    with pytest.raises(CheckpointError, match=message):
        parse(header, weights)


def test_a_name_may_have_200_characters() -> None:
    name = "layers.0." + "a" * 191
    assert list(parse({name: entry(0, 8)}, 8)) == [name]


def test_a_key_twice_is_rejected() -> None:
    content = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    with pytest.raises(CheckpointError, match="a key twice"):
        parse_header(content, Path("model.safetensors"), 8 + len(content) + 8)


@hypothesis.given(st.binary(max_size=200), st.integers(0, 400))
def test_arbitrary_bytes_are_rejected_or_fill_the_file(content: bytes, size: int) -> None:
    try:
        tensors = parse_header(content, Path("model.safetensors"), size)
    except CheckpointError:
        return
    assert sum(tensor.end - tensor.begin for tensor in tensors.values()) == size - 8 - len(content)


@hypothesis.given(st.data())
def test_a_file_with_a_changed_byte_is_never_loaded(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("drafter", numbered=True)
    files = write_drafter(folder)
    path = folder / data.draw(st.sampled_from(sorted(files)))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(CheckpointError), open_checkpoint(folder, list(files)) as checkpoint:
        checkpoint.load(files, never)


def test_a_long_header_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    files = write_drafter(tmp_path)
    with (tmp_path / "model-1.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", 1 << 40))
        stream.truncate(1 << 41)  # sparse
    with pytest.raises(CheckpointError) as failure, open_checkpoint(tmp_path, list(files)):
        pass
    assert failure.value.reason == "Truncated"
