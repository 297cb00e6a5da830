"""Headers from bytes: the parsed tensors, and a message for everything else."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aerie.engine.models.checkpoint import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    CheckpointError,
    SafetensorsHeader,
    build_checkpoint,
    parse_config,
    parse_header,
    parse_index,
    read_header_length,
)


def parse(data: bytes, file: str = "a.safetensors") -> SafetensorsHeader:
    length = read_header_length(data[:8], len(data), file)
    return parse_header(data[8 : 8 + length], len(data), file)


def prepend_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_names_types_shapes_and_offsets(small_models: Any) -> None:
    data = small_models.build_file(
        {"a": ("BF16", (4, 2)), "b": ("I64", (3,))}, {"format": "pt"}, {"b": struct.pack("<3q", 5, 6, 7)}
    )
    header = parse(data)
    assert header.metadata == {"format": "pt"}
    assert header.tensors["a"].shape == (4, 2)
    assert header.tensors["a"].dtype == "BF16"
    b = header.tensors["b"]
    assert b.byte_size == 24
    assert struct.unpack("<3q", data[b.begin : b.end]) == (5, 6, 7)
    assert build_checkpoint("m", {}, [header]).weight_bytes == 16 + 24


def test_scalars_empty_tensors_and_types_of_less_than_a_byte() -> None:
    header = parse(
        prepend_header(
            {
                "s": tensor([], 0, 1),
                "e": tensor([0, 7], 1, 1),
                "f": tensor([4], 1, 3, "F4"),
                "x": tensor([9], 3, 4, "F2"),
            },
            b"1234",
        )
    )
    assert {name: info.byte_size for name, info in header.tensors.items()} == {"s": 1, "e": 0, "f": 2, "x": 1}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes, but a safetensors file has at least 8"),
        (b"short", "has 5 bytes"),
        (b"version https://git-lfs", "declares a header of"),
        (struct.pack("<Q", 2**63) + b"{}", f"but the maximum is {MAX_HEADER_BYTES}: it is not a safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "declares a header of 100 bytes, but the file ends after 2 more"),
        (prepend_header(b"{"), "the header is not JSON"),
        (prepend_header(b"\xff\xfe{}"), "the header is not JSON"),
        (prepend_header(b"[" * 50_000), "the header is not JSON"),
        (prepend_header([1]), "the header is a list, not a table of tensors"),
        (prepend_header(b'{"a": 1, "a": 2}'), "the header names 'a' twice"),
        (prepend_header({"__metadata__": {"a": 1}}), '__metadata__ must map strings to strings, found {"a": 1}'),
        (prepend_header({"a": 1}), "'a' is 1, but must have dtype, shape and data_offsets"),
        (prepend_header({"a": {"dtype": "U8", "shape": [1]}}), "'a' is {"),
        (prepend_header({"a": tensor([1], 0, 1) | {"data_offsets": [0, 1, 2]}}, b"1"), "'a' is {"),
        (prepend_header({"a": tensor([True], 0, 1)}, b"1"), "'a' is {"),
        (prepend_header({"a": tensor([-1], 0, 1)}, b"1"), "'a' is {"),
        (prepend_header({"a": tensor([1], 2, 1)}, b"12"), "'a' goes from byte 2 to byte 1"),
        (prepend_header({"a": tensor([2], 0, 1)}, b"1"), "'a', U8 [2], needs 2 bytes and has 1"),
        (prepend_header({"a": tensor([2], 0, 2), "b": tensor([2], 1, 3)}, b"123"), "overlaps 'a'"),
        (prepend_header({"a": tensor([1], 0, 1), "b": tensor([1], 2, 3)}, b"123"), "leaves a gap after 'a'"),
        (prepend_header({"a": tensor([1], 1, 2)}, b"12"), "leaves a gap after the header"),
        (prepend_header({"a": tensor([4], 0, 4)}, b"12"), "is cut off: its header describes"),
        (prepend_header({"a": tensor([1], 0, 1)}, b"12"), "is longer than its header says"),
    ],
)
def test_damaged_files_are_rejected_with_a_message(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(data)
    assert str(caught.value).startswith("a.safetensors")
    assert message in str(caught.value)
    assert str(caught.value).endswith(".")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a"]) | st.text(), inner),
)


@settings(deadline=None)
@given(st.binary(max_size=200) | json_values.map(prepend_header), st.integers(0, 300))
@example(prepend_header({"__metadata__": None}), 0)
def test_any_input_parses_or_is_rejected_with_a_message(data: bytes, length: int) -> None:
    for candidate in (data, data[:length]):
        try:
            header = parse(candidate)
        except CheckpointError as error:
            assert str(error)  # noqa: PT017 - either outcome is fine, nothing else is
        else:
            assert sum(info.byte_size for info in header.tensors.values()) <= len(candidate)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8).filter(str.isprintable),
        st.tuples(st.sampled_from(["BF16", "F32", "I64", "BOOL"]), st.lists(st.integers(0, 5), max_size=4)),
    )
)
def test_a_written_header_parses_to_the_same_tensors(specs: dict[str, tuple[str, list[int]]]) -> None:
    specs.pop("__metadata__", None)
    document, position = {}, 0
    for name, (dtype, shape) in specs.items():
        size = DTYPE_BITS[dtype] // 8
        for length in shape:
            size *= length
        document[name] = tensor(shape, position, position + size, dtype)
        position += size
    header = parse(prepend_header(document, bytes(position)))
    assert {name: (info.dtype, list(info.shape)) for name, info in header.tensors.items()} == specs


@settings(deadline=None)
@given(st.binary(max_size=100) | json_values.map(lambda value: json.dumps(value).encode()))
def test_config_and_index_parse_or_are_rejected(text: bytes) -> None:
    for read in (parse_config, parse_index):
        try:
            assert isinstance(read(text, "config.json"), dict)
        except CheckpointError as error:
            assert str(error).startswith("config.json")  # noqa: PT017 - as above


@pytest.mark.parametrize("shard", ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "", "..", "a\\b", 7])
def test_an_index_with_a_path_as_shard_is_rejected(shard: object) -> None:
    with pytest.raises(CheckpointError, match="is not a plain name"):
        parse_index(json.dumps({"weight_map": {"a": shard}}).encode(), "index.json")


def test_shards_become_one_checkpoint_that_is_compared_with_the_index(small_models: Any) -> None:
    first = parse(small_models.build_file({"a": ("U8", (1,))}), "1.safetensors")
    second = parse(small_models.build_file({"b": ("U8", (2,))}), "2.safetensors")
    index = {"a": "1.safetensors", "b": "2.safetensors"}
    whole = build_checkpoint("m", {}, [first, second], index)
    assert (whole.weight_bytes, whole.misindexed_tensors, whole.duplicate_tensors) == (3, {}, {})
    assert build_checkpoint("m", {}, [first], index).misindexed_tensors == {"b": "2.safetensors"}


def test_a_tensor_in_several_files_counts_once(small_models: Any) -> None:
    first, second, third = (parse(small_models.build_file({"a": ("U8", (size,))}), f"{size}.safetensors") for size in (1, 2, 3))
    checkpoint = build_checkpoint("m", {}, [first, second, third], {"a": "1.safetensors"})
    assert checkpoint.weight_bytes == 3
    assert [copy.file for copy in checkpoint.duplicate_tensors["a"]] == ["1.safetensors", "2.safetensors", "3.safetensors"]
    assert checkpoint.misindexed_tensors == {}


def test_d2t_values_are_read_from_i64_tensors_only(small_models: Any) -> None:
    plain = build_checkpoint("m", {}, [small_models.build_header({"d2t": ("I64", (2,))})])
    assert plain.with_d2t_offsets(struct.pack("<2q", 3, -1)).d2t_offsets == (3, -1)
    with pytest.raises(CheckpointError, match="d2t is I64 with 8 of 16 bytes read"):
        plain.with_d2t_offsets(bytes(8))
    with pytest.raises(CheckpointError, match="d2t is F32 with 8 of 8 bytes read: it must be I64"):
        build_checkpoint("m", {}, [small_models.build_header({"d2t": ("F32", (2,))})]).with_d2t_offsets(bytes(8))
