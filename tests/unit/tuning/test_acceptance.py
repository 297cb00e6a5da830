"""Acceptance from counters: exact downwards, bounded where dummies hide, honest about clusters, refused where not identified."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.engine.samples import Counters
from aerie.engine.speculation import Adaptive, Schedule, Setting, Static, Tier
from aerie.engine.windows import Unknown
from aerie.tuning.acceptance import Acceptance, acceptance
from aerie.tuning.telemetry import Block
from tests.unit.tuning.windows import K3, window


def blocks(setting: Setting, *conditionals: tuple[float, ...], start: int = 0) -> list[Block]:
    counted = [window(setting, 8, 0.01, each, seconds=300.0) for each in conditionals]
    return [Block(300.0 * (start + index), setting, one) for index, one in enumerate(counted)]


def fitted(found: list[Block], most: int = 7, seed: int = 1, draws: int = 400) -> Acceptance:
    result = acceptance(found, most, draws, np.random.default_rng(seed))
    assert isinstance(result, Acceptance), result
    return result


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.05, 0.95), min_size=3, max_size=3))
def test_what_never_varies_is_exact_up_to_k(q: list[float]) -> None:
    found = fitted(blocks(K3, *[tuple(q)] * 12))
    survival = np.cumprod(q)
    assert found.observed == 3
    assert found.survival[:, :3] == pytest.approx(np.tile(survival, (400, 1)), rel=1e-3)
    for tokens in (1, 2, 3):
        assert float(found.length(tokens).mean()) == pytest.approx(1 + survival[:tokens].sum(), rel=1e-3)
    assert found.lengths[:, 0].tolist() == [1.0] * 400


def test_beyond_k_the_last_conditional_is_carried_on_and_less_and_less_certain() -> None:
    found = fitted(blocks(K3, *[(0.8, 0.7, 0.75)] * 12))
    conditionals = found.survival[:, 1:] / found.survival[:, :-1]
    assert np.median(conditionals[:, 2:], axis=0) == pytest.approx([0.75] * 4, abs=0.04)
    spread = (np.log(conditionals[:, 2:]) - np.log1p(-conditionals[:, 2:])).std(axis=0)
    assert spread[0] == pytest.approx(0.5, abs=0.08)
    assert spread[3] == pytest.approx(1.0, abs=0.16)


def test_a_canary_with_more_tokens_settles_the_deeper_positions() -> None:
    deep = (0.8, 0.75, 0.7, 0.6, 0.5)
    found = fitted([*blocks(K3, *[deep] * 12), *blocks(Static(5), *[deep] * 6, start=6)])
    assert found.observed == 5
    assert found.survival[:, :5].mean(axis=0) == pytest.approx(np.cumprod(deep), rel=1e-3)


def test_two_tiers_of_a_schedule_count_and_three_where_nothing_else_does() -> None:
    two = Schedule((Tier(1, 8, 3), Tier(9, 64, 1)), 3)
    three = Schedule((Tier(1, 4, 3), Tier(5, 8, 2), Tier(9, 64, 1)), 3)
    q = (0.8, 0.7, 0.6)

    def both(setting: Setting) -> list[Block]:
        busy, quiet = window(setting, 20, 0.01, q, seconds=300.0), window(setting, 4, 0.01, q, seconds=300.0)
        return [Block(300.0 * index, setting, busy + quiet) for index in range(12)]

    assert fitted(both(two), 3).survival.mean(axis=0) == pytest.approx(np.cumprod(q), rel=1e-3)
    alone = fitted(both(three), 3).survival
    assert alone[:, 0].mean() == pytest.approx(q[0], rel=1e-3)
    for position, true in enumerate(np.cumprod(q)):
        assert alone[:, position].min() <= true + 0.01
        assert alone[:, position].max() >= true - 0.02
    assert alone[:, 2].std() > 0.01, "bounds are no figure"
    other = [Block(300.0 * (12 + index), K3, window(K3, 20, 0.01, (0.7, 0.6, 0.5), seconds=300.0)) for index in range(12)]
    assert fitted([*both(three), *other], 3).survival.mean(axis=0) == pytest.approx(np.cumprod((0.7, 0.6, 0.5)), rel=1e-3)


def test_adaptive_verification_is_not_read_as_acceptance() -> None:
    found = [Block(block.start, Adaptive(3), block.counters) for block in blocks(K3, *[(0.8, 0.7, 0.6)] * 12)]
    refused = acceptance(found, 3, 100, np.random.default_rng(1))
    assert isinstance(refused, Unknown)
    assert "trimmed" in refused.sentence


@pytest.mark.parametrize("count", [0, 5])
def test_too_few_blocks_are_refused_with_how_many_are_needed(count: int) -> None:
    refused = acceptance(blocks(K3, *[(0.8, 0.7, 0.6)] * count), 3, 100, np.random.default_rng(1))
    assert isinstance(refused, Unknown)
    assert f"in {count} blocks" in refused.sentence
    assert "6 with 2000 are needed" in refused.sentence


def _with_dummies(counters: Counters, share: float) -> Counters:
    """The same with dummy drafts of cached prompts: K tokens each, none accepted."""
    speculation = counters.speculation
    assert speculation is not None
    dummies = share * speculation.drafts
    padded = replace(speculation, drafts=speculation.drafts + dummies, draft_tokens=speculation.draft_tokens + 3 * dummies)
    first = replace(counters.time_to_first_token, counts=tuple(dummies for _ in counters.time_to_first_token.counts))
    return replace(counters, speculation=padded, prompt_tokens=counters.prompt_tokens + 10 * dummies, time_to_first_token=first)


def test_the_truth_lies_between_the_bounds_that_dummy_drafts_leave() -> None:
    truth = (0.8, 0.7, 0.6)
    found = [Block(b.start, K3, _with_dummies(b.counters, 0.05)) for b in blocks(K3, *[truth] * 12)]
    first = fitted(found).survival[:, 0]
    assert float(first.min()) == pytest.approx(0.8 / 1.05, abs=0.005)
    assert float(first.max()) == pytest.approx(0.8, abs=0.005)


def test_intervals_hold_when_blocks_are_alike_for_an_hour() -> None:
    """Acceptance wanders slowly; an interval that took blocks for independent would cover far less than 90 %."""
    random, covered, runs = np.random.default_rng(5), 0, 60
    for run in range(runs):
        noise = random.standard_normal(150)
        wander = np.convolve(noise, np.ones(4) / 2.0, mode="valid")[:144] * 0.04
        found = fitted(blocks(K3, *[(0.75 + float(w), 0.7, 0.65) for w in wander]), 3, seed=run, draws=200)
        low, high = np.quantile(found.survival[:, 0], (0.05, 0.95))
        covered += bool(low <= 0.75 <= high)
    assert 0.72 * runs <= covered <= runs


def test_the_same_seed_gives_the_same_draws() -> None:
    found = blocks(K3, *[(0.7 + 0.01 * index, 0.7, 0.65) for index in range(10)])
    assert (fitted(found, seed=3).survival == fitted(found, seed=3).survival).all()
    assert (fitted(found, seed=3).survival != fitted(found, seed=4).survival).any()
