"""Draws of requests, and what engines count of them."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.cli.commands.evaluator import evaluator
from aerie.forecast.assumptions import TOKENS_PER_STEP, Requests
from aerie.forecast.requests import MAX_ANSWER_TOKENS, _integrate, draw_factor, draw_tokens, serve

TIMES = st.floats(0, 100)


@given(st.lists(st.tuples(st.floats(-20, 100), st.floats(0, 50), st.floats(0.1, 3)), max_size=8), st.lists(TIMES, min_size=1))
def test_the_seconds_of_requests_are_summed_up(requests: list[tuple[float, float, float]], times: list[float]) -> None:
    begins, lengths, weights = (np.array([request[index] for request in requests]) for index in range(3))
    expected = [sum(weight * min(max(time - begin, 0), length) for begin, length, weight in requests) for time in sorted(times)]
    assert _integrate(begins, begins + lengths, weights, np.array(sorted(times))) == pytest.approx(expected, abs=1e-8)


def test_engines_count_what_arrives() -> None:
    requests = Requests(5.0, seconds=4.0, tokens=100.0)
    tokens, steps, finished = (
        part[1] - part[0] for part in serve(requests, 2, np.array([0.0, 5000.0]), np.random.default_rng(1))
    )
    assert tokens == pytest.approx(10 * 100 * 5000, rel=0.03)
    assert tokens / steps == pytest.approx(TOKENS_PER_STEP, rel=0.01)
    assert finished == pytest.approx(10 * 5000, rel=0.03)


def test_steps_per_token_of_windows_deviate_as_those_of_requests() -> None:
    """The deviation of n requests that end in their window is that of one, times the root of the dispersion of sizes over n."""
    requests = Requests(1.0, seconds=0.1)
    served = serve(requests, 1, 100.0 * np.arange(3001), np.random.default_rng(1))
    ratio = np.diff(served.steps) / np.diff(served.tokens) * TOKENS_PER_STEP
    assert ratio.std() == pytest.approx(requests.deviation * np.sqrt(requests.size_dispersion / 100), rel=0.1)


def test_draws_have_their_moments() -> None:
    random = np.random.default_rng(1)
    tokens = draw_tokens(Requests(1.0, tokens=50.0, size_dispersion=2.0), 400_000, random)
    assert tokens.mean() == pytest.approx(50, rel=0.01)
    assert (tokens**2).mean() / tokens.mean() ** 2 == pytest.approx(2, rel=0.05)
    factors = draw_factor(0.2, 400_000, random)
    assert (factors.mean(), factors.std()) == pytest.approx((1, 0.2), rel=0.02)


def test_no_requests_are_no_counts() -> None:
    assert all((part == 0).all() for part in serve(Requests(0.0), 4, np.array([0.0, 60.0]), np.random.default_rng(1)))


def test_answers_are_cut_as_the_evaluator_cuts_them() -> None:
    assert inspect.signature(evaluator).parameters["max_tokens"].default == MAX_ANSWER_TOKENS
