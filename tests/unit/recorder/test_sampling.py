"""Which requests are recorded: the share, and the limit per minute."""

from __future__ import annotations

import random

import pytest
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


@pytest.mark.parametrize("per_second", [20, 2000])
def test_recorded_requests_are_from_the_whole_minute(per_second: int) -> None:
    sampler, draws = Sampler(0.5, 60), random.Random(7)  # noqa: S311 - no secrets
    times = [number / per_second for number in range(per_second * 360)]
    admitted = [now for now in times if sampler.admit(draws.random(), now) is None]
    for minute in range(1, 6):
        seconds = [now % 60 for now in admitted if now // 60 == minute]
        assert 30 <= len(seconds) <= 60
        assert all(sum(begin <= second < begin + 20 for second in seconds) >= 5 for begin in (0, 20, 40))


def test_share_is_whole_again_after_a_minute_without_too_many() -> None:
    sampler = Sampler(1.0, 1)
    assert [sampler.admit(0.9, now) for now in (0.0, 1.0)] == [None, SkipReason.OVER_LIMIT]
    assert sampler.admit(0.9, 60.0) is SkipReason.OVER_LIMIT  # half of the share
    assert sampler.admit(0.9, 120.0) is None
    assert [sampler.admit(0.9, now) for now in (121.0, 240.0)] == [SkipReason.OVER_LIMIT, None]


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
