"""Metrics pages that nobody would send but an engine that means harm: reading one costs in proportion to its bytes, and little
of it stays."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.engine import page
from aerie.engine.page import LONGEST_LABELS, LONGEST_VALUE, MOST_VALUES, PageError, parse

REASONS = b'vllm:request_success_total{finished_reason="%d"} 1\n'


@pytest.mark.parametrize(
    ("evil", "words"),
    [
        (b"vllm:cache_config_info{" + b'a="",' * 100_000 + b"} 1\n", f"more than {LONGEST_LABELS} bytes of labels"),
        (b'vllm:request_success_total{finished_reason="' + b"x" * 100_000 + b'"} 1\n', "bytes of labels"),
        (b"".join(REASONS % number for number in range(36_000)), f"more than {MOST_VALUES} values of one label"),
        (
            b'vllm:request_success_total{finished_reason="' + b"x" * (LONGEST_VALUE + 1) + b'"} 1\n',
            f"of more than {LONGEST_VALUE} bytes",
        ),
        (b"vllm:generation_tokens_total{engine=" + b"\\" * 5_000 + b"} 1\n", "malformed labels"),
        (b'vllm:generation_tokens_total{engine="0"} 1e999\n', "no finite value"),
        (b"vllm:" * 100_000 + b"\n", "the metrics page has no vllm:"),
        (b"\n" * 500_000, "the metrics page has no vllm:"),
    ],
)
def test_an_evil_page_is_refused_with_a_sentence(evil: bytes, words: str) -> None:
    with pytest.raises(PageError, match="metrics page") as caught:
        parse(evil)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("labels", [b'a="",' * 2_000, b'a="\\\\",' * 1_500, b"," * 15_000, b'a="' + b'\\"' * 7_000 + b'"'])
def test_labels_are_read_in_one_walk(labels: bytes) -> None:
    """Steps of the interpreter for twice the labels: twice as many, and not four times."""

    def steps(text: bytes) -> int:
        count = 0

        def trace(frame: object, event: str, argument: object) -> object:  # noqa: ARG001
            nonlocal count
            count += event == "line"
            return trace

        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            page._labels(text)
        finally:
            sys.settrace(None)
        return count

    half = labels[: len(labels) // 2 // 10 * 10]
    if half.count(b'"') % 2 or half.endswith(b"\\"):
        half = labels
    assert steps(labels) <= 2.2 * steps(half) + 20


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(max_size=20), max_size=6))
def test_labels_are_read_as_they_were_written(labels: dict[str, str]) -> None:
    written = ",".join(
        '{}="{}"'.format(name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, value in labels.items()
    )
    assert page._labels(written.encode()) == labels
