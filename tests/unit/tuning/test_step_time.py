"""Step times: known parameters are estimated, also from simulated engines; unidentified ones are unknown, with a message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.rates import Unknown
from aerie.engine.metrics.sample import Counters, Sample, diff_samples
from aerie.engine.speculation import Off, Static
from aerie.tuning.models.step_time import StepTimeModel, fit_step_time
from aerie.tuning.telemetry import ReplicaWindow, TuningTelemetry
from aerie_lab.engine.acceptance import Acceptance
from aerie_lab.engine.exposition import render_exposition
from aerie_lab.engine.fleet import SimulatedFleet, SimulatedPod
from aerie_lab.engine.request import EngineSettings
from aerie_lab.engine.step import STEP_TIME_FORMULAS, StepTimeFormula
from aerie_lab.engine.workload import DiurnalArrivals, LengthDistribution, TrafficClass
from tests.unit.tuning.windows import K3, spread, telemetry

DENSE = STEP_TIME_FORMULAS["dense-32b"]


def seconds(formula: StepTimeFormula, batch: float, tokens: float) -> float:
    low = formula.fixed_seconds(int(batch), int(tokens))
    return low + (batch - int(batch)) * (formula.fixed_seconds(int(batch) + 1, int(tokens)) - low)


def predict(model: StepTimeModel, batch: float, tokens: int) -> float:
    draws = model.draw_step_seconds(np.array([batch]), np.array([float(tokens)]), 400, np.random.default_rng(0))
    return float(np.median(draws))


def fit(telemetry: TuningTelemetry, captured: int | None = None, experts: bool | None = None) -> StepTimeModel:
    model = fit_step_time(telemetry.cells, captured, is_moe=experts)
    assert isinstance(model, StepTimeModel), model
    return model


@settings(max_examples=15, deadline=None)
@given(
    base=st.floats(3e-3, 15e-3),
    share=st.floats(0.003, 0.01),
    draft=st.floats(0.03, 0.15),
)
def test_two_settings_identify_the_step_time_of_a_third(base: float, share: float, draft: float) -> None:
    truth = StepTimeFormula(base, share * base, draft * base, 0.2 * share * base)
    model = fit(telemetry([Static(1), Static(5)], lambda b, k: seconds(truth, b, k), spread(1, 100, 60)), experts=False)
    for batch in (2, 16, 64):
        assert predict(model, batch, 3) == pytest.approx(seconds(truth, batch, 3), rel=0.04)
    assert model.floor_seconds == pytest.approx(base, rel=0.08)


def test_one_setting_uses_the_prior_and_has_a_wide_interval() -> None:
    alone = fit(telemetry([K3], lambda b, k: seconds(DENSE, b, k), spread(1, 100, 60)), experts=False)
    both = fit(telemetry([K3, Static(7)], lambda b, k: seconds(DENSE, b, k), spread(1, 100, 60)), experts=False)
    truth = 0.32 / 7.8
    for model in (alone, both):
        low, _, high = model.draft_step_share
        assert low < truth < high
    assert both.draft_step_share[2] - both.draft_step_share[0] < 0.6 * (alone.draft_step_share[2] - alone.draft_step_share[0])
    assert predict(alone, 20, 3) == pytest.approx(seconds(DENSE, 20, 3), rel=0.02)
    assert predict(alone, 20, 5) == pytest.approx(seconds(DENSE, 20, 5), rel=0.12)


def test_a_mixture_of_experts_is_concave() -> None:
    moe = STEP_TIME_FORMULAS["moe-30b-a3b"]
    model = fit(telemetry([K3, Static(1)], lambda b, k: seconds(moe, b, k), spread(1, 100, 80)), experts=True)
    slopes = np.exp(model.center[3:6])
    assert slopes[0] > 3 * slopes[2]
    for batch, tokens in ((1, 0), (4, 5), (64, 2)):
        assert predict(model, batch, tokens) == pytest.approx(seconds(moe, batch, tokens), rel=0.15)


def test_steps_without_captured_graphs_do_not_change_the_slopes() -> None:
    truth = StepTimeFormula(7e-3, 2e-5, 5e-4, captured_sizes=tuple(range(8, 513, 8)), no_graph_seconds=20e-3)
    model = fit(telemetry([K3, Static(1)], lambda b, k: seconds(truth, b, k), spread(1, 250, 80)), captured=512)
    assert predict(model, 100, 2) == pytest.approx(seconds(truth, 100, 2), rel=0.06)
    assert predict(model, 200, 3) == pytest.approx(seconds(truth, 200, 3), rel=0.06)


def test_prefill_is_subtracted() -> None:
    model = fit(telemetry([K3], lambda b, k: seconds(DENSE, b, k), spread(1, 64, 80), prefill_seconds=5e-5), experts=False)
    assert predict(model, 32, 3) == pytest.approx(seconds(DENSE, 32, 3), rel=0.06)


def test_outliers_and_a_slow_replica_do_not_change_the_fit() -> None:
    clean = telemetry([K3], lambda b, k: seconds(DENSE, b, k), spread(1, 64, 60), replicas=4)
    stalls = telemetry([K3], lambda b, k: 1.1 * seconds(DENSE, b, k), spread(1, 64, 60), replicas=1)
    for key, cell in stalls.cells.items():
        slow = type(key)(key.slot, "slow", key.setting, key.batch_bin, key.prefill_bin)
        clean.cells[slow] = cell
    broken = next(iter(clean.cells.values()))
    broken.step_seconds *= 5
    model = fit(clean, experts=False)
    assert predict(model, 20, 3) == pytest.approx(seconds(DENSE, 20, 3), rel=0.04)


def test_the_step_time_of_simulated_engines_is_estimated() -> None:
    """Scrape two engines, with K = 3 and K = 1 and a varying load, through the parser of the operator."""
    truth = StepTimeFormula(6e-3, 1e-4, 6e-4, seconds_per_prompt_token=1e-5, log_sd=0.03)
    kind = TrafficClass("chat", Acceptance((0.75, 0.7, 0.6)), LengthDistribution(100, 0.3), LengthDistribution(150, 0.3))
    pods = [SimulatedPod(f"k{k}", EngineSettings(num_speculative_tokens=k), truth) for k in (3, 1)]
    collected, samples = TuningTelemetry(), dict[str, Sample]()
    for scrape in SimulatedFleet(
        pods, [kind], DiurnalArrivals(6.0, 0.9, peak_seconds=150.0, day_seconds=600.0), routing="random", seed=3
    ).run(700.0):
        assert scrape.counters is not None
        sample = parse_exposition(render_exposition(scrape.counters, "m", 0.0).encode())
        if (before := samples.get(scrape.pod)) is not None:
            window = diff_samples(before, sample)
            assert isinstance(window, Counters)
            collected.add(ReplicaWindow(scrape.pod, scrape.time, Static(int(scrape.pod[1:])), window))
        samples[scrape.pod] = sample
    model = fit(collected)
    low, high = (min(model.batches), max(model.batches))
    middle = float(np.sqrt(low * high))
    for tokens in (1, 2, 3):
        assert predict(model, middle, tokens) == pytest.approx(seconds(truth, middle, tokens), rel=0.08)


def test_too_few_windows_are_unknown() -> None:
    unknown = fit_step_time(telemetry([K3], lambda b, k: seconds(DENSE, b, k), spread(1, 64, 10)).cells)
    assert isinstance(unknown, Unknown)
    assert unknown.message == "20 windows measure the cost of a step, and 40 are needed."
    assert isinstance(fit_step_time({}), Unknown)


def test_a_constant_batch_is_unknown() -> None:
    unknown = fit_step_time(telemetry([K3], lambda b, k: seconds(DENSE, b, k), spread(20, 25, 60)).cells)
    assert isinstance(unknown, Unknown)
    assert "has varied 2-fold" in unknown.message


def test_step_times_with_unexplained_variance_are_unknown() -> None:
    unknown = fit_step_time(telemetry([K3], lambda b, k: seconds(DENSE, b, k), spread(1, 64, 100), noise=0.4, replicas=4).cells)
    assert isinstance(unknown, Unknown)
    assert "scatter by" in unknown.message


def test_engines_without_speculation_have_a_step_time_too() -> None:
    model = fit(telemetry([Off()], lambda b, k: seconds(DENSE, b, k), spread(1, 64, 60)), experts=False)
    assert predict(model, 16, 0) == pytest.approx(seconds(DENSE, 16, 0), rel=0.03)
