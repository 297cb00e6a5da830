"""Text of an answer: words by position, and events that are built from pieces."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from aerie_lab.engine import api
from aerie_lab.engine.api import GenerationRequest, RequestKind

_WORDS = [
    "the",
    "eyrie",
    "stands",
    "high",
    "above",
    "a",
    "river",
    "and",
    "watches",
    "over",
    "what",
    "comes",
    "up",
    "from",
    "below",
]


@given(first=st.integers(0, 100), count=st.integers(0, 100))
def test_words_repeat_in_a_cycle(first: int, count: int) -> None:
    assert api.filler_text(first, count).split() == list(itertools.islice(itertools.cycle(_WORDS), first, first + count))


@given(
    kind=st.sampled_from(["completion", "chat"]),
    model=st.sampled_from(["m", " the", '" the"', "{"]),
    first=st.integers(0, 40),
    count=st.integers(1, 20),
    lossy=st.sampled_from([0.0, 0.5]),
)
def test_an_event_built_from_pieces_equals_the_whole_event(
    kind: RequestKind, model: str, first: int, count: int, lossy: float
) -> None:
    ask = GenerationRequest(kind, model, 1, (), 9, stream=True, include_usage=False, ignore_eos=False, prompt_digest=b"prompt")
    whole = api.encode_event(api.build_chunk(ask, "cmpl-1", 5, first, count, None, lossy))
    assert api.ChunkEncoder(ask, "cmpl-1", 5, lossy).encode(first, count) == whole
