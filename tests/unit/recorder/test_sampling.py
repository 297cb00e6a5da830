"""Which requests are recorded: the share, and the limit per minute."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from aerie.recorder.sampling import Sampler
from aerie.recorder.skip_reasons import SkipReason


def test_share_of_the_requests() -> None:
    sampler, draws = Sampler(0.1, 10**6), random.Random(7)  # noqa: S311 - no secrets
    admitted = sum(sampler.admit(draws.random(), 0.0) is None for _ in range(20_000))
    assert 1850 < admitted < 2150  # 3.5 standard deviations


def test_rate_of_one_admits_all_and_rate_of_zero_none() -> None:
    assert Sampler(1.0, 1).admit(0.999999, 0.0) is None
    assert Sampler(0.0, 1).admit(0.0, 0.0) is SkipReason.NOT_SAMPLED


def test_limit_holds_in_each_minute() -> None:
    sampler = Sampler(1.0, 2)
    assert [sampler.admit(0.0, now) for now in (0.0, 59.9, 59.99)] == [None, None, SkipReason.OVER_LIMIT]
    assert [sampler.admit(0.0, now) for now in (60.0, 60.1, 119.0)] == [None, None, SkipReason.OVER_LIMIT]


@given(
    st.floats(0, 1),
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 300)), max_size=60),
)
def test_no_minute_has_more_than_the_limit(rate: float, limit: int, requests: list[tuple[float, float]]) -> None:
    sampler, admitted = Sampler(rate, limit), dict.fromkeys(range(6), 0)
    for draw, now in sorted(requests, key=lambda request: request[1]):
        reason = sampler.admit(draw, now)
        assert (reason is SkipReason.NOT_SAMPLED) == (draw >= rate)
        admitted[int(now // 60)] += reason is None
    assert max(admitted.values()) <= limit
