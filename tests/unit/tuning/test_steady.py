"""Successive decisions on a fleet with known parameters: an exploration is used, and then the setting stays."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from aerie.engine.arguments import EngineArguments
from aerie.engine.releases import Version
from aerie.engine.speculation import Off, SpeculationSetting, Static, max_speculative_tokens
from aerie.tuning.decision.candidates import EngineConfig
from aerie.tuning.decision.load_distribution import LoadDistribution
from aerie.tuning.decision.policy import TrialHistory, TuningPolicy
from aerie.tuning.decision.recommend import decide_setting
from aerie.tuning.decision.types import TuningAction, TuningContext, TuningDecision
from aerie.tuning.telemetry import HOUR, ReplicaWindow, TuningTelemetry
from aerie_lab.engine.performance_model.acceptance import Acceptance, expected_survival
from tests.nightly import use_each_nth
from tests.unit.tuning.windows import K3, StepSeconds, window

ENGINE = EngineConfig(Version.parse("0.33.0"), EngineArguments(data_parallel=2, api_server_count=1), is_moe=False)
"""A data-parallel engine, which supports only fixed settings."""
REPLICAS = 4
POLICY = TuningPolicy(draws=150)
DEEP = (0.9, 0.88, 0.87, 0.86, 0.86, 0.85, 0.85)
SHALLOW = (0.72, 0.6, 0.5, 0.4, 0.35, 0.3, 0.3)


def cheap_steps(batch: float, tokens: float) -> float:
    """Return the seconds of a step for which deep drafts pay at every batch."""
    return 8e-3 + 3e-4 * tokens + 1e-5 * batch * (tokens + 1)


def balanced_steps(batch: float, tokens: float) -> float:
    """Return the seconds of a step for which K = 3 is within 1 % of the best at shallow acceptance."""
    return 8e-3 + 9e-4 * tokens + 2e-5 * batch * (tokens + 1)


@cache
def survival(conditionals: tuple[float, ...], tokens: int) -> tuple[float, ...]:
    """Return the survival at a K of requests that differ by 0.4 on the logit scale and have fixed numbers of tokens."""
    return tuple(expected_survival(Acceptance(conditionals, 0.4), tokens).tolist())


class SimulatedTuning:
    """A simulated fleet of four replicas with varying batches, and the decisions about its setting."""

    def __init__(self, truth: StepSeconds, conditionals: tuple[float, ...], seed: int, current: SpeculationSetting = K3) -> None:
        self.truth, self.conditionals, self.current = truth, conditionals, current
        self.random = np.random.default_rng(seed)
        self.seed, self.now, self.history = seed, 100 * HOUR, TrialHistory()
        self.telemetry = TuningTelemetry()
        self.level = 16.0
        self.changes: list[SpeculationSetting] = []
        self.canaries: list[SpeculationSetting] = []

    def run(self, hours: float, canary: SpeculationSetting | None = None) -> None:
        """Add windows of every replica, every 5 minutes, or every 10 without a canary; replica 0 is the canary."""
        interval = 600.0 if canary is None else 300.0
        for _ in range(round(hours * HOUR / interval)):
            self.now += interval
            for replica in range(REPLICAS):
                setting = canary if canary is not None and replica == 0 else self.current
                batch = float(np.clip(self.level * math.exp(0.5 * self.random.standard_normal()), 1.0, 200.0))
                noise = math.exp(0.03 * self.random.standard_normal())
                shift = 0.03 * self.random.standard_normal()
                survivals = survival(self.conditionals, max(1, max_speculative_tokens(setting)))
                conditionals = [deeper / before for before, deeper in itertools.pairwise((1.0, *survivals))]
                q = [1 / (1 + math.exp(-math.log(each / (1 - each)) - shift)) for each in conditionals]
                counted = window(setting, batch, noise * self.truth(batch, max_speculative_tokens(setting)), q, seconds=300.0)
                self.telemetry.add(ReplicaWindow(f"{setting}-{replica}", self.now, setting, counted))

    def decide(self) -> TuningDecision:
        context = TuningContext(ENGINE, self.current, 7, REPLICAS, self.now, history=self.history)
        return decide_setting(self.telemetry, context, POLICY, self.seed)

    def act(self) -> TuningDecision:
        """Act like the operator: run a canary for half an hour, or change the setting."""
        decision = self.decide()
        if decision.action is TuningAction.EXPLORE:
            assert decision.setting is not None
            self.canaries.append(decision.setting)
            self.run(0.5, decision.setting)
            self.history = replace(self.history, exploration_times=(self.now, *self.history.exploration_times))
        elif decision.action is TuningAction.CHANGE:
            assert decision.setting is not None
            self.changes.append(decision.setting)
            self.current = decision.setting
            self.history = replace(self.history, changed_at=self.now)
        return decision

    def gain(self, setting: SpeculationSetting, over: SpeculationSetting, load: LoadDistribution | None = None) -> float:
        """Return the true gain on a load, or at the middle batch."""
        pairs = [(self.level, 1.0)] if load is None else load.pairs

        def per_token(candidate: SpeculationSetting) -> float:
            tokens = max_speculative_tokens(candidate)
            length = 1 + sum(survival(self.conditionals, tokens))
            return sum(share * self.truth(batch, tokens) / batch for batch, share in pairs) / length

        return per_token(over) / per_token(setting) - 1


@pytest.mark.slow
def test_the_measurements_of_an_exploration_decide() -> None:
    simulation = SimulatedTuning(cheap_steps, DEEP, seed=1)
    simulation.run(2.0)
    first = simulation.act()
    assert first.action is TuningAction.EXPLORE, first.reason
    explored_setting = simulation.canaries[0]
    second = simulation.act()
    assert second.evidence.acceptance is not None
    assert second.evidence.acceptance.observed_positions == max_speculative_tokens(explored_setting)
    assert second.action is TuningAction.CHANGE, second.reason
    best = max(simulation.gain(Static(k), K3) for k in range(1, 8))
    assert simulation.gain(simulation.current, K3) > best - 0.03
    predicted = next(prediction for prediction in second.predictions if prediction.setting == simulation.current)
    assert second.evidence.forecast is not None
    truth = simulation.gain(simulation.current, K3, second.evidence.forecast.load)
    assert predicted.gain[0] - 0.02 < truth < predicted.gain[3] + 0.02


@pytest.mark.slow
def test_a_canary_that_shows_no_gain_changes_nothing() -> None:
    simulation = SimulatedTuning(balanced_steps, SHALLOW, seed=2)
    simulation.run(2.0)
    simulation.run(0.5, Static(5))
    simulation.history = replace(simulation.history, exploration_times=(simulation.now,))
    decision = simulation.decide()
    assert decision.action is TuningAction.HOLD, decision.reason
    five = next(prediction for prediction in decision.predictions if prediction.setting == Static(5))
    assert decision.evidence.forecast is not None
    assert five.gain[0] - 0.02 < simulation.gain(Static(5), K3, decision.evidence.forecast.load) < five.gain[3] + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("first", use_each_nth(2, range(0, 50, 10)))
def test_steady_traffic_is_changed_once_and_explored_once_a_day(first: int) -> None:
    """One simulation in ten, at most, needs two changes to reach the right setting."""
    more = []
    for seed in range(first, first + 10):
        simulation = SimulatedTuning(cheap_steps, DEEP, seed)
        before = simulation.current
        for hours in (2.0, 0.5, 7.0, 7.0):
            simulation.run(hours)
            simulation.act()
            assert simulation.gain(simulation.current, before) > -0.01, (seed, simulation.changes)
            before = simulation.current
        if len(simulation.changes) > 1 or len(simulation.canaries) > 1:
            more.append((seed, simulation.changes, simulation.canaries))
    assert len(more) <= 1, more
    assert all(len(changes) <= 2 and len(canaries) <= 2 for _, changes, canaries in more), more


@pytest.mark.slow
@pytest.mark.parametrize("first", use_each_nth(2, range(0, 50, 10)))
def test_the_best_setting_is_not_changed(first: int) -> None:
    for seed in range(first, first + 10):
        simulation = SimulatedTuning(balanced_steps, SHALLOW, seed)
        for hours in (2.0, 0.5, 7.0):
            simulation.run(hours)
            simulation.act()
        assert simulation.changes == [], seed


@pytest.mark.slow
def test_the_current_load_decides_after_a_change() -> None:
    def expensive_steps(batch: float, tokens: float) -> float:
        return 8e-3 + 4e-4 * tokens + 1.5e-4 * batch * (tokens + 1)

    simulation = SimulatedTuning(expensive_steps, SHALLOW, seed=3)
    simulation.level = 4.0
    simulation.run(3.0)
    simulation.run(0.5, Static(1))
    calm = simulation.decide()
    assert calm.evidence.change_points.load is None
    simulation.level = 100.0
    simulation.run(2.5)
    busy = simulation.act()
    assert busy.evidence.change_points.load is not None
    assert busy.evidence.forecast is not None
    assert busy.evidence.forecast.load.quantile(0.1) > 30
    if busy.action is TuningAction.EXPLORE:  # nothing was measured at such a batch but K = 3
        busy = simulation.act()
    assert busy.action is TuningAction.CHANGE, busy.reason
    assert busy.setting in (Off(), Static(1))


@pytest.mark.slow
def test_acceptance_before_a_change_is_not_used() -> None:
    simulation = SimulatedTuning(cheap_steps, DEEP, seed=4)
    simulation.run(2.0)
    simulation.run(0.5, Static(7))
    assert simulation.decide().action is TuningAction.CHANGE
    simulation.conditionals = SHALLOW
    simulation.run(1.0)
    decision = simulation.decide()
    assert decision.evidence.change_points.acceptance is not None
    assert decision.evidence.acceptance is not None
    assert decision.evidence.acceptance.observed_positions == 3
    assert float(decision.evidence.acceptance.survival[:, 0].mean()) == pytest.approx(SHALLOW[0], abs=0.02)
    assert decision.action is not TuningAction.CHANGE, decision.reason
