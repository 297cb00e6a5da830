"""Scenarios of the fleet simulation: the random conditions of each run, independent of the tuner.

Six replicas begin with K = 3 and run for three days. The rate of all requests drifts (standard deviation 25 %, 40 minutes of
memory), and so does the share of each replica (10 %, 20 minutes). A drafter's acceptance is that of one class of
`aerie_lab.engine.acceptance`, or a mixture. Levels are drawn by run: the batch, and the speed of the engines.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from aerie.engine.arguments import EngineArguments
from aerie.engine.releases import Version
from aerie.engine.speculation import Off, SpeculationSetting, Static
from aerie.tuning.decision.candidates import EngineConfig
from aerie_lab.engine import step
from benchmarks._tuning_fleet_model import BATCH, MOST, Floats, Target, lengths, mix_classes, steady, survival

TICK = 300.0
"""Seconds of a window, which is one reading of a replica. Also the duration of a reload."""
DAYS = 3
START = Static(3)
TICKS = round(DAYS * 86400 / TICK)
HOUR = round(3600 / TICK)
REPLICAS = 6
PLAIN = EngineConfig(Version.parse("0.33.0"), EngineArguments(enable_lora=True, max_num_seqs=BATCH))
"""LoRA excludes adaptive verification, whose true cost is not modelled."""
CAPTURED = 512
CLIFF = replace(PLAIN, arguments=replace(PLAIN.arguments, max_cudagraph_capture_size=CAPTURED))
_SIZES = (1, 2, 4, *range(8, CAPTURED + 1, 8))


@dataclass(frozen=True)
class World:
    """True conditions of one run; times are ticks."""

    target: Target
    rates: Floats
    """Requests per second of the fleet, by tick."""
    shares: Floats
    """Replica by tick: the router's weight."""
    survivals: Floats
    """Tick by K by position."""
    slowness: Floats
    """Replica by tick: factor on step times."""
    start: SpeculationSetting = START
    engine: EngineConfig = PLAIN
    event: int = 0
    """When the right setting changes; 0: never."""
    fresh: int | None = None
    """When the revision of a new drafter begins, without telemetry."""
    lost: Floats | None = None
    """Replica by tick: 1 where the window is lost."""
    objective: float = math.inf
    """Objective: seconds per output token for 95 % of the requests of a window."""


Draw = Callable[[np.random.Generator], World]


def draw_drift(random: np.random.Generator, count: int, spread: float, memory: float) -> Floats:
    """Draw logarithms, row by tick: an AR(1) with `memory` seconds of memory."""
    keep = math.exp(-TICK / memory)
    noise = random.standard_normal((count, TICKS))
    series = np.empty((count, TICKS))
    series[:, 0] = noise[:, 0]
    for tick in range(1, TICKS):
        series[:, tick] = keep * series[:, tick - 1] + math.sqrt(1 - keep * keep) * noise[:, tick]
    return spread * series


def world(
    random: np.random.Generator,
    target: Target,
    *,
    batch: tuple[float, float] = (6.0, 80.0),
    kind: str = "math",
    shape: Floats | None = None,
    survivals: Floats | None = None,
) -> World:
    """Draw a run whose load gives a batch in a range, with K = 3 and the initial acceptance."""
    if survivals is None:
        survivals = survival(kind, draw_drift(random, 1, 0.03, 3600.0)[0])
    middle = batch[0] * (batch[1] / batch[0]) ** float(random.uniform())
    rate_per_replica = target.rate(middle, 3, float(lengths(survivals[0])[3]))
    rates = REPLICAS * rate_per_replica * np.exp(draw_drift(random, 1, 0.25, 2400.0)[0]) * (1.0 if shape is None else shape)
    slowness = np.repeat(np.exp(0.01 * random.standard_normal((REPLICAS, 1))), TICKS, axis=1)
    drawn = World(target, rates, np.exp(draw_drift(random, REPLICAS, 0.1, 1200.0)), survivals, slowness)
    # 1.5 times the 95 % point of the hours with K = 3: a plausible objective.
    usual = steady(target, drawn.start, rates / REPLICAS, survivals).per_token
    return replace(drawn, objective=1.5 * float(np.quantile(usual, 0.95)) * 1.4)


def _formula(random: np.random.Generator, *names: str) -> Target:
    """Draw one of the simulator's formulas, between 20 % faster and 25 % slower."""
    name = names[int(random.integers(len(names)))]
    return Target.of(step.STEP_TIME_FORMULAS[name], math.exp(float(random.uniform(-0.22, 0.22))))


def _any(random: np.random.Generator) -> Target:
    return _formula(random, *step.STEP_TIME_FORMULAS)


def _kind(random: np.random.Generator) -> str:
    return str(random.choice(["chat", "code", "math"]))


def _later(random: np.random.Generator) -> int:
    """Draw a tick in the second day."""
    return int(random.integers(24, 40)) * HOUR


def _ramp(event: int) -> Floats:
    """Return a ramp: 0 before the event, 1 from half an hour after it."""
    return np.clip((np.arange(TICKS) - event) / 6, 0, 1)


def stationary(random: np.random.Generator) -> World:
    return world(random, _any(random), kind=_kind(random))


def diurnal(random: np.random.Generator) -> World:
    hours = np.arange(TICKS) / HOUR
    shape = 1 + 0.7 * np.cos(2 * math.pi * (hours - float(random.uniform(0, 24))) / 24)
    return world(random, _any(random), kind=_kind(random), shape=shape, batch=(8.0, 60.0))


def mix_shift(random: np.random.Generator) -> World:
    """Draw a run that changes from one class of traffic to another, in either direction."""
    event = _later(random)
    drift = draw_drift(random, 1, 0.03, 3600.0)[0]
    before, after = ("math", "chat") if random.random() < 0.5 else ("chat", "math")
    survivals = mix_classes(survival(before, drift), survival(after, drift - (0.5 if after == "chat" else 0.0)), _ramp(event))
    return replace(world(random, _any(random), survivals=survivals), event=event)


def depth_collapse(random: np.random.Generator) -> World:
    """Draw a run with long contexts from an event on, where the drafter has almost no accepted tokens (logit - 3.5)."""
    event = _later(random)
    survivals = survival(_kind(random), draw_drift(random, 1, 0.03, 3600.0)[0] - 3.5 * _ramp(event))
    return replace(world(random, _any(random), survivals=survivals), event=event)


def capture_cliff(random: np.random.Generator) -> World:
    """Draw a run with graphs up to 512 tokens and a load around 64 to 140 requests: beyond 128, K = 3 has no graph."""
    formula = replace(step.STEP_TIME_FORMULAS["dense-32b"], captured_sizes=_SIZES, no_graph_seconds=15e-3)
    target = Target.of(formula, math.exp(float(random.uniform(-0.22, 0.22))))
    return replace(world(random, target, batch=(50.0, 110.0)), engine=CLIFF)


def saturation(random: np.random.Generator) -> World:
    """The peak of each day is more than K = 3 can serve."""
    hours = np.arange(TICKS) / HOUR
    shape = 1 + 0.8 * np.cos(2 * math.pi * (hours - float(random.uniform(0, 24))) / 24)
    return world(random, _formula(random, "dense-32b", "dense-8b"), kind="code", shape=shape, batch=(110.0, 180.0))


def drafter_change(random: np.random.Generator) -> World:
    """A new drafter, worse (logit - 0.8) or better (+ 0.5), is promoted: its revision begins with no history."""
    event = _later(random)
    jump = -0.8 if random.random() < 0.5 else 0.5
    shift = draw_drift(random, 1, 0.03, 3600.0)[0] + jump * (np.arange(TICKS) >= event)
    drawn = world(random, _any(random), survivals=survival(_kind(random), shift))
    return replace(drawn, event=event, fresh=event)


def misfit(random: np.random.Generator) -> World:
    """Draw a run with step times of the published grids, which do not have the fitted form."""
    names = step.list_grid_names()
    target = Target.of(step.load_grid(names[int(random.integers(len(names)))], seconds_per_prompt_token=20e-6, log_sd=0.03))
    return world(random, target, kind=_kind(random))


def scrape_loss(random: np.random.Generator) -> World:
    """Draw a run that loses a fifth of its windows, and has two gaps of one to three hours."""
    drawn = stationary(random)
    lost = (random.random((REPLICAS, TICKS)) < 0.2).astype(float)
    for _ in range(2):
        begin = int(random.integers(TICKS))
        lost[:, begin : begin + int(random.integers(HOUR, 3 * HOUR))] = 1.0
    return replace(drawn, lost=lost)


def noisy_replica(random: np.random.Generator) -> World:
    """Draw a run with one replica that is 15 % slower, and whose speed drifts by 8 %."""
    drawn = stationary(random)
    slowness = drawn.slowness.copy()
    slowness[int(random.integers(REPLICAS))] *= 1.15 * np.exp(draw_drift(random, 1, 0.08, 1800.0)[0])
    return replace(drawn, slowness=slowness)


def best_at_start(random: np.random.Generator) -> World:
    """Draw a run that begins with the best setting: even the best K of each hour would gain less than 1 %."""
    while True:
        drawn = stationary(random)
        every = slice(None, None, HOUR)
        rows = [
            steady(drawn.target, Static(k) if k else Off(), drawn.rates[every] / REPLICAS, drawn.survivals[every])
            for k in range(MOST + 1)
        ]
        costs = np.stack([row.per_token for row in rows])
        weights = rows[3].tokens
        fixed = costs @ weights
        best = int(fixed.argmin())
        if best and fixed[best] < 1.01 * float(costs.min(axis=0) @ weights):
            return replace(drawn, start=Static(best))


SCENARIOS: dict[str, tuple[str, Draw]] = {
    "stationary": ("stationary", stationary),
    "diurnal": ("diurnal, 0.3 to 1.7 times the mean", diurnal),
    "mix": ("mix shift", mix_shift),
    "depth": ("depth collapse", depth_collapse),
    "cliff": ("capture cliff", capture_cliff),
    "saturation": ("saturation", saturation),
    "drafter": ("drafter change", drafter_change),
    "misfit": ("misfit cost model (published grids)", misfit),
    "loss": ("scrape loss", scrape_loss),
    "noisy": ("noisy replica", noisy_replica),
    "same": ("A/A", best_at_start),
}


def draw(name: str, run: int, seed: int = 1) -> World:
    """Draw a run of a scenario, reproducibly."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode()), run])
    return SCENARIOS[name][1](random)
