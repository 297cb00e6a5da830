"""Acceptance from counters: correct at other K, bounded with dummy drafts, unknown without evidence."""

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


def make_blocks(setting: SpeculationSetting, *conditionals: tuple[float, ...], start: int = 0) -> list[TelemetryBlock]:
    counted = [window(setting, 8, 0.01, each, seconds=300.0) for each in conditionals]
    return [TelemetryBlock(300.0 * (start + index), setting, counters) for index, counters in enumerate(counted)]


def fit(blocks: list[TelemetryBlock], max_tokens: int = 7, seed: int = 1, draws: int = 400) -> AcceptanceModel:
    model = fit_acceptance(blocks, max_tokens, draws, np.random.default_rng(seed))
    assert isinstance(model, AcceptanceModel), model
    return model


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.05, 0.95), min_size=3, max_size=3))
def test_constant_acceptance_is_exact_at_the_current_k(q: list[float]) -> None:
    model = fit(make_blocks(K3, *[tuple(q)] * 12))
    survival = np.cumprod(q)
    assert model.observed_positions == 3
    assert model.survival[:, :3] == pytest.approx(np.tile(survival, (400, 1)), rel=1e-3)
    assert float(model.length(3).mean()) == pytest.approx(1 + survival.sum(), rel=1e-3)
    for tokens in (1, 2):
        assert float(model.length(tokens).min()) >= (1 + survival[:tokens].sum()) * (1 - 1e-3), "fewer drafts lose no acceptance"
    assert model.lengths[:, 0].tolist() == [1.0] * 400


# ---------------------------------------------------------------------------------------- texts fix tokens, not drafts
def simulate_blocks(kind: truth.Acceptance, tokens: int, count: int = 12, start: int = 0) -> list[TelemetryBlock]:
    """Make the blocks of requests with fixed numbers of tokens, at one K."""
    survival = truth.expected_survival(kind, tokens)
    q = tuple((survival / np.concatenate([[1.0], survival[:-1]])).tolist())
    return make_blocks(Static(tokens), *[q] * count, start=start)


def relative_error(model: AcceptanceModel, kind: truth.Acceptance, tokens: int) -> float:
    return float(model.length(tokens).mean()) / truth.expected_length(kind, tokens) - 1


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(CLASS_ACCEPTANCE)), st.floats(0.4, 0.8), st.integers(2, 7), st.data())
def test_fewer_drafts_accept_more_of_the_same_tokens(name: str, spread: float, ran: int, data: st.DataObject) -> None:
    """Longer drafts pass easy text in fewer drafts, so that they begin at harder positions."""
    kind = truth.Acceptance(CLASS_ACCEPTANCE[name].conditionals, spread)
    other = data.draw(st.integers(1, ran - 1))
    model = fit(simulate_blocks(kind, ran), draws=1500)
    counted = 1 + truth.expected_survival(kind, ran)[:other].sum()
    true = truth.expected_length(kind, other)
    assert counted < true, "the bias"
    assert abs(relative_error(model, kind, other)) < abs(counted / true - 1)
    low, high = np.quantile(model.length(other), (0.02, 0.98))
    assert low < true < high, "how much is not known from one K, and the draws say so"


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(CLASS_ACCEPTANCE)), st.floats(0.0, 0.8), st.integers(1, 3), st.integers(2, 4), st.integers(1, 5))
def test_two_concurrent_settings_correct_the_bias(name: str, spread: float, first: int, more: int, predicted: int) -> None:
    kind, second = truth.Acceptance(CLASS_ACCEPTANCE[name].conditionals, spread), min(5, first + more)
    model = fit([*simulate_blocks(kind, first), *simulate_blocks(kind, second)])
    assert abs(relative_error(model, kind, min(predicted, second))) < 0.003, "deeper, the last conditional is carried on"


def test_simulated_requests_show_the_same_bias() -> None:
    """Simulate each request step by step, independently of the theory behind the correction."""
    random = np.random.default_rng(8)
    kind = truth.Acceptance(CLASS_ACCEPTANCE["chat"].conditionals, 0.8)
    requests = [(kind.spread * z, 200 + 400 * u) for z, u in zip(random.standard_normal(3000), random.random(3000), strict=True)]

    def counted(tokens: int) -> tuple[float, ...]:
        drafts, accepted = 0, np.zeros(tokens)
        for effect, length in requests:
            survival = kind.survival(tokens, float(effect))
            steps = random.random((round(length), 1)) < survival
            step_count = int(np.searchsorted(np.cumsum(1 + steps.sum(axis=1)), length)) + 1
            drafts, accepted = drafts + step_count, accepted + steps[:step_count].sum(axis=0)
        survival = accepted / drafts
        return tuple((survival / np.concatenate([[1.0], survival[:-1]])).tolist())

    q_one, q_three, q_five = counted(1), counted(3), counted(5)
    from_five = fit(make_blocks(Static(5), *[q_five] * 12))
    from_both = fit([*make_blocks(K3, *[q_three] * 12), *make_blocks(Static(5), *[q_five] * 12)])
    for tokens, conditionals in ((1, q_one), (3, q_three)):
        true, naive = 1 + np.cumprod(conditionals).sum(), 1 + np.cumprod(q_five)[:tokens].sum()
        assert naive / true < 0.985
        assert abs(float(from_five.length(tokens).mean()) / true - 1) < 0.8 * abs(naive / true - 1)
        assert float(from_both.length(tokens).mean()) == pytest.approx(true, rel=0.003)


def test_two_settings_at_different_times_do_not_change_the_bias() -> None:
    """Traffic changes more from day to day than the bias between settings."""
    kind = truth.Acceptance(CLASS_ACCEPTANCE["math"].conditionals, 0.4)
    before, after = (
        simulate_blocks(kind, 3),
        simulate_blocks(truth.Acceptance(kind.shift_logits(0.2).conditionals, 0.4), 5, start=12),
    )
    both, alone = fit([*before, *after]), fit(before)
    assert float(both.text_variance.mean()) == pytest.approx(float(alone.text_variance.mean()), rel=0.15)


def test_settings_that_differ_by_chance_keep_the_prior() -> None:
    """Half an hour of a canary with 3 % of noise per block does not replace the prior."""
    kind, random = truth.Acceptance(CLASS_ACCEPTANCE["math"].conditionals, 0.4), np.random.default_rng(2)
    blocks = []
    for index in range(6):
        for tokens in (3, 5):
            shifted = truth.Acceptance(kind.shift_logits(0.15 * float(random.standard_normal())).conditionals, 0.4)
            blocks += simulate_blocks(shifted, tokens, 1, index)
    estimates = fit(blocks).text_variance
    assert 0.05 < float(estimates.mean()) < 1.0
    assert float(estimates.std()) > 0.1


@pytest.mark.parametrize("others", [3, 30, 300, 3000])
def test_one_replica_beside_a_large_fleet_gives_finite_estimates(others: int) -> None:
    """Nearly all drafts are of one setting, which hardly differs from the mean of all."""
    q = (0.7, 0.6, 0.5)
    fleet = [replace(block, counters=multiply(block.counters, others)) for block in make_blocks(K3, *[q] * 12)]
    model = fit([*fleet, *make_blocks(Static(4), *[(*q, 0.5)] * 12)])
    assert np.isfinite(model.lengths).all()
    assert 0 <= float(model.text_variance.mean()) < 1


def multiply(counters: Counters, number: int) -> Counters:
    """Return the counters of `number` replicas, rounded down to a power of two."""
    for _ in range(number.bit_length() - 1):
        counters = counters + counters
    return counters


def test_uncertainty_of_conditionals_grows_beyond_k() -> None:
    model = fit(make_blocks(K3, *[(0.8, 0.7, 0.75)] * 12))
    conditionals = model.survival[:, 1:] / model.survival[:, :-1]
    assert np.median(conditionals[:, 2:], axis=0) == pytest.approx([0.75] * 4, abs=0.04)
    spread = (np.log(conditionals[:, 2:]) - np.log1p(-conditionals[:, 2:])).std(axis=0)
    assert spread[0] == pytest.approx(0.5, abs=0.08)
    assert spread[3] == pytest.approx(1.0, abs=0.16)


def test_a_canary_with_more_tokens_measures_the_deeper_positions() -> None:
    deep = (0.8, 0.75, 0.7, 0.6, 0.5)
    model = fit([*make_blocks(K3, *[deep] * 12), *make_blocks(Static(5), *[deep] * 6, start=6)])
    assert model.observed_positions == 5
    assert float(model.length(5).mean()) == pytest.approx(1 + np.cumprod(deep).sum(), rel=3e-3)
    assert float(model.length(3).mean()) == pytest.approx(1 + np.cumprod(deep)[:3].sum(), rel=3e-3)


def test_three_tiers_of_a_schedule_count_only_without_other_settings() -> None:
    two = Schedule((ScheduleTier(1, 8, 3), ScheduleTier(9, 64, 1)), 3)
    three = Schedule((ScheduleTier(1, 4, 3), ScheduleTier(5, 8, 2), ScheduleTier(9, 64, 1)), 3)
    q = (0.8, 0.7, 0.6)

    def both(setting: SpeculationSetting) -> list[TelemetryBlock]:
        busy, quiet = window(setting, 20, 0.01, q, seconds=300.0), window(setting, 4, 0.01, q, seconds=300.0)
        return [TelemetryBlock(300.0 * index, setting, busy + quiet) for index in range(12)]

    assert fit(both(two), 3).survival.mean(axis=0) == pytest.approx(np.cumprod(q), rel=1e-3)
    alone = fit(both(three), 3).survival
    assert alone[:, 0].mean() == pytest.approx(q[0], rel=1e-3)
    for position, true in enumerate(np.cumprod(q)):
        assert alone[:, position].min() <= true + 0.01
        assert alone[:, position].max() >= true - 0.02
    assert alone[:, 2].std() > 0.01, "bounds are no figure"
    other = [
        TelemetryBlock(300.0 * (12 + index), K3, window(K3, 20, 0.01, (0.7, 0.6, 0.5), seconds=300.0)) for index in range(12)
    ]
    assert fit([*both(three), *other], 3).survival.mean(axis=0) == pytest.approx(np.cumprod((0.7, 0.6, 0.5)), rel=1e-3)


def test_adaptive_verification_is_not_read_as_acceptance() -> None:
    blocks = [TelemetryBlock(block.start, Adaptive(3), block.counters) for block in make_blocks(K3, *[(0.8, 0.7, 0.6)] * 12)]
    unknown = fit_acceptance(blocks, 3, 100, np.random.default_rng(1))
    assert isinstance(unknown, Unknown)
    assert "trimmed" in unknown.message


@pytest.mark.parametrize("count", [0, 5])
def test_too_few_blocks_are_unknown_with_the_number_needed(count: int) -> None:
    unknown = fit_acceptance(make_blocks(K3, *[(0.8, 0.7, 0.6)] * count), 3, 100, np.random.default_rng(1))
    assert isinstance(unknown, Unknown)
    assert f"in {count} blocks" in unknown.message
    assert "6 with 2000 are needed" in unknown.message


def _with_dummies(counters: Counters, share: float) -> Counters:
    """Add dummy drafts of cached prompts to the counters: K tokens each, none accepted."""
    speculation = counters.speculation
    assert speculation is not None
    dummies = share * speculation.drafts
    padded = replace(speculation, drafts=speculation.drafts + dummies, draft_tokens=speculation.draft_tokens + 3 * dummies)
    first = replace(counters.time_to_first_token, counts=tuple(dummies for _ in counters.time_to_first_token.counts))
    return replace(counters, speculation=padded, prompt_tokens=counters.prompt_tokens + 10 * dummies, time_to_first_token=first)


def test_dummy_drafts_give_bounds_around_the_true_acceptance() -> None:
    conditionals = (0.8, 0.7, 0.6)
    blocks = [TelemetryBlock(b.start, K3, _with_dummies(b.counters, 0.05)) for b in make_blocks(K3, *[conditionals] * 12)]
    first = fit(blocks).survival[:, 0]
    assert float(first.min()) == pytest.approx(0.8 / 1.05, abs=0.005)
    assert float(first.max()) == pytest.approx(0.8, abs=0.005)


def test_intervals_cover_autocorrelated_blocks() -> None:
    """Acceptance drifts slowly; intervals that assume independent blocks would cover far less than 90 %."""
    random, covered, runs = np.random.default_rng(5), 0, 60
    for run in range(runs):
        noise = random.standard_normal(150)
        drift = np.convolve(noise, np.ones(4) / 2.0, mode="valid")[:144] * 0.04
        model = fit(make_blocks(K3, *[(0.75 + float(w), 0.7, 0.65) for w in drift]), 3, seed=run, draws=200)
        low, high = np.quantile(model.survival[:, 0], (0.05, 0.95))
        covered += bool(low <= 0.75 <= high)
    assert 0.72 * runs <= covered <= runs


def test_the_same_seed_gives_the_same_draws() -> None:
    blocks = make_blocks(K3, *[(0.7 + 0.01 * index, 0.7, 0.65) for index in range(10)])
    assert (fit(blocks, seed=3).survival == fit(blocks, seed=3).survival).all()
    assert (fit(blocks, seed=3).survival != fit(blocks, seed=4).survival).any()
