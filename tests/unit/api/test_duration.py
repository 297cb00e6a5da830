"""Durations: what is written reads back, and any other text is rejected with a message."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aerie.api.types import duration

UNITS = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}


@given(st.integers(0, duration.MAX_DURATION // timedelta(milliseconds=1)))
@example(0)
@example(duration.MAX_DURATION // timedelta(milliseconds=1))
def test_formatted_duration_parses_back(milliseconds: int) -> None:
    length = timedelta(milliseconds=milliseconds)
    text = duration.format_duration(length)
    assert duration.parse_duration(text) == length
    assert len(text) <= duration.MAX_DURATION_CHARACTERS


@given(st.lists(st.tuples(st.integers(0, 99999), st.sampled_from(sorted(UNITS))), min_size=1, max_size=4))
def test_parts_of_a_duration_are_added_in_any_order(parts: list[tuple[int, str]]) -> None:
    text = "".join(f"{number}{unit}" for number, unit in parts)
    assert duration.parse_duration(text) == timedelta(milliseconds=sum(number * UNITS[unit] for number, unit in parts))
    assert len(text) <= duration.MAX_DURATION_CHARACTERS


@given(st.text(max_size=12) | st.text("0123456789hms. -", max_size=12))
@example("")
@example("5")
@example("1.5h")
@example("-5m")
@example("5 m")
@example("5m\n")
@example("1d")
@example("100000s")
@example("1h1m1s1ms1ms")
@example("٣m")
def test_other_text_is_rejected(text: str) -> None:
    if re.fullmatch(r"([0-9]{1,5}(h|ms|m|s)){1,4}", text):
        return
    with pytest.raises(ValueError, match="is not a duration: write whole numbers with h, m, s or ms"):
        duration.parse_duration(text)


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (timedelta(0), "0s"),
        (timedelta(seconds=90), "1m30s"),
        (timedelta(hours=4), "4h"),
        (timedelta(minutes=120), "2h"),
        (timedelta(milliseconds=40), "40ms"),
        (timedelta(days=14), "336h"),
        (timedelta(seconds=1, milliseconds=5), "1s5ms"),
    ],
)
def test_duration_has_the_shortest_usual_form(length: timedelta, text: str) -> None:
    assert duration.format_duration(length) == text


@pytest.mark.parametrize(
    "length", [timedelta(microseconds=1), timedelta(seconds=-1), duration.MAX_DURATION + timedelta(milliseconds=1)]
)
def test_duration_outside_the_grammar_is_rejected(length: timedelta) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        duration.format_duration(length)
