"""Acceptance from counters: right at another K too, bounded where dummies hide, honest about clusters, refused where unknown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.engine.metrics.rates import Unknown
from aerie.engine.metrics.sample import Counters
from aerie.engine.speculation import Adaptive, Schedule, ScheduleTier, SpeculationSetting, Static
from aerie.tuning.models.acceptance import AcceptanceModel, fit_acceptance
from aerie.tuning.telemetry import TelemetryBlock
from aerie_lab.engine import acceptance as truth
from aerie_lab.engine.acceptance import CLASS_ACCEPTANCE
from tests.unit.tuning.windows import K3, window


def blocks(setting: SpeculationSetting, *conditionals: tuple[float, ...], start: int = 0) -> list[TelemetryBlock]:
    counted = [window(setting, 8, 0.01, each, seconds=300.0) for each in conditionals]
    return [TelemetryBlock(300.0 * (start + index), setting, one) for index, one in enumerate(counted)]


def fitted(found: list[TelemetryBlock], most: int = 7, seed: int = 1, draws: int = 400) -> AcceptanceModel:
    result = fit_acceptance(found, most, draws, np.random.default_rng(seed))
    assert isinstance(result, AcceptanceModel), result
    return result


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.05, 0.95), min_size=3, max_size=3))
def test_what_never_varies_is_exact_at_the_k_that_ran(q: list[float]) -> None:
    found = fitted(blocks(K3, *[tuple(q)] * 12))
    survival = np.cumprod(q)
    assert found.observed_positions == 3
    assert found.survival[:, :3] == pytest.approx(np.tile(survival, (400, 1)), rel=1e-3)
    assert float(found.length(3).mean()) == pytest.approx(1 + survival.sum(), rel=1e-3)
    for tokens in (1, 2):
        assert float(found.length(tokens).min()) >= (1 + survival[:tokens].sum()) * (1 - 1e-3), "fewer drafts lose no acceptance"
    assert found.lengths[:, 0].tolist() == [1.0] * 400


# ---------------------------------------------------------------------------------------- texts fix tokens, not drafts
def _blocks_of(kind: truth.Acceptance, tokens: int, count: int = 12, start: int = 0) -> list[TelemetryBlock]:
    """What requests of given numbers of tokens show at one K."""
    survival = truth.expected_survival(kind, tokens)
    q = tuple((survival / np.concatenate([[1.0], survival[:-1]])).tolist())
    return blocks(Static(tokens), *[q] * count, start=start)


def _off(found: AcceptanceModel, kind: truth.Acceptance, tokens: int) -> float:
    return float(found.length(tokens).mean()) / truth.expected_length(kind, tokens) - 1


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(CLASS_ACCEPTANCE)), st.floats(0.4, 0.8), st.integers(2, 7), st.data())
def test_fewer_drafts_accept_more_of_the_same_tokens(name: str, spread: float, ran: int, data: st.DataObject) -> None:
    """A draft of more tokens passes easy text in fewer drafts, so its drafts begin at harder places."""
    kind = truth.Acceptance(CLASS_ACCEPTANCE[name].conditionals, spread)
    other = data.draw(st.integers(1, ran - 1))
    found = fitted(_blocks_of(kind, ran), draws=1500)
    counted = 1 + truth.expected_survival(kind, ran)[:other].sum()
    true = truth.expected_length(kind, other)
    assert counted < true, "the bias"
    assert abs(_off(found, kind, other)) < abs(counted / true - 1)
    low, high = np.quantile(found.length(other), (0.02, 0.98))
    assert low < true < high, "how much is not known from one K, and the draws say so"


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(CLASS_ACCEPTANCE)), st.floats(0.0, 0.8), st.integers(1, 3), st.integers(2, 4), st.integers(1, 5))
def test_two_settings_side_by_side_tell_the_bias(name: str, spread: float, first: int, more: int, asked: int) -> None:
    kind, second = truth.Acceptance(CLASS_ACCEPTANCE[name].conditionals, spread), min(5, first + more)
    found = fitted([*_blocks_of(kind, first), *_blocks_of(kind, second)])
    assert abs(_off(found, kind, min(asked, second))) < 0.003, "deeper, the last conditional is carried on"


def test_requests_one_by_one_show_the_same_bias() -> None:
    """By steps, until the tokens of each request are done: nothing of the correction's own theory in it."""
    random = np.random.default_rng(8)
    kind = truth.Acceptance(CLASS_ACCEPTANCE["chat"].conditionals, 0.8)
    requests = [(kind.spread * z, 200 + 400 * u) for z, u in zip(random.standard_normal(3000), random.random(3000), strict=True)]

    def counted(tokens: int) -> tuple[float, ...]:
        drafts, accepted = 0, np.zeros(tokens)
        for effect, length in requests:
            survival = kind.survival(tokens, float(effect))
            steps = random.random((round(length), 1)) < survival
            until = int(np.searchsorted(np.cumsum(1 + steps.sum(axis=1)), length)) + 1
            drafts, accepted = drafts + until, accepted + steps[:until].sum(axis=0)
        survival = accepted / drafts
        return tuple((survival / np.concatenate([[1.0], survival[:-1]])).tolist())

    one, three, five = counted(1), counted(3), counted(5)
    alone = fitted(blocks(Static(5), *[five] * 12))
    both = fitted([*blocks(K3, *[three] * 12), *blocks(Static(5), *[five] * 12)])
    for tokens, there in ((1, one), (3, three)):
        true, naive = 1 + np.cumprod(there).sum(), 1 + np.cumprod(five)[:tokens].sum()
        assert naive / true < 0.985
        assert abs(float(alone.length(tokens).mean()) / true - 1) < 0.8 * abs(naive / true - 1)
        assert float(both.length(tokens).mean()) == pytest.approx(true, rel=0.003)


def test_what_two_settings_show_at_different_times_tells_no_bias() -> None:
    """Between two days traffic moves by more than what is sought."""
    kind = truth.Acceptance(CLASS_ACCEPTANCE["math"].conditionals, 0.4)
    before, after = _blocks_of(kind, 3), _blocks_of(truth.Acceptance(kind.shift_logits(0.2).conditionals, 0.4), 5, start=12)
    apart, alone = fitted([*before, *after]), fitted(before)
    assert float(apart.text_variance.mean()) == pytest.approx(float(alone.text_variance.mean()), rel=0.15)


def test_settings_that_differ_by_chance_alone_tell_little() -> None:
    """Half an hour of a canary that scatters by 3 % a block: the prior counts on."""
    kind, random = truth.Acceptance(CLASS_ACCEPTANCE["math"].conditionals, 0.4), np.random.default_rng(2)
    found = []
    for index in range(6):
        for tokens in (3, 5):
            moved = truth.Acceptance(kind.shift_logits(0.15 * float(random.standard_normal())).conditionals, 0.4)
            found += _blocks_of(moved, tokens, 1, index)
    estimates = fitted(found).text_variance
    assert 0.05 < float(estimates.mean()) < 1.0
    assert float(estimates.std()) > 0.1


@pytest.mark.parametrize("others", [3, 30, 300, 3000])
def test_one_replica_beside_a_fleet_of_another_setting_may_tell_next_to_nothing(others: int) -> None:
    """Nearly all drafts are of one setting, so that it hardly differs from the mean of its time."""
    q = (0.7, 0.6, 0.5)
    fleet = [replace(block, counters=_times(block.counters, others)) for block in blocks(K3, *[q] * 12)]
    found = fitted([*fleet, *blocks(Static(4), *[(*q, 0.5)] * 12)])
    assert np.isfinite(found.lengths).all()
    assert 0 <= float(found.text_variance.mean()) < 1


def _times(counters: Counters, number: int) -> Counters:
    """Of so many replicas."""
    for _ in range(number.bit_length() - 1):
        counters = counters + counters
    return counters


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
    assert found.observed_positions == 5
    assert float(found.length(5).mean()) == pytest.approx(1 + np.cumprod(deep).sum(), rel=3e-3)
    assert float(found.length(3).mean()) == pytest.approx(1 + np.cumprod(deep)[:3].sum(), rel=3e-3)


def test_two_tiers_of_a_schedule_count_and_three_where_nothing_else_does() -> None:
    two = Schedule((ScheduleTier(1, 8, 3), ScheduleTier(9, 64, 1)), 3)
    three = Schedule((ScheduleTier(1, 4, 3), ScheduleTier(5, 8, 2), ScheduleTier(9, 64, 1)), 3)
    q = (0.8, 0.7, 0.6)

    def both(setting: SpeculationSetting) -> list[TelemetryBlock]:
        busy, quiet = window(setting, 20, 0.01, q, seconds=300.0), window(setting, 4, 0.01, q, seconds=300.0)
        return [TelemetryBlock(300.0 * index, setting, busy + quiet) for index in range(12)]

    assert fitted(both(two), 3).survival.mean(axis=0) == pytest.approx(np.cumprod(q), rel=1e-3)
    alone = fitted(both(three), 3).survival
    assert alone[:, 0].mean() == pytest.approx(q[0], rel=1e-3)
    for position, true in enumerate(np.cumprod(q)):
        assert alone[:, position].min() <= true + 0.01
        assert alone[:, position].max() >= true - 0.02
    assert alone[:, 2].std() > 0.01, "bounds are no figure"
    other = [
        TelemetryBlock(300.0 * (12 + index), K3, window(K3, 20, 0.01, (0.7, 0.6, 0.5), seconds=300.0)) for index in range(12)
    ]
    assert fitted([*both(three), *other], 3).survival.mean(axis=0) == pytest.approx(np.cumprod((0.7, 0.6, 0.5)), rel=1e-3)


def test_adaptive_verification_is_not_read_as_acceptance() -> None:
    found = [TelemetryBlock(block.start, Adaptive(3), block.counters) for block in blocks(K3, *[(0.8, 0.7, 0.6)] * 12)]
    refused = fit_acceptance(found, 3, 100, np.random.default_rng(1))
    assert isinstance(refused, Unknown)
    assert "trimmed" in refused.message


@pytest.mark.parametrize("count", [0, 5])
def test_too_few_blocks_are_refused_with_how_many_are_needed(count: int) -> None:
    refused = fit_acceptance(blocks(K3, *[(0.8, 0.7, 0.6)] * count), 3, 100, np.random.default_rng(1))
    assert isinstance(refused, Unknown)
    assert f"in {count} blocks" in refused.message
    assert "6 with 2000 are needed" in refused.message


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
    found = [TelemetryBlock(b.start, K3, _with_dummies(b.counters, 0.05)) for b in blocks(K3, *[truth] * 12)]
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
