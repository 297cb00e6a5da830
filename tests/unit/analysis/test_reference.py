"""When the reference acceptance length is known, and how exact it is then."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.reference import (
    MIN_COMPARED_DRAFTS,
    MIN_COMPARED_REQUESTS,
    MIN_REFERENCE_DRAFTS,
    MIN_REFERENCE_REQUESTS,
    AcceptanceCounts,
    has_regressed,
)

COUNTS = st.builds(AcceptanceCounts, *(st.integers(0, 10**6).map(float) for _ in range(3)))


@pytest.mark.parametrize(
    ("counts", "length"),
    [
        (AcceptanceCounts(), None),
        (AcceptanceCounts(MIN_REFERENCE_REQUESTS, MIN_REFERENCE_DRAFTS, 1500.0), 2.5),
        (AcceptanceCounts(MIN_REFERENCE_REQUESTS - 1, 1e6, 1.5e6), None),  # long answers of few requests
        (AcceptanceCounts(1e6, MIN_REFERENCE_DRAFTS - 1, 1500.0), None),  # answers of one token
        (AcceptanceCounts(1e6, 1e6, 4e3), None),  # noise: 1.00
        (AcceptanceCounts(1e6, 1e6, 1e4), 1.01),
    ],
)
def test_a_reference_needs_enough_requests_and_drafts_and_accepted_tokens(counts: AcceptanceCounts, length: float | None) -> None:
    assert counts.reference_length == length


@given(st.lists(COUNTS, max_size=20), st.randoms(use_true_random=False))
def test_the_reference_depends_on_the_sum_alone(pods: list[AcceptanceCounts], order: random.Random) -> None:
    def total(items: list[AcceptanceCounts]) -> AcceptanceCounts:
        result = AcceptanceCounts()
        for item in items:
            result = result.add(item)
        return result

    shuffled = list(pods)
    order.shuffle(shuffled)
    assert total(shuffled) == total(pods)
    assert total(pods).reference_length == AcceptanceCounts(*map(sum, zip(*pods, strict=True))).reference_length


@pytest.mark.parametrize(("drafts_per_request", "request_sd"), [(10, 0.0), (10, 0.15), (200, 0.15)])
def test_the_standard_error_is_small_against_the_drop(drafts_per_request: int, request_sd: float) -> None:
    """The necessary requests suffice, although requests differ by 15 % of their acceptance length."""
    rng = random.Random(1)  # noqa: S311 - has to be the same each time
    lengths = []
    for _ in range(60):
        accepted = 0
        for _ in range(int(MIN_REFERENCE_REQUESTS)):
            level = min(0.95, max(0.05, 0.6 * (1 + request_sd * 1.1 * rng.gauss())))
            for _ in range(drafts_per_request):
                accepted += next((n for n in range(3) if rng.random() > level), 3)
        counts = AcceptanceCounts(MIN_REFERENCE_REQUESTS, MIN_REFERENCE_REQUESTS * drafts_per_request, float(accepted))
        assert counts.reference_length is not None
        lengths.append(counts.reference_length)
    middle = mean(lengths)
    error = math.sqrt(mean((length - middle) ** 2 for length in lengths)) / middle
    assert error < 0.15 / 6


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        (AcceptanceCounts(MIN_COMPARED_REQUESTS, MIN_COMPARED_DRAFTS), 0.0398),
        (AcceptanceCounts(MIN_COMPARED_REQUESTS - 1, 1e6), math.inf),
        (AcceptanceCounts(1e6, MIN_COMPARED_DRAFTS - 1), math.inf),
        (AcceptanceCounts(720.0, 72_000.0), 0.0059),
    ],
)
def test_the_standard_error_follows_from_requests_and_drafts(counts: AcceptanceCounts, error: float) -> None:
    assert counts.standard_error == pytest.approx(error, abs=1e-4)


@pytest.mark.parametrize(
    ("length", "standard_error", "before", "regressed"),
    [
        (2.10, 0.0, False, True),
        (2.15, 0.0, False, False),
        (2.10, 0.02, False, False),  # 16 % is within 15 % and three standard errors
        (1.96, 0.02, False, True),
        (2.10, 0.02, True, True),
        (2.15, 0.02, True, False),
        (1.50, math.inf, False, False),
        (2.50, math.inf, True, True),
        (None, 0.0, True, True),
    ],
)
def test_a_regression_exceeds_margin_and_noise_and_ends_within_the_margin(
    length: float | None, standard_error: float, before: bool, regressed: bool
) -> None:
    assert has_regressed(length, 2.5, standard_error, before=before) is regressed
    assert not has_regressed(length, None, standard_error, before=before)
