"""Difference of the fleet simulation's windows from the step-level simulator's, at the same rates: one replica, by window.

The step-level simulator runs requests one by one, each with an acceptance of its own, prefill in chunks, and a step's noise. Its
windows of five minutes are compared with the stationary state that `_tuning_fleet_model` computes for the rate (the error), and
their dispersion with that of disturbed windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from aerie.engine.speculation import Schedule, ScheduleTier, SpeculationSetting, Static, max_speculative_tokens
from aerie.tuning.decision.forecast import draft_tokens_by_batch
from aerie_lab.engine.acceptance import CLASS_ACCEPTANCE
from aerie_lab.engine.fleet import SimulatedFleet, SimulatedPod
from aerie_lab.engine.request import EngineSettings
from aerie_lab.engine.step import STEP_TIME_FORMULAS
from aerie_lab.engine.workload import LengthDistribution, PoissonArrivals, TrafficClass
from benchmarks import _tuning_fleet_model as model
from benchmarks._tuning_fleet_model import Floats
from benchmarks._tuning_fleet_scenarios import TICK

WARM = 300.0
SECONDS = 2400.0
NAMES = ("batch", "step time", "acceptance length", "time per output token")


@dataclass(frozen=True)
class Point:
    """Conditions of a comparison of the two."""

    profile: str
    kind: str
    setting: SpeculationSetting
    batch: float


POINTS = (
    Point("dense-32b", "math", Static(3), 4.0),
    Point("dense-8b", "chat", Static(5), 16.0),
    Point("moe-30b-a3b", "code", Static(1), 32.0),
    Point("dense-32b", "math", Schedule((ScheduleTier(1, 12, 5), ScheduleTier(13, 256, 2)), 5), 14.0),
)


@dataclass(frozen=True)
class Agreement:
    """Relative error of each of NAMES: model by simulator - 1, and the dispersion of windows in both."""

    error: Floats
    dispersion: Floats
    simulated: Floats


def agreement(point: Point, seconds: float = SECONDS, seed: int = 1) -> Agreement:
    """Compare the two at one point."""
    target = model.Target.of(STEP_TIME_FORMULAS[point.profile])
    survivals = model.survival(point.kind, np.zeros(1))
    middle = int(draft_tokens_by_batch(point.setting, np.array([point.batch]))[0])
    rate = target.rate(point.batch, middle, float(model.lengths(survivals)[0, middle]))
    simulated = np.array(list(_windows(point, rate, seconds, seed)))
    still = _figures(model.steady(target, point.setting, np.array([rate]), survivals))[0]
    count = 400
    rates, many = np.full(count, rate), np.repeat(survivals, count, axis=0)
    off = model.disturb(rates, many, TICK, np.random.default_rng(seed))
    noisy = _figures(model.steady(target, point.setting, rates * off.work, off.survivals, off.clock))
    mean = simulated.mean(axis=0)
    spread = simulated.std(axis=0, ddof=1) if len(simulated) > 1 else np.zeros(len(mean))
    return Agreement(still / mean - 1, noisy.std(axis=0) / still, spread / mean)


def _figures(rows: model.Rows) -> Floats:
    drafting = rows.by_tokens[:, 1:].sum(axis=1)
    accepted = rows.tokens - rows.steps
    length = 1 + np.divide(accepted, drafting, out=np.zeros_like(accepted), where=drafting > 0)
    return np.stack([rows.steps / rows.iterations, rows.running / rows.steps, length, rows.per_token], axis=1)


def _windows(point: Point, rate: float, seconds: float, seed: int) -> Iterator[tuple[float, ...]]:
    """Simulate the windows of a tick with the step-level simulator."""
    median = model.ANSWER / math.exp(model.ANSWER_SPREAD**2 / 2)
    kind = TrafficClass(
        point.kind,
        CLASS_ACCEPTANCE[point.kind],
        LengthDistribution(model.PROMPT),
        LengthDistribution(median, model.ANSWER_SPREAD, 2, 8000),
    )
    schedule = None
    if isinstance(point.setting, Schedule):
        schedule = tuple((tier.first, tier.last, tier.tokens) for tier in point.setting.tiers)
    settings = EngineSettings(
        num_speculative_tokens=max_speculative_tokens(point.setting) or None,
        k_schedule=schedule,
        enable_prefix_caching=False,
        num_blocks=100_000,
    )
    fleet = SimulatedFleet(
        [SimulatedPod("pod", settings, STEP_TIME_FORMULAS[point.profile])], [kind], PoissonArrivals(rate), seed=seed
    )
    last: tuple[float, ...] | None = None
    due = WARM
    for scrape in fleet.run(WARM + seconds):
        if scrape.counters is None or scrape.time < due:
            continue
        due += TICK
        counters = scrape.counters
        itl = counters.inter_token_latency
        now = tuple(
            map(
                float,
                (
                    itl.count,
                    itl.total,
                    counters.iteration_tokens.count,
                    counters.spec_decode_num_drafts,
                    counters.spec_decode_num_accepted_tokens,
                ),
            )
        )
        if last is not None:
            steps, busy, iterations, drafts, accepted = (after - before for after, before in zip(now, last, strict=True))
            yield steps / iterations, busy / steps, 1 + accepted / drafts, busy / (steps + accepted)
        last = now


def table(seconds: float = SECONDS) -> tuple[list[str], float]:
    """Return the rows of a table, and the largest error of a mean."""
    lines = [
        f"| windows of 5 min: error of the mean (dispersion; simulator's) | {' | '.join(NAMES)} |",
        "|---|" + "---:|" * len(NAMES),
    ]
    largest = 0.0
    for point in POINTS:
        agreed = agreement(point, seconds)
        largest = max(largest, float(np.abs(agreed.error).max()))
        cells = [
            f"{100 * error:+.1f} % ({100 * model_dispersion:.1f}; {100 * simulator_dispersion:.1f})"
            for error, model_dispersion, simulator_dispersion in zip(
                agreed.error, agreed.dispersion, agreed.simulated, strict=True
            )
        ]
        lines.append(f"| {point.profile}, {point.kind}, {point.setting}, batch {point.batch:.0f} | {' | '.join(cells)} |")
    return lines, largest
