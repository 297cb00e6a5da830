"""A request's next steps: steps drawn together equal single steps drawn from the same random numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie_lab.engine.acceptance import Acceptance
from aerie_lab.engine.step_sequence import draw_step_sequence


@given(
    seed=st.integers(0, 2**32),
    q=st.lists(st.sampled_from([0.0, 0.3, 0.9, 1.0]), max_size=5).map(tuple),
    cached=st.integers(1, 400),
    left=st.integers(1, 400),
)
def test_a_path_equals_its_single_steps(seed: int, q: tuple[float, ...], cached: int, left: int) -> None:
    survival = np.multiply.accumulate(np.array(q))
    path = draw_step_sequence(np.random.default_rng(seed), survival, cached, left, 128)
    emitted, tokens = [], [cached]
    for chance in np.random.default_rng(seed).random(min(left, 128) + 1).tolist()[1:]:
        emitted.append(1 + sum(chance < s for s in survival.tolist()))
        tokens.append(tokens[-1] + emitted[-1])
        if tokens[-1] >= cached + left:
            tokens[-1] = cached + left
            break
    assert path.step_tokens.tolist() == emitted
    assert path.cached_tokens.tolist() == tokens
    assert (path.draft_tokens, path.steps_left) == (len(q), len(emitted))


def test_steps_are_independent_and_follow_the_survivals() -> None:
    survival = Acceptance((0.8, 0.6, 0.5)).survival(3)
    random = np.random.default_rng(7)
    accepted = np.concatenate([draw_step_sequence(random, survival, 1, 10_000, 128).step_tokens - 1 for _ in range(1000)])
    assert [float((accepted > i).mean()) for i in range(3)] == pytest.approx(survival.tolist(), abs=0.006)
    assert abs(np.corrcoef(accepted[1:], accepted[:-1])[0, 1]) < 0.012
