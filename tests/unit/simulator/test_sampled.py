"""The comparison of sampled answers: no false alarm for equal engines, and relevant differences are detected."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from aerie_lab.testing import sampled

ANSWERS = 200


def draw(generator: np.random.Generator, shares: list[float], copies: float = 0.0) -> NDArray[np.int64]:
    """Return answers whose tokens have these shares; `copies`: share of last tokens that repeat the previous one."""
    tokens = generator.choice(len(shares), size=(ANSWERS, sampled.SHORT_ANSWER_TOKENS), p=shares)
    same = generator.random(ANSWERS) < copies
    tokens[same, -1] = tokens[same, -2]
    return tokens


def compare(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    return sampled.permutation_p_value(sampled.EngineSamples((first,), ()), sampled.EngineSamples((second,), ()))


@pytest.mark.slow
def test_equal_distributions_give_uniform_p_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "NUM_PERMUTATIONS", 202)
    generator = np.random.default_rng(1)
    p_values = [compare(draw(generator, [0.5, 0.3, 0.2]), draw(generator, [0.5, 0.3, 0.2])) for _ in range(80)]
    assert 0.35 < np.mean(p_values) < 0.65
    assert 0.0 < np.mean(np.array(p_values) < 0.2) < 0.4


@pytest.mark.parametrize(("shares", "copies"), [([0.3, 0.4, 0.3], 0.0), ([0.5, 0.3, 0.2], 0.7)])
def test_other_shares_and_other_neighbours_are_detected(
    shares: list[float], copies: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "NUM_PERMUTATIONS", 1010)
    generator = np.random.default_rng(2)
    assert compare(draw(generator, [0.5, 0.3, 0.2]), draw(generator, shares, copies)) < 0.005


def test_mixed_requests_have_all_settings_and_distinct_seeds() -> None:
    prompts = [[{"role": "user", "content": str(index)}] for index in range(5)]
    requests = sampled.build_mixed_requests("off", prompts, 30, sampled.SAMPLING_SETTINGS)
    assert [sum(request.sampling_settings == kind for request in requests) for kind in sampled.SAMPLING_SETTINGS] == [30] * 4
    assert sum(request.sampling_settings["temperature"] == 0 for request in requests) == 20
    drawn = [request.seed for request in requests if request.sampling_settings["temperature"]]
    assert len(set(drawn)) == len(drawn)
    assert not {request.seed for request in sampled.build_mixed_requests("greedy", prompts, 30, sampled.SAMPLING_SETTINGS)} & {
        request.seed for request in requests
    }
